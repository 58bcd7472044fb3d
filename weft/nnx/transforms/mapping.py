"""vmap, shard_map and pmap: functions of objects mapped over an axis or over devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Unpack

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from weft import lifting
from weft.core.meta import PARTITION_NAME
from weft.lifting import traces
from weft.lifting.roles import broadcast_roles, carrier_roles
from weft.nnx import graph, settings, spmd, versions
from weft.nnx.filters import to_predicate
from weft.nnx.transforms import calls, kind, state_roles
from weft.nnx.transforms.calls import MISSING, P, R, optional_function
from weft.nnx.variables import Variable
from weft.typing import same_signature

_NONE: Mapping[Any, Any] = MappingProxyType({})


@same_signature
@optional_function
def vmap(
    f: Callable[P, R] = MISSING,
    *,
    in_axes: object = 0,
    out_axes: object = 0,
    axis_name: object = None,
    axis_size: int | None = None,
    spmd_axis_name: object = None,
    transform_metadata: Mapping[Any, Any] = _NONE,
    **options: Unpack[settings.GraphOptions],
) -> Callable[P, R]:
    """Applies `jax.vmap` to a function of objects; without one, returns a decorator.

    Args:
        in_axes: an axis or None per argument, or a pytree prefix of these; for an object an axis
            for all its state, `StateAxes`, or the result of `nnx.prefix`.
        out_axes: the same for the results. Arguments keep their axes.
        axis_name: name of the new axis for collectives.
        axis_size: size of the new axis, if no argument determines it.
        spmd_axis_name: mesh axis over which the new axis is sharded.
        transform_metadata: `{nnx.PARTITION_NAME: name}` names the new axis in variables' metadata.

    Raises:
        InconsistentAliasError: if one object is in two places with different axes.
        CapturedObjectError: if `f` returns an object that was not passed as an argument.
        AxisSizeError: if the mapped axes do not agree.
        VariableAxisError: if a variable with the axis None differs between indices.

    >>> a = nnx.Dict(w=nnx.Param(jnp.ones((2, 3))))
    >>> b = nnx.Dict(w=nnx.Param(jnp.ones((3, 2))))
    >>> nnx.vmap(lambda a, b: a.w @ b.w, in_axes=(1, 0))(a, b)
    Array([2., 2., 2.], dtype=float32)
    """
    mapped = lifting.vmap(
        kind.ObjectKind("vmap", *settings.resolve_graph_options(**options)),
        f,
        in_axes=state_roles.as_axes(in_axes, "in_axes"),
        out_axes=state_roles.as_axes(out_axes, "out_axes"),
        axis_size=axis_size,
        axis_name=axis_name,
        spmd_axis_name=spmd_axis_name,
        metadata=dict(transform_metadata),
    )
    return calls.wrap_transformed("vmap", f, mapped, in_axes=in_axes, by_position=True)


@same_signature
@optional_function
def pmap(
    f: Callable[P, R] = MISSING,
    *,
    axis_name: Any = None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    static_broadcasted_argnums: int | Sequence[int] = (),
    devices: Sequence[Any] | None = None,
    backend: str | None = None,
    axis_size: int | None = None,
    donate_argnums: int | Sequence[int] = (),
    transform_metadata: Mapping[Any, Any] = _NONE,
    **options: Unpack[settings.GraphOptions],
) -> Callable[P, R]:
    """Maps a function of objects over devices, one index of the mapped axes per device.

    Args:
        f: the function; without it, a decorator is returned.
        in_axes, out_axes: as for `vmap`, with axes from 0.
        static_broadcasted_argnums: positions of static, hashable arguments.
        devices: by default as many of `jax.devices(backend)` as needed.
        axis_size: number of devices, if neither `devices` nor arguments determine it.
        donate_argnums: accepted for compatibility; no memory is donated.

    Raises AxisSizeError if the mapped axes do not agree, or need more devices than available.
    """
    if devices is None and (backend is not None or axis_size is not None):
        devices = jax.devices(backend)[:axis_size]
    static = calls.StaticArguments(
        "pmap", "static_broadcasted_argnums", f, static_broadcasted_argnums
    )
    mapped = lifting.pmap(
        kind.ObjectKind("pmap", *settings.resolve_graph_options(**options)),
        static.fn,
        axis_name="devices" if axis_name is None else axis_name,
        in_axes=state_roles.as_axes(in_axes, "in_axes"),
        out_axes=state_roles.as_axes(out_axes, "out_axes"),
        devices=devices,
        metadata=dict(transform_metadata),
    )

    def call(*args: object) -> Any:
        return mapped(*static.wrapped(args))

    return calls.wrap_transformed("pmap", f, call, in_axes=in_axes, by_position=True)


@same_signature
@optional_function
def shard_map(
    f: Callable[P, R] = MISSING,
    *,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    in_specs: object,
    out_specs: object,
    axis_names: frozenset[str] | set[str] = frozenset(),
    check_vma: bool = True,
    **options: Unpack[settings.GraphOptions],
) -> Callable[P, R]:
    """Applies `jax.shard_map` to a function of objects.

    Args:
        f: the function of the local shards; without it, a decorator is returned.
        in_specs: a `PartitionSpec` per argument, or a pytree prefix of these; for an object one for
            all its state, `StateSharding`, or the result of `nnx.prefix`.
        out_specs: the same for the results. Arguments keep their specifications.
        axis_names: the manual axes of the mesh; by default all.

    Raises InconsistentAliasError if one object is in two places with different specifications.

    >>> from jax.sharding import Mesh, PartitionSpec as P
    >>> mesh = Mesh(jax.devices()[:1], ("data",))
    >>> model = nnx.Dict(w=nnx.Param(jnp.ones(3)))
    >>> f = nnx.shard_map(
    ...     lambda m, x: m.w * x, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")
    ... )
    >>> f(model, jnp.ones(3))
    Array([1., 1., 1.], dtype=float32)
    """
    of_objects = kind.ObjectKind("shard_map", *settings.resolve_graph_options(**options))
    in_roles = state_roles.as_shardings(in_specs, "in_specs")
    mapped = lifting.shard_map(
        of_objects,
        f,
        mesh=mesh,
        in_specs=in_roles,
        out_specs=state_roles.as_shardings(out_specs, "out_specs"),
        axis_names=frozenset(axis_names),
        check_vma=check_vma,
    )

    def call(*args: object) -> Any:
        result = mapped(*args)
        if of_objects.structure and isinstance(mesh, jax.sharding.Mesh):
            _lay_out(args, in_roles, mesh)
        return result

    specs = "in_specs", "out_specs"
    return calls.wrap_transformed("shard_map", f, call, specs, in_specs, by_position=True)


def _lay_out(args: tuple[Any, ...], in_roles: object, mesh: jax.sharding.Mesh) -> None:
    """Lays out variables that a function only reads by their specifications, as in Flax."""
    for variable, spec in _mapped(args, in_roles, "in_specs").values():
        value, is_here = variable._value, kind.trace_of(variable) == traces.current_trace()
        is_array = isinstance(value, jax.Array | np.ndarray)
        if is_here and is_array and not isinstance(value, Tracer):
            if not isinstance(spec, PartitionSpec):
                continue  # a key for each device
            new = jax.device_put(value, NamedSharding(mesh, spec))
            object.__setattr__(variable, "_value", new)


@same_signature
@optional_function
def transform_metadata(
    f: Callable[P, R] = MISSING,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    partition: str | None,
    **options: Unpack[settings.GraphOptions],
) -> Callable[P, R]:
    """Returns `f` with the mapped axis removed from the metadata of its variables.

    Under `jax.vmap`, or `nnx.vmap` without `transform_metadata=`, the value of a variable has one
    axis less than outside. The wrapper removes that axis from the metadata while `f` runs, and adds
    it to the metadata of variables that `f` returns.

    Args:
        in_axes, out_axes: as for `nnx.vmap`.
        partition: name of the axis.
        **options: ignored; objects keep their references.

    >>> @nnx.vmap(axis_size=3)
    ... @nnx.transform_metadata(partition="layers")
    ... def create():
    ...     return nnx.Param(jnp.ones(4), out_sharding=("model",), eager_sharding=False)
    >>> create().out_sharding
    ('layers', 'model')
    """
    params = {PARTITION_NAME: partition}
    in_roles, out_roles = state_roles.as_roles(in_axes), state_roles.as_roles(out_axes)

    @functools.wraps(f)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = calls.bind_positional(f, args, kwargs) if kwargs else (args, kwargs)
        given = _mapped(args, in_roles, "in_axes")
        call = versions.current_call()
        # A transformation of objects moves the axes itself, and only needs the name.
        is_inside = call is not None and call.fn is wrapper
        for variable, axis in () if is_inside else given.values():
            spmd.remove_axis(variable, axis, params)
        result = f(*args, **kwargs)
        made = _mapped(result, out_roles, "out_axes")
        made = {key: item for key, item in made.items() if key not in given}
        for variable, axis in (made if is_inside else {**given, **made}).values():
            if is_inside:
                spmd.name_next_axis(variable, partition)
            else:
                spmd.add_axis(variable, axis, params)
        return result

    return wrapper


def _mapped(tree: object, roles: object, what: str) -> dict[int, tuple[Variable[Any], int]]:
    leaves = jax.tree.leaves(tree, is_leaf=kind.is_object)
    found: dict[int, tuple[Variable[Any], int]] = {}
    for x, role in zip(leaves, broadcast_roles(roles, tree, kind.is_object, what), strict=True):
        if not kind.is_object(x):
            continue
        of_object: lifting.Roles = carrier_roles(role)
        flat = graph.flatten_graph(x)
        for path, leaf in flat.items():
            axis = next((r for where, r in of_object if to_predicate(where)(path, leaf)), None)
            if isinstance(leaf, Variable) and axis is not None and axis is not lifting.CARRY:
                found.setdefault(id(leaf), (leaf, axis))
    return found
