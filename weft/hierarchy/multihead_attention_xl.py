"""Transformer-XL attention, with logits that depend on relative positions (Dai et al., 2019).

    logit(i, j) = (q_i + u) · k_j  +  (q_i + v) · r(i - j)

`r` projects sinusoidal embeddings of the distance; `u` and `v` are learned for each head.
"""

import enum
from typing import Any

import jax.numpy as jnp

from weft import functional
from weft.config import REQUIRED, Required, config_class
from weft.errors import ArgumentValueError, LayerConfigError
from weft.functional.ranks import to_ndim
from weft.hierarchy.base_layer import ParameterSpec
from weft.hierarchy.context import child_context
from weft.hierarchy.module import Module
from weft.hierarchy.multihead_attention import MultiheadAttention
from weft.hierarchy.positional import SinusoidalPositionalEmbedding
from weft.hierarchy.qkv_linear import FusedQKVLinear, MultiheadInputLinear
from weft.typing import Tensor


def xl_attention_logits(
    q_proj: Tensor, k_proj: Tensor, relative_pos_emb: Tensor, u: Tensor, v: Tensor
) -> Tensor:
    """Computes `functional.xl_attention_logits`: content and relative position over a sequence."""
    return functional.xl_attention_logits(q_proj, k_proj, relative_pos_emb, u, v)


class MultiheadRelativePositionLinear(MultiheadInputLinear):
    """Projection of relative position embeddings to the heads."""


class MultiheadAttentionXL(MultiheadAttention):
    """Self attention with relative positions."""

    class ScalePosition(enum.Enum):
        """Place where the scale factor of queries is applied."""

        LOGIT = 0
        """On the logits, after adding `u` and `v`."""
        QUERY = 1
        """On the queries, before adding `u` and `v`."""

    @config_class
    class Config(MultiheadAttention.Config):
        """Configures a MultiheadAttentionXL.

        Attributes:
          pos_emb_dim: size of relative position embeddings; None for `query_dim`.
          relative_pos_linear: projects the embeddings to the heads.
          scale_position: where the scale factor of queries is applied.
        """

        pos_emb_dim: int | None = None
        relative_pos_emb: SinusoidalPositionalEmbedding.Config = (
            SinusoidalPositionalEmbedding.default_config()
        )
        relative_pos_linear: MultiheadRelativePositionLinear.Config = (
            MultiheadRelativePositionLinear.default_config().set(bias=False)
        )
        scale_position: Required["MultiheadAttentionXL.ScalePosition"] = REQUIRED

    @classmethod
    def default_config(cls) -> Any:
        """Returns a config with one fused projection without bias."""
        cfg = super().default_config()
        layer = MultiheadInputLinear.default_config().set(bias=False)
        return cfg.set(
            scale_position=cls.ScalePosition.LOGIT,
            input_linear=FusedQKVLinear.default_config().set(layer=layer),
        )

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        if self._shares_kv:
            raise LayerConfigError(
                f"{self.path()}: relative positions need the layer's own keys; use an "
                "input_linear that projects to keys."
            )
        dim = cfg.pos_emb_dim or cfg.query_dim
        self._add_child("relative_pos_emb", cfg.relative_pos_emb.set(dim=dim))
        self._add_child(
            "r_proj",
            cfg.relative_pos_linear.set(
                model_dim=dim, num_heads=cfg.num_heads, per_head_dim=self.per_head_dim()
            ),
        )

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        shape = (self.config.num_heads, self.per_head_dim())
        bias = ParameterSpec(shape, mesh_axes=("model", None))
        return {**super()._create_layer_parameter_specs(), "u_bias": bias, "v_bias": bias}

    def forward(self, query, *, key=None, value=None, **kwargs):
        """Self-attends over a whole sequence; see `MultiheadAttention.forward`.

        Raises:
          ArgumentValueError: if `key`, `value` or `query_positions` is given; positions start at 0.
        """
        given = {"key": key, "value": value, "query_positions": kwargs.get("query_positions")}
        if wrong := [name for name, x in given.items() if x is not None]:
            raise ArgumentValueError(
                f"{self.path()}: {', '.join(wrong)} given, but MultiheadAttentionXL is self "
                "attention with positions from 0; omit the argument or use MultiheadAttention."
            )
        return super().forward(query, **kwargs)

    def _scale_query(self, q_proj: Tensor, positions: Tensor) -> Tensor:
        if self.config.scale_position is self.ScalePosition.QUERY:
            return super()._scale_query(q_proj, positions)
        with child_context("scale_query"):
            return self.scale_query.apply_per_dim_scale(self.scale_query.apply_norm(q_proj))

    def _compute_logits(
        self, q_proj: Tensor, k_proj: Tensor, *, query_positions: Tensor, key_positions: Tensor
    ) -> Tensor:
        u, v = self.parameters["u_bias"], self.parameters["v_bias"]
        length = k_proj.shape[1]
        distances = jnp.arange(length - 1, -length, -1)
        r_proj = self.r_proj(self.relative_pos_emb(distances).astype(q_proj.dtype))
        if q_proj.shape[1] == length:
            logits = xl_attention_logits(q_proj, k_proj, r_proj, u, v)
        else:
            # A decoding step has few queries, each with its own position.
            by_distance = functional.attention_logits(q_proj + to_ndim(v, 4), r_proj[None])
            at = length - 1 - (query_positions[:, :, None] - key_positions[:, None, :])
            logits = functional.attention_logits(
                q_proj + to_ndim(u, 4), k_proj
            ) + jnp.take_along_axis(by_distance, at[:, None], axis=-1, mode="clip")
        if self.config.scale_position is self.ScalePosition.LOGIT:
            with child_context("scale_logits", module=self.scale_query):
                return self.scale_query.apply_scale_factor(logits)
        return logits
