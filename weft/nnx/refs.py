"""Variables whose arrays are in a `jax.Ref`, which JAX can write to in place.

The caller of a transformed function sees its writes to such a variable, even one in the function's
closure. In exchange, JAX must know all aliases: no references are shared or returned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from weft.errors import VariableArgumentError, VariableShapeError
from weft.nnx.settings import Setting


@dataclasses.dataclass(frozen=True)
class VarDefaults(Mapping[str, bool]):
    """Defaults of new variables: `ref`, whether to hold values in a `jax.Ref`; alias `hijax`."""

    hijax: bool = False
    ref: bool = False

    def __getitem__(self, name: str) -> bool:
        return dataclasses.asdict(self)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(("hijax", "ref"))

    def __len__(self) -> int:
        return 2


_NO_DEFAULTS = VarDefaults()
_NUMERIC = (jax.Array, np.ndarray, np.generic, int, float, complex)


class VarDefaultsContext(Setting, default=_NO_DEFAULTS):
    """Setting of `var_defaults`."""


def var_defaults(
    *, hijax: bool | None = None, ref: bool | None = None
) -> VarDefaults | VarDefaultsContext:
    """Returns the defaults of new variables, or sets them for this thread if arguments are given.

    As a context manager or decorator, the result limits the setting to the block or call. `ref`
    holds each array of a value in a `jax.Ref`; `hijax` is its alias.

    >>> with var_defaults(ref=True):
    ...     count = nnx.Variable(jnp.array(0))
    >>> @jax.jit
    ... def step():
    ...     count[...] += 1
    >>> step()
    >>> int(count), var_defaults().ref
    (1, False)
    """
    now = VarDefaultsContext.current()
    given = {name: v for name, v in (("hijax", hijax), ("ref", ref)) if v is not None}
    return VarDefaultsContext(dataclasses.replace(now, **given)) if given else now


def with_var_defaults(metadata: dict[str, Any]) -> dict[str, Any]:
    """Fills in `ref` and `hijax` of a new variable's metadata from the defaults."""
    now = VarDefaultsContext.current()
    if now is _NO_DEFAULTS and not ("ref" in metadata or "hijax" in metadata):
        return metadata
    asked = {name: metadata.get(name, now[name]) for name in now}
    rest = {name: v for name, v in metadata.items() if name not in asked}
    return {**rest, **{name: True for name, v in asked.items() if v}}


def to_ref(value: object, metadata: Mapping[str, Any]) -> Any:
    """Returns a value as a variable with this metadata holds it: in references, or unchanged."""

    def held(x: Any) -> Any:
        return jax.new_ref(x) if isinstance(x, jax.Array | np.ndarray) else x

    return jax.tree.map(held, value) if "ref" in metadata or "hijax" in metadata else value


def is_in_ref(value: object) -> bool:
    """Returns whether arrays of a value are in references."""
    return any(isinstance(x, jax.Ref) for x in jax.tree.leaves(value))


def read_ref(value: Any) -> Any:
    """Returns a value with arrays in place of references."""
    if isinstance(value, jax.Ref):  # fast path
        return value[...]
    return jax.tree.map(lambda x: x[...] if isinstance(x, jax.Ref) else x, value)


def initial_ref(
    value: object, metadata: dict[str, Any], given: Mapping[str, Any], what: str
) -> Any:
    """Returns the value of a new variable as it is held.

    If it has other leaves than arrays, `metadata` loses `ref` and `hijax`. Raises
    VariableArgumentError instead if `given`, the explicitly passed part, has `ref=True`.
    """
    leaves, structure = jax.tree.flatten(value)
    others = [x for x in leaves if not isinstance(x, _NUMERIC)]
    if leaves and not others:
        return to_ref(structure.unflatten(map(jnp.asarray, leaves)), metadata)
    if others and (given.get("ref") or given.get("hijax")):
        raise VariableArgumentError(
            f"a {what} with ref=True was given a {type(others[0]).__name__}, but a jax.Ref holds "
            "an array; omit ref=True, or make another variable for it."
        )
    for name in ("ref", "hijax"):
        metadata.pop(name, None)
    return value


def write_ref(held: Any, value: Any, index: Any, what: str) -> None:
    """Writes to a part of a reference or to a part of a tree of references, in their dtypes.

    Raises VariableShapeError if the whole is written with another shape or structure.
    """
    if index is not ... and not isinstance(held, jax.Ref):
        held, index = held[index], ...
    refs, structure = jax.tree.flatten(held)
    if isinstance(held, jax.Ref):
        values, is_alike = [jnp.asarray(value, held.dtype)], True
    else:
        values, is_alike = jax.tree.leaves(value), jax.tree.structure(value) == structure
    shapes, wanted = ([x.shape for x in arrays] for arrays in (map(jnp.asarray, values), refs))
    if index is ... and not (is_alike and shapes == wanted):
        raise VariableShapeError(
            f"a {what} is held in a jax.Ref, whose shape is fixed, and was given a value of shape "
            f"{jax.tree.map(jnp.shape, value)}; give one of shape {structure.unflatten(wanted)}, "
            "or make the variable without ref=True."
        )
    for ref, x in zip(refs, values, strict=True):
        ref[index] = jnp.asarray(x, ref.dtype)
