"""scan: a function of objects in a loop over an axis."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax

from weft import lifting
from weft.errors import RoleError, TransformArgumentError
from weft.lifting import CARRY, Roles
from weft.lifting.names import takes_name
from weft.nnx.transforms.calls import MISSING, only_by_position, recorded, transformed
from weft.nnx.transforms.carry import with_objects, without_objects
from weft.nnx.transforms.kind import AtPaths, ObjectKind, SharedChanges
from weft.nnx.transforms.modes import references_and_structure
from weft.nnx.transforms.symbols import Carry, as_axes


def scan(
    f: Callable[..., Any] = MISSING,
    *,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    _split_transpose: bool = False,
    in_axes: Any = (Carry, 0),
    out_axes: Any = (Carry, 0),
    transform_metadata: Mapping[Any, Any] = MappingProxyType({}),
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Callable[..., Any]:
    """Applies `jax.lax.scan` to a function of objects.

    Args:
        f: the body; without it, a decorator is returned.
        length: number of iterations, if no argument determines it.
        reverse: whether to run from the last index to the first.
        unroll: as for `jax.lax.scan`, like `_split_transpose`.
        in_axes: per argument `Carry`, an axis, or None to share it between iterations; for an
            object also `StateAxes`. With a shared key count (`RngCount`), each iteration draws the
            same keys, and the count keeps its value.
        out_axes: per result `Carry` or the axis along which it is stacked; not a tuple if there is
            one result. Arguments that are not carried keep their axes.
        transform_metadata: see `nnx.vmap`.
        graph: see `nnx.set_graph_mode`; for `graph_updates`, `nnx.set_graph_updates`.

    Raises:
        TransformArgumentError: if a carry has no counterpart among the results, or the body
            returns another object than it received.
        CarryStructureError: if the body changes the structure, a shape or a dtype of the carry.
        LoopStructureError: if it changes attributes or references of a carried or shared object,
            except for new attributes with variables, which are made before the loop and carried;
            without graph updates, if it replaces a variable or an array attribute.
        RoleError: if it changes shared state; without graph updates, a changed variable of an
            object shared with None is carried instead, as in Flax.

    Example:
        >>> import jax.numpy as jnp
        >>> from weft import nnx
        >>> layers = nnx.Dict(w=nnx.Param(jnp.array([1.0, 2.0, 3.0])))
        >>> nnx.scan(lambda x, layer: x * layer.w, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
        ...     jnp.array(1.0), layers
        ... )
        Array(6., dtype=float32)
    """
    if f is MISSING:
        options: dict[str, Any] = {"length": length, "reverse": reverse, "unroll": unroll}
        options |= {"_split_transpose": _split_transpose, "transform_metadata": transform_metadata}
        options |= {"in_axes": in_axes, "out_axes": out_axes}
        return functools.partial(scan, graph=graph, graph_updates=graph_updates, **options)
    pairs = _pairs(in_axes, out_axes)
    looped = functools.partial(
        lifting.scan,
        ObjectKind("scan", *references_and_structure(graph, graph_updates), is_loop=True),
        recorded(_boxing(f, pairs)),
        in_axes=as_axes(in_axes, "in_axes", has_carry=True),
        out_axes=as_axes(out_axes, "out_axes", has_carry=True),
        length=length,
        reverse=reverse,
        unroll=unroll,
        split_transpose=_split_transpose,
        metadata=dict(transform_metadata),
    )
    call = _carrying_what_changes(looped)

    def call_with_objects(*args: Any) -> Any:
        return _changed(args, call(*args), pairs, with_objects)

    return transformed("scan", f, only_by_position("scan", call_with_objects), in_axes=in_axes)


def _carrying_what_changes(looped: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    """Returns a loop of `looped` that carries the shared variables which its body changes."""
    carried: frozenset[Any] = frozenset()
    loop = looped()

    def call(*args: Any) -> Any:
        nonlocal carried, loop
        try:
            return loop(*args)
        except SharedChanges as error:
            # `StateAxes` determine what is carried.
            if error.paths <= carried:
                raise RoleError(error.text) from None
            carried |= error.paths
        loop = looped(of_carriers=Roles(((AtPaths(carried), CARRY), (True, None))))
        return call(*args)

    return call


_Pairs = tuple[tuple[int | None, int | None], ...]


def _pairs(in_axes: Any, out_axes: Any) -> _Pairs:
    """Returns the positions of each carry among arguments and results."""
    for name, axes in (("in_axes", in_axes), ("out_axes", out_axes)):
        for axis in axes if isinstance(axes, tuple | list) else ():
            if axis is not Carry and any(x is Carry for x in jax.tree.leaves(axis)):
                raise TransformArgumentError(
                    f"scan: {name}={_shown(axes)} has a Carry inside an entry; use Carry for a "
                    "whole argument or result, or nnx.StateAxes({...: nnx.Carry}) for an object."
                )
    carries = _carries(in_axes), _carries(out_axes)
    if len(carries[0]) != len(carries[1]):
        raise TransformArgumentError(
            f"scan: in_axes={_shown(in_axes)} has {len(carries[0])} Carry and out_axes="
            f"{_shown(out_axes)} has {len(carries[1])}; each Carry of one needs "
            "its counterpart in the other, since a carry is also returned."
        )
    return tuple(zip(*carries, strict=True))


def _carries(axes: Any) -> list[int | None]:
    if axes is Carry:
        return [None]
    at = list(axes) if isinstance(axes, tuple | list) else []
    return [i for i, axis in enumerate(at) if axis is Carry]


def _shown(axes: Any) -> str:
    return repr(axes).replace(repr(Carry), "Carry")


def _boxing(f: Callable[..., Any], pairs: _Pairs) -> Callable[..., Any]:
    return takes_name(f, lambda *args: _changed(args, f(*args), pairs, without_objects))


def _changed(args: Any, result: Any, pairs: _Pairs, change: Callable[[Any, Any], Any]) -> Any:
    """Returns the results, with `change(given, returned)` applied to each carry."""
    for i, j in pairs:
        given = args[0 if i is None else i]
        if j is None:
            result = change(given, result)
        elif not isinstance(result, tuple | list) or j >= len(result):
            raise TransformArgumentError(
                f"scan: the body returns {type(result).__name__}, but by out_axes its "
                f"result {j} is the carry; return a tuple with one entry per entry of out_axes."
            )
        else:
            result = (*result[:j], change(given, result[j]), *result[j + 1 :])
    return result
