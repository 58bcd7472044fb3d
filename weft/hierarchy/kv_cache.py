"""What attention remembers while a sequence grows: keys and values.

A cache has room for `max_len` positions of each sequence. A step writes the keys and values of its
own positions and gets those of all positions back; which of them are filled is for the caller to
know, who masks the others.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from weft.config import config_class
from weft.errors import ArgumentValueError
from weft.hierarchy.base_layer import BaseLayer
from weft.typing import DType, NestedTensor, Shape, Tensor


class KVState(NamedTuple):
    """Keys and values that a layer hands to another, which attends to them as well.

    Attributes:
      k_proj: `Float[Array, "batch source kv_heads per_head_dim"]`.
      v_proj: likewise.
      key_positions: `Int[Array, "#batch source"]`.
    """

    k_proj: Tensor
    v_proj: Tensor
    key_positions: Tensor


class BaseKVCache(BaseLayer):
    """Keeps keys and values."""

    @config_class
    class Config(BaseLayer.Config):
        """Configures a BaseKVCache.

        Attributes:
          cache_dtype: of what is kept; None for the dtype that `init_states` is given.
        """

        cache_dtype: DType | None = None

    def init_states(self, shape: Shape, *, dtype: DType) -> NestedTensor:
        """An empty cache.

        Args:
          shape: batch, positions, heads of keys and values, dimensions of a head.
          dtype: of what is kept, if the config has none.
        """
        raise NotImplementedError(type(self))

    def extend_step(
        self,
        cached_states: Any,
        *,
        k_proj: Tensor,
        v_proj: Tensor,
        key_positions: Tensor,
        unpadded_len: Tensor | None = None,
        page_pool: Any = None,
    ) -> tuple[NestedTensor, KVState]:
        """Writes some positions and reads all.

        Args:
          cached_states: from `init_states` or a step before.
          k_proj: `Float[Array, "batch step kv_heads per_head_dim"]`.
          v_proj: likewise.
          key_positions: `Int[Array, "#batch step"]`: where they belong.
          unpadded_len: `Int[Array, "batch"]`: how many of the step's positions are written; all if
            None.
          page_pool: memory that is shared by the caches of all layers, for caches that use one.

        Returns:
          The new state, and the keys and values of all positions, also of those that nothing was
          written to.
        """
        raise NotImplementedError(type(self))


class KVCache(BaseKVCache):
    """One array of keys and one of values, with an entry for each position."""

    def init_states(self, shape: Shape, *, dtype: DType) -> NestedTensor:
        dtype = self.config.cache_dtype or dtype
        return {"key": jnp.zeros(shape, dtype), "value": jnp.zeros(shape, dtype)}

    def extend_step(
        self,
        cached_states: Any,
        *,
        k_proj: Tensor,
        v_proj: Tensor,
        key_positions: Tensor,
        unpadded_len: Tensor | None = None,
        page_pool: Any = None,
    ) -> tuple[NestedTensor, KVState]:
        if page_pool is not None:
            raise ArgumentValueError(
                f"{self.path()} is a KVCache, which has no pages, and was given a page_pool; leave "
                "it out, or set kv_cache to the config of a cache that has pages."
            )
        batch, step = k_proj.shape[:2]
        max_len = cached_states["key"].shape[1]
        at = jnp.broadcast_to(key_positions, (batch, step))
        if unpadded_len is not None:
            # Past the end, where a write is dropped.
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
