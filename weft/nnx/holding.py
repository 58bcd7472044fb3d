"""`vars_as`: copies of objects that hold variables differently."""

from __future__ import annotations

from typing import Any, TypeVar

from weft.errors import GraphStructureError
from weft.nnx.assembling import put_together
from weft.nnx.filters import All, Filter, OfType, to_predicate
from weft.nnx.graph import find_duplicates, take_apart
from weft.nnx.references import held_at_first
from weft.nnx.state import shown_path
from weft.nnx.variables import Variable

A = TypeVar("A")


def vars_as(
    node: A,
    /,
    *,
    hijax: bool | None = None,
    ref: bool | None = None,
    mutable: bool | None = None,
    only: Filter = ...,
    allow_duplicates: bool = False,
) -> A:
    """Returns a copy of an object that holds its variables differently, and shares unaffected ones.

    Args:
        ref: whether to hold values in a `jax.Ref` (`weft.nnx.references`); `hijax` is an alias.
        mutable: whether values can be changed.
        only: filter of the variables.
        allow_duplicates: whether a variable may occur twice, which JAX rejects for a `jax.Ref`.

    Raises:
        GraphStructureError: if a variable occurs twice.
        VariableArgumentError: if a value for a `jax.Ref` is not an array.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from weft import nnx
        >>> model = vars_as(nnx.Dict(n=nnx.Variable(jnp.array(0))), ref=True)
        >>> @jax.jit
        ... def step(model):
        ...     model.n[...] += 1
        >>> step(model)
        >>> int(model.n)
        1
    """
    asked = {"hijax": hijax, "ref": ref, "mutable": mutable}
    wanted = {name: value for name, value in asked.items() if value is not None}
    matches = to_predicate(All(OfType(Variable), only))
    flat = take_apart(node)
    leaves = [
        _held_as(x, wanted) if matches(path, x) else x
        for path, x in zip(flat.graphdef.paths, flat.leaves, strict=True)
    ]
    for first, *others in [] if allow_duplicates or not wanted else _duplicates(node, only):
        raise GraphStructureError(
            f"the variable at {shown_path(first)!r} is also at "
            f"{', '.join(repr(shown_path(path)) for path in others)}, but JAX accepts a reference "
            "only once; give allow_duplicates=True, or a copy at one place."
        )
    return put_together(flat.graphdef, leaves, share=True)[0]


with_vars = vars_as


def _duplicates(node: Any, only: Filter) -> list[Any]:
    return find_duplicates(node, only=All(OfType(Variable), only))


def _held_as(variable: Variable[Any], wanted: dict[str, bool]) -> Variable[Any]:
    there = {"mutable": True, "hijax": False, "ref": False, **variable.get_metadata()}
    updates = {name: value for name, value in wanted.items() if there[name] != value}
    if not updates:
        return variable
    value = variable.get_raw_value()
    if updates.get("ref") or updates.get("hijax"):
        metadata = {**variable.get_metadata(), **updates}
        value = held_at_first(value, metadata, updates, type(variable).__name__)
    new = variable.copy(value, **updates)
    if updates.get("mutable"):
        new.del_metadata("mutable")
    return new
