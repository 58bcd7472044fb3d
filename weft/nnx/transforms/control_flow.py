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
from typing import Any, NamedTuple, TypeVar, Unpack

import jax

from weft import lifting
from weft.errors import RoleError, TransformArgumentError
from weft.lifting import signature
from weft.lifting.kind import Static
from weft.nnx import filters, graph, settings, versions
from weft.nnx.pytree import Pytree, is_object, objects_in
from weft.nnx.transforms import calls
from weft.nnx.transforms.calls import (
    MISSING,
    P,
    R,
    optional_function,
    with_graph_options,
)
from weft.nnx.transforms.kind import ObjectKind, SharedStateChanged
from weft.nnx.transforms.state_roles import Carry, as_axes
from weft.nnx.variables import Variable, value_of
from weft.typing import ArrayLike, Fn, PyTree, same_signature


@same_signature
@optional_function
def scan(
    f: Callable[P, R] = MISSING,
    *,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    _split_transpose: bool = False,
    in_axes: PyTree = (Carry, 0),
    out_axes: PyTree = (Carry, 0),
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
    kind = ObjectKind(
        "scan", *settings.resolve_graph_options(**options), is_loop=True
    )
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

    def call_with_objects(*args: PyTree) -> PyTree:
        if not kind.structure:
            args = _with_own_carries(args, pairs, kind)
        return _map_carries(args, call(*args), pairs, _unbox_objects)

    return calls.wrap_transformed(
        "scan", f, call_with_objects, in_axes=in_axes, by_position=True
    )


def _with_changes_carried(
    looped: Callable[..., Callable[..., Any]],
) -> Callable[..., Any]:
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
            default_roles=lifting.Roles(
                ((filters.PathIn(carried), lifting.CARRY), (True, None))
            )
        )
        return call(*args)

    return call


class _CarryPair(NamedTuple):
    """The positions of a carry among the arguments and the results; None is the whole result."""

    arg: int
    result: int | None


_Pairs = Sequence[_CarryPair]


def _pairs(in_axes: PyTree, out_axes: PyTree) -> _Pairs:
    """Returns the positions of each carry.

    The first `Carry` of the arguments belongs to the first of the results, and so on. Raises
    TransformArgumentError if their numbers differ.
    """
    _refuse_nested_carry("in_axes", in_axes)
    _refuse_nested_carry("out_axes", out_axes)
    arg_positions = _carry_positions(in_axes)
    result_positions = _carry_positions(out_axes)
    if len(arg_positions) != len(result_positions):
        raise TransformArgumentError(
            f"scan: in_axes={_axes_text(in_axes)} has {len(arg_positions)} Carry and out_axes="
            f"{_axes_text(out_axes)} has {len(result_positions)}; each Carry of one needs "
            "its counterpart in the other, since a carry is also returned."
        )
    pairs: list[_CarryPair] = []
    for arg, result in zip(arg_positions, result_positions, strict=True):
        pairs.append(_CarryPair(0 if arg is None else arg, result))
    return pairs


def _refuse_nested_carry(name: str, axes: PyTree) -> None:
    for axis in axes if isinstance(axes, tuple | list) else ():
        has_carry = any(leaf is Carry for leaf in jax.tree.leaves(axis))
        if has_carry and axis is not Carry:
            raise TransformArgumentError(
                f"scan: {name}={_axes_text(axes)} has a Carry inside an entry; use Carry for a "
                "whole argument or result, or nnx.StateAxes({...: nnx.Carry}) for an object."
            )


def _carry_positions(axes: PyTree) -> list[int | None]:
    """Returns the positions of `Carry` in axes; None for axes that are `Carry` themselves."""
    if axes is Carry:
        return [None]
    if not isinstance(axes, tuple | list):
        return []
    return [i for i, axis in enumerate(axes) if axis is Carry]


def _axes_text(axes: PyTree) -> str:
    return repr(axes).replace(repr(Carry), "Carry")


def _box_carries(f: Fn, pairs: _Pairs, kind: ObjectKind) -> Fn:
    """Returns a body whose results have a box in place of each object of the carry.

    `(model, x)` comes in and `(Static(0), x)` goes out: the engine takes the state of the objects
    from the arguments, and a box has no leaves.
    """
    box = _box_objects if kind.structure else _box_trees

    def body(*args: PyTree) -> PyTree:
        return _map_carries(args, f(*args), pairs, box)

    return signature.copy_name(f, body)


def _map_carries(
    args: tuple[PyTree, ...],
    result: PyTree,
    pairs: _Pairs,
    change: Callable[[PyTree, PyTree], PyTree],
) -> PyTree:
    """Returns the results, with `change(carry_in, carry_out)` applied to each carry."""
    for pair in pairs:
        carry_in = args[pair.arg]
        if pair.result is None:
            result = change(carry_in, result)
            continue
        if not isinstance(result, tuple | list) or pair.result >= len(result):
            raise TransformArgumentError(
                f"scan: the body returns {type(result).__name__}, but by out_axes its "
                f"result {pair.result} is the carry; return a tuple with one entry per entry of "
                "out_axes."
            )
        entries = list(result)
        entries[pair.result] = change(carry_in, entries[pair.result])
        result = tuple(entries)
    return result


T = TypeVar("T")


@with_graph_options
def while_loop(
    cond_fun: Callable[[T], ArrayLike | Variable[Any]],
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

    def continues(carry: T) -> ArrayLike:
        return value_of(cond_fun(carry))

    loop = lifting.while_loop(
        kind,
        continues,
        _box_carries(body_fun, [_CarryPair(arg=0, result=None)], kind),
        in_axes=lifting.CARRY,
    )
    with versions.TransformCall(
        "while_loop", body_fun, (init_val,), ("init_val", "the result")
    ):
        if not kind.structure:
            init_val = _with_own_arrays(init_val, kind)
        return _unbox_objects(init_val, loop(init_val))


@with_graph_options
def fori_loop(
    lower: ArrayLike | Variable[Any],
    upper: ArrayLike | Variable[Any],
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
    kind = ObjectKind(
        "fori_loop", *settings.resolve_graph_options(**options), is_loop=True
    )
    loop = lifting.fori_loop(
        kind,
        value_of(lower),
        value_of(upper),
        _box_carries(body_fun, [_CarryPair(arg=1, result=None)], kind),
        in_axes=lifting.CARRY,
        unroll=unroll,
    )
    with versions.TransformCall(
        "fori_loop",
        body_fun,
        (init_val,),
        ("init_val", "the result"),
        names=calls.parameter_names(body_fun)[1:],
    ):
        if not kind.structure:
            init_val = _with_own_arrays(init_val, kind)
        return _unbox_objects(init_val, loop(init_val))


@with_graph_options
def cond(
    pred: ArrayLike | Variable[Any],
    true_fun: Callable[..., T],
    false_fun: Callable[..., T],
    *operands: PyTree,
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
    branch_fn = lifting.cond(kind, true_fun, false_fun)
    with versions.TransformCall(
        "cond", true_fun, operands, ("operands", "the result")
    ):
        return branch_fn(pred, *operands)


@with_graph_options
def switch(
    index: ArrayLike | Variable[Any],
    branches: Sequence[Callable[..., T]],
    *operands: PyTree,
    **options: Unpack[settings.GraphOptions],
) -> T:
    """Applies `jax.lax.switch` to functions of objects, with results of the same structure.

    The index is clamped to the range of `branches`. Raises TransformArgumentError if there is no
    branch; for other errors see `cond`.
    """
    if not branches:
        raise TransformArgumentError(
            "switch: there are no branches; give at least one function."
        )
    kind = ObjectKind("switch", *settings.resolve_graph_options(**options))
    branch_fn = lifting.switch(kind, tuple(branches))
    with versions.TransformCall(
        "switch", branches[0], operands, ("operands", "the result")
    ):
        return branch_fn(index, *operands)


def _box_objects(carry_in: PyTree, carry_out: PyTree) -> PyTree:
    """Returns the carry that a body returned, with leafless boxes in place of its objects.

    A box holds the index of an object in the carry that the body received.

    Raises TransformArgumentError if the returned objects differ from the received ones.
    """
    objects = objects_in(carry_in)
    paths_and_leaves, tree = jax.tree_util.tree_flatten_with_path(
        carry_out, is_leaf=is_object
    )
    num_boxed = 0
    boxed: list[PyTree] = []
    for path, leaf in paths_and_leaves:
        if not is_object(leaf):
            boxed.append(leaf)
            continue
        if num_boxed >= len(objects) or leaf is not objects[num_boxed]:
            raise TransformArgumentError(
                f"{calls.call_title('a loop')}: the carry{jax.tree_util.keystr(path)} is returned "
                f"as another {type(leaf).__name__} than the body received; change a carried object "
                "in place (nnx.update(model, state), variable[...] = value) and return the same "
                "object."
            )
        boxed.append(Static(num_boxed))
        num_boxed += 1
    if num_boxed < len(objects):
        raise TransformArgumentError(
            f"{calls.call_title('a loop')}: the body receives {len(objects)} objects in its carry "
            f"and returns {num_boxed}; return each in its place."
        )
    return jax.tree.unflatten(tree, boxed)


def _unbox_objects(carry_in: PyTree, carry_out: PyTree) -> PyTree:
    """Returns the carry that a loop returned, with the caller's own objects in it."""
    objects = objects_in(carry_in)

    def is_box(x: PyTree) -> bool:
        return isinstance(x, Static)

    def unboxed(x: PyTree) -> PyTree:
        return objects[x.value] if is_box(x) else x

    return jax.tree.map(unboxed, carry_out, is_leaf=is_box)


def _with_own_arrays(carry: T, kind: ObjectKind) -> T:
    """Returns a carry with copies of its objects, which share the variables of the caller's.

    A loop without graph updates changes these, and the caller's keep their arrays.
    """
    leaves, tree = jax.tree.flatten(carry, is_leaf=is_object)
    indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Pytree)]
    flat = kind.flatten([leaves[i] for i in indices])
    (copies, _), _ = graph.build_graph(flat.graphdef, flat.leaves, share=True)
    for i, copied in zip(indices, copies, strict=True):
        leaves[i] = copied
    return jax.tree.unflatten(tree, leaves)


def _with_own_carries(
    args: tuple[PyTree, ...], pairs: _Pairs, kind: ObjectKind
) -> tuple[PyTree, ...]:
    """Applies `_with_own_arrays` to the carries of a scan, all at once: they may share objects."""
    # A call with too few arguments fails later.
    positions = [pair.arg for pair in pairs if pair.arg < len(args)]
    carries = _with_own_arrays([args[i] for i in positions], kind)
    new_args = list(args)
    for i, carry in zip(positions, carries, strict=True):
        new_args[i] = carry
    return tuple(new_args)


def _box_trees(carry_in: PyTree, carry_out: PyTree) -> PyTree:
    """Boxes the objects of a carry without graph updates, where a body may return others.

    The received ones get the arrays of those that only differ in these.
    """
    leaves, tree = jax.tree.flatten(carry_out, is_leaf=is_object)
    indices = [i for i, leaf in enumerate(leaves) if is_object(leaf)]
    # `_box_objects` refuses another number of objects.
    for i, received in zip(indices, objects_in(carry_in), strict=False):
        if leaves[i] is not received and _take_arrays(received, leaves[i]):
            leaves[i] = received
    return _box_objects(carry_in, jax.tree.unflatten(tree, leaves))


def _take_arrays(
    x: Pytree | Variable[Any], other: Pytree | Variable[Any]
) -> bool:
    """Gives an object the arrays of another one; returns False if they differ by more."""
    # Descriptions have everything but arrays and variables, which come in the same order.
    old = graph.flatten_graph(x)
    new = graph.flatten_graph(other)
    if old.graphdef != new.graphdef:
        return False
    for leaf, new_leaf in zip(old.leaves, new.leaves, strict=True):
        if isinstance(leaf, Variable) and leaf is not new_leaf:
            return False
    existing = dict(enumerate(old.objects))
    graph.build_graph(new.graphdef, new.leaves, share=True, existing=existing)
    return True
