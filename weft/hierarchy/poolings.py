"""Pooling of a sequence of tokens to a few vectors.

In a `paddings` array, True or 1 marks tokens to ignore, which may be NaN or infinite.
"""

from typing import ClassVar

import jax.numpy as jnp

from weft.config import REQUIRED, InstantiableConfig, Required
from weft.errors import LayerConfigError
from weft.functional.arrays import (
    counted,
    finite_or_counted,
    gathered,
    positions,
)
from weft.hierarchy.attention.bias import BoolTensorAttentionBias
from weft.hierarchy.attention.feed_forward import (
    TransformerFeedForwardLayer,
    scaled_hidden_dim,
)
from weft.hierarchy.attention.transformer import TransformerAttentionLayer
from weft.hierarchy.base_layer import BaseLayer, ParameterSpec
from weft.hierarchy.layers.linear import Linear
from weft.hierarchy.module import Module
from weft.typing import Tensor


class BasePoolingLayer(BaseLayer):
    """Base of poolings of tokens. A subclass defines `forward`."""

    class Config(BaseLayer.Config):
        """Configures a BasePoolingLayer with `num_outputs` vectors of size `output_dim`."""

        input_dim: Required[int] = REQUIRED
        output_dim: Required[int] = REQUIRED
        num_outputs: int = 1

    _keeps_size: ClassVar[bool] = False
    _has_one_output: ClassVar[bool] = False

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        if self._keeps_size and cfg.input_dim != cfg.output_dim:
            raise LayerConfigError(
                f"{self.path()}: a {type(self).__name__} keeps the size of tokens, but input_dim="
                f"{cfg.input_dim} differs from output_dim={cfg.output_dim}; wrap it in a "
                "PoolingWithProjection."
            )
        if self._has_one_output and cfg.num_outputs != 1:
            raise LayerConfigError(
                f"{self.path()}: a {type(self).__name__} returns one vector, but num_outputs="
                f"{cfg.num_outputs}; use an AttentionPooling for more."
            )

    def forward(self, tokens: Tensor, paddings: Tensor | None = None) -> Tensor:
        """Pools tokens, `Float[Array, "batch time input_dim"]`.

        Returns `Float[Array, "batch num_outputs output_dim"]`. Paddings are
        `Bool[Array, "batch time"]`.
        """
        raise NotImplementedError(type(self))


class AttentionPooling(BasePoolingLayer):
    """Pooling by learned queries that attend to the tokens (Lee et al., 2019, section 3.2).

    Parameter: `query_weight` of shape (num_outputs, output_dim).
    """

    class Config(BasePoolingLayer.Config):
        cross_attention: InstantiableConfig = (
            TransformerAttentionLayer.default_config()
        )
        feed_forward: InstantiableConfig = (
            TransformerFeedForwardLayer.default_config()
        )

    @classmethod
    def default_config(cls) -> Config:
        """Returns a config with one head, whose feed-forward layer is four times as wide."""
        cfg = super().default_config()
        cfg.cross_attention.attention.num_heads = 1
        cfg.feed_forward.hidden_dim = scaled_hidden_dim(4)
        return cfg

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        dims = {"target_dim": cfg.output_dim, "source_dim": cfg.input_dim}
        self._add_child("cross_attention", cfg.cross_attention.set(**dims))
        self._add_child(
            "feed_forward", cfg.feed_forward.set(input_dim=cfg.output_dim)
        )

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg = self.config
        # Queries are initialized as the rows of a weight.
        query = ParameterSpec(
            (cfg.num_outputs, cfg.output_dim), mesh_axes=(None, None)
        )
        return {"query_weight": query}

    def forward(self, tokens: Tensor, paddings: Tensor | None = None) -> Tensor:
        query = self.parameters["query_weight"].astype(tokens.dtype)
        target = jnp.broadcast_to(query, (tokens.shape[0], *query.shape))
        bias = None
        if paddings is not None:
            tokens = finite_or_counted(
                tokens, jnp.logical_not(paddings)[..., None]
            )
            is_real = jnp.logical_not(paddings)[:, None, None]
            shape = (*is_real.shape[:2], query.shape[0], is_real.shape[-1])
            bias = BoolTensorAttentionBias.from_tensor(
                jnp.broadcast_to(is_real, shape)
            )
        attended = self.cross_attention(
            target=target, source=tokens, attention_logit_biases=bias
        )
        return self.feed_forward(attended.data)


class AveragePooling(BasePoolingLayer):
    """Mean of the tokens that are not padding; 0 if all are."""

    class Config(BasePoolingLayer.Config):
        """Configures an AveragePooling; `eps` is added to the number of tokens."""

        eps: float = 1e-8

    _keeps_size, _has_one_output = True, True

    def forward(self, tokens: Tensor, paddings: Tensor | None = None) -> Tensor:
        weights = _token_mask(tokens, paddings).astype(jnp.float32)[..., None]
        total = jnp.sum(
            counted(tokens, weights) * weights, axis=1, keepdims=True
        )
        mean = total / (
            jnp.sum(weights, axis=1, keepdims=True) + self.config.eps
        )
        return mean.astype(tokens.dtype)


class MaxPooling(BasePoolingLayer):
    """Maximum of each dimension over the tokens that are not padding; 0 if all are."""

    _keeps_size, _has_one_output = True, True

    def forward(self, tokens: Tensor, paddings: Tensor | None = None) -> Tensor:
        is_real = _token_mask(tokens, paddings)[..., None]
        largest = jnp.max(
            jnp.where(is_real, tokens, -jnp.inf), axis=1, keepdims=True
        )
        return jnp.where(
            jnp.any(is_real, axis=1, keepdims=True), largest, 0.0
        ).astype(tokens.dtype)


class FirstNTokenPooling(BasePoolingLayer):
    """First `num_outputs` tokens that are not padding, followed by zeros if there are fewer."""

    _keeps_size = True

    def forward(self, tokens: Tensor, paddings: Tensor | None = None) -> Tensor:
        tokens = gathered(tokens, 1)
        is_real = gathered(_token_mask(tokens, paddings), 1)
        return _select_tokens(
            tokens,
            is_real,
            jnp.cumsum(is_real, axis=1) - 1,
            self.config.num_outputs,
        )


class LastNTokenPooling(BasePoolingLayer):
    """Last `num_outputs` tokens that are not padding, from the last one on, followed by zeros."""

    _keeps_size = True

    def forward(self, tokens: Tensor, paddings: Tensor | None = None) -> Tensor:
        tokens = gathered(tokens, 1)
        is_real = gathered(_token_mask(tokens, paddings), 1)
        order = jnp.sum(is_real, axis=1, keepdims=True) - jnp.cumsum(
            is_real, axis=1
        )
        return _select_tokens(tokens, is_real, order, self.config.num_outputs)


class PoolingWithProjection(BasePoolingLayer):
    """Pooling followed by a linear map."""

    class Config(BasePoolingLayer.Config):
        """Configures a PoolingWithProjection; `pooler` keeps the size `input_dim`.

        If `num_outputs` is 1, that of `pooler` counts.
        """

        pooler: Required[BasePoolingLayer.Config] = REQUIRED
        proj: InstantiableConfig = Linear.default_config()

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        pooler = cfg.pooler.set(
            input_dim=cfg.input_dim, output_dim=cfg.input_dim
        )
        if 1 != cfg.num_outputs != pooler.num_outputs != 1:
            raise LayerConfigError(
                f"{self.path()}: num_outputs={cfg.num_outputs}, but that of its pooler is "
                f"{pooler.num_outputs}; set one of the two."
            )
        self._add_child(
            "pooler",
            pooler.set(num_outputs=max(cfg.num_outputs, pooler.num_outputs)),
        )
        self._add_child(
            "proj",
            cfg.proj.set(input_dim=cfg.input_dim, output_dim=cfg.output_dim),
        )

    def forward(self, tokens: Tensor, paddings: Tensor | None = None) -> Tensor:
        return self.proj(self.pooler(tokens, paddings))


def _token_mask(tokens: Tensor, paddings: Tensor | None) -> Tensor:
    """Returns which tokens are not padding, `Bool[Array, "batch time"]`."""
    if paddings is None:
        return jnp.ones(tokens.shape[:2], jnp.bool_)
    return jnp.logical_not(paddings)


def _select_tokens(
    tokens: Tensor, is_real: Tensor, order: Tensor, n: int
) -> Tensor:
    """Returns the tokens in `is_real` at places 0 to `n - 1` of `order`, in that order."""
    is_at = (order[..., None] == positions(n, order.ndim + 1)) & is_real[
        ..., None
    ]
    tokens = counted(tokens, is_real[..., None])
    # At most one token is at each place, so that nothing is rounded.
    return jnp.einsum("btn,btd->bnd", is_at.astype(tokens.dtype), tokens)
