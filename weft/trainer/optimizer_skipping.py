"""Skipping steps whose gradients are not to be trusted: not finite, or too large.

A step that is skipped leaves parameters and state as they were, except for what counts such steps.
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
    """Norms above which a step is skipped, from statistics of the norms so far."""

    def __call__(self, *, count: Tensor, mean: Tensor, stddev: Tensor) -> dict[str, Tensor]:
        """The thresholds.

        Args:
          count: the number of steps that were not skipped.
          mean: the moving average of their gradients' norms.
          stddev: the moving standard deviation.

        Returns:
          Thresholds by name. A step is skipped if its norm is above the least of them; how often
          each was exceeded is counted.
        """
        ...


def drop_norm_by_grad_norm_ema(multipliers: Sequence[float] = (20, 40, 100)) -> DropNormThresholdFn:
    """Thresholds at multiples of the mean norm; the first step has none.

    Args:
      multipliers: of the mean.
    """

    def fn(*, count: Tensor, mean: Tensor, stddev: Tensor) -> dict[str, Tensor]:
        return {f"{m}x_ema": jnp.where(count > 0, mean * m, jnp.inf) for m in multipliers}

    return fn


def drop_norm_by_grad_norm_stddev(
    *, min_count: int = 500, multipliers: Sequence[float] = (20, 40, 100)
) -> DropNormThresholdFn:
    """Thresholds at multiples of the standard deviation above the mean norm.

    Args:
      min_count: the number of steps before there is any threshold.
      multipliers: of the standard deviation.
    """

    def fn(*, count: Tensor, mean: Tensor, stddev: Tensor) -> dict[str, Tensor]:
        return {
            f"{m}x_stddev": jnp.where(count >= min_count, mean + stddev * m, jnp.inf)
            for m in multipliers
        }

    return fn


class SkipClipState(NamedTuple):
    """The state of `skip_and_clip_by_global_norm`.

    Attributes:
      count: the number of steps that were not skipped.
      nonvalid_count: the number of steps that were.
      grad_norm_ema: the moving average of the norms of those that were not.
      grad_norm_square_ema: that of their squares.
      inner_state: of the wrapped transformation.
      drop_stats: how often each threshold was exceeded, by its name.

    All but `nonvalid_count` and `inner_state` are None where `drop_norm` is no function.
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

    Reports "gradient_norm", "nonvalid_count" and "gradient_scale"; where `drop_norm` is a function
    also "gradient_norm_ema", "gradient_norm_stddev" and, for each threshold, how often it was
    exceeded.

    Args:
      inner: the transformation to wrap, or a config of it.
      drop_norm: steps with a larger norm are skipped: a number, or a function of statistics of the
        norms of the steps that were not skipped, or a config of one. None for no limit.
      max_norm: gradients are scaled to at most this norm; None not to clip.
      grad_norm_ema_decay: the decay of the statistics; needed if `drop_norm` is a function.
      eps: added to the norm before dividing by it.

    Raises:
      OptimizerArgumentError: if `drop_norm` is a function and there is no `grad_norm_ema_decay`.
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
        # The inner step is elementwise: a selection fuses with it, a branch would not.
        updates, inner_state = inner.update(updates, state.inner_state, params)
        updates = jax.tree.map(lambda u: jnp.where(is_valid, u, 0), updates)
        state = tree_where(is_valid, accepted._replace(inner_state=inner_state), state)
        return updates, state._replace(nonvalid_count=nonvalid_count, drop_stats=drop_stats)

    def partition_fn(param_specs: NestedParameterSpec) -> SkipClipState:
        return _specs(norms, inner.partition(param_specs))

    return PartitionedGradientTransformation(init_fn, update_fn, partition_fn)


class _NormStatistics(NamedTuple):
    """The part of the state that a `drop_norm` function needs."""

    threshold_fn: DropNormThresholdFn
    decay: float

    @classmethod
    def for_drop_norm(cls, limit: Any, decay: float | None) -> "_NormStatistics | None":
        if not callable(limit):
            return None
        if decay is None:
            raise OptimizerArgumentError(
                "skip_and_clip_by_global_norm was given a function as drop_norm, but no "
                "grad_norm_ema_decay, by which the statistics for it are averaged; set for example "
                "grad_norm_ema_decay=0.99."
            )
        threshold_fn: Any = limit
        return cls(threshold_fn, decay)

    def threshold_names(self) -> list[str]:
        count, number = jnp.zeros((), jnp.int32), jnp.zeros(())
        return list(self.threshold_fn(count=count, mean=number, stddev=number))

    def compare(self, norm: Tensor, state: SkipClipState) -> tuple[Tensor, dict[str, Tensor]]:
        """Whether the norm is below all thresholds, and how often each was exceeded by now."""
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
        """The state once the norm belongs to the statistics."""
        decay = decay_bias_correction(self.decay)(state.count)
        # Infinite, it would stay in the average for good, and there would be no threshold.
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
    """Whether an optimizer has a part that expects gradients that are no numbers.

    Args:
      state: the optimizer's; it holds that of the part, of this module or of optax.
    """
    found = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, _SKIPPING_STATES))
    return any(isinstance(x, _SKIPPING_STATES) for x in found)


def all_finite(tree: Any) -> Tensor:
    """Whether every number of every array is finite."""
    finite = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]
    return jnp.all(jnp.array(finite)) if finite else jnp.array(True)


def tree_where(condition: Tensor, tree: Any, otherwise: Any) -> Any:
    """`tree` if the condition holds, else `otherwise`, in the dtypes of the latter."""

    def choose(x: Tensor, y: Tensor) -> Tensor:
        return jnp.where(condition, x if x.dtype == y.dtype else x.astype(y.dtype), y)

    return jax.tree.map(choose, tree, otherwise)
