"""Caches of the keys and values of attention while a sequence grows.

A step writes keys and values at its own positions and returns those that it may attend to, with
their positions; the caller masks positions outside the sequence.

    KVCache                 one entry per position: room for all positions of each sequence
    SlidingWindowKVCache    the last `cached_kv_length` positions of each sequence
    PagedKVCache            pages of `page_size` positions from a pool, listed for each sequence
    RingKVCache             slots of a ring; in a step, all sequences write to the same one

Pages (Kwon et al., 2023, https://arxiv.org/abs/2309.06180) need not be adjacent, so that sequences
of different lengths share a pool without gaps, and sequences with a common prefix share its pages.
"""

import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from weft import config, errors, struct
from weft.functional import arrays
from weft.hierarchy import base_layer, parameter_spec
from weft.hierarchy.module import nowrap
from weft.typing import (
    DType,
    MeshAxes,
    NestedTensor,
    PartitionSpec,
    Shape,
    Tensor,
)


class KVState(NamedTuple):
    """Keys and values to attend to, also passed from one layer to another.

    Attributes:
      k_proj, v_proj: `Float[Array, "batch source kv_heads per_head_dim"]`, or pages,
        `Float[Array, "num_pages page_size kv_heads per_head_dim"]`.
      key_positions: `Int[Array, "#batch source"]`; negative for entries without a position.
      page_indices: `Int[Array, "batch pages"]`, the pages of each sequence; None without pages.
    """

    k_proj: Tensor
    v_proj: Tensor
    key_positions: Tensor
    page_indices: Tensor | None = None


class KVPages(struct.PyTreeNode):
    """State of a PagedKVCache.

    A position p of a sequence is entry `p % page_size` of page `page_indices[p // page_size]`. A
    sequence has no page where its index is `num_pages`: writes are dropped, and these positions are
    masked.

    Attributes:
      key, value: `Float[Array, "num_pages page_size kv_heads per_head_dim"]`.
      page_indices: `Int[Array, "batch pages"]`, the pages of each sequence. They can be set by
        `replace` between steps; a page may be in several sequences if they do not write to it.
    """

    key: Tensor
    value: Tensor
    page_indices: Tensor

    def take(self, rows: Tensor) -> "KVPages":
        """Returns a state of copies of some sequences, `Int[Array, "rows"]`, each on own pages."""
        page_indices = self.page_indices[rows]

        def copy_pages(pages: Tensor) -> Tensor:
            return _pages_at(pages, page_indices).reshape(-1, *pages.shape[1:])

        new_indices = _consecutive(page_indices.shape)
        return KVPages(
            copy_pages(self.key), copy_pages(self.value), new_indices
        )


class KVRing(struct.PyTreeNode):
    """State of a RingKVCache.

    Attributes:
      key, value: `Float[Array, "batch kv_heads slots per_head_dim"]`.
      key_positions: `Int[Array, "batch slots"]`, negative for slots without a position.
      next_slot: `Int[Array, ""]`, the slot that the next position of every sequence goes to.
    """

    key: Tensor
    value: Tensor
    key_positions: Tensor
    next_slot: Tensor

    def insert(self, prompt: "KVRing", row: Tensor, length: Tensor) -> "KVRing":
        """Returns the state with another sequence in a row, whose next position is the next slot.

        Args:
          prompt: the state of that sequence alone, with its positions in the first slots.
          row: `Int[Array, ""]`.
          length: `Int[Array, ""]`, the number of positions of the sequence.
        """
        num_slots = self.key.shape[2]
        first_slot = self.next_slot - length

        def placed(x: Tensor, axis: int, fill_value: int) -> Tensor:
            padding = [(0, 0)] * x.ndim
            padding[axis] = (0, num_slots - x.shape[axis])
            padded = jnp.pad(x, padding, constant_values=fill_value)
            return jnp.roll(padded, first_slot, axis)

        def write(cached: Tensor, new: Tensor) -> Tensor:
            return jax.lax.dynamic_update_slice_in_dim(
                cached, new.astype(cached.dtype), row, axis=0
            )

        return self.replace(
            key=write(self.key, placed(prompt.key, 2, 0)),
            value=write(self.value, placed(prompt.value, 2, 0)),
            key_positions=write(
                self.key_positions, placed(prompt.key_positions, 1, -1)
            ),
        )


class BaseKVCache(base_layer.BaseLayer):
    """Base of the caches of keys and values."""

    class Config(base_layer.BaseLayer.Config):
        """Configures a BaseKVCache."""

        cache_dtype: DType | None = None
        """Dtype of the cache; None for the dtype passed to `init_states`."""
        kv_partition_spec: PartitionSpec | MeshAxes | None = None
        """Sharding of the cache, (batch, positions, kv_heads, per_head_dim), or of its pages,
        (pages, positions, kv_heads, per_head_dim)."""

    Output = KVState

    def init_states(self, shape: Shape, *, dtype: DType) -> NestedTensor:
        """Returns an empty cache of a shape (batch, positions, kv_heads, per_head_dim)."""
        raise NotImplementedError(type(self))

    def extend_step(
        self,
        cached_states: Any,
        *,
        k_proj: Tensor,
        v_proj: Tensor,
        key_positions: Tensor,
        unpadded_len: Tensor | None = None,
        page_pool: KVPages | None = None,
    ) -> tuple[NestedTensor, KVState]:
        """Writes some positions and reads all that are cached.

        Args:
          cached_states: from `init_states` or the step before.
          k_proj, v_proj: `Float[Array, "batch step kv_heads per_head_dim"]`.
          key_positions: `Int[Array, "#batch step"]`: the positions to write.
          unpadded_len: `Int[Array, "batch"]`: number of positions to write; None for all.
          page_pool: for a PagedKVCache, the state whose pages to write to and to read, such as
            those of the sequences that are being decoded, for the prompt of another one; None for
            those of `cached_states`.

        Returns:
          The new state, and the keys and values of cached positions, including unfilled ones.
        """
        if page_pool is not None and not isinstance(cached_states, KVPages):
            raise errors.ArgumentValueError(
                f"{self.path()} is a {type(self).__name__}, which has no pages, but a page_pool "
                "was passed; omit it, or set kv_cache to PagedKVCache.default_config()."
            )
        new = KVState(
            k_proj, v_proj, jnp.broadcast_to(key_positions, k_proj.shape[:2])
        )
        states, kv_state = self._extend(
            cached_states, new, unpadded_len, page_pool
        )
        kv_state = kv_state._replace(
            k_proj=kv_state.k_proj.astype(k_proj.dtype),
            v_proj=kv_state.v_proj.astype(v_proj.dtype),
        )
        return states, kv_state

    def _extend(
        self,
        cached_states: Any,
        new: KVState,
        unpadded_len: Tensor | None,
        pool: KVPages | None,
    ) -> tuple[Any, KVState]:
        """Implements `extend_step`; the result may have the dtype of the cache."""
        raise NotImplementedError(type(self))

    @nowrap
    def maybe_normalize_kv(self, kv_state: KVState) -> KVState:
        """Joins the pages of each sequence; other keys and values are returned as they are."""
        return kv_state

    def _zeros(self, shape: Shape, dtype: DType) -> Tensor:
        return self._shard(jnp.zeros(shape, self.config.cache_dtype or dtype))

    def _shard(self, x: Tensor) -> Tensor:
        spec = parameter_spec.free_if_indivisible(
            self.config.kv_partition_spec, axis=2, size=x.shape[2]
        )
        return parameter_spec.maybe_shard(x, spec)

    def _write(
        self, cached: Tensor, indices: tuple[Tensor, Tensor], new: Tensor
    ) -> Tensor:
        """Writes to the first two axes of an array; indices past its end write nothing."""

        def write(
            cached: Tensor, indices: tuple[Tensor, Tensor], new: Tensor
        ) -> Tensor:
            return cached.at[indices].set(new.astype(cached.dtype), mode="drop")

        spec = arrays.explicit_spec(cached)
        return self._shard(
            arrays.sharded_by_compiler(write, cached, indices, new, spec=spec)
        )


class KVCache(BaseKVCache):
    """Cache with one array of keys and one of values, with an entry per position."""

    def init_states(self, shape: Shape, *, dtype: DType) -> NestedTensor:
        return {
            "key": self._zeros(shape, dtype),
            "value": self._zeros(shape, dtype),
        }

    def _extend(
        self,
        cached_states: Any,
        new: KVState,
        unpadded_len: Tensor | None,
        pool: KVPages | None,
    ) -> tuple[Any, KVState]:
        batch, max_len = cached_states["key"].shape[:2]
        rows = jnp.arange(batch)[:, None]
        positions = _positions_to_write(new, unpadded_len, past_end=max_len)
        key = self._write(cached_states["key"], (rows, positions), new.k_proj)
        value = self._write(
            cached_states["value"], (rows, positions), new.v_proj
        )
        return {"key": key, "value": value}, KVState(
            key, value, jnp.arange(max_len)[None]
        )


class SlidingWindowKVCache(BaseKVCache):
    """Cache of the last positions of each sequence, for attention within a window.

    A step also returns its own keys and values, so that its first query has the whole window.
    """

    class Config(BaseKVCache.Config):
        """Configures a SlidingWindowKVCache.

        It keeps `cached_kv_length` positions, at least the `sliding_window_size` of the mask.
        """

        cached_kv_length: config.Required[int] = config.REQUIRED

    def init_states(self, shape: Shape, *, dtype: DType) -> NestedTensor:
        """Returns an empty cache; the number of positions in `shape` does not matter."""
        batch, _, *heads = shape
        length = self.config.cached_kv_length
        return {
            "key": self._zeros((batch, length, *heads), dtype),
            "value": self._zeros((batch, length, *heads), dtype),
            "key_positions": jnp.full((batch, length), -1, jnp.int32),
        }

    def _extend(
        self,
        cached_states: Any,
        new: KVState,
        unpadded_len: Tensor | None,
        pool: KVPages | None,
    ) -> tuple[Any, KVState]:
        batch, step = new.key_positions.shape
        if unpadded_len is None:
            unpadded_len = jnp.full([batch], step)
        rows = jnp.arange(batch)[:, None]
        # Of the entries of the cache and then those of the step, the last before its padding.
        columns = (
            unpadded_len[:, None]
            + jnp.arange(self.config.cached_kv_length)[None]
        )

        def append(cached: Tensor, new_entries: Tensor) -> Tensor:
            return jnp.concatenate(
                [cached, new_entries.astype(cached.dtype)], axis=1
            )

        def take_last(entries: Tensor) -> Tensor:
            spec = arrays.explicit_spec(entries)
            return arrays.sharded_by_compiler(
                operator.getitem, entries, (rows, columns), spec=spec
            )

        keys = append(cached_states["key"], new.k_proj)
        values = append(cached_states["value"], new.v_proj)
        key_positions = append(
            cached_states["key_positions"], new.key_positions
        )
        states = {
            "key": self._shard(take_last(keys)),
            "value": self._shard(take_last(values)),
            "key_positions": take_last(key_positions),
        }
        return states, KVState(keys, values, key_positions)


class PagedKVCache(BaseKVCache):
    """Cache of pages from a pool; its state is a KVPages.

    >>> cfg = PagedKVCache.default_config().set(name="cache", page_size=2, num_pages=3)
    >>> states = cfg.instantiate(parent=None).init_states((2, 4, 1, 8), dtype=jnp.float32)
    >>> states.key.shape  # memory for 6 positions instead of 2 * 4
    (3, 2, 1, 8)
    >>> states = states.replace(page_indices=jnp.array([[0, 2], [1, 3]]))  # 3: no page
    """

    class Config(BaseKVCache.Config):
        """Configures a PagedKVCache."""

        page_size: config.Required[int] = config.REQUIRED
        num_pages: int | None = None
        """Size of the pool, from which the caller assigns pages to each sequence by `page_indices`;
        None gives each sequence pages for all its positions."""

    def init_states(self, shape: Shape, *, dtype: DType) -> KVPages:
        cfg = self.config
        batch, max_len, *heads = shape
        num_pages_per_sequence = -(-max_len // cfg.page_size)
        page_indices = _consecutive((batch, num_pages_per_sequence))
        num_pages = page_indices.size
        if cfg.num_pages is not None:
            num_pages = cfg.num_pages
            page_indices = jnp.full_like(page_indices, num_pages)
        pool_shape = (num_pages, cfg.page_size, *heads)
        keys, values = (
            self._zeros(pool_shape, dtype),
            self._zeros(pool_shape, dtype),
        )
        return KVPages(keys, values, page_indices)

    def _extend(
        self,
        cached_states: Any,
        new: KVState,
        unpadded_len: Tensor | None,
        pool: KVPages | None,
    ) -> tuple[Any, KVState]:
        page_indices = arrays.gathered(cached_states.page_indices, 1)
        page_size = self.config.page_size
        pages: KVPages = cached_states if pool is None else pool
        num_pages = len(pages.key)
        max_len = page_indices.shape[1] * page_size
        positions = _positions_to_write(new, unpadded_len, past_end=max_len)
        rows = jnp.arange(page_indices.shape[0])[:, None]

        def pages_of(
            page_indices: Tensor, indices: tuple[Tensor, Tensor]
        ) -> Tensor:
            # Past the end there is no page: `num_pages`, where nothing is written.
            return page_indices.at[indices].get(
                mode="fill", fill_value=num_pages
            )

        page_numbers = arrays.sharded_by_compiler(
            pages_of,
            page_indices,
            (rows, positions // page_size),
            spec=arrays.explicit_spec(positions),
        )
        places = (page_numbers, positions % page_size)
        key = self._write(pages.key, places, new.k_proj)
        value = self._write(pages.value, places, new.v_proj)
        has_page = jnp.repeat(page_indices < num_pages, page_size, axis=1)
        key_positions = jnp.where(has_page, jnp.arange(max_len), -1)
        states = KVPages(key, value, page_indices)
        return states, KVState(key, value, key_positions, page_indices)

    def maybe_normalize_kv(self, kv_state: KVState) -> KVState:
        page_indices = kv_state.page_indices
        if page_indices is None:
            return kv_state

        def join_pages(pages: Tensor) -> Tensor:
            sequences = _pages_at(pages, page_indices)
            return sequences.reshape(len(page_indices), -1, *pages.shape[2:])

        keys, values = join_pages(kv_state.k_proj), join_pages(kv_state.v_proj)
        return KVState(keys, values, kv_state.key_positions)


class RingKVCache(BaseKVCache):
    """Cache of the last positions of sequences that grow together, in slots that are reused.

    In a step, all sequences write to the same slot, whatever their positions are. This is a slice,
    which XLA writes in place, while the other caches write to a place of its own in each sequence.
    Its state is a KVRing. There are as many slots as positions in the longest sequence.

    >>> cfg = RingKVCache.default_config().set(name="cache")
    >>> states = cfg.instantiate(parent=None).init_states((2, 4, 1, 8), dtype=jnp.float32)
    >>> states.key.shape
    (2, 1, 4, 8)
    """

    def init_states(self, shape: Shape, *, dtype: DType) -> KVRing:
        batch, num_slots, kv_heads, per_head_dim = shape
        slots_shape = (batch, kv_heads, num_slots, per_head_dim)
        return KVRing(
            key=self._zeros(slots_shape, dtype),
            value=self._zeros(slots_shape, dtype),
            key_positions=jnp.full((batch, num_slots), -1, jnp.int32),
            next_slot=jnp.zeros((), jnp.int32),
        )

    @nowrap
    def _shard(self, x: Tensor) -> Tensor:
        spec = self.config.kv_partition_spec
        if spec is not None:
            batch_axis, slot_axis, head_axis, dim_axis = spec
            spec = (batch_axis, head_axis, slot_axis, dim_axis)
        spec = parameter_spec.free_if_indivisible(spec, axis=1, size=x.shape[1])
        return parameter_spec.maybe_shard(x, spec)

    def _extend(
        self,
        cached_states: Any,
        new: KVState,
        unpadded_len: Tensor | None,
        pool: KVPages | None,
    ) -> tuple[Any, KVState]:
        num_slots = cached_states.key.shape[2]
        step = new.key_positions.shape[1]
        positions = _positions_to_write(new, unpadded_len, past_end=-1)
        slot = cached_states.next_slot

        def write(cached: Tensor, new: Tensor, axis: int) -> Tensor:
            def write_slots(
                cached: Tensor, new: Tensor, slot: Tensor
            ) -> Tensor:
                if step == 1:
                    return jax.lax.dynamic_update_slice_in_dim(
                        cached, new, slot, axis
                    )
                slots = (slot + jnp.arange(step)) % num_slots
                index = (*[slice(None)] * axis, slots)
                return cached.at[index].set(new)

            new = new.astype(cached.dtype)
            spec = arrays.explicit_spec(cached)
            return arrays.sharded_by_compiler(
                write_slots, cached, new, slot, spec=spec
            )

        def by_head(x: Tensor) -> Tensor:
            return jnp.swapaxes(x, 1, 2)

        states = KVRing(
            key=self._shard(write(cached_states.key, by_head(new.k_proj), 2)),
            value=self._shard(
                write(cached_states.value, by_head(new.v_proj), 2)
            ),
            key_positions=write(cached_states.key_positions, positions, 1),
            next_slot=(slot + step) % num_slots,
        )
        return states, KVState(
            by_head(states.key), by_head(states.value), states.key_positions
        )


def _positions_to_write(
    new: KVState, unpadded_len: Tensor | None, *, past_end: int
) -> Tensor:
    """Returns `Int[Array, "batch step"]`, `past_end` for padding: there, writes are dropped."""
    positions = new.key_positions
    if unpadded_len is None:
        return positions
    is_live = jnp.arange(positions.shape[1])[None] < unpadded_len[:, None]
    return jnp.where(is_live, positions, past_end)


def _pages_at(pages: Tensor, indices: Tensor) -> Tensor:
    return pages.at[indices].get(mode="fill", fill_value=0)


def _consecutive(shape: Shape) -> Tensor:
    return jax.lax.iota(jnp.int32, shape[0] * shape[1]).reshape(shape)
