"""Variables whose value is a `jax.Ref`, an array that JAX itself can write to.

What a function that JAX transforms writes to such a variable is seen outside, also if the variable
was not given to it as an argument. It costs that JAX must know of each alias: two arguments may not
share a reference, and a function may not return one.
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
    """What holds for variables for which nothing else is said.

    Attributes:
        hijax: whether their value is held in a `jax.Ref`; another name for `ref`.
        ref: whether their value is held in a `jax.Ref`.
    """

    hijax: bool = False
    ref: bool = False

    def __getitem__(self, name: str) -> bool:
        return dataclasses.asdict(self)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(("hijax", "ref"))

    def __len__(self) -> int:
        return 2


_NONE = VarDefaults()


class VarDefaultsContext(Setting, default=_NONE):
    """The setting of `var_defaults`."""


def var_defaults(
    *, hijax: bool | None = None, ref: bool | None = None
) -> VarDefaults | VarDefaultsContext:
    """What holds for new variables for which nothing else is said.

    Args:
        hijax: whether the value is held in a `jax.Ref`; another name for `ref`.
        ref: whether the value is held in a `jax.Ref`, if it is an array.

    Returns:
        Without an argument, what holds. Otherwise a setting: it holds from now on in this thread;
        in a `with` statement, and on a function that it decorates, for so long.

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


def with_defaults(metadata: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a new variable: `ref` and `hijax` where they hold, and not where not."""
    now = VarDefaultsContext.current()
    if now is _NONE and not ("ref" in metadata or "hijax" in metadata):
        return metadata
    asked = {name: metadata.get(name, now[name]) for name in now}
    rest = {name: v for name, v in metadata.items() if name not in asked}
    return {**rest, **{name: True for name, v in asked.items() if v}}


def held(value: Any, metadata: Mapping[str, Any]) -> Any:
    """A value as a variable with this metadata holds it: an array in a reference, or as it is."""
    if "ref" in metadata or "hijax" in metadata:
        return jax.new_ref(value) if isinstance(value, jax.Array | np.ndarray) else value
    return value


def held_at_first(value: Any, metadata: dict[str, Any], given: Mapping[str, Any], what: str) -> Any:
    """The value of a new variable as it is held.

    Args:
        value: the value.
        metadata: of the variable; for what is no array, it loses `ref` and `hijax`.
        given: the part of it that was given for this variable by name.
        what: the variable, for errors.

    Raises:
        VariableArgumentError: if the value is no array, and `ref=True` was given.
    """
    if isinstance(value, int | float | complex | np.generic):
        value = jnp.asarray(value)
    if isinstance(value, jax.Array | np.ndarray):
        return held(value, metadata)
    if given.get("ref") or given.get("hijax"):
        raise VariableArgumentError(
            f"a {what} with ref=True was given a {type(value).__name__}, and a jax.Ref holds one "
            "array; leave ref=True out, or make a variable for each array."
        )
    for name in ("ref", "hijax"):
        metadata.pop(name, None)
    return value


def write(ref: jax.Ref, value: Any, index: Any, what: str) -> None:
    """Writes to a reference, in its dtype.

    Args:
        ref: the reference.
        value: the new value.
        index: the part of it that is written.
        what: the variable, for errors.

    Raises:
        VariableShapeError: if the whole is written, and its shape is another.
    """
    value = jnp.asarray(value, ref.dtype)
    if index is ... and value.shape != ref.shape:
        raise VariableShapeError(
            f"a {what} is held in a jax.Ref, which keeps its shape, and was given a value of shape "
            f"{value.shape}; give one of shape {ref.shape}, or make the variable without ref=True."
        )
    ref[index] = value
