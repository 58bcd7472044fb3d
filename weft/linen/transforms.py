"""Lifting of module classes and functions, based on functions of scopes.

A class becomes a subclass with lifted methods, which call those of the class. A function, or a
method, takes a module or a tree of modules first. Each transformation corresponds to a function of
`weft.core.lift`, which has the same options; `variables` and `rngs` select the collections and PRNG
streams that a function sees. `methods` names those of a class to transform, by default `__call__`;
a dict has options.

The way of `nn.scan(Block, ...)`:

outside   split_modules     the module and those that it uses -> one pytree of scopes
outside   lift.scan         axes by collection -> roles; `weft.lifting.scan` of these scopes
inside    merge_modules     scopes -> modules; the method of `Block` runs
outside   commit_counters   the numbers of automatic names that the method has used

Loops and branches over functions call a bound method `self.method` as `method(module, ...)`, with
the module inside of the transformation.
"""

import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax

from weft.core import lift, meta
from weft.core.filters import Filter
from weft.core.lift.transforms import VariableAxis
from weft.errors import TransformArgumentError, TransformTargetError
from weft.lifting import signature, trace_cache
from weft.lifting.jit import Lowered
from weft.linen.module import Module
from weft.linen.module_kind import (
    ModuleState,
    TransformToken,
    Unpack,
    commit_counters,
    lifted_call,
    merge_modules,
    split_modules,
    unbound,
)
from weft.linen.state import named_call_enabled, untransformed
from weft.typing import ArrayLike, Fn, PyTree, T

Methods = str | Collection[str] | Mapping[str, Mapping[str, Any]] | None
Build = Callable[..., Fn]
Target = TypeVar("Target")


def transformed(
    prefix: str,
    build: Build,
    target: PyTree,
    methods: Methods = None,
    **options: object,
) -> Any:
    """Returns a transformed module class or function; raises TransformTargetError for others.

    Of a `functools.partial` of a class, the class is transformed.

    Args:
        build: `build(fn, **options)` is a function of `weft.core.lift`.
        methods: methods of a class to lift: names, or options by name; by default `__call__`.
    """
    if isinstance(target, functools.partial) and isinstance(target.func, type):
        cls = transformed(prefix, build, target.func, methods, **options)
        return functools.partial(cls, *target.args, **target.keywords)
    if isinstance(target, type) and issubclass(target, Module):
        return _transform_class(prefix, build, target, methods, options)
    if isinstance(target, Module) or not callable(target):
        raise TransformTargetError(target)
    return _transform_function(prefix, build, target, options)


def _transform_class(
    prefix: str,
    build: Build,
    cls: type[Module],
    methods: Methods,
    options: dict[str, Any],
) -> type[Module]:
    if methods is None:
        methods = ("__call__",)
    elif isinstance(methods, str):
        methods = (methods,)
    options_by_method: dict[str, dict[str, Any]] = {}
    for name in methods:
        if not callable(getattr(cls, name, None)):
            raise TransformTargetError(f"{cls.__name__}.{name}")
        method_options = dict(options)
        if isinstance(methods, Mapping):
            method_options.update(methods[name])
        options_by_method[name] = method_options

    def create_subclass() -> type[Module]:
        token = TransformToken()
        lifted_methods: dict[str, Fn] = {}
        for name, method_options in options_by_method.items():
            method = getattr(cls, name)
            lifted_methods[name] = _transform_function(
                prefix, build, method, method_options, token
            )
        return subclass(cls, prefix, lifted_methods)

    # A class that each call transforms again is one class, so that it is compiled once.
    key = ("class", prefix, build, cls, options_by_method)
    return trace_cache.cached(key, create_subclass)


def subclass(
    cls: type[Module], prefix: str, methods: dict[str, Fn]
) -> type[Module]:
    """Returns a subclass of `cls` with other methods and the prefixed name."""
    name = prefix + cls.__name__
    namespace = {
        "__module__": cls.__module__,
        "__qualname__": name,
        "__doc__": cls.__doc__,
        **methods,
        "_transforms": untransformed(cls),
    }
    return type(name, (cls,), namespace)


class _Packing(NamedTuple):
    """Form in which a function of `weft.core.lift` passes on its arguments.

    Attributes:
        pack: converts the user's arguments to those of the lifted function, after the module.
        unpack: converts them back inside, to the positional and the keyword arguments.
    """

    pack: Callable[..., tuple[PyTree, PyTree]]
    unpack: Unpack


def _transform_function(
    prefix: str,
    build: Build,
    fn: Fn,
    options: dict[str, Any],
    token: TransformToken | None = None,
) -> Fn:
    for name in ("static_argnums", "donate_argnums"):
        signature.check_argnums(
            f"linen.{prefix.lower()}", name, fn, options.get(name, ())
        )
    # Each wrapper around the function would be a frame in every traceback.
    packing = _PACKINGS.get(build)
    unpack = None if packing is None else packing.unpack
    lifted = build(merge_modules(fn, unpack=unpack), **options)

    @functools.wraps(fn)
    def run(target: PyTree, *args: PyTree, **kwargs: PyTree) -> PyTree:
        if token is not None and token in target._state.transform_tokens:
            return fn(
                target, *args, **kwargs
            )  # a lifted method of the same module calls this one
        splitter, module_state, args, kwargs = split_modules(
            (fn,), target, args, kwargs, token
        )
        if packing is None:
            result = lifted(module_state, *args, **kwargs)
        else:
            result = lifted(module_state, *packing.pack(*args, **kwargs))
        commit_counters(splitter)
        return result

    if hasattr(lifted, "lower"):
        _add_jit_methods(run, fn, lifted, token)
    return run


def _add_jit_methods(
    run: Any, fn: Fn, lifted: Any, token: TransformToken | None
) -> None:
    """Adds to `run`, a function of modules, the methods of a jitted function of scopes."""

    def lower(target: PyTree, *args: PyTree, **kwargs: PyTree) -> Lowered:
        _, module_state, args, kwargs = split_modules(
            (fn,), target, args, kwargs, token
        )
        return Lowered(
            lifted.lower(module_state, *args, **kwargs), run_compiled
        )

    def run_compiled(
        compiled: Fn, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> PyTree:
        splitter, module_state, args, kwargs = split_modules(
            (fn,), args[0], args[1:], kwargs, token
        )
        result = compiled(module_state, *args, **kwargs)
        commit_counters(splitter)
        return result

    run.lower = lower
    run.explain_recompile = lifted.explain_recompile


_PACKED_ARGS = _Packing(
    pack=lambda *args, **kwargs: (args, kwargs),
    unpack=lambda args, kwargs: (args, kwargs),
)
_PACKED_SLICES = _Packing(
    pack=lambda carry, *xs: (carry, xs),
    unpack=lambda carry, xs: ((carry, *xs), {}),
)
# The others take positional and keyword arguments, as `jit` has to for `static_argnames`.
_PACKINGS = {
    **dict.fromkeys(
        (lift.vmap, lift.pmap, lift.shard_map, lift.remat), _PACKED_ARGS
    ),
    **dict.fromkeys(
        (lift.checkify, lift.fold_rngs, lift.map_variables), _PACKED_ARGS
    ),
    lift.scan: _PACKED_SLICES,
}


def vmap(
    target: Target,
    variable_axes: Mapping[Any, VariableAxis] = {},
    split_rngs: Mapping[Any, bool] = {},
    in_axes: PyTree = 0,
    out_axes: PyTree = 0,
    axis_size: int | None = None,
    axis_name: Hashable = None,
    spmd_axis_name: Hashable = None,
    metadata_params: Mapping[Any, Any] = {},
    methods: Methods = None,
) -> Target:
    """Applies `jax.vmap` to a module class or a function of a module; see `weft.core.lift.vmap`.

    Args:
        variable_axes: by filter of collections, the mapped axis, or None for shared variables;
            `partitioning.ScanIn(axis)` or `ScanOut(axis)` if they only enter or only leave.
        split_rngs: by filter of PRNG streams, whether each index has its own keys.
        in_axes: see `jax.vmap`, for the arguments after the module.
        axis_size: size of the new axis, if no mapped value determines it.
        spmd_axis_name: mesh axis over which the new axis is laid out.
        metadata_params: passed to axis metadata that gains or loses the axis, such as
            `{nn.PARTITION_NAME: "layers"}`.

    >>> Ensemble = nn.vmap(nn.Dense, {"params": 0}, {"params": True}, in_axes=None, axis_size=5)
    >>> jax.tree.map(jnp.shape, Ensemble(2).init(jax.random.key(0), jnp.ones(3)))
    {'params': {'bias': (5, 2), 'kernel': (5, 3, 2)}}
    """
    return transformed(
        "Vmap",
        lift.vmap,
        target,
        methods,
        variable_axes=variable_axes,
        split_rngs=split_rngs,
        in_axes=in_axes,
        out_axes=out_axes,
        axis_size=axis_size,
        axis_name=axis_name,
        spmd_axis_name=spmd_axis_name,
        metadata_params=metadata_params,
    )


def pmap(
    target: Target,
    variable_axes: Mapping[Any, VariableAxis] = {},
    split_rngs: Mapping[Any, bool] = {},
    in_axes: PyTree = 0,
    out_axes: PyTree = 0,
    axis_name: str = "devices",
    devices: Sequence[Any] | None = None,
    metadata_params: Mapping[Any, Any] = {},
    methods: Methods = None,
) -> Target:
    """Applies `vmap` with one device for each index, by default the first of `jax.devices()`."""
    return transformed(
        "Pmap",
        lift.pmap,
        target,
        methods,
        variable_axes=variable_axes,
        split_rngs=split_rngs,
        in_axes=in_axes,
        out_axes=out_axes,
        axis_name=axis_name,
        devices=devices,
        metadata_params=metadata_params,
    )


def shard_map(
    target: Target,
    variable_specs: Mapping[Any, Any] = {},
    split_rngs: Mapping[Any, bool] = {},
    *,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    in_specs: PyTree,
    out_specs: PyTree,
    axis_names: frozenset[str] = frozenset(),
    check_vma: bool = True,
    methods: Methods = None,
) -> Target:
    """Applies `jax.shard_map` to a module class or a function of a module.

    Args:
        variable_specs: by filter of collections, the `PartitionSpec` of the variables.
        split_rngs: by filter of PRNG streams, whether each device has its own keys.
        in_specs: a prefix of the arguments after the module.
        axis_names: mesh axes that the function sees; by default all.
    """
    return transformed(
        "Shard_map",
        lift.shard_map,
        target,
        methods,
        variable_specs=variable_specs,
        split_rngs=split_rngs,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=axis_names,
        check_vma=check_vma,
    )


def scan(
    target: Target,
    variable_axes: Mapping[Any, VariableAxis] = {},
    variable_broadcast: Filter = False,
    variable_carry: Filter = False,
    split_rngs: Mapping[Any, bool] = {},
    in_axes: PyTree = 0,
    out_axes: PyTree = 0,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    data_transform: Callable[..., Any] | None = None,
    metadata_params: Mapping[Any, Any] = {},
    methods: Methods = None,
    _split_transpose: bool = False,
    check_constancy_invariants: bool = True,
) -> Target:
    """Applies `jax.lax.scan` to a module class or a function `(module, carry, *xs) -> (carry, y)`.

    Args:
        variable_axes: by filter of collections, the axis of separate variables, see `vmap`.
        variable_broadcast: collections that all iterations share.
        variable_carry: collections that each iteration passes to the next.
        split_rngs: by filter of PRNG streams, whether each iteration has its own keys.
        in_axes: the scanned axis of each of `xs`; `nn.broadcast` for values of all iterations.
        out_axes: the axis along which `y` is stacked.
        length: number of iterations, if no scanned value determines it.
        unroll, data_transform, check_constancy_invariants: see `weft.core.lift.scan`.
        metadata_params: see `vmap`.

    >>> class Block(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x, _):
    ...         return x + nn.Dense(4)(x), None
    >>> Stack = nn.scan(Block, {"params": 0}, split_rngs={"params": True}, length=6)
    >>> variables = Stack().init(jax.random.key(0), jnp.ones((2, 4)), None)
    >>> variables["params"]["Dense_0"]["kernel"].shape
    (6, 4, 4)
    """
    return transformed(
        "Scan",
        lift.scan,
        target,
        methods,
        variable_axes=variable_axes,
        variable_broadcast=variable_broadcast,
        variable_carry=variable_carry,
        split_rngs=split_rngs,
        in_axes=in_axes,
        out_axes=out_axes,
        length=length,
        reverse=reverse,
        unroll=unroll,
        data_transform=data_transform,
        metadata_params=metadata_params,
        _split_transpose=_split_transpose,
        check_constancy_invariants=check_constancy_invariants,
    )


def remat_scan(
    target: Target,
    lengths: Sequence[int] | None = (),
    policy: Callable[..., bool] | None = None,
    variable_broadcast: Filter = False,
    variable_carry: Filter = False,
    variable_axes: Mapping[Any, VariableAxis] = {True: 0},
    split_rngs: Mapping[Any, bool] = {True: True},
) -> Target:
    """Applies nested scans with rematerialization to a class or `fn(module, carry) -> carry`.

    See `scan` for the other arguments.

    Args:
        lengths: of the loops, the outermost first; `a * b` iterations store `a + b` carries.
        policy: selects further values to store, see `jax.checkpoint_policies`.
    """
    if not lengths:
        raise TransformArgumentError(
            f"remat_scan(lengths={lengths!r}) has no loops; give the length of each, the outer one "
            "first, as lengths=(4, 8) for 32 layers."
        )
    return transformed(
        "Remat_scan",
        lift.remat_scan,
        target,
        lengths=tuple(lengths),
        policy=policy,
        variable_broadcast=variable_broadcast,
        variable_carry=variable_carry,
        variable_axes=variable_axes,
        split_rngs=split_rngs,
    )


# Execution.


def remat(
    target: Target,
    variables: Filter = True,
    rngs: Filter = True,
    concrete: bool = False,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
    policy: Callable[..., bool] | None = None,
    methods: Methods = None,
) -> Target:
    """Applies `jax.checkpoint` to a module class or a function of a module.

    Args:
        prevent_cse: see `jax.checkpoint`; False inside a scan.
        static_argnums: arguments that are hashable values, not arrays; 0 is the module.
        policy: selects values to store, see `jax.checkpoint_policies`.

    >>> sorted(nn.remat(nn.Dense)(2).init(jax.random.key(0), jnp.ones(3))["params"])
    ['bias', 'kernel']
    """
    return transformed(
        "Checkpoint",
        lift.remat,
        target,
        methods,
        variables=variables,
        rngs=rngs,
        concrete=concrete,
        prevent_cse=prevent_cse,
        static_argnums=static_argnums,
        policy=policy,
    )


checkpoint = remat
"""The same as `remat`."""


def jit(
    target: Target,
    variables: Filter = True,
    rngs: Filter = True,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    device: object = None,
    backend: str | None = None,
    methods: Methods = None,
) -> Target:
    """Applies `jax.jit` to a module class or a function; equal modules are compiled once.

    Args:
        rngs: PRNG streams that it sees; they restart from a key drawn outside.
        static_argnums: arguments that are hashable values, not arrays; 0 is the module.
        donate_argnums: arguments whose buffers may be reused for the results.
        device: device to use instead of the arguments' device.

    A function's `explain_recompile()` describes what caused a recompilation.
    """
    return transformed(
        "Jit",
        lift.jit,
        target,
        methods,
        variables=variables,
        rngs=rngs,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        device=device,
        backend=backend,
    )


def checkify(
    target: Target,
    variables: Filter = True,
    rngs: Filter = True,
    errors: object = None,
    methods: Methods = None,
) -> Target:
    """Applies `jax.experimental.checkify.checkify` to a module class or a function of a module.

    The class or function then returns a checkify error and the result. `errors` are the enabled
    checks, by default `checkify.user_checks`.

    >>> from jax.experimental import checkify
    >>> class Positive(nn.Module):
    ...     def __call__(self, x):
    ...         checkify.check(jnp.all(x > 0), "not positive")
    ...         return x
    >>> error, _ = nn.checkify(Positive)().apply({}, jnp.array([-1.0]))
    >>> error.get() is None
    False
    """
    return transformed(
        "Checkify",
        lift.checkify,
        target,
        methods,
        variables=variables,
        rngs=rngs,
        errors=errors,
    )


def fold_rngs(
    target: Target, variables: Filter = True, rngs: Filter = True
) -> Target:
    """Restarts the PRNG streams inside of a module class or a function of a module."""
    return transformed(
        "Fold_rngs", lift.fold_rngs, target, variables=variables, rngs=rngs
    )


def map_variables(
    target: Target,
    mapped_collections: Filter = True,
    trans_in_fn: Callable[[Any], Any] = lambda variables: variables,
    trans_out_fn: Callable[[Any], Any] = lambda variables: variables,
    init: bool = False,
    mutable: bool = False,
    rngs: Filter = True,
    variables: Filter = True,
    methods: Methods = None,
) -> Target:
    """Maps the variables that a module class or a function of a module sees.

    Args:
        trans_in_fn: maps the dict of those collections to the one that the target sees.
        trans_out_fn: maps the dict that the target leaves to the one to store.
        init: whether to run first on the unmapped collections, to create missing variables.
        mutable: whether the target may change the mapped collections.

    >>> class Tied(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         dense = nn.Dense(2, use_bias=False)
    ...         back = nn.map_variables(
    ...             lambda dense, h: dense.clone(features=3, parent=dense.scope)(h),
    ...             "params", lambda params: jax.tree.map(jnp.transpose, params))
    ...         return back(dense, dense(x))
    >>> Tied().init_with_output(jax.random.key(0), jnp.ones(3))[0].shape
    (3,)
    """
    return transformed(
        "Map_variables",
        lift.map_variables,
        target,
        methods,
        mapped_collections=mapped_collections,
        map_in_fn=trans_in_fn,
        map_out_fn=trans_out_fn,
        init=init,
        mutable=mutable,
        rngs=rngs,
        variables=variables,
    )


def add_metadata_axis(
    target: Target,
    variable_axes: Mapping[Any, int | None] = {},
    metadata_params: Mapping[Any, Any] = {},
) -> Target:
    """Adds an axis to the metadata of variables of a module class or a function of a module.

    Use it for variables whose axis was not added by a transformation.

    Args:
        variable_axes: by filter of collections, the position of the axis.
        metadata_params: see `vmap`.
    """
    params = dict(metadata_params)

    def build(fn: Fn) -> Fn:
        for collections, axis in variable_axes.items():
            if axis is None:
                continue
            # The function sees the metadata without the axis.
            remove = functools.partial(
                meta.remove_axis, index=axis, params=params
            )
            add = functools.partial(meta.add_axis, index=axis, params=params)
            fn = lift.map_variables(fn, collections, remove, add, mutable=True)
        return fn

    # The class names of Flax, which name submodules.
    return transformed("Map_variables" * len(variable_axes), build, target)


def named_call(class_fn: Target, force: bool = True) -> Target:
    """Names the operations of a module class or a function of a module in profiles.

    `force` overrides `disable_named_call`.
    """

    def named(fn: Fn) -> Fn:
        fn_in_named_scope = lift.named_call(fn)

        @functools.wraps(fn)
        def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
            if force or named_call_enabled():
                return fn_in_named_scope(*args, **kwargs)
            return fn(*args, **kwargs)

        return call

    target: Any = class_fn
    if isinstance(target, type) and issubclass(target, Module):

        def create_subclass() -> type[Module]:
            return subclass(target, "", {"__call__": named(target.__call__)})

        return trace_cache.cached(("named", target, force), create_subclass)  # pyright: ignore[reportReturnType]
    if isinstance(target, Module) or not callable(target):
        raise TransformTargetError(target)
    return named(target)  # pyright: ignore[reportReturnType]


def while_loop(
    cond_fn: Fn,
    body_fn: Fn,
    mdl: PyTree,
    init: T,
    carry_variables: Filter = False,
    broadcast_variables: Filter = True,
    split_rngs: Mapping[Any, bool] = {},
) -> T:
    """Applies `jax.lax.while_loop` to functions of a module and returns the last carry.

    Args:
        cond_fn: `cond_fn(module, carry)` returns whether to continue; it changes no variables.
        body_fn: `body_fn(module, carry)` returns the next carry.
        carry_variables: collections that the body may change.
        split_rngs: by filter of PRNG streams, whether each iteration has its own keys.
    """
    cond_fn, body_fn = unbound(cond_fn), unbound(body_fn)
    with lifted_call((body_fn, cond_fn), mdl, (init,)) as (
        module_state,
        (init,),
    ):
        return lift.while_loop(
            merge_modules(cond_fn, 1),
            merge_modules(body_fn),
            module_state,
            init,
            carry_variables,
            broadcast_variables,
            split_rngs,
        )


def fori_loop(
    lower: ArrayLike,
    upper: ArrayLike,
    body_fn: Fn,
    mdl: PyTree,
    init: T,
    carry_variables: Filter = False,
    broadcast_variables: Filter = True,
    split_rngs: Mapping[Any, bool] = {},
) -> T:
    """Applies `jax.lax.fori_loop` to `body_fn(i, module, carry)`; see `while_loop`."""

    def module_first(mdl: PyTree, i: jax.Array, carry: T) -> T:
        return body_fn(i, mdl, carry)

    run = merge_modules(module_first)

    def index_first(i: jax.Array, module_state: ModuleState, carry: T) -> T:
        return run(module_state, i, carry)

    with lifted_call((body_fn,), mdl, (init,)) as (module_state, (init,)):
        return lift.fori_loop(
            lower,
            upper,
            index_first,
            module_state,
            init,
            carry_variables,
            broadcast_variables,
            split_rngs,
        )


def cond(
    pred: ArrayLike,
    true_fun: Callable[..., T],
    false_fun: Callable[..., T],
    mdl: PyTree,
    *operands: PyTree,
    variables: Filter = True,
    rngs: Filter = True,
) -> T:
    """Applies `jax.lax.cond` to functions of a module.

    Args:
        false_fun: as `true_fun`, with a result of the same structure. Variables that only one of
            them creates are created for both.
        rngs: PRNG streams that both functions see; both draw the same keys.

    >>> class Routed(nn.Module):
    ...     def setup(self):
    ...         self.one, self.other = nn.Dense(2), nn.Dense(2)
    ...     def __call__(self, x, first):
    ...         return nn.cond(first, lambda m, x: m.one(x), lambda m, x: m.other(x), self, x)
    >>> sorted(Routed().init(jax.random.key(0), jnp.ones(3), True)["params"])
    ['one', 'other']
    """
    true_fun, false_fun = unbound(true_fun), unbound(false_fun)
    with lifted_call((true_fun, false_fun), mdl, operands) as (
        module_state,
        operands,
    ):
        return lift.cond(
            pred,
            merge_modules(true_fun),
            merge_modules(false_fun, 1),
            module_state,
            *operands,
            variables=variables,
            rngs=rngs,
        )


def switch(
    index: ArrayLike,
    branches: Sequence[Callable[..., T]],
    mdl: PyTree,
    *operands: PyTree,
    variables: Filter = True,
    rngs: Filter = True,
) -> T:
    """Applies `jax.lax.switch` to functions `branch(module, *operands)`; see `cond`."""
    fns = tuple(map(unbound, branches))
    lifted = [merge_modules(fn, i) for i, fn in enumerate(fns)]
    with lifted_call(fns, mdl, operands) as (module_state, operands):
        return lift.switch(
            index,
            lifted,
            module_state,
            *operands,
            variables=variables,
            rngs=rngs,
        )
