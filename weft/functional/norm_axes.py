"""Axes that share statistics in norms of channels."""

from collections.abc import Sequence

from weft.errors import ArgumentValueError
from weft.functional.statistics import Axes, canonical_axes


def group_norm_axes(reduction_axes: Axes | None, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the axes that share statistics, the last one split into groups.

    `reduction_axes` of None means all but the first.

    Raises:
        ArgumentValueError: if the last axis is not among them.

    >>> group_norm_axes(None, (2, 3, 4)), group_norm_axes((0, -1), (2, 3, 4))
    ((1, 2), (0, 2))
    """
    ndim = len(shape)
    if reduction_axes is None:
        return tuple(range(1, ndim))
    axes = canonical_axes(reduction_axes, ndim)
    if ndim - 1 not in axes:
        raise ArgumentValueError(
            f"reduction_axes={reduction_axes} of an input of shape {tuple(shape)} leave out the "
            "last axis, which holds the channels; add -1."
        )
    return axes


def instance_norm_axes(
    feature_axes: Axes, shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the axes of the channels in increasing order, and those that share statistics.

    Raises:
        ArgumentValueError: if `feature_axes` include the first axis, the batch axis.

    >>> instance_norm_axes(-1, (2, 3, 4, 5))
    ((3,), (1, 2))
    """
    features = tuple(sorted(canonical_axes(feature_axes, len(shape))))
    if 0 in features:
        raise ArgumentValueError(
            f"feature_axes={feature_axes} of an input of shape {tuple(shape)} include the first "
            "axis, the batch axis; leave it out."
        )
    return features, tuple(a for a in range(1, len(shape)) if a not in features)
