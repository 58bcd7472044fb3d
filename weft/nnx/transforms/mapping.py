"""vmap, shard_map and pmap: functions of objects mapped over an axis or over devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Unpack

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from weft import lifting
from weft.core.meta import PARTITION_NAME
from weft.lifting import traces
from weft.lifting.roles import Role, broadcast_roles, carrier_roles
from weft.nnx import graph, settings, spmd, versions
from weft.nnx.filters import Path, to_predicate
from weft.nnx.pytree import is_object
from weft.nnx.transforms import calls, state_roles
from weft.nnx.transforms.calls import MISSING, P, R, optional_function
from weft.nnx.transforms.kind import ObjectKind, trace_of
from weft.nnx.variables import Variable
from weft.typing import PyTree, same_signature

Metadata = Mapping[str, Any]
_NO_METADATA: Metadata = MappingProxyType({})


@same_signature
@optional_function
def vmap(
    f: Callable[P, R] = MISSING,
    *,
    in_axes: PyTree = 0,
    out_axes: PyTree = 0,
    axis_name: Hashable = None,
    axis_size: int | None = None,
    spmd_axis_name: str | tuple[str, ...] | None = None,
    transform_metadata: Metadata = _NO_METADATA,
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
        ObjectKind("vmap", *settings.resolve_graph_options(**options)),
        f,
        in_axes=state_roles.as_axes(in_axes, "in_axes"),
        out_axes=state_roles.as_axes(out_axes, "out_axes"),
        axis_size=axis_size,
        axis_name=axis_name,
        spmd_axis_name=spmd_axis_name,
        metadata=dict(transform_metadata),
    )
    return calls.wrap_transformed(
        "vmap", f, mapped, in_axes=in_axes, by_position=True
    )


@same_signature
@optional_function
def pmap(
    f: Callable[P, R] = MISSING,
    *,
    axis_name: str | None = None,
    in_axes: PyTree = 0,
    out_axes: PyTree = 0,
    static_broadcasted_argnums: int | Sequence[int] = (),
    devices: Sequence[Any] | None = None,
    backend: str | None = None,
    axis_size: int | None = None,
    donate_argnums: int | Sequence[int] = (),
    transform_metadata: Metadata = _NO_METADATA,
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
    if axis_name is None:
        axis_name = "devices"
    static = calls.StaticArguments(
        "pmap", "static_broadcasted_argnums", f, static_broadcasted_argnums
    )
    mapped = lifting.pmap(
        ObjectKind("pmap", *settings.resolve_graph_options(**options)),
        static.fn,
        axis_name=axis_name,
        in_axes=state_roles.as_axes(in_axes, "in_axes"),
        out_axes=state_roles.as_axes(out_axes, "out_axes"),
        devices=devices,
        metadata=dict(transform_metadata),
    )

    def call(*args: PyTree) -> PyTree:
        return mapped(*static.wrapped(args))

    return calls.wrap_transformed(
        "pmap", f, call, in_axes=in_axes, by_position=True
    )


@same_signature
@optional_function
def shard_map(
    f: Callable[P, R] = MISSING,
    *,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    in_specs: PyTree,
    out_specs: PyTree,
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
    object_kind = ObjectKind(
        "shard_map", *settings.resolve_graph_options(**options)
    )
    in_roles = state_roles.as_shardings(in_specs, "in_specs")
    mapped = lifting.shard_map(
        object_kind,
        f,
        mesh=mesh,
        in_specs=in_roles,
        out_specs=state_roles.as_shardings(out_specs, "out_specs"),
        axis_names=frozenset(axis_names),
        check_vma=check_vma,
    )

    def call(*args: PyTree) -> PyTree:
        result = mapped(*args)
        if object_kind.structure and isinstance(mesh, jax.sharding.Mesh):
            _lay_out(args, in_roles, mesh)
        return result

    return calls.wrap_transformed(
        "shard_map",
        f,
        call,
        ("in_specs", "out_specs"),
        in_specs,
        by_position=True,
    )


def _lay_out(
    args: tuple[PyTree, ...], in_roles: PyTree, mesh: jax.sharding.Mesh
) -> None:
    """Lays out variables that a function only reads by their specifications, as in Flax."""
    for variable, spec in _mapped_variables(
        args, in_roles, "in_specs"
    ).values():
        if not isinstance(spec, PartitionSpec):
            continue  # a key for each device
        value = variable._value
        is_array = isinstance(value, jax.Array | np.ndarray)
        if not is_array or isinstance(value, Tracer):
            continue
        if trace_of(variable) == traces.current_trace():
            value = jax.device_put(value, NamedSharding(mesh, spec))
            # Not a change of the user's, so no hook and no check of the trace.
            object.__setattr__(variable, "_value", value)


@same_signature
@optional_function
def transform_metadata(
    f: Callable[P, R] = MISSING,
    *,
    in_axes: PyTree = 0,
    out_axes: PyTree = 0,
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
    axis_metadata = {PARTITION_NAME: partition}
    in_roles = state_roles.as_roles(in_axes)
    out_roles = state_roles.as_roles(out_axes)

    @functools.wraps(f)
    def wrapper(*args: PyTree, **kwargs: PyTree) -> R:
        if kwargs:
            args, kwargs = calls.bind_positional(f, args, kwargs)
        call = versions.current_call()
        # A transformation of objects moves the axes itself, and only needs the name.
        moves_axes = call is None or call.fn is not wrapper
        arguments = _mapped_variables(args, in_roles, "in_axes")
        if moves_axes:
            for variable, axis in arguments.values():
                spmd.remove_axis(variable, axis, axis_metadata)
        result = f(*args, **kwargs)
        results = _mapped_variables(result, out_roles, "out_axes")
        if moves_axes:
            # An argument that is also returned keeps its axis.
            for variable, axis in {**results, **arguments}.values():
                spmd.add_axis(variable, axis, axis_metadata)
        else:
            for key in results.keys() - arguments.keys():
                spmd.name_next_axis(results[key].variable, partition)
        return result

    return wrapper


class _MappedVariable(NamedTuple):
    """A variable with its axis, or its specification in a `shard_map`."""

    variable: Variable[Any]
    role: Any


def _mapped_variables(
    tree: PyTree, roles: PyTree, prefix_name: str
) -> dict[int, _MappedVariable]:
    """Returns the variables in a tree that have an axis or a specification, by their ids."""
    leaves = jax.tree.leaves(tree, is_leaf=is_object)
    leaf_roles = broadcast_roles(roles, tree, is_object, prefix_name)
    mapped: dict[int, _MappedVariable] = {}
    for x, role in zip(leaves, leaf_roles, strict=True):
        if not is_object(x):
            continue
        object_roles = carrier_roles(role)
        for path, leaf in graph.flatten_graph(x).items():
            if not isinstance(leaf, Variable) or id(leaf) in mapped:
                continue
            leaf_role = _role_of(leaf, path, object_roles)
            if leaf_role is not None and leaf_role is not lifting.CARRY:
                mapped[id(leaf)] = _MappedVariable(leaf, leaf_role)
    return mapped


def _role_of(variable: Variable[Any], path: Path, roles: lifting.Roles) -> Role:
    """Returns the role of the first filter that matches, None without one."""
    for where, role in roles:
        if to_predicate(where)(path, variable):
            return role
    return None
