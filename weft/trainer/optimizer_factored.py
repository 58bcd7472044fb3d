"""Second moments stored as sums over rows and over columns.

For a matrix of gradients G, the moment of G² is approximated by the outer product of its row means
and its column means, divided by the mean of all: two vectors replace a matrix. The layer chooses
the row and column axes in the parameter's factorization spec.
Source: Shazeer and Stern, https://arxiv.org/abs/1804.04235.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from weft.hierarchy.base_layer import FactorizationSpec, NestedParameterSpec, TensorSpec
from weft.trainer.optimizer_base import (
    COUNT_SPEC,
    NestedOptParam,
    PartitionedGradientTransformation,
    replicated,
)
from weft.trainer.schedule import Schedule, as_schedule_fn
from weft.typing import NestedTensor, Tensor


class _Moment(NamedTuple):
    """Second moment of one parameter: either `v_row` and `v_col` or `v` is used."""

    v_row: Any
    v_col: Any
    v: Any


def scale_by_factored_rms(
    decay: Schedule, *, factored: bool = True, eps: float = 1e-30
) -> PartitionedGradientTransformation:
    """Divides updates by the root of the moving average of their squares.

    Args:
      decay: weight of the previous average; may be a schedule.
      factored: whether to factor the averages of parameters whose spec allows it.
      eps: added to the squares.
    """
    decay_fn = as_schedule_fn(decay)

    def row_and_col(spec: FactorizationSpec | None) -> tuple[int, int] | None:
        if not factored or spec is None or not {"row", "col"} <= set(spec.axes):
            return None
        return spec.axes.index("row"), spec.axes.index("col")

    def init_fn(params: NestedOptParam) -> optax.FactoredState:
        specs = jax.tree.map(
            lambda p: _moment_spec(p, None, row_and_col(p.factorization_spec)), params
        )
        zeros = jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), specs)
        return _state(jnp.zeros((), jnp.int32), zeros)

    def update_fn(
        updates: NestedTensor, state: optax.FactoredState, params: NestedOptParam
    ) -> tuple[NestedTensor, optax.FactoredState]:
        decay = decay_fn(state.count)

        def step(update, param, *moment):
            axes = row_and_col(param.factorization_spec)
            return _step(update, _Moment(*moment), axes, decay, eps)

        steps = jax.tree.map(step, updates, params, state.v_row, state.v_col, state.v)
        moments = jax.tree.map(lambda u, s: s[1], updates, steps)
        updates = jax.tree.map(lambda u, s: s[0], updates, steps)
        return updates, _state(optax.safe_increment(state.count), moments)

    def partition_fn(param_specs: NestedParameterSpec) -> optax.FactoredState:
        specs = jax.tree.map(
            lambda s: _moment_spec(s, s.partition_spec, row_and_col(s.factorization)), param_specs
        )
        return _state(COUNT_SPEC, specs)

    return PartitionedGradientTransformation(init_fn, update_fn, partition_fn)


def _state(count: Any, moments: Any) -> optax.FactoredState:
    fields = {
        name: jax.tree.map(
            lambda m, name=name: getattr(m, name), moments, is_leaf=lambda x: type(x) is _Moment
        )
        for name in _Moment._fields
    }
    return optax.FactoredState(count=count, **fields)


def _moment_spec(param: Any, mesh_axes: Any, axes: tuple[int, int] | None) -> _Moment:
    shape = tuple(param.shape)
    unused = replicated((1,), jnp.float32)
    if axes is None:
        return _Moment(unused, unused, TensorSpec(shape, jnp.float32, mesh_axes))

    def without(axis: int) -> TensorSpec:
        layout = None if mesh_axes is None else _drop(tuple(mesh_axes), axis)
        return TensorSpec(_drop(shape, axis), jnp.float32, layout)

    return _Moment(without(axes[0]), without(axes[1]), unused)


def _drop(entries: tuple, axis: int) -> tuple:
    return (*entries[:axis], *entries[axis + 1 :])


def _step(
    update: Tensor, moment: _Moment, axes: tuple[int, int] | None, decay: Any, eps: float
) -> tuple[Tensor, _Moment]:
    squares = jnp.square(update.astype(jnp.float32)) + eps

    def averaged(kept: Tensor, new: Tensor) -> Tensor:
        return decay * kept + (1 - decay) * new

    if axes is None:
        v = averaged(moment.v, squares)
        return update * jax.lax.rsqrt(v), moment._replace(v=v)
    row, col = axes
    v_row = averaged(moment.v_row, jnp.mean(squares, axis=row))
    v_col = averaged(moment.v_col, jnp.mean(squares, axis=col))
    # The mean over the remaining one of both axes; the other axes are stacked, not factored.
    mean = jnp.mean(v_row, axis=col - (row < col), keepdims=True)
    by_row = jnp.expand_dims(jax.lax.rsqrt(v_row / mean), axis=row)
    by_col = jnp.expand_dims(jax.lax.rsqrt(v_col), axis=col)
    return update * by_row * by_col, _Moment(v_row, v_col, moment.v)
