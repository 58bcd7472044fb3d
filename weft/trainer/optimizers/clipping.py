"""Transformations that clip updates, or skip steps whose gradients are not finite or too large.

A skipped step leaves parameters and state unchanged, except for the counters of skipped steps.
"""

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
from weft.typing import NestedTensor, T, Tensor


def global_norm(updates: NestedTensor) -> Tensor:
    """Returns the global norm, at least in float32, without overflow of the squares."""
    norm = norm_by_squares(updates)
    # The slower computation is needed only if the sum of squares overflows.
    return jax.lax.cond(jnp.isfinite(norm), lambda _: norm, _norm_by_shares, updates)


def norm_by_squares(updates: NestedTensor) -> Tensor:
    """Returns the norm in one pass over the updates; infinite if a sum of squares is."""
    return optax.tree.norm(base.at_least_float32(updates))


def _norm_by_shares(updates: NestedTensor) -> Tensor:
    """Returns the norm relative to the largest absolute value, at most the largest float."""
    updates = base.at_least_float32(updates)
    largest = optax.tree.norm(updates, ord="inf")
    norm = largest * optax.tree.norm(jax.tree.map(lambda u: u / largest, updates))
    norm = jnp.minimum(norm, jnp.finfo(norm.dtype).max)
    return jnp.where(jnp.isfinite(largest), norm, largest)


def scaled(updates: NestedTensor, factor: Tensor) -> NestedTensor:
    """Multiplies updates by a number, in their own dtypes."""
    return jax.tree.map(lambda u: (u * factor).astype(u.dtype), updates)


def clipping_factor(norm: Tensor, max_norm: float | None, eps: float) -> Tensor:
    """Returns the factor that reduces a norm to `max_norm`: at most 1, and NaN if the norm is."""
    # The factor depends on the norm even without a limit, to propagate NaN.
    return norm * 0 + 1 if max_norm is None else jnp.minimum(1.0, max_norm / (norm + eps))


def clip_by_global_norm(
    max_norm: float | None = None, *, drop_norm: float | None = None, eps: float = 1e-8
) -> base.PartitionedGradientTransformation:
    """Scales all updates such that their global norm is at most `max_norm`.

    Reports "gradient_norm", before clipping, and "gradient_scale". A NaN norm makes the updates
    NaN; see `skip_and_clip_by_global_norm`.

    Args:
      max_norm: None disables clipping.
      drop_norm: updates with a larger norm become zero; None disables dropping.
      eps: added to the norm before dividing by it.
    """

    def clipped(updates: NestedTensor, params: base.NestedOptParam) -> NestedTensor:
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

    def clipped(updates: NestedTensor, params: base.NestedOptParam) -> NestedTensor:
        rms = map_blocks(lambda u: jnp.sqrt(jnp.mean(jnp.square(u.astype(jnp.float32)))), updates)
        if summary_suffix is not None:
            report_blocks(rms, summary_suffix)
        if threshold is None:
            return updates
        factors = jax.tree.map(lambda x: 1.0 / jnp.maximum(1.0, x / threshold), rms)
        return map_blocks(lambda u, factor: (u * factor).astype(u.dtype), updates, factors)

    return base.stateless(clipped)


def report_blocks(values: NestedTensor, suffix: str) -> None:
    """Reports scalars per parameter, or per layer of a stack, under the paths with a suffix.

    Each enclosing `VDict` adds a leading axis to the values.
    """

    def visit(value: NestedTensor, path: str) -> None:
        if isinstance(value, VDict):
            num_layers = next((len(x) for x in jax.tree.leaves(value)), 0)
            for i in range(num_layers):
                visit(jax.tree.map(lambda x, i=i: x[i], dict(value)), f"{path}{i}/")
            return
        entries = jax.tree_util.tree_flatten_with_path(
            value, is_leaf=lambda x: isinstance(x, VDict)
        )[0]
        for below, entry in entries:
            name = path + "".join(f"{part}/" for part in [base.path_name(below)] if part)
            if isinstance(entry, VDict):
                visit(entry, name)
            else:
                base.report(name + suffix, entry)

    visit(values, "")


class DropNormThresholdFn(Protocol):
    """Function from statistics of past norms to norms above which a step is skipped."""

    def __call__(self, *, count: Tensor, mean: Tensor, stddev: Tensor) -> dict[str, Tensor]:
        """Returns thresholds by name, from statistics of the steps that were not skipped.

        A step is skipped if its norm exceeds the smallest threshold; the steps that exceed each
        threshold are counted.

        Args:
          count: number of steps.
          mean: moving average of the gradients' norms.
          stddev: moving standard deviation of the same.
        """
        ...


def drop_norm_by_grad_norm_ema(multipliers: Sequence[float] = (20, 40, 100)) -> DropNormThresholdFn:
    """Returns thresholds at multiples of the mean norm; the first step has none."""
    return lambda *, count, mean, stddev: {
        f"{m}x_ema": jnp.where(count > 0, mean * m, jnp.inf) for m in multipliers
    }


def drop_norm_by_grad_norm_stddev(
    *, min_count: int = 500, multipliers: Sequence[float] = (20, 40, 100)
) -> DropNormThresholdFn:
    """Returns thresholds at multiples of the standard deviation above the mean norm.

    There are no thresholds in the first `min_count` steps.
    """
    return lambda *, count, mean, stddev: {
        f"{m}x_stddev": jnp.where(count >= min_count, mean + stddev * m, jnp.inf)
        for m in multipliers
    }


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
    norms = None
    if callable(limit):
        if grad_norm_ema_decay is None:
            raise errors.OptimizerArgumentError(
                "skip_and_clip_by_global_norm was given a function as drop_norm, but no "
                "grad_norm_ema_decay for the statistics that the function needs; set for example "
                "grad_norm_ema_decay=0.99."
            )
        norms = _NormStatistics(cast(DropNormThresholdFn, limit), grad_norm_ema_decay)

    def init_fn(params: base.NestedOptParam) -> SkipClipState:
        zeros = jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), _specs(norms, None))
        return zeros._replace(inner_state=transformation.init(params))

    def update_fn(
        updates: NestedTensor, state: SkipClipState, params: base.NestedOptParam, **extra_args: Any
    ) -> tuple[NestedTensor, SkipClipState]:
        norm = global_norm(updates)
        is_valid = jnp.isfinite(norm)
        accepted, drop_stats = state, state.drop_stats
        if norms is not None:
            is_small, drop_stats = norms.compare(norm, state)
            is_valid &= is_small
            accepted = norms.with_norm(norm, state)
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
        state = tree_where(is_valid, accepted._replace(inner_state=inner_state), state)
        return updates, state._replace(nonvalid_count=nonvalid_count, drop_stats=drop_stats)

    def partition_fn(param_specs: NestedParameterSpec) -> SkipClipState:
        return _specs(norms, transformation.partition(param_specs))

    return base.PartitionedGradientTransformationExtraArgs(init_fn, update_fn, partition_fn)


class _NormStatistics(NamedTuple):
    threshold_fn: DropNormThresholdFn
    decay: float

    def compare(self, norm: Tensor, state: SkipClipState) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns whether the norm is below all thresholds, and the updated counts."""
        mean = state.grad_norm_ema
        stddev = jnp.sqrt(jnp.maximum(state.grad_norm_square_ema - jnp.square(mean), 0))
        thresholds = self.threshold_fn(count=state.count, mean=mean, stddev=stddev)
        exceeded = {name: norm > threshold for name, threshold in thresholds.items()}
        counts = {name: state.drop_stats[name] + exceeded[name] for name in exceeded}
        base.report("gradient_norm_ema", mean)
        base.report("gradient_norm_stddev", stddev)
        for name, count in counts.items():
            base.report(f"count_exceeds_{name}", count)
        return ~jnp.any(jnp.array(list(exceeded.values()))), counts

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


def _specs(norms: _NormStatistics | None, inner: base.NestedOptStateSpec) -> SkipClipState:
    if norms is None:
        return SkipClipState(None, base.COUNT_SPEC, None, None, inner, None)
    number, zero = base.replicated((), jnp.float32), jnp.zeros(())
    thresholds = norms.threshold_fn(count=jnp.zeros((), jnp.int32), mean=zero, stddev=zero)
    drop_stats = dict.fromkeys(thresholds, base.COUNT_SPEC)
    return SkipClipState(base.COUNT_SPEC, base.COUNT_SPEC, number, number, inner, drop_stats)


_SKIPPING_STATES = (SkipClipState, optax.ApplyIfFiniteState, optax.ZeroNansState)


def skips_undefined(state: object) -> bool:
    """Returns whether a part of an optimizer, here or of optax, skips steps with NaN gradients."""
    found = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, _SKIPPING_STATES))
    return any(isinstance(x, _SKIPPING_STATES) for x in found)


def all_finite(tree: object) -> Tensor:
    """Returns whether every number of every array is finite."""
    finite = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]
    return jnp.all(jnp.array(finite)) if finite else jnp.array(True)


def tree_where(condition: Tensor, tree: T, otherwise: T) -> T:
    """Returns `tree` if the condition holds, else `otherwise`, in the dtypes of the latter."""

    def choose(x: Tensor, y: Tensor) -> Tensor:
        return jnp.where(condition, x if x.dtype == y.dtype else x.astype(y.dtype), y)

    return jax.tree.map(choose, tree, otherwise)
