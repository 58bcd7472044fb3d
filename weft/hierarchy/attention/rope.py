"""Rotary position embeddings: queries and keys are rotated by angles proportional to position.

Inner products of queries and keys then depend on relative positions (Su et al., 2021).
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from weft import config, errors, functional
from weft.hierarchy.attention import qkv_linear
from weft.hierarchy.base_layer import BaseLayer
from weft.hierarchy.module import Module, nowrap
from weft.typing import Tensor


class RoFormerSinusoidalPositionalEmbedding(BaseLayer):
    """Sines and cosines of rotary angles."""

    class Config(BaseLayer.Config):
        """Configures a RoFormerSinusoidalPositionalEmbedding of even size `dim`."""

        dim: config.Required[int] = config.REQUIRED
        theta: float = 10000.0

    @nowrap
    def default_query_positions(self, max_seq_len: int) -> Tensor:
        """Returns the default positions of a sequence, `Int[Array, "1 max_seq_len"]`."""
        return jnp.arange(max_seq_len)[None]

    def _positions(
        self, positions: Tensor | None, max_seq_len: int | None
    ) -> Tensor:
        if positions is not None and max_seq_len is not None:
            raise errors.ArgumentValueError(
                f"{self.path()} was given positions of shape {positions.shape} and "
                f"max_seq_len={max_seq_len}; expected only one of them."
            )
        if positions is not None:
            return positions
        if max_seq_len is None:
            raise errors.ArgumentValueError(
                f"{self.path()} needs positions, or max_seq_len for positions from 0."
            )
        return self.default_query_positions(max_seq_len)

    def forward(
        self, *, positions: Tensor | None = None, max_seq_len: int | None = None
    ) -> Tensor:
        """Returns sines, then cosines, `Float[Array, "batch time dim"]`.

        Args:
          positions: `Int[Array, "batch time"]`.
          max_seq_len: shorthand for positions 0 to `max_seq_len - 1`.

        Raises:
          ArgumentValueError: unless exactly one of the arguments is given.
        """
        positions = self._positions(positions, max_seq_len)
        return jnp.concatenate(
            functional.sincos(positions, self._frequencies()), axis=-1
        )

    def _frequencies(self) -> Tensor:
        return functional.rotary_frequencies(self.config.dim, self.config.theta)


class YaRNSinusoidalPositionalEmbedding(RoFormerSinusoidalPositionalEmbedding):
    """Rotary embedding for contexts longer than in training (Peng et al., 2023)."""

    class Config(RoFormerSinusoidalPositionalEmbedding.Config):
        """Configures a YaRNSinusoidalPositionalEmbedding; see `functional.yarn_frequencies`.

        `attn_factor` is a factor of queries and keys, on top of that derived from `scaling_factor`.
        `truncate` rounds where the ramp begins and ends, as most published checkpoints do.
        """

        original_max_seq_length: config.Required[int] = config.REQUIRED
        scaling_factor: float = 1.0
        extrapolation_factor: float = 1.0
        attn_factor: float = 1.0
        beta_fast: float = 32.0
        beta_slow: float = 1.0
        truncate: bool = False

    def compute_rope_params(self) -> tuple[Tensor, float]:
        """Returns frequencies, `Float[Array, "dim/2"]`, and the factor of sines and cosines."""
        cfg = self.config
        frequencies = functional.yarn_frequencies(
            cfg.dim,
            cfg.theta,
            original_max_seq_length=cfg.original_max_seq_length,
            scaling_factor=cfg.scaling_factor,
            extrapolation_factor=cfg.extrapolation_factor,
            beta_fast=cfg.beta_fast,
            beta_slow=cfg.beta_slow,
            truncate=cfg.truncate,
        )
        return frequencies, functional.yarn_magnitude(
            cfg.scaling_factor, cfg.attn_factor
        )

    def build_rotary_sinusoidal_positional_embeddings(
        self, positions: Tensor, inv_freq: Tensor, mscale: float
    ) -> Tensor:
        """Returns sines and cosines times `mscale`; `inv_freq` is the angle per position."""
        return (
            jnp.concatenate(functional.sincos(positions, inv_freq), axis=-1)
            * mscale
        )

    def forward(
        self, *, positions: Tensor | None = None, max_seq_len: int | None = None
    ) -> Tensor:
        return self.build_rotary_sinusoidal_positional_embeddings(
            self._positions(positions, max_seq_len), *self.compute_rope_params()
        )


class Llama3SinusoidalPositionalEmbedding(
    RoFormerSinusoidalPositionalEmbedding
):
    """Rotary embedding of Llama 3.1 for contexts longer than in initial training."""

    class Config(RoFormerSinusoidalPositionalEmbedding.Config):
        """Configures a Llama3SinusoidalPositionalEmbedding; see `functional.llama3_frequencies`."""

        original_max_seq_length: config.Required[int] = config.REQUIRED
        scaling_factor: float = 8.0
        low_freq_factor: float = 1.0
        high_freq_factor: float = 4.0

    def _frequencies(self) -> Tensor:
        cfg = self.config
        return functional.llama3_frequencies(
            cfg.dim,
            cfg.theta,
            original_max_seq_length=cfg.original_max_seq_length,
            scaling_factor=cfg.scaling_factor,
            low_freq_factor=cfg.low_freq_factor,
            high_freq_factor=cfg.high_freq_factor,
        )


class DynamicNTKSinusoidalPositionalEmbedding(
    RoFormerSinusoidalPositionalEmbedding
):
    """Rotary embedding whose frequencies fall as a sequence outgrows the training's context.

    Beyond `original_max_seq_length`, `theta` grows with the length n, one more than the largest
    position of the batch, times (factor * n / original - factor + 1) ** (dim / (dim - 2)).
    """

    class Config(RoFormerSinusoidalPositionalEmbedding.Config):
        """Configures a DynamicNTKSinusoidalPositionalEmbedding."""

        original_max_seq_length: config.Required[int] = config.REQUIRED
        scaling_factor: float = 1.0

    def forward(
        self, *, positions: Tensor | None = None, max_seq_len: int | None = None
    ) -> Tensor:
        cfg = self.config
        positions = self._positions(positions, max_seq_len)
        original, factor = cfg.original_max_seq_length, cfg.scaling_factor
        length = jnp.maximum(jnp.max(positions) + 1, original)
        growth = factor * length / original - (factor - 1)
        exponents = jnp.arange(0, cfg.dim, 2, dtype=jnp.float32) / cfg.dim
        theta = cfg.theta * growth ** (cfg.dim / (cfg.dim - 2))
        return jnp.concatenate(
            functional.sincos(positions, theta**-exponents), axis=-1
        )


class LongRoPESinusoidalPositionalEmbedding(
    RoFormerSinusoidalPositionalEmbedding
):
    """Rotary embedding with a factor per frequency, found by search (Ding et al., 2024).

    Sequences of a batch that all fit into `original_max_seq_length` have `short_factors`, longer
    ones `long_factors`.
    """

    class Config(RoFormerSinusoidalPositionalEmbedding.Config):
        """Configures a LongRoPESinusoidalPositionalEmbedding."""

        original_max_seq_length: config.Required[int] = config.REQUIRED
        short_factors: config.Required[Sequence[float]] = config.REQUIRED
        """Divisors of the `dim / 2` frequencies."""
        long_factors: config.Required[Sequence[float]] = config.REQUIRED
        attn_factor: float = 1.0
        """Factor of sines and cosines."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        for name in ("short_factors", "long_factors"):
            count = len(getattr(cfg, name))
            if 2 * count != cfg.dim:
                raise errors.LayerConfigError(
                    f"{self.path()}: {name} has {count} numbers; expected one for each of the "
                    f"{cfg.dim // 2} frequencies of dim={cfg.dim}."
                )

    def forward(
        self, *, positions: Tensor | None = None, max_seq_len: int | None = None
    ) -> Tensor:
        cfg = self.config
        positions = self._positions(positions, max_seq_len)
        is_long = jnp.max(positions) >= cfg.original_max_seq_length
        divisors = jnp.where(
            is_long,
            jnp.asarray(cfg.long_factors, jnp.float32),
            jnp.asarray(cfg.short_factors, jnp.float32),
        )
        frequencies = self._frequencies() / divisors
        sincos = functional.sincos(positions, frequencies)
        return jnp.concatenate(sincos, axis=-1) * cfg.attn_factor


def apply_rotary_position_embeddings(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinusoidal_pos: Tensor,
    rotary_key: bool,
    rotary_value: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotates queries, and optionally keys and values, all `Float[Array, "batch time heads dim"]`.

    `sinusoidal_pos` is `Float[Array, "#batch time #heads dim"]`, first the sines.
    """
    if rotary_key:
        key = _rotate(key, sinusoidal_pos)
    if rotary_value:
        value = _rotate(value, sinusoidal_pos)
    return _rotate(query, sinusoidal_pos), key, value


def _rotate(x: Tensor, sinusoidal_pos: Tensor) -> Tensor:
    """Rotates as many leading dimensions of `x` as there are sines and cosines."""
    dim = sinusoidal_pos.shape[-1]
    sines, cosines = jnp.split(sinusoidal_pos, 2, axis=-1)
    rotated = functional.apply_rotary(x[..., :dim], sines, cosines)
    if dim == x.shape[-1]:
        return rotated
    return jnp.concatenate([rotated, x[..., dim:]], axis=-1)


class RoFormerQKVLinear(qkv_linear.BaseQKVLinear):
    """Rotates the queries and keys of another projection layer."""

    class Config(qkv_linear.BaseQKVLinear.Config):
        """Configures a RoFormerQKVLinear."""

        rope_pos_emb_layer: RoFormerSinusoidalPositionalEmbedding.Config = (
            RoFormerSinusoidalPositionalEmbedding.default_config()
        )
        input_linear: qkv_linear.BaseQKVLinear.Config = (
            qkv_linear.QKVLinear.default_config()
        )
        rotary_value: config.Required[bool] = config.REQUIRED
        query_scale: qkv_linear.BaseScaleQK.Config | None = None
        """Norm and scale of queries before the rotation."""
        key_scale: qkv_linear.BaseScaleQK.Config | None = None
        """Norm and scale of keys before the rotation."""
        partial_rope_factor: float | None = None
        """Fraction of leading dimensions of each head to rotate; None for all."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        factor = cfg.partial_rope_factor
        if factor is None:
            factor = 1.0
        self._rotary_dim = 0
        if 0 < factor <= 1:
            self._rotary_dim = int(cfg.per_head_dim * factor)
        if not 0 < factor <= 1 or self._rotary_dim % 2:
            raise errors.LayerConfigError(
                f"{self.path()}: partial_rope_factor={factor} of per_head_dim={cfg.per_head_dim} "
                f"rotates {self._rotary_dim} dimensions; expected a factor in (0, 1] and an even "
                "number of dimensions."
            )
        self._add_child(
            "rope_pos_emb_layer",
            cfg.rope_pos_emb_layer.set(dim=self._rotary_dim),
        )
        self._add_child("i_proj", self._with_dims(cfg.input_linear))
        for name in ("query_scale", "key_scale"):
            self._maybe_add_child(
                name, getattr(cfg, name), per_head_dim=cfg.per_head_dim
            )

    @property
    def num_kv_heads(self) -> int:
        return self.i_proj.num_kv_heads

    @classmethod
    def is_kv_sharing(cls, cfg: Any) -> bool:
        return cfg.input_linear.klass.is_kv_sharing(cfg.input_linear)

    def forward(
        self,
        query,
        *,
        key=None,
        value=None,
        kv_state=None,
        query_positions=None,
    ):
        cfg = self.config
        q, k, v = self.i_proj(
            query,
            key=key,
            value=value,
            kv_state=kv_state,
            query_positions=query_positions,
        )
        if query_positions is None:
            query_positions = self.rope_pos_emb_layer.default_query_positions(
                query.shape[1]
            )
        if q.shape[1] != k.shape[1] and kv_state is None:
            raise errors.ArgumentShapeError(
                f"{self.path()} rotates keys by the positions of the queries, but there are "
                f"{q.shape[1]} queries and {k.shape[1]} keys; use QKVLinear for cross attention."
            )
        sinusoidal = self.rope_pos_emb_layer(positions=query_positions)[
            :, :, None
        ]
        if cfg.query_scale is not None:
            q = self.query_scale(q, positions=query_positions)
        q = _rotate(q, sinusoidal)
        if self.is_kv_sharing(cfg):
            return self.Output(q, k, v)  # already rotated by the other layer
        if cfg.key_scale is not None:
            k = self.key_scale(k, positions=query_positions)
        if cfg.rotary_value:
            v = _rotate(v, sinusoidal)
        return self.Output(q, _rotate(k, sinusoidal), v)
