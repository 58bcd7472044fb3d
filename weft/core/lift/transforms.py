"""Functions of scopes that are mapped, scanned, compiled, chosen, or see other variables.

Arguments that are not described here are those of the functions of `weft.linen` with these names.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax

from weft import lifting
from weft.core.filters import Filter, subtract_filters
from weft.core.rngs import LazyRng
from weft.core.scope_kind import Group, ScopeKind, Select
from weft.errors import TransformArgumentError
from weft.lifting import CARRY, FORK, Roles, signature
from weft.lifting.kind import Static, is_carrier
from weft.lifting.roles import Role
from weft.typing import ArrayLike, Fn, PyTree, T


class _Broadcast:
    def __repr__(self) -> str:
        return "broadcast"


broadcast = _Broadcast()
"""Axis of a scan for values shared by all iterations."""


Axis = TypeVar("Axis", bound=int | None)


@dataclasses.dataclass(frozen=True)
class In(Generic[Axis]):
    """Axis of collections that a function sees and cannot change."""

    axis: Axis


@dataclasses.dataclass(frozen=True)
class Out(Generic[Axis]):
    """Axis of collections that a function makes without seeing earlier values."""

    axis: Axis


VariableAxis = int | None | In[Any] | Out[Any]


def axis_number(axis: VariableAxis) -> int | None:
    """Returns an axis without `In` or `Out`."""
    return axis.axis if isinstance(axis, In | Out) else axis


def _select_and_axis(
    where: Filter, axis: VariableAxis
) -> tuple[Select, int | None]:
    select = Select(
        where, out=not isinstance(axis, In), enters=not isinstance(axis, Out)
    )
    number = axis_number(axis)
    if number is None:
        return select, None
    try:
        return select, operator.index(number)
    except TypeError:
        raise TransformArgumentError(
            f"variable_axes={{{where!r}: {axis!r}}}; expected an axis, None for shared variables, "
            "or In(axis) or Out(axis) for variables that only enter or only leave."
        ) from None


def roles_of(
    axes: Mapping[Any, VariableAxis],
    rngs: Mapping[Any, bool],
    *first_roles: tuple[Filter, Role],
) -> Roles:
    """Returns the roles of a scope's collections and streams; `first_roles` take precedence."""
    roles: list[tuple[Select, Role]] = []
    for where, role in first_roles:
        roles.append((Select(where), role))
    for where, axis in axes.items():
        roles.append(_select_and_axis(where, axis))
    for where, is_split in rngs.items():
        roles.append((Select(rngs=where), FORK if is_split else None))
    return Roles(roles)


def shared(variables: Filter, rngs: Filter) -> Roles:
    """Returns the roles of a scope that crosses unchanged."""
    return Roles(((Select(variables, rngs), None),))


def without_broadcast(axes: PyTree) -> PyTree:
    """Returns axes with the engine's value for `broadcast`."""

    def is_leaf(axis: PyTree) -> bool:
        return axis is None or axis is broadcast

    return jax.tree.map(
        lambda axis: None if axis is broadcast else axis, axes, is_leaf=is_leaf
    )


def takes_packed_args(fn: Fn) -> bool:
    """Returns whether a function takes its arguments as the lifted function receives them.

    Such a function is lifted without wrappers: it takes the scope, a tuple of positional arguments
    and a dict of keyword arguments, or for `scan` the scope, the carry and a tuple of slices.
    """
    return getattr(fn, "takes_packed_args", False)


def with_packed_args(fn: Fn) -> Fn:
    """Wraps `fn` to take its positional arguments as a tuple and keyword arguments as a dict."""
    if takes_packed_args(fn):
        return fn

    @functools.wraps(fn)
    def call(
        scope: PyTree, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> PyTree:
        return fn(scope, *args, **kwargs)

    return call


def _lifted(transform: Fn, fn: Fn, **options: Any) -> Fn:
    """Applies a transformation of `weft.lifting`, which takes packed arguments, to `fn`."""
    kind = ScopeKind(transform.__name__)
    return with_unpacked_args(
        fn, transform(kind, with_packed_args(fn), **options)
    )


def with_unpacked_args(fn: Fn, lifted: Fn) -> Fn:
    """Inverts `with_packed_args`: takes the arguments as `fn` does."""
    if takes_packed_args(fn):
        return lifted

    @functools.wraps(fn)
    def call(scope: PyTree, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return lifted(scope, args, kwargs)

    return call


def vmap(
    fn: Fn,
    variable_axes: Mapping[Any, VariableAxis],
    split_rngs: Mapping[Any, bool],
    in_axes: PyTree = 0,
    out_axes: PyTree = 0,
    axis_size: int | None = None,
    axis_name: Hashable = None,
    spmd_axis_name: Hashable = None,
    metadata_params: Mapping[Any, Any] = {},
) -> Fn:
    """Applies `jax.vmap` to `fn(scope, *args)`; keyword arguments are mapped over axis 0.

    >>> from weft.core import init, lift, nn
    >>> dense = lift.vmap(nn.dense, {"params": 0}, {"params": True}, in_axes=(0, None))
    >>> y, variables = init(dense)(jax.random.key(0), jax.numpy.ones((5, 3)), 2)
    >>> y.shape, variables["params"]["kernel"].shape
    ((5, 2), (5, 3, 2))
    """
    return _lifted(
        lifting.vmap,
        fn,
        in_axes=(roles_of(variable_axes, split_rngs), in_axes, 0),
        out_axes=out_axes,
        axis_size=axis_size,
        axis_name=axis_name,
        spmd_axis_name=spmd_axis_name,
        metadata=dict(metadata_params),
    )


def pmap(
    fn: Fn,
    variable_axes: Mapping[Any, VariableAxis],
    split_rngs: Mapping[Any, bool],
    in_axes: PyTree = 0,
    out_axes: PyTree = 0,
    axis_name: str = "devices",
    devices: Sequence[Any] | None = None,
    metadata_params: Mapping[Any, Any] = {},
) -> Fn:
    """Applies `vmap` with one device for each index, by default the first of `jax.devices()`.

    Mapped axes count from 0. Raises AxisSizeError if there are fewer devices than indices.
    """
    return _lifted(
        lifting.pmap,
        fn,
        in_axes=(roles_of(variable_axes, split_rngs), in_axes, 0),
        out_axes=out_axes,
        axis_name=axis_name,
        devices=devices,
        metadata=dict(metadata_params),
    )


def shard_map(
    fn: Fn,
    variable_specs: Mapping[Any, Any],
    split_rngs: Mapping[Any, bool],
    *,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    in_specs: PyTree,
    out_specs: PyTree,
    axis_names: frozenset[str] = frozenset(),
    check_vma: bool = True,
) -> Fn:
    """Applies `jax.shard_map` to `fn(scope, *args)`."""
    replicated = jax.sharding.PartitionSpec()
    roles: list[tuple[Select, PyTree]] = []
    for where, spec in variable_specs.items():
        roles.append((Select(where), spec))
    for where, is_split in split_rngs.items():
        roles.append((Select(rngs=where), FORK if is_split else replicated))
    return _lifted(
        lifting.shard_map,
        fn,
        mesh=mesh,
        in_specs=(Roles(roles), in_specs, replicated),
        out_specs=out_specs,
        axis_names=axis_names,
        check_vma=check_vma,
    )


def remat(
    fn: Fn,
    variables: Filter = True,
    rngs: Filter = True,
    concrete: bool = False,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
    policy: Callable[..., bool] | None = None,
) -> Fn:
    """Applies `jax.checkpoint` to `fn(scope, *args)`; `concrete` must be False."""
    if concrete:
        raise TransformArgumentError(
            "remat(concrete=True): JAX no longer computes concrete values in it; name the "
            "arguments that have to be concrete in static_argnums."
        )
    signature.check_argnums("lift.remat", "static_argnums", fn, static_argnums)
    static_argnums = signature.as_tuple(static_argnums)
    packed = with_packed_args(fn)

    # A static argument crosses as a pytree without leaves, since it is part of a structure.
    @functools.wraps(packed)
    def without_static(
        scope: PyTree, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> PyTree:
        args = tuple(
            arg.value if isinstance(arg, Static) else arg for arg in args
        )
        return packed(scope, args, kwargs)

    lifted = lifting.remat(
        ScopeKind("remat"),
        without_static if static_argnums else packed,
        prevent_cse=prevent_cse,
        policy=policy,
        in_axes=(shared(variables, rngs), None, None),
    )
    if not static_argnums:
        return with_unpacked_args(fn, lifted)

    def with_static(
        scope: PyTree, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> PyTree:
        num_args = len(args) + 1  # the numbers count the scope
        static_indices = {number % num_args - 1 for number in static_argnums}
        new_args: list[PyTree] = []
        for index, arg in enumerate(args):
            new_args.append(Static(arg) if index in static_indices else arg)
        return lifted(scope, tuple(new_args), kwargs)

    return with_unpacked_args(fn, with_static)


checkpoint = remat
"""The same as `remat`."""


def scan(
    fn: Fn,
    variable_axes: Mapping[Any, VariableAxis] = {},
    variable_broadcast: Filter = False,
    variable_carry: Filter = False,
    split_rngs: Mapping[Any, bool] = {},
    in_axes: PyTree = 0,
    out_axes: PyTree = 0,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    _split_transpose: bool = False,
    data_transform: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    metadata_params: Mapping[Any, Any] = {},
    check_constancy_invariants: bool = True,
) -> Fn:
    """Applies `jax.lax.scan` to `fn(scope, carry, *xs) -> (carry, y)`.

    Args:
        data_transform: maps groups of variables and PRNG streams to those that `fn` sees.
        check_constancy_invariants: whether to count keys as after a first run, as Flax with True.

    >>> from weft.core import init, lift, nn
    >>> def layer(scope, x, _):
    ...     return nn.dense(scope, x, 4), None
    >>> stack = lift.scan(layer, {"params": 0}, split_rngs={"params": True}, length=3)
    >>> (y, _), variables = init(stack)(jax.random.key(0), jax.numpy.ones(4), None)
    >>> variables["params"]["kernel"].shape
    (3, 4, 4)
    """
    roles = roles_of(
        variable_axes,
        split_rngs,
        (variable_broadcast, None),
        (variable_carry, CARRY),
    )
    kind = ScopeKind(
        "scan",
        data_transform=data_transform,
        counts_first_run=check_constancy_invariants,
    )
    is_packed = takes_packed_args(fn)
    lifted = lifting.scan(
        kind,
        fn if is_packed else lambda scope, carry, xs: fn(scope, carry, *xs),
        in_axes=(roles, CARRY, without_broadcast(in_axes)),
        out_axes=(CARRY, without_broadcast(out_axes)),
        length=length,
        reverse=reverse,
        unroll=unroll,
        split_transpose=_split_transpose,
        metadata=dict(metadata_params),
    )
    if is_packed:
        return lifted

    @functools.wraps(fn)
    def call(scope: PyTree, carry: PyTree, *xs: PyTree) -> PyTree:
        return lifted(scope, carry, xs)

    return call


def remat_scan(
    body_fn: Fn,
    lengths: Sequence[int],
    policy: Callable[..., bool] | None = None,
    variable_broadcast: Filter = False,
    variable_carry: Filter = False,
    variable_axes: Mapping[Any, VariableAxis] = {True: 0},
    split_rngs: Mapping[Any, bool] = {True: True},
) -> Fn:
    """Applies nested scans with rematerialization to `body_fn(scope, carry) -> carry`.

    A variable has a new axis for each loop.
    """

    def looped(inner_fn: Fn, length: int) -> Fn:
        def body(scope: PyTree, carry: PyTree) -> tuple[PyTree, None]:
            return inner_fn(scope, carry), None

        loop = scan(
            remat(body, prevent_cse=False, policy=policy),
            variable_axes,
            variable_broadcast,
            variable_carry,
            split_rngs,
            length=length,
        )

        @functools.wraps(body_fn)
        def call(scope: PyTree, carry: PyTree) -> PyTree:
            last_carry, _ = loop(scope, carry)
            return last_carry

        return call

    # The innermost loop has the last length.
    fn = body_fn
    for length in reversed(lengths):
        fn = looped(fn, length)
    return fn


def jit(
    fn: Fn,
    variables: Filter = True,
    rngs: Filter = True,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    device: object = None,
    backend: str | None = None,
) -> Fn:
    """Applies `jax.jit` to `fn(scope, *args)`, compiling once for equal structure.

    The position of the scope does not matter. A function that is transformed again is compiled
    again, as with `jax.jit`. PRNG streams restart inside, from a key drawn outside.

    Returns the function. Its `explain_recompile()` describes the cause of a recompilation, and its
    `lower` is that of `jax.jit`.
    """
    signature.check_argnums("lift.jit", "static_argnums", fn, static_argnums)
    signature.check_argnums("lift.jit", "donate_argnums", fn, donate_argnums)
    lifted = lifting.jit(
        ScopeKind("jit", folds=True),
        fn,
        default_roles=shared(variables, rngs),
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
    )
    if backend is not None:
        device = jax.devices(backend)[0]

    @functools.wraps(fn)
    def call(scope: PyTree, *args: PyTree, **kwargs: PyTree) -> PyTree:
        if device is None:
            return lifted(scope, *args, **kwargs)
        with jax.default_device(device):
            return lifted(scope, *args, **kwargs)

    call.explain_recompile = lifted.explain_recompile  # pyright: ignore[reportAttributeAccessIssue]
    call.lower = lifted.lower  # pyright: ignore[reportAttributeAccessIssue]
    return call


def eval_shape(fn: Fn, variables: Filter = True, rngs: Filter = True) -> Fn:
    """Applies `jax.eval_shape` to `fn(scope, *args)`; changed variables become shapes."""
    return _lifted(
        lifting.eval_shape, fn, in_axes=(shared(variables, rngs), None, None)
    )


def checkify(
    fn: Fn, variables: Filter = True, rngs: Filter = True, errors: object = None
) -> Fn:
    """Applies `jax.experimental.checkify.checkify` to `fn(scope, *args)`.

    The result returns a checkify error and the result of `fn`. `errors` are the enabled checks, by
    default `checkify.user_checks`.
    """
    in_axes = (shared(variables, rngs), None, None)
    return _lifted(lifting.checkify, fn, errors=errors, in_axes=in_axes)


def named_call(
    fn: Callable[..., T], name: str | None = None
) -> Callable[..., T]:
    """Names the operations of `fn` in profiles, by default after the function."""
    scope_name = name or getattr(fn, "__name__", "fn")

    @functools.wraps(fn)
    def call(*args: PyTree, **kwargs: PyTree) -> T:
        with jax.named_scope(scope_name):
            return fn(*args, **kwargs)

    return call


Map = Callable[[PyTree], PyTree]
Groups = tuple[Group, ...]


def _identity(variables: T) -> T:
    return variables


def map_variables(
    fn: Fn,
    mapped_collections: Filter,
    map_in_fn: Map = _identity,
    map_out_fn: Map = _identity,
    init: bool = False,
    mutable: bool = False,
    rngs: Filter = True,
    variables: Filter = True,
) -> Fn:
    """Maps the variables that `fn(scope, *args)` sees.

    `map_in_fn` and `map_out_fn` are `trans_in_fn` and `trans_out_fn` there.

    >>> from weft.core import init, lift, nn
    >>> def transposed(variables):
    ...     return jax.tree.map(lambda x: x.T, variables)
    >>> decode = lift.map_variables(nn.dense, "params", transposed)
    >>> def tied(scope, x):
    ...     hidden = nn.dense(scope, x, 2, bias=False)
    ...     return decode(scope.rewound(), hidden, 3, bias=False)
    >>> init(tied)(jax.random.key(0), jax.numpy.ones(3))[0].shape
    (3,)
    """
    kind = ScopeKind("map_variables")
    mapped = Select(mapped_collections, out=mutable or init)
    unmapped = Select(subtract_filters(variables, mapped_collections), rngs)

    # The first group of a scope has the mapped collections.
    def map_in(groups: Groups) -> Groups:
        return _map_group(map_in_fn, groups[0]), *groups[1:]

    def map_out(inputs: Groups, results: Groups, is_first: bool) -> Groups:
        changes = results[0]
        if not (is_first or mutable or changes.variables or changes.created):
            return results
        # The function maps whole collections, so what has not changed takes part.
        new = _map_group(map_out_fn, kind.union(inputs[0], changes))
        created: dict[str, PyTree] = {}
        if changes.created:
            initial = kind.union(inputs[0], Group({}, {}, changes.created))
            created = map_out_fn(initial.variables)
        return new._replace(created=created), *results[1:]

    def initialize(inputs: Groups, results: Groups) -> Groups:
        return _map_group(
            map_out_fn, kind.union(inputs[0], results[0])
        ), *inputs[1:]

    def is_first(scope: PyTree, *_: PyTree) -> bool:
        scopes = jax.tree.leaves(scope, is_leaf=is_carrier(kind))
        return any(
            kind.needs_creation(one, mapped_collections) for one in scopes
        )

    lifted = lifting.map_state(
        kind,
        with_packed_args(fn),
        in_axes=(Roles(((mapped, None), (unmapped, None))), None, None),
        map_in=map_in,
        map_out=map_out,
        initialize=initialize if init else None,
        is_first=is_first,
    )
    return with_unpacked_args(fn, lifted)


def _map_group(fn: Map, group: Group) -> Group:
    return Group(fn(group.variables), group.streams, {})


def swap_collection(fn: Fn, col_a: str, col_b: str) -> Fn:
    """Swaps two collections that `fn(scope, *args)` sees."""
    names = {col_a: col_b, col_b: col_a}

    def swap(collections: dict[str, PyTree]) -> dict[str, PyTree]:
        return {
            names[collection]: variables
            for collection, variables in collections.items()
        }

    return map_variables(fn, (col_a, col_b), swap, swap, mutable=True)


def fold_rngs(fn: Fn, variables: Filter = True, rngs: Filter = True) -> Fn:
    """Restarts the PRNG streams that `fn(scope, *args)` sees from a key drawn of each."""
    in_axes = (shared(variables, rngs), None, None)
    kind = ScopeKind("fold_rngs", folds=True)
    return with_unpacked_args(
        fn, lifting.map_state(kind, with_packed_args(fn), in_axes=in_axes)
    )


def tree_map_rngs(fn: Map, tree: PyTree) -> PyTree:
    """Maps the keys of PRNG streams, as in the groups of `pack`.

    `fn` maps a key to its replacement, such as several keys along a new axis.
    """

    def map_one(stream: LazyRng | jax.Array) -> LazyRng | jax.Array:
        return (
            stream.replace(rng=fn(stream.rng))
            if isinstance(stream, LazyRng)
            else fn(stream)
        )

    return jax.tree.map(map_one, tree, is_leaf=lambda x: isinstance(x, LazyRng))


def while_loop(
    cond_fn: Fn,
    body_fn: Fn,
    scope: PyTree,
    init: T,
    carry_variables: Filter = False,
    broadcast_variables: Filter = True,
    split_rngs: Mapping[Any, bool] = {},
) -> T:
    """Applies `jax.lax.while_loop` to functions of a scope and returns the last carry."""
    roles = roles_of(
        {}, split_rngs, (carry_variables, CARRY), (broadcast_variables, None)
    )
    kind = ScopeKind("while_loop", counts_first_run=False)
    loop = lifting.while_loop(kind, cond_fn, body_fn, in_axes=(roles, CARRY))
    return loop(scope, init)


def fori_loop(
    lower: ArrayLike,
    upper: ArrayLike,
    body_fn: Fn,
    scope: PyTree,
    init: T,
    carry_variables: Filter = False,
    broadcast_variables: Filter = True,
    split_rngs: Mapping[Any, bool] = {},
) -> T:
    """Applies `jax.lax.fori_loop` to `body_fn(i, scope, carry)`; see `while_loop`."""
    roles = roles_of(
        {}, split_rngs, (carry_variables, CARRY), (broadcast_variables, None)
    )
    kind = ScopeKind("fori_loop", counts_first_run=False)
    return lifting.fori_loop(
        kind, lower, upper, body_fn, in_axes=(roles, CARRY)
    )(scope, init)


def cond(
    pred: ArrayLike,
    true_fun: Callable[..., T],
    false_fun: Callable[..., T],
    scope: PyTree,
    *operands: PyTree,
    variables: Filter = True,
    rngs: Filter = True,
) -> T:
    """Applies `jax.lax.cond` to functions `fun(scope, *operands)` with equal result structures.

    Variables that only one of them creates are created for both, and both draw the same keys.
    """
    in_axes = (shared(variables, rngs), *[None] * len(operands))
    lifted = lifting.cond(
        ScopeKind("cond"), true_fun, false_fun, in_axes=in_axes
    )
    return lifted(pred, scope, *operands)


def switch(
    index: ArrayLike,
    branches: Sequence[Callable[..., T]],
    scope: PyTree,
    *operands: PyTree,
    variables: Filter = True,
    rngs: Filter = True,
) -> T:
    """Applies `jax.lax.switch` to functions `branch(scope, *operands)`; see `cond`."""
    in_axes = (shared(variables, rngs), *[None] * len(operands))
    return lifting.switch(ScopeKind("switch"), branches, in_axes=in_axes)(
        index, scope, *operands
    )
