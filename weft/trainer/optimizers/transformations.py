"""Transformations that scale updates, add weight decay, or keep moving averages.

A per-parameter scale is a function from the tree of parameters to a tree of factors.
"""

import logging
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from weft import config, struct
from weft.functional.arrays import to_ndim
from weft.hierarchy import base_layer, parameter_spec
from weft.trainer.optimizers import base
from weft.trainer.schedule import (
    Schedule,
    ScheduleFn,
    as_schedule_fn,
    check_learning_rate,
)
from weft.typing import (
    DType,
    Nested,
    NestedTensor,
    PartitionSpec,
    PyTree,
    Shape,
    Tensor,
)

PerParamScale = Callable[[base.NestedOptParam], Nested[Any]]
"""Maps parameters to a scale for each."""

logger = logging.getLogger(__name__)


def scale(step_size: float) -> base.PartitionedGradientTransformation:
    """Multiplies updates by a number."""
    return base.stateless(
        lambda updates, params: jax.tree.map(lambda u: u * step_size, updates)
    )


def scale_by_schedule(
    step_size_fn: Schedule, *, name: str | None = None
) -> base.PartitionedGradientTransformation:
    """Multiplies updates by a schedule's value at the number of the step, counted from 1.

    Reports "schedule_step" and "schedule_scale", with the prefix `name` to distinguish two
    schedules.
    """
    schedule_fn = as_schedule_fn(step_size_fn)
    prefix = "" if name is None else f"{name}/"

    def update_fn(
        updates: NestedTensor,
        state: optax.ScaleByScheduleState,
        params: base.NestedOptParam,
    ) -> tuple[NestedTensor, optax.ScaleByScheduleState]:
        step = optax.safe_increment(state.count)
        step_size = schedule_fn(step)
        base.report(f"{prefix}schedule_step", step)
        base.report(f"{prefix}schedule_scale", step_size)
        updates = jax.tree.map(lambda u: u * step_size, updates)
        return updates, optax.ScaleByScheduleState(step)

    return base.starting_at_zero(
        update_fn, lambda _: optax.ScaleByScheduleState(base.COUNT_SPEC)
    )


def scale_from_learning_rate(
    learning_rate: Schedule, *, flip_sign: bool = True
) -> ScheduleFn:
    """Returns the schedule that computes the learning rate of each step, for `scale_by_schedule`.

    It reports "learning_rate" and "lr_schedule_step", and is negated for gradient descent unless
    `flip_sign` is False. Raises ScheduleError for a number below 0.
    """
    check_learning_rate("learning_rate", learning_rate)
    learning_rate_fn = as_schedule_fn(learning_rate)

    def fn(step: Tensor) -> Tensor:
        value = learning_rate_fn(step)
        base.report("lr_schedule_step", step)
        base.report("learning_rate", value)
        if flip_sign:
            return -value
        return value

    return fn


def per_param_scale_by_path(
    *,
    scale_by_path: Sequence[tuple[str, float]],
    description: str,
    default_scale: float = 1.0,
) -> PerParamScale:
    """Returns scales by regular expressions on parameters' paths.

    Args:
      scale_by_path: pairs of a pattern, which must match the whole path, such as
        "decoder/emb/weight", and a scale; the first match counts.
      description: purpose of the scale, logged with the parameters whose scale differs.
      default_scale: scale without a match.

    >>> no_bias_decay = per_param_scale_by_path(
    ...     scale_by_path=[(".*/bias", 0.0)], description="weight decay"
    ... )
    >>> no_bias_decay({"linear": {"weight": 1.0, "bias": 2.0}})
    {'linear': {'bias': 0.0, 'weight': 1.0}}
    """

    def scale_of(path: str) -> float:
        for pattern, scale in scale_by_path:
            if re.fullmatch(pattern, path):
                logger.info("%s of %s: %s", description, path, scale)
                return scale
        return default_scale

    return lambda params: jax.tree.map(scale_of, base.tree_paths(params))


def per_param_scale_by_rms(*, min_scale: float = 1e-4) -> PerParamScale:
    """Returns scales by the root mean square of each parameter, at least `min_scale`."""

    def scale_of(param: base.OptParam) -> Tensor:
        return optax.safe_root_mean_squares(param.value, min_scale)

    return lambda params: jax.tree.map(scale_of, params)


def scale_update_per_param(
    per_param_scale: PerParamScale,
) -> base.PartitionedGradientTransformation:
    """Multiplies each update by the scale of its parameter; accepts the function or its config."""
    scale_fn = config.maybe_instantiate(per_param_scale)
    return base.stateless(
        lambda updates, params: jax.tree.map(
            lambda u, s: u * s, updates, scale_fn(params)
        )
    )


def scale_by_param_block_rms(
    min_scale: float = 1e-3,
) -> base.PartitionedGradientTransformation:
    """Multiplies each update by its parameter's root mean square, per layer of a stack.

    The factor is at least `min_scale`, which lets parameters that are zero change.
    """

    def scaled(update: Tensor, value: Tensor) -> Tensor:
        return update * optax.safe_root_mean_squares(value, min_scale)

    return base.stateless(
        lambda updates, params: struct.map_blocks(
            scaled, updates, base.opt_param_values(params)
        )
    )


def scale_by_trust_ratio(
    min_norm: float = 0.0, trust_coefficient: float = 1.0, eps: float = 0.0
) -> base.PartitionedGradientTransformation:
    """Multiplies each update by the ratio of its parameter's norm to its own, per layer of a stack.

    Source: [You et al., 2020](https://arxiv.org/abs/1904.00962); see `optax.scale_by_trust_ratio`.

    Args:
      min_norm: lower bound of both norms.
      trust_coefficient: factor of the ratio.
      eps: added to the norm of the update.
    """
    trust_ratio = optax.scale_by_trust_ratio(min_norm, trust_coefficient, eps)

    def scaled(update: Tensor, value: Tensor) -> optax.Updates:
        scaled_update, _ = trust_ratio.update(update, optax.EmptyState(), value)
        return scaled_update

    return base.stateless(
        lambda updates, params: struct.map_blocks(
            scaled, updates, base.opt_param_values(params)
        )
    )


# Decay.


class AddDecayedWeightsState(NamedTuple):
    """State of `add_decayed_weights`: the number of steps done, or None without a schedule."""

    count: Any


def decay_scales(
    params: base.NestedOptParam, per_param_scale: PerParamScale | None
) -> Nested[Any]:
    """Returns the decay factors of the layers, else of `per_param_scale`, else 1."""
    if per_param_scale is None:
        return jax.tree.map(_layer_scale, params)
    return jax.tree.map(_layer_scale, params, per_param_scale(params))


def _layer_scale(
    param: base.OptParam, otherwise: float | Tensor = 1.0
) -> float | Tensor:
    if param.weight_decay_scale is None:
        return otherwise
    return param.weight_decay_scale


def add_decayed_weights(
    weight_decay: float,
    *,
    learning_rate_exponent: float | None = None,
    learning_rate: Schedule | None = None,
    per_param_scale: PerParamScale | None = None,
) -> base.PartitionedGradientTransformation:
    """Adds to each update its parameter times the weight decay.

    Args:
      learning_rate_exponent: if given, multiplies the decay by this power of the learning rate.
      learning_rate: schedule of the learning rate.
      per_param_scale: function, or a config of one, that returns factors for parameters whose layer
        sets no `weight_decay_scale`.
    """
    scale_fn = config.maybe_instantiate(per_param_scale)
    learning_rate_fn = as_schedule_fn(learning_rate)

    def update_fn(
        updates: NestedTensor,
        state: AddDecayedWeightsState,
        params: base.NestedOptParam,
    ) -> tuple[NestedTensor, AddDecayedWeightsState]:
        rate = weight_decay
        if learning_rate_exponent is not None:
            state = AddDecayedWeightsState(optax.safe_increment(state.count))
            rate = (
                rate * learning_rate_fn(state.count) ** learning_rate_exponent
            )
        return _with_decay(updates, params, rate, scale_fn), state

    # Without a schedule there is nothing to count, and the state has no arrays.
    count_spec = None
    if learning_rate_exponent is not None:
        count_spec = base.COUNT_SPEC
    return base.starting_at_zero(
        update_fn, lambda _: AddDecayedWeightsState(count_spec)
    )


def l2_regularizer(
    regularizer_weight: float | None = 0.0,
    per_param_scale: PerParamScale | None = None,
) -> base.PartitionedGradientTransformation:
    """Adds to each gradient that of an L2 penalty, `regularizer_weight` times the parameter.

    `regularizer_weight` is the weight of half the squared norm, with 0 or None for no penalty, and
    `per_param_scale` is as for `add_decayed_weights`.
    """
    if not regularizer_weight:
        return base.identity()
    scale_fn = config.maybe_instantiate(per_param_scale)
    return base.stateless(
        lambda updates, params: _with_decay(
            updates, params, regularizer_weight, scale_fn
        )
    )


def _with_decay(
    updates: NestedTensor,
    params: base.NestedOptParam,
    rate: float | Tensor,
    scale_fn: PerParamScale | None,
) -> NestedTensor:
    if isinstance(rate, int | float) and rate == 0:
        return updates  # not 0 * inf

    def add_decay(
        update: Tensor, param: base.OptParam, scale: float | Tensor
    ) -> Tensor:
        return update + rate * scale * param.value

    return jax.tree.map(
        add_decay, updates, params, decay_scales(params, scale_fn)
    )


def decoupled_scale_and_decay(
    learning_rate: Schedule,
    weight_decay: float,
    weight_decay_per_param_scale: PerParamScale | None,
    update_schedule: Schedule,
) -> tuple[base.PartitionedGradientTransformation, ...]:
    """Returns parts of `-update_schedule * (learning_rate * update + weight_decay * parameter)`.

    Source: [Loshchilov and Hutter, 2019](https://arxiv.org/abs/1711.05101), where weight decay
    does not depend on the learning rate, but both depend on the schedule.
    """
    return (
        scale_by_schedule(
            scale_from_learning_rate(learning_rate, flip_sign=False),
            name="learning_rate",
        ),
        add_decayed_weights(
            weight_decay, per_param_scale=weight_decay_per_param_scale
        ),
        scale_by_schedule(update_schedule),
        scale(-1.0),
    )


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
    decay: Schedule,
    debias: bool = True,
    accumulator_dtype: DType | None = jnp.float32,
) -> base.PartitionedGradientTransformation:
    """Replaces updates by their exponential moving average.

    In an integer dtype, averages are fixed-point numbers with one factor per column, where a column
    shares all indices but that of the first axis.

    Args:
      decay: weight of the previous average; may be a schedule, whose first step is 0.
      debias: whether to divide by `1 - decay**t` after t steps, to correct for the initial zero.
      accumulator_dtype: dtype of the stored average; None for that of the parameter.
    """
    decay_fn = as_schedule_fn(decay)

    def update_fn(
        updates: NestedTensor, state: EmaState, params: base.NestedOptParam
    ) -> tuple[NestedTensor, EmaState]:
        decay = decay_fn(state.count)
        count = optax.safe_increment(state.count)
        correction = 1.0
        if debias:
            correction = 1 - decay**count

        def new_average(
            update: Tensor, stored: Tensor, scale: Tensor
        ) -> Tensor:
            return (1 - decay) * update + decay * _from_accumulator(
                stored, scale
            )

        def corrected(average: Tensor, update: Tensor) -> Tensor:
            return (average / correction).astype(update.dtype)

        averages = jax.tree.map(new_average, updates, state.ema, state.scale)
        updates = jax.tree.map(corrected, averages, updates)
        accumulators = jax.tree.map(
            lambda average, stored: _to_accumulator(average, stored.dtype),
            averages,
            state.ema,
        )
        new_ema = jax.tree.map(
            lambda _, accumulator: accumulator[0], averages, accumulators
        )
        new_scale = jax.tree.map(
            lambda _, accumulator: accumulator[1], averages, accumulators
        )
        return updates, EmaState(count, new_ema, new_scale)

    def specs_of(
        params: Nested[base_layer.ParameterSpec | base.OptParam],
    ) -> EmaState:
        return EmaState(
            base.COUNT_SPEC,
            jax.tree.map(spec_of, params),
            jax.tree.map(scale_spec_of, params),
        )

    def spec_of(
        param: base_layer.ParameterSpec | base.OptParam,
    ) -> base.OptStateSpec:
        dtype = param.dtype if accumulator_dtype is None else accumulator_dtype
        return base.spec_like(param, dtype)

    def scale_spec_of(
        param: base_layer.ParameterSpec | base.OptParam,
    ) -> base.OptStateSpec:
        spec = spec_of(param)
        if not jnp.issubdtype(jnp.dtype(spec.dtype), jnp.integer):
            return base.replicated((1,), jnp.float32)
        mesh_axes = spec.mesh_axes
        if mesh_axes is not None:
            mesh_axes = mesh_axes[1:]
        return parameter_spec.TensorSpec(spec.shape[1:], jnp.float32, mesh_axes)

    return base.starting_at_zero(update_fn, specs_of)


def _from_accumulator(stored: Tensor, scale: Tensor) -> Tensor:
    if not jnp.issubdtype(stored.dtype, jnp.integer):
        return stored
    return stored.astype(jnp.float32) * to_ndim(scale, stored.ndim)


def _to_accumulator(average: Tensor, dtype: DType) -> tuple[Tensor, Tensor]:
    """Returns an average as it is stored, and its scale."""
    if not jnp.issubdtype(dtype, jnp.integer):
        return average.astype(dtype), jnp.zeros((1,), jnp.float32)
    # The largest absolute value of a column is the largest integer.
    average = average.astype(jnp.float32)
    first_axis = 0 if average.ndim else None
    scale = jnp.max(jnp.abs(average), axis=first_axis) / jnp.iinfo(dtype).max
    divisor = to_ndim(jnp.where(scale > 0, scale, 1), average.ndim)
    return jnp.round(average / divisor).astype(dtype), scale


class ParamEmaState(NamedTuple):
    """State of `param_ema`: the number of steps done and the averages of the parameters."""

    count: Any
    ema: Any


SCHEDULE_FREE = "schedule_free"


def param_ema(
    *, decay: Schedule | Literal["schedule_free"] | None = None
) -> base.PartitionedGradientTransformation:
    """Keeps an exponential moving average of the parameters and leaves updates unchanged.

    The average starts at zero; the decays of `weft.trainer.schedule.ema_schedule` correct for that.
    `decay`, which may be a schedule, whose first step is 0, is the weight of the previous average;
    None keeps no average. "schedule_free" keeps the average of a schedule-free optimizer of optax,
    `optax.contrib.schedule_free_eval_params`, which starts at the initial parameters.
    State of layers, such as moving statistics, is stored without averaging.
    """
    if decay is None:
        return base.identity()
    if decay == SCHEDULE_FREE:
        return _schedule_free_params()
    decay_fn = as_schedule_fn(decay)

    def init_fn(params: base.NestedOptParam) -> ParamEmaState:
        def first_average(param: base.OptParam) -> Tensor:
            return (
                param.value if param.is_state else jnp.zeros_like(param.value)
            )

        return ParamEmaState(
            jnp.zeros((), jnp.int32), jax.tree.map(first_average, params)
        )

    def update_fn(
        updates: NestedTensor, state: ParamEmaState, params: base.NestedOptParam
    ) -> tuple[NestedTensor, ParamEmaState]:
        decay = decay_fn(state.count)

        def new_average(param: base.OptParam, average: Tensor) -> Tensor:
            if param.is_state:
                return param.value
            return ((1 - decay) * param.value + decay * average).astype(
                average.dtype
            )

        averages = jax.tree.map(new_average, params, state.ema)
        return updates, ParamEmaState(
            optax.safe_increment(state.count), averages
        )

    def partition_fn(
        param_specs: base_layer.NestedParameterSpec,
    ) -> ParamEmaState:
        return ParamEmaState(base.COUNT_SPEC, base.copy_partition(param_specs))

    return base.PartitionedGradientTransformation(
        init_fn, update_fn, partition_fn
    )


def schedule_free_states(tree: PyTree) -> list[optax.contrib.ScheduleFreeState]:
    """Returns the states of schedule-free optimizers in a state, or in its specs."""

    def is_state(x: object) -> bool:
        return isinstance(x, optax.contrib.ScheduleFreeState)

    return [x for x in jax.tree.leaves(tree, is_leaf=is_state) if is_state(x)]


def _schedule_free_params() -> base.PartitionedGradientTransformation:
    """Keeps the parameters that schedule-free optimizers evaluate (Defazio et al., 2024).

    They train at other parameters, y = (1 - b1) z + b1 x, and z is in their states. `update` takes
    these states, after the step, as `optimizer_states`.
    """

    def init_fn(params: base.NestedOptParam) -> ParamEmaState:
        return ParamEmaState(
            jnp.zeros((), jnp.int32), base.opt_param_values(params)
        )

    def update_fn(
        updates: NestedTensor,
        state: ParamEmaState,
        params: base.NestedOptParam,
        *,
        optimizer_states: PyTree = (),
    ) -> tuple[NestedTensor, ParamEmaState]:
        trained_values = base.leaves_by_path(base.opt_param_values(params))
        evaluated_values = dict(trained_values)
        for schedule_free in schedule_free_states(optimizer_states):
            # The optimizer's part of the parameters.
            trained = jax.tree_util.tree_map_with_path(
                lambda path, _: trained_values[path], schedule_free.z
            )
            averages = optax.contrib.schedule_free_eval_params(
                schedule_free, trained
            )
            evaluated_values.update(base.leaves_by_path(averages))

        def new_average(path: jax.tree_util.KeyPath, average: Tensor) -> Tensor:
            return evaluated_values[path].astype(average.dtype)

        averages = jax.tree_util.tree_map_with_path(new_average, state.ema)
        return updates, ParamEmaState(
            optax.safe_increment(state.count), averages
        )

    def partition_fn(
        param_specs: base_layer.NestedParameterSpec,
    ) -> ParamEmaState:
        return ParamEmaState(base.COUNT_SPEC, base.copy_partition(param_specs))

    return base.PartitionedGradientTransformationExtraArgs(
        init_fn, update_fn, partition_fn
    )


def replace_with_updates() -> base.PartitionedGradientTransformation:
    """Sets each parameter to its incoming update instead of adding the update to it.

    For statistics that come back as gradients, such as the scales of 8-bit floating point.
    """
    return base.stateless(
        lambda updates, params: jax.tree.map(
            lambda u, p: u - p.value, updates, params
        )
    )


class _Moment(NamedTuple):
    """Second moment of one parameter: either `v_row` and `v_col` or `v` is used."""

    v_row: Any
    v_col: Any
    v: Any


def scale_by_factored_rms(
    decay: Schedule, *, factored: bool = True, eps: float = 1e-30
) -> base.PartitionedGradientTransformation:
    """Divides updates by the root of the moving average of their squares.

    For a matrix of gradients G, the moment of G² is approximated by the outer product of its row
    means and its column means, divided by the mean of all: two vectors replace a matrix. The layer
    chooses the row and column axes in the parameter's factorization spec.
    Source: [Shazeer and Stern, 2018](https://arxiv.org/abs/1804.04235).

    Args:
      decay: weight of the previous average; may be a schedule.
      factored: whether to factor the averages of parameters whose spec allows it.
      eps: added to the squares.
    """
    decay_fn = as_schedule_fn(decay)

    def row_and_col(
        spec: parameter_spec.FactorizationSpec | None,
    ) -> tuple[int, int] | None:
        if not factored or spec is None or not {"row", "col"} <= set(spec.axes):
            return None
        return spec.axes.index("row"), spec.axes.index("col")

    def update_fn(
        updates: NestedTensor,
        state: optax.FactoredState,
        params: base.NestedOptParam,
    ) -> tuple[NestedTensor, optax.FactoredState]:
        count = optax.safe_increment(state.count)
        decay = decay_fn(count)

        def step(update, param, *moment):
            axes = row_and_col(param.factorization_spec)
            return _step(update, _Moment(*moment), axes, decay, eps)

        # A pair per parameter, of its update and its moment; `updates` has the structure for both.
        results = jax.tree.map(
            step, updates, params, state.v_row, state.v_col, state.v
        )
        moments = jax.tree.map(lambda _, result: result[1], updates, results)
        updates = jax.tree.map(lambda _, result: result[0], updates, results)
        return updates, _state(count, moments)

    def moment_spec(param: base.OptParam | base_layer.ParameterSpec) -> _Moment:
        if isinstance(param, base.OptParam):
            return _moment_spec(
                param.shape, None, row_and_col(param.factorization_spec)
            )
        return _moment_spec(
            param.shape, param.partition_spec, row_and_col(param.factorization)
        )

    def specs_of(
        params: Nested[base.OptParam | base_layer.ParameterSpec],
    ) -> optax.FactoredState:
        return _state(base.COUNT_SPEC, jax.tree.map(moment_spec, params))

    return base.starting_at_zero(update_fn, specs_of)


def _state(
    count: jax.typing.ArrayLike, moments: Nested[_Moment]
) -> optax.FactoredState:
    def field(name: str) -> NestedTensor:
        return jax.tree.map(
            operator.attrgetter(name),
            moments,
            is_leaf=lambda x: type(x) is _Moment,
        )

    return optax.FactoredState(
        count, v_row=field("v_row"), v_col=field("v_col"), v=field("v")
    )


def _moment_spec(
    shape: Shape, mesh_axes: PartitionSpec | None, axes: tuple[int, int] | None
) -> _Moment:
    unused = base.replicated((1,), jnp.float32)
    if axes is None:
        return _Moment(
            unused,
            unused,
            parameter_spec.TensorSpec(shape, jnp.float32, mesh_axes),
        )

    def mean_spec(axis: int) -> parameter_spec.TensorSpec:
        """Returns the spec of the mean over an axis."""
        mean_shape = (*shape[:axis], *shape[axis + 1 :])
        mean_mesh_axes = None
        if mesh_axes is not None:
            mean_mesh_axes = (*mesh_axes[:axis], *mesh_axes[axis + 1 :])
        return parameter_spec.TensorSpec(
            mean_shape, jnp.float32, mean_mesh_axes
        )

    row, col = axes
    return _Moment(mean_spec(row), mean_spec(col), unused)


def _step(
    update: Tensor,
    moment: _Moment,
    axes: tuple[int, int] | None,
    decay: float | Tensor,
    eps: float,
) -> tuple[Tensor, _Moment]:
    squares = jnp.square(update.astype(jnp.float32)) + eps

    def averaged(average: Tensor, new: Tensor) -> Tensor:
        return decay * average + (1 - decay) * new

    if axes is None:
        v = averaged(moment.v, squares)
        return update * jax.lax.rsqrt(v), moment._replace(v=v)
    row, col = axes
    v_row = averaged(moment.v_row, jnp.mean(squares, axis=row))
    v_col = averaged(moment.v_col, jnp.mean(squares, axis=col))
    # The mean over the remaining one of both axes; the other axes are stacked, not factored.
    mean = jnp.mean(v_row, axis=col - (row < col), keepdims=True)
    row_factor = jnp.expand_dims(jax.lax.rsqrt(v_row / mean), axis=row)
    col_factor = jnp.expand_dims(jax.lax.rsqrt(v_col), axis=col)
    return update * row_factor * col_factor, _Moment(v_row, v_col, moment.v)
