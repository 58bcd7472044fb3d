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

__all__ = ["ArraySummary", "AudioSummary", "CallbackSummary", "ImageSummary", "Summary"]


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
    due = _flatten(values, kept=_PLAIN)
    if every_n_steps_by_kind:
        intervals = {
            path: every_n_steps_by_kind.get(_kind(x), every_n_steps) for path, x in due.items()
        }
        due = {path: x for path, x in due.items() if step % intervals[path] == 0}
    # The values of a callback are known on the host.
    kept = (ArraySummary, AudioSummary, ImageSummary)
    leaves = sorted(_flatten(jax.device_get(due), kept).items())
    shown = [_show(path, leaf) for path, leaf in leaves]
    return [summary for summary in shown if summary is not None]


def _flatten(values: object, kept: tuple[type[Summary], ...]) -> dict[str, Any]:
    """Returns the leaves of nested summaries by path; evaluates a `Summary` unless it is `kept`."""
    leaves: dict[str, Any] = {}
    rest: list[tuple[str, Any]] = [("", values)]
    while rest:
        path, value = rest.pop()
        if isinstance(value, Mapping):
            rest += [(f"{path}/{name}" if path else str(name), x) for name, x in value.items()]
        elif isinstance(value, Summary) and not isinstance(value, kept):
            shown: Any = value.value()
            # Each number of a metric has a meaning; a histogram would lose it.
            if isinstance(value, Metric) and hasattr(shown, "shape") and shown.shape:
                shown = ArraySummary(shown)
            rest.append((path, shown))
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
    return "HistogramSummary" if np.ndim(leaf) else "ScalarSummary"  # pyright: ignore[reportArgumentType]


def _show(path: str, leaf: object) -> FlatSummary | None:
    """Returns a leaf as it is written; None, with a warning, if it has no numbers."""
    if isinstance(leaf, str):
        return FlatSummary(path, "TextSummary", leaf)
    value: Any = leaf.value() if isinstance(leaf, Summary) else leaf
    dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    if not (jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)):
        logging.getLogger(__name__).warning(
            "The summary %s holds values of %s, which cannot be shown; it is left out.", path, dtype
        )
        return None
    array = np.asarray(value)
    if isinstance(leaf, ArraySummary):
        return FlatSummary(path, "ArraySummary", array)
    if isinstance(leaf, ImageSummary):
        return FlatSummary(path, "ImageSummary", array if array.ndim == 4 else array[None])
    if isinstance(leaf, AudioSummary):
        sound = array if array.ndim == 3 else array[None]
        return FlatSummary(path, "AudioSummary", sound, leaf.sample_rate)
    if array.ndim:
        return FlatSummary(path, "HistogramSummary", array)
    return FlatSummary(path, "ScalarSummary", float(np.real(array)))
