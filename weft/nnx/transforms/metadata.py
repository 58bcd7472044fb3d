"""transform_metadata: adds and removes axes in the metadata of variables, not in their values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from weft.core.meta import PARTITION_NAME
from weft.lifting import CARRY, Roles
from weft.lifting.roles import broadcast_roles, roles_of_carrier
from weft.nnx.filters import to_predicate
from weft.nnx.graph import take_apart
from weft.nnx.spmd import add_axis, name_next_axis, remove_axis
from weft.nnx.transforms.calls import MISSING, by_position, current_call
from weft.nnx.transforms.kind import is_object
from weft.nnx.transforms.symbols import as_roles
from weft.nnx.variables import Variable


def transform_metadata(
    f: Callable[..., Any] = MISSING,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    partition: str | None,
    graph: bool | None = None,
) -> Callable[..., Any]:
    """Returns `f` with the mapped axis removed from the metadata of its variables.

    Under `jax.vmap`, or `nnx.vmap` without `transform_metadata=`, the value of a variable has one
    axis less than outside. The wrapper removes that axis from the metadata while `f` runs, and adds
    it to the metadata of variables that `f` returns.

    Args:
        f: the function; without it, a decorator is returned.
        in_axes: as for `nnx.vmap`, like `out_axes`.
        partition: name of the axis.
        graph: see `nnx.set_graph_mode`; it does not affect metadata.

    Example:
        >>> import jax.numpy as jnp
        >>> from weft import nnx
        >>> @nnx.vmap(axis_size=3)
        ... @nnx.transform_metadata(partition="layers")
        ... def create():
        ...     return nnx.Param(jnp.ones(4), out_sharding=("model",), eager_sharding=False)
        >>> create().out_sharding
        ('layers', 'model')
    """
    if f is MISSING:
        return functools.partial(
            transform_metadata, in_axes=in_axes, out_axes=out_axes, partition=partition, graph=graph
        )
    params = {PARTITION_NAME: partition}
    in_roles, out_roles = as_roles(in_axes), as_roles(out_axes)

    @functools.wraps(f)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = by_position(f, args, kwargs) if kwargs else (args, kwargs)
        given = _mapped(args, in_roles, "in_axes")
        call = current_call()
        # A transformation of objects moves the axes itself, and only needs the name.
        is_inside = call is not None and call.fn is wrapper
        for variable, axis in () if is_inside else given.values():
            remove_axis(variable, axis, params)
        result = f(*args, **kwargs)
        made = _mapped(result, out_roles, "out_axes")
        made = {key: item for key, item in made.items() if key not in given}
        for variable, axis in (made if is_inside else {**given, **made}).values():
            if is_inside:
                name_next_axis(variable, partition)
            else:
                add_axis(variable, axis, params)
        return result

    return wrapper


def _mapped(tree: Any, roles: Any, what: str) -> dict[int, tuple[Variable[Any], int]]:
    """Returns the variables in a tree that have the mapped axis, by identity."""
    leaves = jax.tree.leaves(tree, is_leaf=is_object)
    found: dict[int, tuple[Variable[Any], int]] = {}
    for x, role in zip(leaves, broadcast_roles(roles, tree, is_object, what), strict=True):
        if not is_object(x):
            continue
        of_object: Roles = roles_of_carrier(role)
        flat = take_apart(x)
        for path, leaf in zip(flat.graphdef.paths, flat.leaves, strict=True):
            axis = next((r for where, r in of_object if to_predicate(where)(path, leaf)), None)
            if isinstance(leaf, Variable) and axis is not None and axis is not CARRY:
                found.setdefault(id(leaf), (leaf, axis))
    return found
