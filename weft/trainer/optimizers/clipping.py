"""Transformations that clip updates, or skip steps whose gradients are not finite or too large.

A skipped step leaves parameters and state unchanged, except for the counters of skipped steps.
"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
import optax

from weft import config, errors
from weft.hierarchy.base_layer import NestedParameterSpec
from weft.struct import VDict, map_blocks
from weft.trainer.optimizers import base
from weft.trainer.schedule import decay_bias_correction
from weft.typing import NestedTensor, PyTree, T, Tensor


def global_norm(updates: NestedTensor) -> Tensor:
    """Returns the global norm, at least in float32, without overflow of the squares."""
    norm = norm_by_squares(updates)
    # The slower computation is needed only if the sum of squares overflows.
    return jax.lax.cond(
        jnp.isfinite(norm), lambda _: norm, _norm_by_shares, updates
    )


def norm_by_squares(updates: NestedTensor) -> Tensor:
    """Returns the norm in one pass over the updates; infinite if a sum of squares is."""
    return optax.tree.norm(base.at_least_float32(updates))


def _norm_by_shares(updates: NestedTensor) -> Tensor:
    """Returns the norm relative to the largest absolute value, at most the largest float."""
    updates = base.at_least_float32(updates)
    largest = optax.tree.norm(updates, ord="inf")
    norm = largest * optax.tree.norm(
        jax.tree.map(lambda u: u / largest, updates)
    )
    norm = jnp.minimum(norm, jnp.finfo(norm.dtype).max)
    return jnp.where(jnp.isfinite(largest), norm, largest)


def scaled(updates: NestedTensor, factor: Tensor) -> NestedTensor:
    """Multiplies updates by a number, in their own dtypes."""
    return jax.tree.map(lambda u: (u * factor).astype(u.dtype), updates)


def clipping_factor(norm: Tensor, max_norm: float | None, eps: float) -> Tensor:
    """Returns the factor that reduces a norm to `max_norm`: at most 1, and NaN if the norm is."""
    if max_norm is None:
        return (
            norm * 0 + 1
        )  # depends on the norm nevertheless, to propagate NaN
    return jnp.minimum(1.0, max_norm / (norm + eps))


def clip_by_global_norm(
    max_norm: float | None = None,
    *,
    drop_norm: float | None = None,
    eps: float = 1e-8,
) -> base.PartitionedGradientTransformation:
    """Scales all updates such that their global norm is at most `max_norm`.

    Reports "gradient_norm", before clipping, and "gradient_scale". A NaN norm makes the updates
    NaN; see `skip_and_clip_by_global_norm`.

    Args:
      max_norm: None disables clipping.
      drop_norm: updates with a larger norm become zero; None disables dropping.
      eps: added to the norm before dividing by it.
    """

    def clipped(
        updates: NestedTensor, params: base.NestedOptParam
    ) -> NestedTensor:
        norm = global_norm(updates)
        base.report("gradient_norm", norm)
        if max_norm is None and drop_norm is None:
            return updates
        factor = clipping_factor(norm, max_norm, eps)
        if drop_norm is not None:
            factor = jnp.where(norm > drop_norm, 0.0, factor)
        base.report("gradient_scale", factor)
        return scaled(updates, factor)

    return base.stateless(clipped)


def clip_by_block_rms(
    threshold: float | None, *, summary_suffix: str | None = None
) -> base.PartitionedGradientTransformation:
    """Scales each update, per layer of a stack, to a root mean square of at most `threshold`.

    Args:
      threshold: None disables clipping.
      summary_suffix: if given, each update's root mean square before clipping is reported under its
        path with this suffix, as "decoder/emb/weight/norm"; in a stack, under "repeat/0/layer/...".
    """

    def root_mean_square(update: Tensor) -> Tensor:
        return jnp.sqrt(jnp.mean(jnp.square(update.astype(jnp.float32))))

    def scale(update: Tensor, factor: Tensor) -> Tensor:
        return (update * factor).astype(update.dtype)

    def clipped(
        updates: NestedTensor, params: base.NestedOptParam
    ) -> NestedTensor:
        rms = map_blocks(root_mean_square, updates)
        if summary_suffix is not None:
            report_blocks(rms, summary_suffix)
        if threshold is None:
            return updates
        factors = jax.tree.map(
            lambda x: 1.0 / jnp.maximum(1.0, x / threshold), rms
        )
        return map_blocks(scale, updates, factors)

    return base.stateless(clipped)


def report_blocks(values: NestedTensor, suffix: str) -> None:
    """Reports scalars per parameter, or per layer of a stack, under the paths with a suffix.

    Each enclosing `VDict` adds a leading axis to the values.
    """

    def is_stack(x: object) -> bool:
        return isinstance(x, VDict)

    def visit(tree: NestedTensor, prefix: str) -> None:
        for path, entry in jax.tree_util.tree_leaves_with_path(
            tree, is_leaf=is_stack
        ):
            entry_prefix = prefix
            if path:
                entry_prefix += f"{base.path_name(path)}/"
            if isinstance(entry, VDict):
                visit_layers(entry, entry_prefix)
            else:
                base.report(entry_prefix + suffix, entry)

    def visit_layers(stack: VDict, prefix: str) -> None:
        leaves = jax.tree.leaves(stack)
        num_layers = len(leaves[0]) if leaves else 0
        for i in range(num_layers):
            layer = jax.tree.map(operator.itemgetter(i), dict(stack))
            visit(layer, f"{prefix}{i}/")

    visit(values, "")


class DropNormThresholdFn(Protocol):
    """Function from statistics of past norms to norms above which a step is skipped."""

    def __call__(
        self, *, count: Tensor, mean: Tensor, stddev: Tensor
    ) -> dict[str, Tensor]:
        """Returns thresholds by name, from statistics of the steps that were not skipped.

        A step is skipped if its norm exceeds the smallest threshold; the steps that exceed each
        threshold are counted.

        Args:
          count: number of steps.
          mean: moving average of the gradients' norms.
          stddev: moving standard deviation of the same.
        """
        ...


def drop_norm_by_grad_norm_ema(
    multipliers: Sequence[float] = (20, 40, 100),
) -> DropNormThresholdFn:
    """Returns thresholds at multiples of the mean norm; the first step has none."""

    def thresholds(
        *, count: Tensor, mean: Tensor, stddev: Tensor
    ) -> dict[str, Tensor]:
        return {
            f"{m}x_ema": jnp.where(count > 0, mean * m, jnp.inf)
            for m in multipliers
        }

    return thresholds


def drop_norm_by_grad_norm_stddev(
    *, min_count: int = 500, multipliers: Sequence[float] = (20, 40, 100)
) -> DropNormThresholdFn:
    """Returns thresholds at multiples of the standard deviation above the mean norm.

    There are no thresholds in the first `min_count` steps.
    """

    def thresholds(
        *, count: Tensor, mean: Tensor, stddev: Tensor
    ) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}
        for m in multipliers:
            values[f"{m}x_stddev"] = jnp.where(
                count >= min_count, mean + stddev * m, jnp.inf
            )
        return values

    return thresholds


class SkipClipState(NamedTuple):
    """State of `skip_and_clip_by_global_norm`.

    `count` and the averages cover the steps that were not skipped, `nonvalid_count` the others;
    `drop_stats` counts the steps above each threshold. All but `nonvalid_count` and `inner_state`
    are None unless `drop_norm` is a function.
    """

    count: Any
    nonvalid_count: Any
    grad_norm_ema: Any
    grad_norm_square_ema: Any
    inner_state: Any
    drop_stats: Any


def skip_and_clip_by_global_norm(
    inner: base.TransformationLike,
    *,
    drop_norm: float | DropNormThresholdFn | None = None,
    max_norm: float | None = None,
    grad_norm_ema_decay: float | None = None,
    eps: float = 1e-8,
) -> base.PartitionedGradientTransformation:
    """Clips gradients for `inner`, and skips steps whose gradients are not finite or too large.

    Reports "gradient_norm", "nonvalid_count" and "gradient_scale"; if `drop_norm` is a function
    also "gradient_norm_ema", "gradient_norm_stddev" and the number of times each threshold was
    exceeded.

    Args:
      inner: the transformation to wrap, or a config of it.
      drop_norm: steps with a larger norm are skipped: a number, or a function (or its config) of
        statistics of the norms of steps that were not skipped. None for no limit.
      max_norm: gradients are scaled to at most this norm; None disables clipping.
      grad_norm_ema_decay: decay of the statistics; required if `drop_norm` is a function.
      eps: added to the norm before dividing by it.

    Raises OptimizerArgumentError if `drop_norm` is a function and `grad_norm_ema_decay` is None.
    """
    transformation = base.as_partitioned(inner)
    limit: Any = config.maybe_instantiate(drop_norm)
    statistics = None
    if callable(limit):
        if grad_norm_ema_decay is None:
            raise errors.OptimizerArgumentError(
                "skip_and_clip_by_global_norm was given a function as drop_norm, but no "
                "grad_norm_ema_decay for the statistics that the function needs; set for example "
                "grad_norm_ema_decay=0.99."
            )
        statistics = _NormStatistics(
            cast(DropNormThresholdFn, limit), grad_norm_ema_decay
        )

    def init_fn(params: base.NestedOptParam) -> SkipClipState:
        specs = _specs(statistics, None)
        zeros = jax.tree.map(
            lambda spec: jnp.zeros(spec.shape, spec.dtype), specs
        )
        return zeros._replace(inner_state=transformation.init(params))

    def update_fn(
        updates: NestedTensor,
        state: SkipClipState,
        params: base.NestedOptParam,
        **extra_args: Any,
    ) -> tuple[NestedTensor, SkipClipState]:
        norm = global_norm(updates)
        is_valid = jnp.isfinite(norm)
        accepted_state = state
        drop_stats = state.drop_stats
        if statistics is not None:
            is_small, drop_stats = statistics.compare(norm, state)
            is_valid &= is_small
            accepted_state = statistics.with_norm(norm, state)
        elif limit is not None:
            is_valid &= norm < cast(float, limit)
        nonvalid_count = state.nonvalid_count + jnp.where(is_valid, 0, 1)
        base.report("gradient_norm", norm)
        base.report("nonvalid_count", nonvalid_count)
        if max_norm is not None:
            factor = clipping_factor(norm, max_norm, eps)
            base.report("gradient_scale", factor)
            updates = scaled(updates, factor)
        # The inner step is elementwise: a select fuses with it, a conditional would not.
        updates, inner_state = base.update_with(
            transformation, updates, state.inner_state, params, extra_args
        )
        updates = jax.tree.map(lambda u: jnp.where(is_valid, u, 0), updates)
        accepted_state = accepted_state._replace(inner_state=inner_state)
        state = tree_where(is_valid, accepted_state, state)
        return updates, state._replace(
            nonvalid_count=nonvalid_count, drop_stats=drop_stats
        )

    def partition_fn(param_specs: NestedParameterSpec) -> SkipClipState:
        return _specs(statistics, transformation.partition(param_specs))

    return base.PartitionedGradientTransformationExtraArgs(
        init_fn, update_fn, partition_fn
    )


class _NormStatistics(NamedTuple):
    """Thresholds for the norm, by its moving mean and standard deviation, which a state holds."""

    threshold_fn: DropNormThresholdFn
    decay: float

    def compare(
        self, norm: Tensor, state: SkipClipState
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns whether the norm is below all thresholds, and the updated counts."""
        mean = state.grad_norm_ema
        stddev = jnp.sqrt(
            jnp.maximum(state.grad_norm_square_ema - jnp.square(mean), 0)
        )
        base.report("gradient_norm_ema", mean)
        base.report("gradient_norm_stddev", stddev)
        thresholds = self.threshold_fn(
            count=state.count, mean=mean, stddev=stddev
        )
        exceeds_each: list[Tensor] = []
        counts: dict[str, Tensor] = {}
        for name, threshold in thresholds.items():
            exceeds = norm > threshold
            exceeds_each.append(exceeds)
            counts[name] = state.drop_stats[name] + exceeds
            base.report(f"count_exceeds_{name}", counts[name])
        return ~jnp.any(jnp.array(exceeds_each)), counts

    def with_norm(self, norm: Tensor, state: SkipClipState) -> SkipClipState:
        """Returns the state after adding the norm to the statistics."""
        count = optax.safe_increment(state.count)
        decay = decay_bias_correction(self.decay)(count)
        # An infinite square would stay in the average forever, and remove the threshold.
        square = jnp.minimum(jnp.square(norm), jnp.finfo(jnp.float32).max)

        def averaged(ema: Tensor, x: Tensor) -> Tensor:
            return decay * ema + (1 - decay) * x

        return state._replace(
            count=count,
            grad_norm_ema=averaged(state.grad_norm_ema, norm),
            grad_norm_square_ema=averaged(state.grad_norm_square_ema, square),
        )


def _specs(
    statistics: _NormStatistics | None, inner_specs: base.NestedOptStateSpec
) -> SkipClipState:
    specs = SkipClipState(
        count=None,
        nonvalid_count=base.COUNT_SPEC,
        grad_norm_ema=None,
        grad_norm_square_ema=None,
        inner_state=inner_specs,
        drop_stats=None,
    )
    if statistics is None:
        return specs
    zero = jnp.zeros(())
    thresholds = statistics.threshold_fn(
        count=jnp.zeros((), jnp.int32), mean=zero, stddev=zero
    )
    return specs._replace(
        count=base.COUNT_SPEC,
        grad_norm_ema=base.replicated((), jnp.float32),
        grad_norm_square_ema=base.replicated((), jnp.float32),
        drop_stats=dict.fromkeys(thresholds, base.COUNT_SPEC),
    )


_SKIPPING_STATES = (
    SkipClipState,
    optax.ApplyIfFiniteState,
    optax.ZeroNansState,
)


def skips_undefined(state: PyTree) -> bool:
    """Returns whether a part of an optimizer, here or of optax, skips steps with NaN gradients."""

    def is_skipping(x: object) -> bool:
        return isinstance(x, _SKIPPING_STATES)

    return any(map(is_skipping, jax.tree.leaves(state, is_leaf=is_skipping)))


def all_finite(tree: PyTree) -> Tensor:
    """Returns whether every number of every array is finite."""
    are_finite = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]
    if not are_finite:
        return jnp.array(True)
    return jnp.all(jnp.array(are_finite))


def tree_where(condition: Tensor, tree: T, otherwise: T) -> T:
    """Returns `tree` if the condition holds, else `otherwise`, in the dtypes of the latter."""

    def choose(x: Tensor, y: Tensor) -> Tensor:
        if x.dtype != y.dtype:
            x = x.astype(y.dtype)
        return jnp.where(condition, x, y)

    return jax.tree.map(choose, tree, otherwise)
