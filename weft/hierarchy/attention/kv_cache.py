"""Caches of the keys and values of attention while a sequence grows.

A cache has room for `max_len` positions per sequence. A step writes keys and values at its own
positions and returns those of all positions; the caller masks the unfilled ones.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from weft.config import config_class
from weft.errors import ArgumentValueError
from weft.hierarchy.base_layer import BaseLayer
from weft.typing import DType, NestedTensor, Shape, Tensor


class KVState(NamedTuple):
    """Keys and values passed from one layer to another, which also attends to them.

    Attributes:
      k_proj, v_proj: `Float[Array, "batch source kv_heads per_head_dim"]`.
      key_positions: `Int[Array, "#batch source"]`.
    """

    k_proj: Tensor
    v_proj: Tensor
    key_positions: Tensor


class BaseKVCache(BaseLayer):
    """Base of the caches of keys and values."""

    @config_class
    class Config(BaseLayer.Config):
        """Configures a BaseKVCache; `cache_dtype` None is the dtype passed to `init_states`."""

        cache_dtype: DType | None = None

    def init_states(self, shape: Shape, *, dtype: DType) -> NestedTensor:
        """Returns an empty cache of a shape (batch, positions, kv_heads, per_head_dim)."""
        raise NotImplementedError(type(self))

    def extend_step(
        self,
        cached_states: dict[str, Any],
        *,
        k_proj: Tensor,
        v_proj: Tensor,
        key_positions: Tensor,
        unpadded_len: Tensor | None = None,
        page_pool: object = None,
    ) -> tuple[NestedTensor, KVState]:
        """Writes some positions and reads all.

        Args:
          cached_states: from `init_states` or the step before.
          k_proj, v_proj: `Float[Array, "batch step kv_heads per_head_dim"]`.
          key_positions: `Int[Array, "#batch step"]`: the positions to write.
          unpadded_len: `Int[Array, "batch"]`: number of positions to write; None for all.
          page_pool: memory shared by the caches of all layers, for caches that use one.

        Returns:
          The new state, and the keys and values of all positions, including unfilled ones.
        """
        raise NotImplementedError(type(self))


class KVCache(BaseKVCache):
    """Cache with one array of keys and one of values, with an entry per position."""

    def init_states(self, shape: Shape, *, dtype: DType) -> NestedTensor:
        dtype = self.config.cache_dtype or dtype
        return {"key": jnp.zeros(shape, dtype), "value": jnp.zeros(shape, dtype)}

    def extend_step(
        self,
        cached_states: dict[str, Any],
        *,
        k_proj: Tensor,
        v_proj: Tensor,
        key_positions: Tensor,
        unpadded_len: Tensor | None = None,
        page_pool: object = None,
    ) -> tuple[NestedTensor, KVState]:
        if page_pool is not None:
            raise ArgumentValueError(
                f"{self.path()} is a KVCache, which has no pages, but a page_pool was passed; omit "
                "it, or set kv_cache to the config of a cache that has pages."
            )
        batch, step = k_proj.shape[:2]
        max_len = cached_states["key"].shape[1]
        at = jnp.broadcast_to(key_positions, (batch, step))
        if unpadded_len is not None:
            # Past the end, where writes are dropped.
            at = jnp.where(jnp.arange(step)[None] < unpadded_len[:, None], at, max_len)
        rows = jnp.arange(batch)[:, None]
        states = {
            name: cached_states[name]
            .at[rows, at]
            .set(new.astype(cached_states[name].dtype), mode="drop")
            for name, new in (("key", k_proj), ("value", v_proj))
        }
        return states, KVState(
            k_proj=states["key"].astype(k_proj.dtype),
            v_proj=states["value"].astype(v_proj.dtype),
            key_positions=jnp.arange(max_len)[None],
        )
