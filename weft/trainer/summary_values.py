"""Flattening of a step's nested summaries for writers.

Each leaf gets its path of names, joined by `/`, and a kind, which decides before any copy from a
device whether the leaf is due at a step.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from weft.hierarchy.summary import AudioSummary, CallbackSummary, ImageSummary, Summary

SummaryKind = Literal[
    "AudioSummary",
    "CallbackSummary",
    "HistogramSummary",
    "ImageSummary",
    "ScalarSummary",
    "TextSummary",
]


class Shown(NamedTuple):
    """Leaf of a step's summaries, on the host, with a path such as "model/decoder/loss".

    Attributes:
        kind: Kind of `value`; never "CallbackSummary", whose value is of another kind.
        value: A float, a str, or an array of values for a histogram, of images `[batch, height,
            width, channels]` or of audio `[batch, time, channels]`.
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
) -> list[Shown]:
    """Returns the summaries of a step that are due, on the host, in order of their paths.

    Args:
        values: Summaries, scalars, arrays and strings in nested dicts. None is omitted.
        every_n_steps: Number of steps between two writes of a leaf.
        every_n_steps_by_kind: The same for leaves of some kinds.
    """
    intervals = every_n_steps_by_kind or {}
    due = {
        path: leaf
        for path, leaf in _flatten(values, "")
        if step % intervals.get(_kind(leaf), every_n_steps) == 0
    }
    host = jax.device_get(due)
    return [shown for path, leaf in sorted(host.items()) for shown in _show(path, leaf)]


def _flatten(values: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(values, Mapping):
        for name, child in values.items():
            yield from _flatten(child, f"{path}/{name}" if path else str(name))
    elif isinstance(values, Summary) and not isinstance(values, tuple(_SHOWN_AS_THEMSELVES)):
        yield from _flatten(values.value(), path)
    elif values is not None:
        yield path, values


_SHOWN_AS_THEMSELVES: dict[type[Summary], SummaryKind] = {
    AudioSummary: "AudioSummary",
    CallbackSummary: "CallbackSummary",
    ImageSummary: "ImageSummary",
}


def _kind(leaf: Any) -> SummaryKind:
    for cls, kind in _SHOWN_AS_THEMSELVES.items():
        if isinstance(leaf, cls):
            return kind
    if isinstance(leaf, str):
        return "TextSummary"
    return "HistogramSummary" if np.ndim(leaf) else "ScalarSummary"


def _show(path: str, leaf: Any) -> Iterator[Shown]:
    kind = _kind(leaf)
    if kind == "CallbackSummary":
        for inner_path, value in _flatten(leaf.value(), path):
            yield from _show(inner_path, value)
        return
    if kind == "TextSummary":
        yield Shown(path, kind, leaf)
        return
    value: Any = leaf.value() if isinstance(leaf, Summary) else leaf
    dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    if not (jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)):
        logging.getLogger(__name__).warning(
            "The summary %s holds values of %s, which cannot be shown; it is left out.", path, dtype
        )
        return
    array = np.asarray(value)
    if kind == "ScalarSummary":
        yield Shown(path, kind, float(np.real(array)))
    elif kind == "HistogramSummary":
        yield Shown(path, kind, array)
    else:
        batched = array if array.ndim == (4 if kind == "ImageSummary" else 3) else array[None]
        yield Shown(path, kind, batched, getattr(leaf, "sample_rate", None))
