"""Moving averages of updates and of parameters.

An average of updates may be stored in an integer dtype: as fixed-point numbers with one factor per
column, where a column shares all indices but that of the first axis.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from weft.functional.ranks import to_ndim
from weft.hierarchy.base_layer import NestedParameterSpec, ParameterSpec, TensorSpec
from weft.trainer.optimizer_base import (
    COUNT_SPEC,
    NestedOptParam,
    OptStateSpec,
    PartitionedGradientTransformation,
    copy_partition,
    identity,
    opt_param_values,
    replicated,
    stateless,
)
from weft.trainer.schedule import Schedule, as_schedule_fn
from weft.typing import DType, NestedTensor, Tensor


class EmaState(NamedTuple):
    """State of `ema`.

    Attributes:
      count: number of steps done.
      ema: averages in the dtype of the accumulator.
      scale: factor of integer averages; one unused number for other dtypes.
    """

    count: Any
    ema: Any
    scale: Any


def ema(
    decay: Schedule, debias: bool = True, accumulator_dtype: DType | None = jnp.float32
) -> PartitionedGradientTransformation:
    """Replaces updates by their exponential moving average.

    Args:
      decay: weight of the previous average; may be a schedule.
      debias: whether to divide by `1 - decay**t` after t steps, to correct for the initial zero.
      accumulator_dtype: dtype of the stored average, fixed-point if an integer; None for that of
        the parameter.
    """
    decay_fn = as_schedule_fn(decay)

    def init_fn(params: NestedOptParam) -> EmaState:
        values = opt_param_values(params)
        specs = jax.tree.map(_spec_of, values), jax.tree.map(_scale_spec_of, values)
        zeros = jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), specs)
        return EmaState(jnp.zeros((), jnp.int32), *zeros)

    def update_fn(
        updates: NestedTensor, state: EmaState, params: NestedOptParam
    ) -> tuple[NestedTensor, EmaState]:
        decay = decay_fn(state.count)
        count = optax.safe_increment(state.count)
        correction = 1 - decay**count if debias else 1.0

        averages = jax.tree.map(
            lambda u, kept, scale: (1 - decay) * u + decay * _from_accumulator(kept, scale),
            updates,
            state.ema,
            state.scale,
        )
        kept = jax.tree.map(lambda x, old: _to_accumulator(x, old.dtype), averages, state.ema)
        new_ema = jax.tree.map(lambda x, pair: pair[0], averages, kept)
        new_scale = jax.tree.map(lambda x, pair: pair[1], averages, kept)
        updates = jax.tree.map(lambda x, u: (x / correction).astype(u.dtype), averages, updates)
        return updates, EmaState(count, new_ema, new_scale)

    def partition_fn(param_specs: NestedParameterSpec) -> EmaState:
        return EmaState(
            COUNT_SPEC,
            jax.tree.map(_spec_of, param_specs),
            jax.tree.map(_scale_spec_of, param_specs),
        )

    def _dtype_of(x: ParameterSpec | Tensor) -> Any:
        return x.dtype if accumulator_dtype is None else accumulator_dtype

    def _spec_of(x: ParameterSpec | Tensor) -> OptStateSpec:
        mesh_axes = getattr(x, "mesh_axes", None)
        return TensorSpec(shape=x.shape, dtype=_dtype_of(x), mesh_axes=mesh_axes)

    def _scale_spec_of(x: ParameterSpec | Tensor) -> OptStateSpec:
        if not jnp.issubdtype(_dtype_of(x), jnp.integer):
            return replicated((1,), jnp.float32)
        mesh_axes = getattr(x, "mesh_axes", None)
        return TensorSpec(
            shape=x.shape[1:],
            dtype=jnp.float32,
            mesh_axes=None if mesh_axes is None else mesh_axes[1:],
        )

    return PartitionedGradientTransformation(init_fn, update_fn, partition_fn)


def _from_accumulator(kept: Tensor, scale: Tensor) -> Tensor:
    if not jnp.issubdtype(kept.dtype, jnp.integer):
        return kept
    return kept.astype(jnp.float32) * to_ndim(scale, kept.ndim)


def _to_accumulator(x: Tensor, dtype: DType) -> tuple[Tensor, Tensor]:
    if not jnp.issubdtype(dtype, jnp.integer):
        return x.astype(dtype), jnp.zeros((1,), jnp.float32)
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=0 if x.ndim else None) / jnp.iinfo(dtype).max
    divisor = to_ndim(jnp.where(scale > 0, scale, 1), x.ndim)
    return jnp.round(x / divisor).astype(dtype), scale


class ParamEmaState(NamedTuple):
    """State of `param_ema`: the number of steps done and the averages of the parameters."""

    count: Any
    ema: Any


def param_ema(*, decay: Schedule | None = None) -> PartitionedGradientTransformation:
    """Keeps an exponential moving average of the parameters and leaves updates unchanged.

    The average starts at zero; the decays of `weft.trainer.schedule.ema_schedule` correct for that.
    `decay`, which may be a schedule, is the weight of the previous average; None keeps no average.
    State of layers, such as moving statistics, is stored without averaging.
    """
    if decay is None:
        return identity()
    decay_fn = as_schedule_fn(decay)

    def init_fn(params: NestedOptParam) -> ParamEmaState:
        first = jax.tree.map(
            lambda param: param.value if param.is_state else jnp.zeros_like(param.value), params
        )
        return ParamEmaState(jnp.zeros((), jnp.int32), first)

    def update_fn(
        updates: NestedTensor, state: ParamEmaState, params: NestedOptParam
    ) -> tuple[NestedTensor, ParamEmaState]:
        decay = decay_fn(state.count)
        averages = jax.tree.map(
            lambda param, kept: (
                param.value
                if param.is_state
                else ((1 - decay) * param.value + decay * kept).astype(kept.dtype)
            ),
            params,
            state.ema,
        )
        return updates, ParamEmaState(optax.safe_increment(state.count), averages)

    def partition_fn(param_specs: NestedParameterSpec) -> ParamEmaState:
        return ParamEmaState(COUNT_SPEC, copy_partition(param_specs))

    return PartitionedGradientTransformation(init_fn, update_fn, partition_fn)


def replace_with_updates() -> PartitionedGradientTransformation:
    """Sets each parameter to its incoming update instead of adding the update to it.

    For statistics that come back as gradients, such as the scales of 8-bit floating point.
    """
    return stateless(
        lambda updates, params: jax.tree.map(lambda u, p: u - p.value, updates, params)
    )
