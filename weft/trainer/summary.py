"""Summaries of a step as writers need them: a flat list on the host.

Each leaf of the nested summaries gets its path of names, joined by `/`, and a kind, which decides
before any copy from a device whether the leaf is due at a step.
"""

import logging
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from weft.hierarchy.metrics import (
    ArraySummary,
    AudioSummary,
    CallbackSummary,
    ImageSummary,
    Summary,
)
from weft.metrics import Metric

__all__ = [
    "ArraySummary",
    "AudioSummary",
    "CallbackSummary",
    "ImageSummary",
    "Summary",
]


SummaryKind = Literal[
    "ArraySummary",
    "AudioSummary",
    "CallbackSummary",
    "HistogramSummary",
    "ImageSummary",
    "ScalarSummary",
    "TextSummary",
]
"""Kinds of summaries."""


class FlatSummary(NamedTuple):
    """Leaf of a step's summaries, on the host, with a path such as "model/decoder/loss".

    Attributes:
        kind: Kind of `value`; never "CallbackSummary", whose value is of another kind.
        value: A float, a str, or an array: of any shape, of values for a histogram, of images
            `[batch, height, width, channels]` or of audio `[batch, time, channels]`.
    """

    path: str
    kind: SummaryKind
    value: Any
    sample_rate: int | None = None


def due_summaries(
    step: int,
    values: Mapping[str, Any],
    *,
    every_n_steps: int,
    every_n_steps_by_kind: Mapping[SummaryKind, int] | None = None,
) -> list[FlatSummary]:
    """Returns the summaries of a step that are due, on the host, in order of their paths.

    Args:
        values: Summaries, scalars, arrays and strings in nested dicts. None is omitted.
        every_n_steps: Number of steps between two writes of a leaf.
        every_n_steps_by_kind: The same for leaves of some kinds.
    """
    if not every_n_steps_by_kind and step % every_n_steps:
        return []
    due_leaves: dict[str, Any] = {}
    for path, leaf in _flatten(values, leaf_types=_PLAIN).items():
        interval = every_n_steps
        if every_n_steps_by_kind:
            interval = every_n_steps_by_kind.get(_kind(leaf), every_n_steps)
        if step % interval == 0:
            due_leaves[path] = leaf
    host_leaves = jax.device_get(due_leaves)
    # The values of a callback are known on the host.
    leaf_types = (ArraySummary, AudioSummary, ImageSummary)
    summaries: list[FlatSummary] = []
    for path, leaf in sorted(_flatten(host_leaves, leaf_types).items()):
        summary = _show(path, leaf)
        if summary is not None:
            summaries.append(summary)
    return summaries


def _flatten(
    values: object, leaf_types: tuple[type[Summary], ...]
) -> dict[str, Any]:
    """Returns the leaves of nested summaries by path.

    A `Summary` is replaced by its value, unless it is of one of the `leaf_types`.
    """
    leaves: dict[str, Any] = {}
    # Without recursion: it runs at each step, and a call takes longer than an iteration.
    unvisited: list[tuple[str, Any]] = [("", values)]
    while unvisited:
        path, value = unvisited.pop()
        if isinstance(value, Mapping):
            for name, item in value.items():
                unvisited.append(
                    (f"{path}/{name}" if path else str(name), item)
                )
        elif isinstance(value, Summary) and not isinstance(value, leaf_types):
            summary_value: Any = value.value()
            # Each number of a metric has a meaning; a histogram would lose it.
            if isinstance(value, Metric) and getattr(
                summary_value, "shape", ()
            ):
                summary_value = ArraySummary(summary_value)
            unvisited.append((path, summary_value))
        elif value is not None:
            leaves[path] = value
    return leaves


_PLAIN_KINDS: dict[type[Summary], SummaryKind] = {
    ArraySummary: "ArraySummary",
    AudioSummary: "AudioSummary",
    CallbackSummary: "CallbackSummary",
    ImageSummary: "ImageSummary",
}


_PLAIN = tuple(_PLAIN_KINDS)


def _kind(leaf: object) -> SummaryKind:
    for cls, kind in _PLAIN_KINDS.items():
        if isinstance(leaf, cls):
            return kind
    if isinstance(leaf, str):
        return "TextSummary"
    if np.ndim(leaf):  # pyright: ignore[reportArgumentType]
        return "HistogramSummary"
    return "ScalarSummary"


def _show(path: str, leaf: object) -> FlatSummary | None:
    """Returns a leaf as it is written; None, with a warning, if it has no numbers."""
    if isinstance(leaf, str):
        return FlatSummary(path, "TextSummary", leaf)
    value: Any = leaf
    if isinstance(leaf, Summary):
        value = leaf.value()
    if not hasattr(value, "dtype"):
        value = np.asarray(value)
    dtype = value.dtype
    if not (
        jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)
    ):
        logging.getLogger(__name__).warning(
            "The summary %s holds values of %s, which cannot be shown; it is left out.",
            path,
            dtype,
        )
        return None
    array = np.asarray(value)
    if isinstance(leaf, ArraySummary):
        return FlatSummary(path, "ArraySummary", array)
    if isinstance(leaf, ImageSummary):
        images = array if array.ndim == 4 else array[None]
        return FlatSummary(path, "ImageSummary", images)
    if isinstance(leaf, AudioSummary):
        sounds = array if array.ndim == 3 else array[None]
        return FlatSummary(path, "AudioSummary", sounds, leaf.sample_rate)
    if array.ndim:
        return FlatSummary(path, "HistogramSummary", array)
    return FlatSummary(path, "ScalarSummary", float(np.real(array)))
