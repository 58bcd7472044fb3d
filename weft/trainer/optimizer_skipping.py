"""Skipping of steps whose gradients are not finite or too large.

A skipped step leaves parameters and state unchanged, except for the counters of skipped steps.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from weft.config import maybe_instantiate
from weft.errors import OptimizerArgumentError
from weft.hierarchy.base_layer import NestedParameterSpec
from weft.trainer.optimizer_base import (
    COUNT_SPEC,
    NestedOptParam,
    PartitionedGradientTransformation,
    as_partitioned,
    replicated,
    report,
)
from weft.trainer.optimizer_clipping import clipping_factor, global_norm, scaled
from weft.trainer.schedule import decay_bias_correction
from weft.typing import NestedTensor, Tensor


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

    def fn(*, count: Tensor, mean: Tensor, stddev: Tensor) -> dict[str, Tensor]:
        return {f"{m}x_ema": jnp.where(count > 0, mean * m, jnp.inf) for m in multipliers}

    return fn


def drop_norm_by_grad_norm_stddev(
    *, min_count: int = 500, multipliers: Sequence[float] = (20, 40, 100)
) -> DropNormThresholdFn:
    """Returns thresholds at multiples of the standard deviation above the mean norm.

    There are no thresholds in the first `min_count` steps.
    """

    def fn(*, count: Tensor, mean: Tensor, stddev: Tensor) -> dict[str, Tensor]:
        return {
            f"{m}x_stddev": jnp.where(count >= min_count, mean + stddev * m, jnp.inf)
            for m in multipliers
        }

    return fn


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
    inner: Any,
    *,
    drop_norm: float | DropNormThresholdFn | None = None,
    max_norm: float | None = None,
    grad_norm_ema_decay: float | None = None,
    eps: float = 1e-8,
) -> PartitionedGradientTransformation:
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

    Raises:
      OptimizerArgumentError: if `drop_norm` is a function and `grad_norm_ema_decay` is None.
    """
    inner = as_partitioned(inner)
    limit: Any = maybe_instantiate(drop_norm)
    norms = _NormStatistics.for_drop_norm(limit, grad_norm_ema_decay)

    def init_fn(params: NestedOptParam) -> SkipClipState:
        zeros = jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), _specs(norms, None))
        return zeros._replace(inner_state=inner.init(params))

    def update_fn(
        updates: NestedTensor, state: SkipClipState, params: NestedOptParam
    ) -> tuple[NestedTensor, SkipClipState]:
        norm = global_norm(updates)
        is_valid = jnp.isfinite(norm)
        accepted, drop_stats = state, state.drop_stats
        if norms is not None:
            is_small, drop_stats = norms.compare(norm, state)
            is_valid &= is_small
            accepted = norms.with_norm(norm, state)
        elif limit is not None:
            is_valid &= norm < limit
        nonvalid_count = state.nonvalid_count + jnp.where(is_valid, 0, 1)
        report("gradient_norm", norm)
        report("nonvalid_count", nonvalid_count)
        if max_norm is not None:
            factor = clipping_factor(norm, max_norm, eps)
            report("gradient_scale", factor)
            updates = scaled(updates, factor)
        # The inner step is elementwise: a select fuses with it, a conditional would not.
        updates, inner_state = inner.update(updates, state.inner_state, params)
        updates = jax.tree.map(lambda u: jnp.where(is_valid, u, 0), updates)
        state = tree_where(is_valid, accepted._replace(inner_state=inner_state), state)
        return updates, state._replace(nonvalid_count=nonvalid_count, drop_stats=drop_stats)

    def partition_fn(param_specs: NestedParameterSpec) -> SkipClipState:
        return _specs(norms, inner.partition(param_specs))

    return PartitionedGradientTransformation(init_fn, update_fn, partition_fn)


class _NormStatistics(NamedTuple):
    """Norm statistics for a `drop_norm` function."""

    threshold_fn: DropNormThresholdFn
    decay: float

    @classmethod
    def for_drop_norm(cls, limit: Any, decay: float | None) -> "_NormStatistics | None":
        if not callable(limit):
            return None
        if decay is None:
            raise OptimizerArgumentError(
                "skip_and_clip_by_global_norm was given a function as drop_norm, but no "
                "grad_norm_ema_decay for the statistics that the function needs; set for example "
                "grad_norm_ema_decay=0.99."
            )
        threshold_fn: Any = limit
        return cls(threshold_fn, decay)

    def threshold_names(self) -> list[str]:
        count, number = jnp.zeros((), jnp.int32), jnp.zeros(())
        return list(self.threshold_fn(count=count, mean=number, stddev=number))

    def compare(self, norm: Tensor, state: SkipClipState) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns whether the norm is below all thresholds, and the updated counts."""
        mean = state.grad_norm_ema
        stddev = jnp.sqrt(jnp.maximum(state.grad_norm_square_ema - jnp.square(mean), 0))
        thresholds = self.threshold_fn(count=state.count, mean=mean, stddev=stddev)
        exceeded = {name: norm > threshold for name, threshold in thresholds.items()}
        counts = {name: state.drop_stats[name] + exceeded[name] for name in exceeded}
        report("gradient_norm_ema", mean)
        report("gradient_norm_stddev", stddev)
        for name, count in counts.items():
            report(f"count_exceeds_{name}", count)
        return ~jnp.any(jnp.array(list(exceeded.values()))), counts

    def with_norm(self, norm: Tensor, state: SkipClipState) -> SkipClipState:
        """Returns the state after adding the norm to the statistics."""
        decay = decay_bias_correction(self.decay)(state.count)
        # An infinite square would stay in the average forever, and remove the threshold.
        square = jnp.minimum(jnp.square(norm), jnp.finfo(jnp.float32).max)

        def averaged(ema: Tensor, x: Tensor) -> Tensor:
            return decay * ema + (1 - decay) * x

        return state._replace(
            count=optax.safe_increment(state.count),
            grad_norm_ema=averaged(state.grad_norm_ema, norm),
            grad_norm_square_ema=averaged(state.grad_norm_square_ema, square),
        )


def _specs(norms: _NormStatistics | None, inner: Any) -> SkipClipState:
    if norms is None:
        return SkipClipState(None, COUNT_SPEC, None, None, inner, None)
    number = replicated((), jnp.float32)
    drop_stats = dict.fromkeys(norms.threshold_names(), COUNT_SPEC)
    return SkipClipState(COUNT_SPEC, COUNT_SPEC, number, number, inner, drop_stats)


_SKIPPING_STATES = (SkipClipState, optax.ApplyIfFiniteState, optax.ZeroNansState)


def skips_undefined(state: Any) -> bool:
    """Returns whether a part of an optimizer, here or of optax, skips steps with NaN gradients."""
    found = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, _SKIPPING_STATES))
    return any(isinstance(x, _SKIPPING_STATES) for x in found)


def all_finite(tree: Any) -> Tensor:
    """Returns whether every number of every array is finite."""
    finite = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]
    return jnp.all(jnp.array(finite)) if finite else jnp.array(True)


def tree_where(condition: Tensor, tree: Any, otherwise: Any) -> Any:
    """Returns `tree` if the condition holds, else `otherwise`, in the dtypes of the latter."""

    def choose(x: Tensor, y: Tensor) -> Tensor:
        return jnp.where(condition, x if x.dtype == y.dtype else x.astype(y.dtype), y)

    return jax.tree.map(choose, tree, otherwise)
