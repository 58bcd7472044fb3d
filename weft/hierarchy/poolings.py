"""Pooling of a sequence of tokens to a few vectors.

In a `paddings` array, True or 1 marks tokens to ignore.
"""

from typing import Any

import jax.numpy as jnp

from weft.config import REQUIRED, InstantiableConfig, Required, config_class
from weft.errors import LayerConfigError
from weft.functional.ranks import positions
from weft.hierarchy.attention_bias import BoolTensorAttentionBias
from weft.hierarchy.base_layer import BaseLayer, ParameterSpec
from weft.hierarchy.feed_forward import TransformerFeedForwardLayer, scaled_hidden_dim
from weft.hierarchy.linear import Linear
from weft.hierarchy.module import Module
from weft.hierarchy.transformer import TransformerAttentionLayer
from weft.typing import Tensor


class BasePoolingLayer(BaseLayer):
    """Base of poolings of tokens. A subclass defines `forward`."""

    @config_class
    class Config(BaseLayer.Config):
        """Configures a BasePoolingLayer with `num_outputs` vectors of size `output_dim`."""

        input_dim: Required[int] = REQUIRED
        output_dim: Required[int] = REQUIRED
        num_outputs: int = 1

    def forward(self, tokens: Tensor, paddings: Tensor | None = None) -> Tensor:
        """Pools tokens.

        Args:
          tokens: `Float[Array, "batch time input_dim"]`.
          paddings: `Bool[Array, "batch time"]`, True for tokens to ignore.

        Returns:
          `Float[Array, "batch num_outputs output_dim"]`.
        """
        raise NotImplementedError(type(self))

    def _require_equal_dims(self) -> None:
        cfg = self.config
        if cfg.input_dim != cfg.output_dim:
            raise LayerConfigError(
                f"{self.path()}: a {type(self).__name__} keeps the size of tokens, but input_dim="
                f"{cfg.input_dim} differs from output_dim={cfg.output_dim}; wrap it in a "
                "PoolingWithProjection."
            )

    def _require_one_output(self) -> None:
        if self.config.num_outputs != 1:
            raise LayerConfigError(
                f"{self.path()}: a {type(self).__name__} returns one vector, but num_outputs="
                f"{self.config.num_outputs}; use an AttentionPooling for more."
            )


class AttentionPooling(BasePoolingLayer):
    """Pooling by learned queries that attend to the tokens (Lee et al., 2019, section 3.2).

    Parameter: `query_weight` of shape (num_outputs, output_dim).
    """

    @config_class
    class Config(BasePoolingLayer.Config):
        """Configures an AttentionPooling; set the number of heads of `cross_attention`."""

        cross_attention: InstantiableConfig = TransformerAttentionLayer.default_config()
        feed_forward: InstantiableConfig = TransformerFeedForwardLayer.default_config()

    @classmethod
    def default_config(cls) -> Any:
        """Returns a config whose feed-forward layer is four times as wide."""
        cfg = super().default_config()
        cfg.feed_forward.hidden_dim = scaled_hidden_dim(4)
        return cfg

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        dims = {"target_dim": cfg.output_dim, "source_dim": cfg.input_dim}
        self._add_child("cross_attention", cfg.cross_attention.set(**dims))
        self._add_child("feed_forward", cfg.feed_forward.set(input_dim=cfg.output_dim))

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg = self.config
        # Queries are initialized as the rows of a weight.
        query = ParameterSpec((cfg.num_outputs, cfg.output_dim), mesh_axes=(None, None))
        return {"query_weight": query}

    def forward(self, tokens: Tensor, paddings: Tensor | None = None) -> Tensor:
        query = self.parameters["query_weight"].astype(tokens.dtype)
        target = jnp.broadcast_to(query, (tokens.shape[0], *query.shape))
        bias = None
        if paddings is not None:
            live = jnp.logical_not(paddings)[:, None, None]
            shape = (*live.shape[:2], query.shape[0], live.shape[-1])
            bias = BoolTensorAttentionBias.from_tensor(jnp.broadcast_to(live, shape))
        attended = self.cross_attention(target=target, source=tokens, attention_logit_biases=bias)
        return self.feed_forward(attended.data)


class AveragePooling(BasePoolingLayer):
    """Mean of the tokens that are not padding; 0 if all are."""

    @config_class
    class Config(BasePoolingLayer.Config):
        """Configures an AveragePooling; `eps` is added to the number of tokens."""

        eps: float = 1e-8

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._require_equal_dims()
        self._require_one_output()

    def forward(self, tokens: Tensor, paddings: Tensor | None = None) -> Tensor:
        weights = _live(tokens, paddings).astype(jnp.float32)[..., None]
        total = jnp.sum(tokens * weights, axis=1, keepdims=True)
        mean = total / (jnp.sum(weights, axis=1, keepdims=True) + self.config.eps)
        return mean.astype(tokens.dtype)


class MaxPooling(BasePoolingLayer):
    """Maximum of each dimension over the tokens that are not padding; 0 if all are."""

    def __init__(self, cfg: BasePoolingLayer.Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._require_equal_dims()
        self._require_one_output()

    def forward(self, tokens: Tensor, paddings: Tensor | None = None) -> Tensor:
        live = _live(tokens, paddings)[..., None]
        largest = jnp.max(jnp.where(live, tokens, -jnp.inf), axis=1, keepdims=True)
        any_live = jnp.any(live, axis=1, keepdims=True)
        return jnp.where(any_live, largest, 0.0).astype(tokens.dtype)


class FirstNTokenPooling(BasePoolingLayer):
    """First `num_outputs` tokens that are not padding, followed by zeros if there are fewer."""

    def __init__(self, cfg: BasePoolingLayer.Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._require_equal_dims()

    def forward(self, tokens: Tensor, paddings: Tensor | None = None) -> Tensor:
        live = _live(tokens, paddings)
        return _picked(tokens, live, jnp.cumsum(live, axis=1) - 1, self.config.num_outputs)


class LastNTokenPooling(BasePoolingLayer):
    """Last `num_outputs` tokens that are not padding, after zeros if there are fewer."""

    def __init__(self, cfg: BasePoolingLayer.Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._require_equal_dims()

    def forward(self, tokens: Tensor, paddings: Tensor | None = None) -> Tensor:
        n = self.config.num_outputs
        live = _live(tokens, paddings)
        order = jnp.cumsum(live, axis=1) - jnp.sum(live, axis=1, keepdims=True) + n - 1
        return _picked(tokens, live, order, n)


class PoolingWithProjection(BasePoolingLayer):
    """Pooling followed by a linear map."""

    @config_class
    class Config(BasePoolingLayer.Config):
        """Configures a PoolingWithProjection; `pooler` keeps the size `input_dim`."""

        pooler: Required[BasePoolingLayer.Config] = REQUIRED
        proj: InstantiableConfig = Linear.default_config()

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        dims = {"input_dim": cfg.input_dim, "output_dim": cfg.input_dim}
        self._add_child("pooler", cfg.pooler.set(num_outputs=cfg.num_outputs, **dims))
        dims["output_dim"] = cfg.output_dim
        self._add_child("proj", cfg.proj.set(**dims))

    def forward(self, tokens: Tensor, paddings: Tensor | None = None) -> Tensor:
        return self.proj(self.pooler(tokens, paddings))


def _live(tokens: Tensor, paddings: Tensor | None) -> Tensor:
    """Returns which tokens are not padding, `Bool[Array, "batch time"]`."""
    if paddings is None:
        return jnp.ones(tokens.shape[:2], jnp.bool_)
    return jnp.logical_not(paddings)


def _picked(tokens: Tensor, live: Tensor, order: Tensor, n: int) -> Tensor:
    """Returns the live tokens at places 0 to `n - 1` of `order`, in that order."""
    is_at = (order[..., None] == positions(n, order.ndim + 1)) & live[..., None]
    # At most one token is at each place, so that nothing is rounded.
    return jnp.einsum("btn,btd->bnd", is_at.astype(tokens.dtype), tokens)
