"""Products of rows in groups, each group with a matrix of its own, as experts need them.

On accelerators this is `jax.lax.ragged_dot`. On CPU that takes as many operations as if each row
were multiplied by all matrices. Here it takes a block of rows at a time:

    rows      a a a a a b b b c c c c      three groups, in blocks of 2
    blocks    [0:2] [2:4] [4:6] [5:7] [7:9] [8:10] [10:12]

The last block of a group may reach into the next one, whose own blocks come later and overwrite it.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from weft.typing import DType

# Measured: smaller blocks cost calls, larger ones rows that are in none of the groups.
_ROWS_PER_BLOCK = 128


def grouped_matmul(
    rows: Float[Array, "rows inputs"],
    weights: Float[Array, "groups inputs outputs"],
    group_sizes: Int[Array, " groups"],
    *,
    preferred_element_type: DType | None = None,
) -> Float[Array, "rows outputs"]:
    """Multiplies each group of rows by its matrix: the first `group_sizes[0]` by `weights[0]`, etc.

    Args:
        group_sizes: numbers of rows, at most all of them. The results of further rows are zeros.
        preferred_element_type: dtype of the results; that of the operands by default.

    >>> rows, weights = jnp.ones((3, 2)), jnp.stack([jnp.eye(2), 2 * jnp.eye(2)])
    >>> grouped_matmul(rows, weights, jnp.array([1, 2])).tolist()
    [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
    """
    dtype = preferred_element_type or jnp.result_type(rows, weights)
    return jax.lax.platform_dependent(
        rows,
        weights,
        group_sizes,
        cpu=functools.partial(_matmul_in_blocks, jnp.dtype(dtype)),
        default=functools.partial(
            jax.lax.ragged_dot, preferred_element_type=dtype
        ),
    )


class _Block(NamedTuple):
    """Some rows of one group.

    Attributes:
        group: the group; for blocks beyond the last row, the last one.
        start: the first of its rows.
        end: the row after the last one of the group.
    """

    group: Array
    start: Array
    end: Array

    def of(self, rows: Array, size: int) -> Array:
        """Returns the rows of the block, zeros for those of another group."""
        block_rows = jax.lax.dynamic_slice_in_dim(rows, self.start, size)
        return self.without_others(block_rows)

    def without_others(self, block_rows: Array) -> Array:
        """Returns rows of the block, with zeros in those of another group."""
        is_of_group = self.start + jnp.arange(len(block_rows)) < self.end
        return jnp.where(is_of_group[:, None], block_rows, 0)


def _blocks(num_rows: int, group_sizes: Array) -> tuple[_Block, int]:
    """Returns the blocks of all groups, stacked, and their number of rows."""
    num_groups = len(group_sizes)
    size = min(_ROWS_PER_BLOCK, num_rows)
    ends = jnp.cumsum(group_sizes)
    num_blocks_of_group = -(-group_sizes // size)
    block_ends = jnp.cumsum(num_blocks_of_group)
    # Each group may need one more than its rows fill.
    numbers = jnp.arange(num_rows // size + num_groups)
    group = jnp.searchsorted(block_ends, numbers, side="right")
    group = jnp.minimum(group, num_groups - 1)
    number_in_group = numbers - (block_ends - num_blocks_of_group)[group]
    start = (ends - group_sizes)[group] + number_in_group * size
    return _Block(group, jnp.minimum(start, num_rows), ends[group]), size


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul_in_blocks(
    dtype: DType, rows: Array, weights: Array, group_sizes: Array
) -> Array:
    return _product(dtype, rows, weights, group_sizes, contracted_axis=0)


def _product(
    dtype: DType,
    rows: Array,
    weights: Array,
    group_sizes: Array,
    *,
    contracted_axis: int,
) -> Array:
    """Multiplies rows by the matrices of their groups, over the first or second of their axes."""
    num_rows = len(rows)
    blocks, size = _blocks(num_rows, group_sizes)
    # The last block may be longer than what is left.
    rows = jnp.pad(rows, ((0, size), (0, 0)))
    contraction = (((1,), (contracted_axis,)), ((), ()))

    def add_block(results: Array, block: _Block) -> tuple[Array, None]:
        block_rows = jax.lax.dynamic_slice_in_dim(rows, block.start, size)
        weight = jax.lax.dynamic_index_in_dim(
            weights, block.group, keepdims=False
        )
        products = jax.lax.dot_general(
            block_rows, weight, contraction, preferred_element_type=dtype
        )
        results = jax.lax.dynamic_update_slice_in_dim(
            results, block.without_others(products), block.start, axis=0
        )
        return results, None

    num_outputs = weights.shape[2 - contracted_axis]
    results = jnp.zeros((num_rows + size, num_outputs), dtype)
    results, _ = jax.lax.scan(add_block, results, blocks)
    return results[:num_rows]


def _forward(
    dtype: DType, rows: Array, weights: Array, group_sizes: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    results = _product(dtype, rows, weights, group_sizes, contracted_axis=0)
    return results, (rows, weights, group_sizes)


def _backward(
    dtype: DType, saved: tuple[Array, Array, Array], cotangent: Array
) -> tuple[Array, Array, None]:
    del dtype
    rows, weights, group_sizes = saved
    rows_cotangent = _product(
        rows.dtype, cotangent, weights, group_sizes, contracted_axis=1
    )
    blocks, size = _blocks(len(rows), group_sizes)
    padding = ((0, size), (0, 0))
    padded_rows = jnp.pad(rows, padding)
    padded_cotangent = jnp.pad(cotangent, padding)
    dtype_of_sums = jnp.promote_types(weights.dtype, jnp.float32)

    def add_block(sums: Array, block: _Block) -> tuple[Array, None]:
        products = jnp.matmul(
            block.of(padded_rows, size).T,
            block.of(padded_cotangent, size),
            preferred_element_type=dtype_of_sums,
        )
        return sums.at[block.group].add(products), None

    sums = jnp.zeros(weights.shape, dtype_of_sums)
    sums, _ = jax.lax.scan(add_block, sums, blocks)
    return rows_cotangent, sums.astype(weights.dtype), None


_matmul_in_blocks.defvjp(_forward, _backward)
