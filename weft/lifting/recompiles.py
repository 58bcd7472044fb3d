"""Causes of recompilation of a jitted function."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax


class Trace(NamedTuple):
    """JAX's cache key of a call: static values, and the type of each array by location."""

    static: Any
    arrays: dict[str, str]

    @classmethod
    def of(cls, static: Any, packed: Any) -> "Trace":
        leaves = jax.tree_util.tree_leaves_with_path(packed)
        arrays = {jax.tree_util.keystr(path): jax.typeof(x).str_short() for path, x in leaves}
        return cls((static, jax.tree.structure(packed)), arrays)


def differences(before: Trace, after: Trace) -> list[str]:
    """Returns the differences between two traces, one line each."""
    lines = []
    for place in dict.fromkeys((*before.arrays, *after.arrays)):
        old, new = before.arrays.get(place), after.arrays.get(place)
        if old != new:
            lines.append(f"the array at {place}: {old or 'not there'} before, {new or 'not there'}")
    of_static = list(_static_differences("", before.static[0], after.static[0]))
    if not lines and not of_static and before.static[1] != after.static[1]:
        of_static = [f"the arguments: {before.static[1]} before, {after.static[1]}"]
    return lines + of_static


def _static_differences(where: str, old: Any, new: Any) -> Iterator[str]:
    if old == new:
        return
    a, b = _parts(old), _parts(new)
    if type(old) is type(new) and a is not None and b is not None and a.keys() == b.keys():
        for name in a:
            yield from _static_differences(f"{where}.{name}", a[name], b[name])
        return
    yield f"the static value at {where.lstrip('.')}: {old!r} before, {new!r}"


def _parts(x: Any) -> dict[str, Any] | None:
    if isinstance(x, type):
        return None
    if dataclasses.is_dataclass(x):
        return {f.name: getattr(x, f.name) for f in dataclasses.fields(x) if f.compare}
    if isinstance(x, Mapping):
        return {str(k): v for k, v in x.items()}
    if hasattr(x, "_asdict"):
        return x._asdict()
    if isinstance(x, tuple | list):
        return {str(i): v for i, v in enumerate(x)}
    return None
