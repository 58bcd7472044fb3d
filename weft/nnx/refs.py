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
from weft.typing import PyTree


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


class VarDefaultsContext(Setting[VarDefaults], default=_NO_DEFAULTS):
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
    defaults = VarDefaultsContext.current()
    if hijax is None and ref is None:
        return defaults
    if hijax is not None:
        defaults = dataclasses.replace(defaults, hijax=hijax)
    if ref is not None:
        defaults = dataclasses.replace(defaults, ref=ref)
    return VarDefaultsContext(defaults)


def with_var_defaults(metadata: dict[str, Any]) -> dict[str, Any]:
    """Fills in `ref` and `hijax` of a new variable's metadata from the defaults."""
    defaults = VarDefaultsContext.current()
    if defaults is _NO_DEFAULTS and not (
        "ref" in metadata or "hijax" in metadata
    ):
        return metadata
    metadata = dict(metadata)
    for name, default in defaults.items():
        # Only True is kept: a variable without it is one with False.
        if metadata.pop(name, default):
            metadata[name] = True
    return metadata


def to_ref(value: PyTree, metadata: Mapping[str, Any]) -> PyTree:
    """Returns a value as a variable with this metadata holds it: in references, or unchanged."""
    if "ref" not in metadata and "hijax" not in metadata:
        return value

    def in_ref(leaf: PyTree) -> PyTree:
        is_array = isinstance(leaf, jax.Array | np.ndarray)
        return jax.new_ref(leaf) if is_array else leaf

    return jax.tree.map(in_ref, value)


def is_in_ref(value: PyTree) -> bool:
    """Returns whether arrays of a value are in references."""
    return any(isinstance(x, jax.Ref) for x in jax.tree.leaves(value))


def read_ref(value: PyTree) -> PyTree:
    """Returns a value with arrays in place of references."""
    if isinstance(value, jax.Ref):  # the most frequent case, without a tree
        return value[...]
    return jax.tree.map(_read_leaf, value)


def _read_leaf(leaf: PyTree) -> PyTree:
    return leaf[...] if isinstance(leaf, jax.Ref) else leaf


def initial_ref(
    value: PyTree,
    metadata: dict[str, Any],
    arguments: Mapping[str, Any],
    type_name: str,
) -> PyTree:
    """Returns the value of a new variable as it is held.

    If it has other leaves than arrays, `metadata` loses `ref` and `hijax`. Raises
    VariableArgumentError instead if `arguments`, the explicitly passed part, have `ref=True`.
    """
    leaves, structure = jax.tree.flatten(value)
    non_arrays = [x for x in leaves if not isinstance(x, _NUMERIC)]
    if leaves and not non_arrays:
        arrays = structure.unflatten(map(jnp.asarray, leaves))
        return to_ref(arrays, metadata)
    if non_arrays and (arguments.get("ref") or arguments.get("hijax")):
        leaf_type = type(non_arrays[0]).__name__
        raise VariableArgumentError(
            f"a {type_name} with ref=True was given a {leaf_type}, but a jax.Ref holds an array; "
            "omit ref=True, or make another variable for it."
        )
    metadata.pop("ref", None)
    metadata.pop("hijax", None)
    return value


def write_ref(
    held: PyTree, value: PyTree, index: PyTree, type_name: str
) -> None:
    """Writes to a part of a reference or to a part of a tree of references, in their dtypes.

    Raises VariableShapeError if the whole is written with another shape or structure.
    """
    if index is not ... and not isinstance(held, jax.Ref):
        # The index of a part of a tree, such as a key of a dict.
        held = held[index]
        index = ...
    refs, structure = jax.tree.flatten(held)
    if isinstance(held, jax.Ref):
        values = [jnp.asarray(value, held.dtype)]
        is_alike = True
    else:
        values = jax.tree.leaves(value)
        is_alike = jax.tree.structure(value) == structure
    if index is ...:
        ref_shapes = [ref.shape for ref in refs]
        if not is_alike or [jnp.shape(x) for x in values] != ref_shapes:
            raise VariableShapeError(
                f"a {type_name} is held in a jax.Ref, whose shape is fixed, and was given a value "
                f"of shape {jax.tree.map(jnp.shape, value)}; give one of shape "
                f"{structure.unflatten(ref_shapes)}, or make the variable without ref=True."
            )
    for ref, new_array in zip(refs, values, strict=True):
        ref[index] = jnp.asarray(new_array, ref.dtype)
