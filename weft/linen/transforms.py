"""Transformations of module classes, of their methods, and of functions of modules.

Each of them is one of `weft.core.lift`, for what `weft.linen.passengers` makes of modules, as
`weft.linen.lifted` says it. Here stand the signatures.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from weft.core import lift, meta
from weft.core.filters import Filter
from weft.errors import TransformArgumentError, TransformTargetError
from weft.lifting.functions import shared_by_equal_functions
from weft.linen.lifted import Build, Methods, subclass, transformed
from weft.linen.module import Module
from weft.linen.passengers import Carriage, Logged
from weft.linen.running import named_call_is_on

Target = TypeVar("Target")
# JAX may run again what it has traced; then the log says which names were given.


def _with_logged_result(build: Build) -> Build:
    def build_logged(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def run(carriage: Carriage, *args: Any, **kwargs: Any) -> Logged:
            return Logged(fn(carriage, *args, **kwargs), carriage)

        lifted = build(run, **options)

        @functools.wraps(lifted)
        def call(carriage: Carriage, *args: Any, **kwargs: Any) -> Any:
            return lifted(carriage, *args, **kwargs).read(carriage)

        return call

    return build_logged


def _scan(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    def body(carriage: Carriage, carry: Logged, *xs: Any) -> Any:
        result = fn(carriage, carry.value, *xs)
        if not isinstance(result, tuple) or len(result) != 2:
            return result
        return Logged(result[0], carriage), result[1]

    loop = lift.scan(body, **options)

    def call(carriage: Carriage, carry: Any, *xs: Any) -> Any:
        carry, y = loop(carriage, Logged(carry, carriage), *xs)
        return carry.read(carriage), y

    return call


def _remat_scan(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    def body(carriage: Carriage, carry: Logged) -> Logged:
        return Logged(fn(carriage, carry.value), carriage)

    loop = lift.remat_scan(body, **options)
    return lambda carriage, carry: loop(carriage, Logged(carry, carriage)).read(carriage)


def _checkify(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    def run(carriage: Carriage, *args: Any, **kwargs: Any) -> Logged:
        return Logged(fn(carriage, *args, **kwargs), carriage)

    lifted = lift.checkify(run, **options)

    def call(carriage: Carriage, *args: Any, **kwargs: Any) -> Any:
        error, result = lifted(carriage, *args, **kwargs)
        return error, result.read(carriage)

    return call


_jit = _with_logged_result(lift.jit)
_remat = _with_logged_result(lift.remat)


# Several runs of one function.


def vmap(
    target: Target,
    variable_axes: Mapping[Any, int | None] = {},
    split_rngs: Mapping[Any, bool] = {},
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_size: int | None = None,
    axis_name: Any = None,
    spmd_axis_name: Any = None,
    metadata_params: Mapping[Any, Any] = {},
    methods: Methods = None,
) -> Target:
    """`jax.vmap` of a module class or a function of a module; see `weft.core.lift.vmap`.

    Args:
        target: the class or function.
        variable_axes: for each filter of collections the axis that is mapped, or None if all share
            the variables.
        split_rngs: for each filter of PRNG streams whether each index has keys of its own.
        in_axes: as for `jax.vmap`, for the arguments after the module.
        out_axes: as for `jax.vmap`.
        axis_size: the size of the new axis, where nothing that is mapped tells it.
        axis_name: the name of the new axis for collectives.
        spmd_axis_name: the mesh axis over which the new axis is laid.
        metadata_params: handed to axis metadata that gains or loses the axis, such as
            `{nn.PARTITION_NAME: "layers"}`.
        methods: of a class, which methods; a dict gives each its own options.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from weft import linen as nn
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
    variable_axes: Mapping[Any, int | None] = {},
    split_rngs: Mapping[Any, bool] = {},
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: str = "devices",
    devices: Sequence[Any] | None = None,
    metadata_params: Mapping[Any, Any] = {},
    methods: Methods = None,
) -> Target:
    """`vmap` with one device for each index; see `weft.core.lift.pmap`.

    Args:
        target: see `vmap`.
        variable_axes: see `vmap`.
        split_rngs: see `vmap`.
        in_axes: see `vmap`.
        out_axes: see `vmap`.
        axis_name: the name of the mapped axis for collectives.
        devices: on which to run, by default the first of `jax.devices()`.
        metadata_params: see `vmap`.
        methods: see `vmap`.
    """
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
    mesh: Any,
    in_specs: Any,
    out_specs: Any,
    axis_names: frozenset[str] = frozenset(),
    check_vma: bool = True,
    methods: Methods = None,
) -> Target:
    """`jax.shard_map` of a module class or a function of a module.

    Args:
        target: the class or function.
        variable_specs: for each filter of collections the `PartitionSpec` of its variables.
        split_rngs: for each filter of PRNG streams whether each device has keys of its own.
        mesh: the devices.
        in_specs: a prefix of the arguments after the module.
        out_specs: a prefix of the result.
        axis_names: the axes of the mesh that the function sees; by default all.
        check_vma: as for `jax.shard_map`.
        methods: see `vmap`.
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
    variable_axes: Mapping[Any, int] = {},
    variable_broadcast: Filter = False,
    variable_carry: Filter = False,
    split_rngs: Mapping[Any, bool] = {},
    in_axes: Any = 0,
    out_axes: Any = 0,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    data_transform: Callable[..., Any] | None = None,
    metadata_params: Mapping[Any, Any] = {},
    methods: Methods = None,
    _split_transpose: bool = False,
    check_constancy_invariants: bool = True,
) -> Target:
    """`jax.lax.scan` of a module class or a function `fn(module, carry, *xs) -> (carry, y)`.

    Args:
        target: the class or function.
        variable_axes: for each filter of collections the axis along which each iteration has its
            own variables.
        variable_broadcast: the collections that all iterations share.
        variable_carry: the collections that are handed from one iteration to the next.
        split_rngs: for each filter of PRNG streams whether each iteration has keys of its own.
        in_axes: the scanned axis of each of `xs`; `nn.broadcast` for what is the same in all
            iterations.
        out_axes: the axis along which `y` is stacked.
        length: the number of iterations, where nothing that is scanned tells it.
        reverse: whether to run from the last index to the first.
        unroll: as for `jax.lax.scan`.
        data_transform: see `weft.core.lift.scan`.
        metadata_params: see `vmap`.
        methods: see `vmap`.
        _split_transpose: as for `jax.lax.scan`.
        check_constancy_invariants: see `weft.core.lift.scan`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from weft import linen as nn
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
        _scan,
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
        _split_transpose=_split_transpose,
        data_transform=data_transform,
        metadata_params=metadata_params,
        check_constancy_invariants=check_constancy_invariants,
    )


def remat_scan(
    target: Target,
    lengths: Sequence[int] | None = (),
    policy: Callable[..., bool] | None = None,
    variable_broadcast: Filter = False,
    variable_carry: Filter = False,
    variable_axes: Mapping[Any, int] = {True: 0},
    split_rngs: Mapping[Any, bool] = {True: True},
) -> Target:
    """Nested scans of a class or function `fn(module, carry) -> carry` with rematerialization.

    Args:
        target: the class or function.
        lengths: of the loops, from the outer one. Of `a * b` iterations `a + b` carries are kept.
        policy: what else to keep, one of `jax.checkpoint_policies`.
        variable_broadcast: see `scan`.
        variable_carry: see `scan`.
        variable_axes: see `scan`.
        split_rngs: see `scan`.

    Raises:
        TransformArgumentError: if there is no loop in `lengths`.
    """
    if not lengths:
        raise TransformArgumentError(
            f"remat_scan(lengths={lengths!r}) has no loops; give the length of each, the outer one "
            "first, as lengths=(4, 8) for 32 layers."
        )
    return transformed(
        "Remat_scan",
        _remat_scan,
        target,
        lengths=tuple(lengths),
        policy=policy,
        variable_broadcast=variable_broadcast,
        variable_carry=variable_carry,
        variable_axes=variable_axes,
        split_rngs=split_rngs,
    )


# How it is computed.


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
    """`jax.checkpoint` of a module class or a function of a module.

    Args:
        target: the class or function.
        variables: the collections that it sees.
        rngs: the PRNG streams that it sees.
        concrete: False; JAX has no other form any more.
        prevent_cse: as for `jax.checkpoint`; False inside a scan.
        static_argnums: the arguments that are hashable values and no arrays; 0 is the module.
        policy: what to keep, one of `jax.checkpoint_policies`.
        methods: see `vmap`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from weft import linen as nn
        >>> sorted(nn.remat(nn.Dense)(2).init(jax.random.key(0), jnp.ones(3))["params"])
        ['bias', 'kernel']
    """
    return transformed(
        "Checkpoint",
        _remat,
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


def jit(
    target: Target,
    variables: Filter = True,
    rngs: Filter = True,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    device: Any = None,
    backend: str | None = None,
    methods: Methods = None,
) -> Target:
    """`jax.jit` of a module class or a function of a module: compiled once for equal modules.

    Args:
        target: the class or function.
        variables: the collections that it sees.
        rngs: the PRNG streams that it sees; they begin anew, from a key drawn outside.
        static_argnums: the arguments that are hashable values and no arrays; 0 is the module.
        static_argnames: those among the arguments given by name.
        donate_argnums: the arguments whose arrays may be used for the results.
        device: where to run, instead of where the arguments are.
        backend: the platform where to run, such as "cpu".
        methods: see `vmap`.

    Returns:
        The class or function. A function's `explain_recompile()` says what differed when it was
        compiled again.
    """
    return transformed(
        "Jit",
        _jit,
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
    errors: Any = None,
    methods: Methods = None,
) -> Target:
    """`jax.experimental.checkify.checkify` of a module class or a function of a module.

    Args:
        target: the class or function.
        variables: the collections that it sees.
        rngs: the PRNG streams that it sees.
        errors: which checks are made; None for `checkify.user_checks`.
        methods: see `vmap`.

    Returns:
        The class or function; it returns the error, which may be none, and the result.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.experimental import checkify
        >>> from weft import linen as nn
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
        _checkify,
        target,
        methods,
        variables=variables,
        rngs=rngs,
        errors=errors,
    )


def fold_rngs(target: Target, variables: Filter = True, rngs: Filter = True) -> Target:
    """A module class or a function of a module, with PRNG streams that begin anew inside.

    Args:
        target: the class or function.
        variables: the collections that it sees.
        rngs: the PRNG streams that it sees.
    """
    return transformed("Fold_rngs", lift.fold_rngs, target, variables=variables, rngs=rngs)


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
    """A module class or a function of a module, on other values of some collections.

    Args:
        target: the class or function.
        mapped_collections: the collections that it sees through the maps.
        trans_in_fn: from the dict of those collections to the one that it sees.
        trans_out_fn: from the dict that it leaves to the one that is kept.
        init: whether it first runs once on the collections as they are, to make what is missing.
        mutable: whether it may change the mapped collections.
        rngs: the PRNG streams that it sees.
        variables: the other collections that it sees.
        methods: see `vmap`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from weft import linen as nn
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
    """A module class or a function of a module, whose variables' metadata has one axis more.

    For variables that are made with an axis that no transformation has added.

    Args:
        target: the class or function.
        variable_axes: for each filter of collections where the axis is.
        metadata_params: see `vmap`.
    """
    params = dict(metadata_params)

    def build(fn: Callable[..., Any]) -> Callable[..., Any]:
        for collections, axis in variable_axes.items():
            if axis is not None:
                fn = lift.map_variables(
                    fn,
                    collections,
                    functools.partial(meta.remove_axis, index=axis, params=params),
                    functools.partial(meta.add_axis, index=axis, params=params),
                    mutable=True,
                )
        return fn

    return transformed("", build, target)


def named_call(class_fn: Target, force: bool = True) -> Target:
    """A module class or a function of a module, whose operations carry its name in profiles.

    Args:
        class_fn: the class or function.
        force: whether also where `disable_named_call` was called.
    """

    def named(fn: Callable[..., Any]) -> Callable[..., Any]:
        shown = lift.named_call(fn)

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (shown if force or named_call_is_on() else fn)(*args, **kwargs)

        return call

    target: Any = class_fn
    if isinstance(target, type) and issubclass(target, Module):
        make = lambda: subclass(target, "", {"__call__": named(target.__call__)})  # noqa: E731
        return shared_by_equal_functions(("named", target, force), make)  # pyright: ignore[reportReturnType]
    if isinstance(target, Module) or not callable(target):
        raise TransformTargetError(target)
    return named(target)  # pyright: ignore[reportReturnType]
