"""scan, while_loop, fori_loop, cond and switch with functions of objects.

Objects in the carry of a loop change in place. They are identified by reference, so a body must
return the objects that it received.

Without graph updates only variables have an identity. An object then comes out of a loop as a copy
that shares its variables, and the caller's keeps its arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar, Unpack

import jax

from weft import lifting
from weft.errors import RoleError, TransformArgumentError
from weft.lifting import signature
from weft.lifting.kind import Static
from weft.nnx import filters, graph, settings, versions
from weft.nnx.pytree import Pytree
from weft.nnx.transforms import calls
from weft.nnx.transforms.calls import MISSING, P, R, optional_function, with_graph_options
from weft.nnx.transforms.kind import ObjectKind, SharedStateChanged, is_object
from weft.nnx.transforms.state_roles import Carry, as_axes
from weft.nnx.variables import Variable, value_of
from weft.typing import same_signature


@same_signature
@optional_function
def scan(
    f: Callable[P, R] = MISSING,
    *,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    _split_transpose: bool = False,
    in_axes: object = (Carry, 0),
    out_axes: object = (Carry, 0),
    transform_metadata: Mapping[Any, Any] = MappingProxyType({}),
    **options: Unpack[settings.GraphOptions],
) -> Callable[P, R]:
    """Applies `jax.lax.scan` to a function of objects.

    Args:
        f: the body; without it, a decorator is returned.
        length: number of iterations, if no argument determines it.
        reverse: whether to run from the last index to the first.
        in_axes: per argument `Carry`, an axis, or None to share it between iterations; for an
            object also `StateAxes`. With graph updates, each iteration begins with the same shared
            variables and drops its changes of them, with a SharedStateWarning. With a shared key
            count (`RngCount`), each draws the same keys.
        out_axes: per result `Carry` or the axis along which it is stacked; not a tuple if there is
            one result. Arguments that are not carried keep their axes.
        transform_metadata: see `nnx.vmap`.

    Raises:
        TransformArgumentError: if a carry has no counterpart among the results, or the body
            returns another object than it received.
        CarryStructureError: if the body changes the structure, a shape or a dtype of the carry.
        LoopStructureError: if it changes attributes or references of a carried or shared object,
            except for new attributes and items, the same after each iteration, which are made
            before the loop and carried; without graph updates, if it replaces a variable.
        RoleError: if it returns a shared result, or changes state that `StateAxes` share without
            graph updates; a changed variable of an object shared with None is then carried.

    >>> layers = nnx.Dict(w=nnx.Param(jnp.array([1.0, 2.0, 3.0])))
    >>> nnx.scan(lambda x, layer: x * layer.w, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
    ...     jnp.array(1.0), layers
    ... )
    Array(6., dtype=float32)
    """
    pairs = _pairs(in_axes, out_axes)
    kind = ObjectKind("scan", *settings.resolve_graph_options(**options), is_loop=True)
    looped = functools.partial(
        lifting.scan,
        kind,
        _box_carries(f, pairs, kind),
        in_axes=as_axes(in_axes, "in_axes", has_carry=True),
        out_axes=as_axes(out_axes, "out_axes", has_carry=True),
        length=length,
        reverse=reverse,
        unroll=unroll,
        split_transpose=_split_transpose,
        metadata=dict(transform_metadata),
    )
    call = _with_changes_carried(looped)

    def call_with_objects(*args: object) -> Any:
        if not kind.structure:
            carried = [i for i, _ in pairs if i < len(args)]
            own = with_own_arrays([args[i] for i in carried], kind)
            given = dict(zip(carried, own, strict=True))
            args = tuple(given.get(i, x) for i, x in enumerate(args))
        return _map_carries(args, call(*args), pairs, unbox_objects)

    return calls.wrap_transformed("scan", f, call_with_objects, in_axes=in_axes, by_position=True)


def _with_changes_carried(looped: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    """Returns a loop of `looped` that carries the shared variables which its body changes."""
    carried: frozenset[Any] = frozenset()
    loop = looped()

    def call(*args: object) -> Any:
        nonlocal carried, loop
        try:
            return loop(*args)
        except SharedStateChanged as error:
            # `StateAxes` determine what is carried.
            if error.paths <= carried:
                raise RoleError(error.text) from None
            carried |= error.paths
        loop = looped(
            default_roles=lifting.Roles(((filters.PathIn(carried), lifting.CARRY), (True, None)))
        )
        return call(*args)

    return call


_Pairs = tuple[tuple[int, int | None], ...]


def _pairs(in_axes: object, out_axes: object) -> _Pairs:
    """Returns the positions of each carry among arguments and results."""
    for name, axes in (("in_axes", in_axes), ("out_axes", out_axes)):
        for axis in axes if isinstance(axes, tuple | list) else ():
            if axis is not Carry and any(x is Carry for x in jax.tree.leaves(axis)):
                raise TransformArgumentError(
                    f"scan: {name}={_axes_text(axes)} has a Carry inside an entry; use Carry for a "
                    "whole argument or result, or nnx.StateAxes({...: nnx.Carry}) for an object."
                )
    carries = _carries(in_axes), _carries(out_axes)
    if len(carries[0]) != len(carries[1]):
        raise TransformArgumentError(
            f"scan: in_axes={_axes_text(in_axes)} has {len(carries[0])} Carry and out_axes="
            f"{_axes_text(out_axes)} has {len(carries[1])}; each Carry of one needs "
            "its counterpart in the other, since a carry is also returned."
        )
    return tuple((i or 0, j) for i, j in zip(*carries, strict=True))


def _carries(axes: object) -> list[int | None]:
    if axes is Carry:
        return [None]
    at = list(axes) if isinstance(axes, tuple | list) else []
    return [i for i, axis in enumerate(at) if axis is Carry]


def _axes_text(axes: object) -> str:
    return repr(axes).replace(repr(Carry), "Carry")


def _box_carries(f: Callable[..., Any], pairs: _Pairs, kind: ObjectKind) -> Callable[..., Any]:
    box = box_objects if kind.structure else _box_trees

    def body(*args: object) -> Any:
        return _map_carries(args, f(*args), pairs, box)

    return signature.copy_name(f, body)


def _map_carries(
    args: tuple[Any, ...], result: Any, pairs: _Pairs, change: Callable[[Any, Any], Any]
) -> Any:
    """Returns the results, with `change(given, returned)` applied to each carry."""
    for i, j in pairs:
        given = args[i]
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


T = TypeVar("T")


@with_graph_options
def while_loop(
    cond_fun: Callable[[T], Any],
    body_fun: Callable[[T], T],
    init_val: T,
    **options: Unpack[settings.GraphOptions],
) -> T:
    """Applies `jax.lax.while_loop` to a carry that may contain objects.

    Args:
        cond_fun: takes the carry and returns whether to continue. Its changes are dropped.
        body_fun: takes the carry and returns the next one, with the same objects.

    Returns the last carry, with the objects of `init_val`.

    Raises:
        CarryStructureError: if the body changes the structure, a shape or a dtype of the carry.
        LoopStructureError: if it changes attributes or references of an object, or puts a new
            variable or object in the place of another one.
        TransformArgumentError: if it returns another object than it received.

    >>> counter = nnx.Dict(n=nnx.Variable(jnp.array(0)))
    >>> def body(c):
    ...     c.n[...] += 1
    ...     return c
    >>> nnx.while_loop(lambda c: c.n < 5, body, counter) is counter, int(counter.n)
    (True, 5)
    """
    # As in Flax, whose `scan` and `fori_loop` carry new objects.
    kind = ObjectKind(
        "while_loop",
        *settings.resolve_graph_options(**options),
        is_loop=True,
        replaces_objects=False,
    )
    loop = lifting.while_loop(
        kind,
        lambda carry: value_of(cond_fun(carry)),
        _box_carries(body_fun, ((0, None),), kind),
        in_axes=lifting.CARRY,
    )
    with versions.TransformCall("while_loop", body_fun, (init_val,), ("init_val", "the result")):
        if not kind.structure:
            init_val = with_own_arrays(init_val, kind)
        return unbox_objects(init_val, loop(init_val))


@with_graph_options
def fori_loop(
    lower: object,
    upper: object,
    body_fun: Callable[[Any, T], T],
    init_val: T,
    *,
    unroll: int | bool | None = None,
    **options: Unpack[settings.GraphOptions],
) -> T:
    """Applies `jax.lax.fori_loop` to a carry that may contain objects.

    Args:
        body_fun: takes the index and the carry, and returns the next carry.
        unroll: number of iterations to unroll, if both bounds are Python numbers.

    Returns the last carry, with the objects of `init_val`. For errors see `while_loop`; a new
    variable may replace one of the same class, and is carried.

    >>> total = nnx.Variable(jnp.array(0))
    >>> def body(i, total):
    ...     total[...] += i
    ...     return total
    >>> int(nnx.fori_loop(0, 5, body, total))
    10
    """
    kind = ObjectKind("fori_loop", *settings.resolve_graph_options(**options), is_loop=True)
    loop = lifting.fori_loop(
        kind,
        value_of(lower),
        value_of(upper),
        _box_carries(body_fun, ((1, None),), kind),
        in_axes=lifting.CARRY,
        unroll=unroll,
    )
    specs, names = ("init_val", "the result"), calls.parameter_names(body_fun)[1:]
    with versions.TransformCall("fori_loop", body_fun, (init_val,), specs, names=names):
        if not kind.structure:
            init_val = with_own_arrays(init_val, kind)
        return unbox_objects(init_val, loop(init_val))


@with_graph_options
def cond(
    pred: object,
    true_fun: Callable[..., T],
    false_fun: Callable[..., T],
    *operands: object,
    **options: Unpack[settings.GraphOptions],
) -> T:
    """Applies `jax.lax.cond` to functions of objects.

    Both take `operands` and return results of the same structure.

    Raises:
        BranchStructureError: if results or values of variables differ in structure, shape or dtype.
        BranchObjectsError: if the functions change references or static attributes differently,
            except for new attributes with variables or arrays, which are made for both.

    >>> n = nnx.Variable(jnp.array(1))
    >>> def double(n):
    ...     n[...] *= 2
    >>> nnx.cond(True, double, lambda n: None, n)
    >>> int(n)
    2
    """
    kind = ObjectKind("cond", *settings.resolve_graph_options(**options))
    chosen = lifting.cond(kind, true_fun, false_fun)
    with versions.TransformCall("cond", true_fun, operands, ("operands", "the result")):
        return chosen(pred, *operands)


@with_graph_options
def switch(
    index: object,
    branches: Sequence[Callable[..., T]],
    *operands: object,
    **options: Unpack[settings.GraphOptions],
) -> T:
    """Applies `jax.lax.switch` to functions of objects, with results of the same structure.

    The index is clamped to the range of `branches`. Raises TransformArgumentError if there is no
    branch; for other errors see `cond`.
    """
    if not branches:
        raise TransformArgumentError("switch: there are no branches; give at least one function.")
    kind = ObjectKind("switch", *settings.resolve_graph_options(**options))
    chosen = lifting.switch(kind, tuple(branches))
    with versions.TransformCall("switch", branches[0], operands, ("operands", "the result")):
        return chosen(index, *operands)


def box_objects(given: object, returned: object) -> Any:
    """Returns the carry that a body returned, with leafless boxes in place of its objects.

    Raises TransformArgumentError if the returned objects differ from the given ones.
    """
    before = [x for x in jax.tree.leaves(given, is_leaf=is_object) if is_object(x)]
    leaves, tree = jax.tree_util.tree_flatten_with_path(returned, is_leaf=is_object)
    n = 0
    boxed = []
    for path, x in leaves:
        if is_object(x):
            if n >= len(before) or x is not before[n]:
                raise TransformArgumentError(
                    f"{calls.call_title('a loop')}: the carry{jax.tree_util.keystr(path)} is "
                    f"returned as another {type(x).__name__} than the body received; change a "
                    "carried object in place (nnx.update(model, state), variable[...] = value) and "
                    "return the same object."
                )
            x = Static(n)
            n += 1
        boxed.append(x)
    if n < len(before):
        raise TransformArgumentError(
            f"{calls.call_title('a loop')}: the body receives {len(before)} objects in its carry "
            f"and returns {n}; return each in its place."
        )
    return jax.tree.unflatten(tree, boxed)


def with_own_arrays(carry: T, kind: ObjectKind) -> T:
    """Returns a carry with copies of its objects, which share the variables of the given ones.

    A loop without graph updates changes these, and the caller's keep their arrays.
    """
    leaves, tree = jax.tree.flatten(carry, is_leaf=is_object)
    positions = [n for n, x in enumerate(leaves) if isinstance(x, Pytree)]
    flat = kind.flatten([leaves[n] for n in positions])
    (copies, _), _ = graph.build_graph(flat.graphdef, flat.leaves, share=True)
    for n, x in zip(positions, copies, strict=True):
        leaves[n] = x
    return jax.tree.unflatten(tree, leaves)


def _box_trees(given: object, returned: object) -> Any:
    """Boxes the objects of a carry without graph updates, where a body may return others.

    The given ones get the arrays of those that only differ in these.
    """
    before = [x for x in jax.tree.leaves(given, is_leaf=is_object) if is_object(x)]
    leaves, tree = jax.tree.flatten(returned, is_leaf=is_object)
    at = [n for n, x in enumerate(leaves) if is_object(x)]
    for n, x in zip(at, before, strict=False):
        if leaves[n] is not x and _take_arrays(x, leaves[n]):
            leaves[n] = x
    return box_objects(given, jax.tree.unflatten(tree, leaves))


def _take_arrays(x: Any, other: Any) -> bool:
    """Gives an object the arrays of another one; returns False if they differ by more."""
    old, new = graph.flatten_graph(x), graph.flatten_graph(other)
    is_alike = old.graphdef == new.graphdef and all(
        a is b for a, b in zip(old.leaves, new.leaves, strict=True) if isinstance(a, Variable)
    )
    if is_alike:
        existing = dict(enumerate(old.objects))
        graph.build_graph(new.graphdef, new.leaves, share=True, existing=existing)
    return is_alike


def unbox_objects(given: object, returned: object) -> Any:
    """Returns the carry that a loop returned, with the caller's own objects in it."""
    objects = [x for x in jax.tree.leaves(given, is_leaf=is_object) if is_object(x)]
    return jax.tree.map(
        lambda x: objects[x.value] if isinstance(x, Static) else x,
        returned,
        is_leaf=lambda x: isinstance(x, Static),
    )
