"""Transformations that clip updates, by their global norm or by the size of each one."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from weft.trainer.optimizer_base import (
    NestedOptParam,
    PartitionedGradientTransformation,
    path_name,
    report,
    stateless,
)
from weft.typing import NestedTensor, Tensor
from weft.vdict import VDict, map_blocks


def global_norm(updates: NestedTensor) -> Tensor:
    """Returns the global norm, at least in float32, without overflow of the squares."""
    norm = norm_by_squares(updates)
    # The slower computation is needed only if the sum of squares overflows.
    return jax.lax.cond(jnp.isfinite(norm), lambda _: norm, _norm_by_shares, updates)


def norm_by_squares(updates: NestedTensor) -> Tensor:
    """Returns the norm in one pass over the updates; infinite if a sum of squares is."""
    return optax.tree.norm(jax.tree.map(_at_least_float32, updates))


def _norm_by_shares(updates: NestedTensor) -> Tensor:
    """Returns the norm relative to the largest absolute value, at most the largest float."""
    updates = jax.tree.map(_at_least_float32, updates)
    largest = optax.tree.norm(updates, ord="inf")
    norm = largest * optax.tree.norm(jax.tree.map(lambda u: u / largest, updates))
    norm = jnp.minimum(norm, jnp.finfo(norm.dtype).max)
    return jnp.where(jnp.isfinite(largest), norm, largest)


def _at_least_float32(update: Tensor) -> Tensor:
    return update.astype(jnp.promote_types(update.dtype, jnp.float32))


def scaled(updates: NestedTensor, factor: Tensor) -> NestedTensor:
    """Multiplies updates by a number, in their own dtypes."""
    return jax.tree.map(lambda u: (u * factor).astype(u.dtype), updates)


def clipping_factor(norm: Tensor, max_norm: float | None, eps: float) -> Tensor:
    """Returns the factor that reduces a norm to `max_norm`: at most 1, and NaN if the norm is."""
    # The factor depends on the norm even without a limit, to propagate NaN.
    return norm * 0 + 1 if max_norm is None else jnp.minimum(1.0, max_norm / (norm + eps))


def clip_by_global_norm(
    max_norm: float | None = None, *, drop_norm: float | None = None, eps: float = 1e-8
) -> PartitionedGradientTransformation:
    """Scales all updates such that their global norm is at most `max_norm`.

    Reports "gradient_norm", before clipping, and "gradient_scale". A NaN norm makes the updates
    NaN; see `skip_and_clip_by_global_norm`.

    Args:
      max_norm: None disables clipping.
      drop_norm: updates with a larger norm become zero; None disables dropping.
      eps: added to the norm before dividing by it.
    """

    def clipped(updates: NestedTensor, params: NestedOptParam) -> NestedTensor:
        norm = global_norm(updates)
        report("gradient_norm", norm)
        if max_norm is None and drop_norm is None:
            return updates
        factor = clipping_factor(norm, max_norm, eps)
        if drop_norm is not None:
            factor = jnp.where(norm > drop_norm, 0.0, factor)
        report("gradient_scale", factor)
        return scaled(updates, factor)

    return stateless(clipped)


def clip_by_block_rms(
    threshold: float | None, *, summary_suffix: str | None = None
) -> PartitionedGradientTransformation:
    """Scales each update, per layer of a stack, to a root mean square of at most `threshold`.

    Args:
      threshold: None disables clipping.
      summary_suffix: if given, each update's root mean square before clipping is reported under its
        path with this suffix, as "decoder/emb/weight/norm"; in a stack, under "repeat/0/layer/...".
    """

    def clipped(updates: NestedTensor, params: NestedOptParam) -> NestedTensor:
        rms = map_blocks(_rms, updates)
        if summary_suffix is not None:
            report_blocks(rms, summary_suffix)
        if threshold is None:
            return updates
        factors = jax.tree.map(lambda x: 1.0 / jnp.maximum(1.0, x / threshold), rms)
        return map_blocks(lambda u, factor: (u * factor).astype(u.dtype), updates, factors)

    return stateless(clipped)


def _rms(x: Tensor) -> Tensor:
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))


def report_blocks(values: NestedTensor, suffix: str) -> None:
    """Reports scalars per parameter, or per layer of a stack, under the paths with a suffix.

    Each enclosing `VDict` adds a leading axis to the values.
    """

    def visit(value: Any, path: str) -> None:
        if isinstance(value, VDict):
            for i in range(_num_layers(value)):
                visit(jax.tree.map(lambda x, i=i: x[i], dict(value)), f"{path}{i}/")
            return
        entries = jax.tree_util.tree_flatten_with_path(
            value, is_leaf=lambda x: isinstance(x, VDict)
        )[0]
        for below, entry in entries:
            name = path + "".join(f"{part}/" for part in [path_name(below)] if part)
            if isinstance(entry, VDict):
                visit(entry, name)
            else:
                report(name + suffix, entry)

    visit(values, "")


def _num_layers(stacked: VDict) -> int:
    return next((len(x) for x in jax.tree.leaves(stacked)), 0)
