"""Variables whose value is a `jax.Ref`, an array that JAX can write to in place.

The caller of a transformed function sees its writes to such a variable, even one in the function's
closure. In exchange, JAX must know all aliases: arguments may not share a reference, and a function
may not return one.
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


class VarDefaultsContext(Setting, default=_NO_DEFAULTS):
    """Setting of `var_defaults`."""


def var_defaults(
    *, hijax: bool | None = None, ref: bool | None = None
) -> VarDefaults | VarDefaultsContext:
    """Returns the defaults of new variables, or sets them for this thread if arguments are given.

    As a context manager or decorator, the result limits the setting to the block or call. `ref`
    holds arrays in a `jax.Ref`; `hijax` is its alias.

    Example:
        >>> from weft import nnx
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
    """Returns a value as a variable with this metadata holds it: in a reference, or unchanged."""
    if "ref" in metadata or "hijax" in metadata:
        return jax.new_ref(value) if isinstance(value, jax.Array | np.ndarray) else value
    return value


def initial_ref(
    value: object, metadata: dict[str, Any], given: Mapping[str, Any], what: str
) -> Any:
    """Returns the value of a new variable as it is held.

    If it is not an array, `metadata` loses `ref` and `hijax`; `given` is the explicitly passed
    part.

    Raises:
        VariableArgumentError: if the value is not an array, and `ref=True` was given.
    """
    if isinstance(value, int | float | complex | np.generic):
        value = jnp.asarray(value)
    if isinstance(value, jax.Array | np.ndarray):
        return to_ref(value, metadata)
    if given.get("ref") or given.get("hijax"):
        raise VariableArgumentError(
            f"a {what} with ref=True was given a {type(value).__name__}, but a jax.Ref holds one "
            "array; omit ref=True, or make a variable for each array."
        )
    for name in ("ref", "hijax"):
        metadata.pop(name, None)
    return value


def write_ref(ref: jax.Ref, value: object, index: object, what: str) -> None:
    """Writes to a part of a reference, in its dtype.

    Raises:
        VariableShapeError: if the whole is written with another shape.
    """
    value = jnp.asarray(value, ref.dtype)
    if index is ... and value.shape != ref.shape:
        raise VariableShapeError(
            f"a {what} is held in a jax.Ref, whose shape is fixed, and was given a value of shape "
            f"{value.shape}; give one of shape {ref.shape}, or make the variable without ref=True."
        )
    ref[index] = value
