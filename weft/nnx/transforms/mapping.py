"""vmap, shard_map and pmap: functions mapped over an axis or over devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from weft import lifting
from weft.nnx.transforms.calls import (
    MISSING,
    StaticArguments,
    only_by_position,
    recorded,
    transformed,
)
from weft.nnx.transforms.kind import ObjectKind
from weft.nnx.transforms.modes import references_and_structure
from weft.nnx.transforms.symbols import as_axes, as_roles

_NONE: Mapping[Any, Any] = MappingProxyType({})


def vmap(
    f: Callable[..., Any] = MISSING,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: Any = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
    transform_metadata: Mapping[Any, Any] = _NONE,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Callable[..., Any]:
    """Applies `jax.vmap` to a function of objects; without one, returns a decorator.

    Args:
        in_axes: an axis or None per argument, or a pytree prefix of these; for an object an axis
            for all its state, `StateAxes`, or the result of `nnx.prefix`.
        out_axes: the same for the results. Arguments keep their axes.
        axis_name: name of the new axis for collectives.
        axis_size: size of the new axis, if no argument determines it.
        spmd_axis_name: mesh axis over which the new axis is sharded.
        transform_metadata: `{nnx.PARTITION_NAME: name}` names the new axis in the metadata of
            variables.
        graph: see `nnx.set_graph_mode`; for `graph_updates`, `nnx.set_graph_updates`.

    Raises:
        InconsistentAliasError: if one object is in two places with different axes.
        CapturedObjectError: if `f` returns an object that was not passed as an argument.
        AxisSizeError: if the mapped axes do not agree.
        VariableAxisError: if a variable with the axis None differs between indices.

    Example:
        >>> import jax.numpy as jnp
        >>> from weft import nnx
        >>> a = nnx.Dict(w=nnx.Param(jnp.ones((2, 3))))
        >>> b = nnx.Dict(w=nnx.Param(jnp.ones((3, 2))))
        >>> nnx.vmap(lambda a, b: a.w @ b.w, in_axes=(1, 0))(a, b)
        Array([2., 2., 2.], dtype=float32)
    """
    options: dict[str, Any] = {"graph": graph, "graph_updates": graph_updates}
    options |= {"axis_name": axis_name, "axis_size": axis_size, "spmd_axis_name": spmd_axis_name}
    options |= {"transform_metadata": transform_metadata}
    if f is MISSING:
        return functools.partial(vmap, in_axes=in_axes, out_axes=out_axes, **options)
    mapped = lifting.vmap(
        ObjectKind("vmap", *references_and_structure(graph, graph_updates)),
        recorded(f),
        in_axes=as_axes(in_axes, "in_axes"),
        out_axes=as_axes(out_axes, "out_axes"),
        axis_size=axis_size,
        axis_name=axis_name,
        spmd_axis_name=spmd_axis_name,
        metadata=dict(transform_metadata),
    )
    return transformed("vmap", f, only_by_position("vmap", mapped), in_axes=in_axes)


def pmap(
    f: Callable[..., Any] = MISSING,
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
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Callable[..., Any]:
    """Maps a function of objects over devices, one index of the mapped axes per device.

    Args:
        f: the function; without it, a decorator is returned.
        axis_name: name of the mapped axis for collectives.
        in_axes: as for `vmap`, with axes from 0.
        out_axes: as for `vmap`.
        static_broadcasted_argnums: positions of static, hashable arguments.
        devices: by default as many of `jax.devices(backend)` as needed.
        axis_size: number of devices, if neither `devices` nor arguments determine it.
        donate_argnums: accepted for compatibility; no memory is donated.
        transform_metadata: see `vmap`.
        graph: see `nnx.set_graph_mode`; for `graph_updates`, `nnx.set_graph_updates`.

    Raises:
        AxisSizeError: if the mapped axes do not agree, or need more devices than available.
    """
    options: dict[str, Any] = {"graph": graph, "graph_updates": graph_updates, "backend": backend}
    options |= {"axis_name": axis_name, "axis_size": axis_size, "devices": devices}
    options |= {"static_broadcasted_argnums": static_broadcasted_argnums}
    options |= {"donate_argnums": donate_argnums, "transform_metadata": transform_metadata}
    if f is MISSING:
        return functools.partial(pmap, in_axes=in_axes, out_axes=out_axes, **options)
    if devices is None and (backend is not None or axis_size is not None):
        devices = jax.devices(backend)[:axis_size]
    static = StaticArguments("pmap", "static_broadcasted_argnums", f, static_broadcasted_argnums)
    mapped = lifting.pmap(
        ObjectKind("pmap", *references_and_structure(graph, graph_updates)),
        recorded(static.fn),
        axis_name="devices" if axis_name is None else axis_name,
        in_axes=as_axes(in_axes, "in_axes"),
        out_axes=as_axes(out_axes, "out_axes"),
        devices=devices,
        metadata=dict(transform_metadata),
    )
    call = only_by_position("pmap", lambda *args: mapped(*static.wrapped(args)))
    return transformed("pmap", f, call, in_axes=in_axes)


def shard_map(
    f: Callable[..., Any] = MISSING,
    *,
    mesh: Mesh | AbstractMesh,
    in_specs: Any,
    out_specs: Any,
    axis_names: frozenset[str] | set[str] = frozenset(),
    check_vma: bool = True,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Callable[..., Any]:
    """Applies `jax.shard_map` to a function of objects.

    Args:
        f: the function of the local shards; without it, a decorator is returned.
        mesh: the device mesh.
        in_specs: a `PartitionSpec` per argument, or a pytree prefix of these; for an object one for
            all its state, `StateSharding`, or the result of `nnx.prefix`.
        out_specs: the same for the results. Arguments keep their specifications.
        axis_names: the manual axes of the mesh; by default all.
        check_vma: as for `jax.shard_map`.
        graph: see `nnx.set_graph_mode`; for `graph_updates`, `nnx.set_graph_updates`.

    Raises:
        InconsistentAliasError: if one object is in two places with different specifications.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax.sharding import Mesh, PartitionSpec as P
        >>> from weft import nnx
        >>> mesh = Mesh(jax.devices()[:1], ("data",))
        >>> model = nnx.Dict(w=nnx.Param(jnp.ones(3)))
        >>> f = nnx.shard_map(
        ...     lambda m, x: m.w * x, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")
        ... )
        >>> f(model, jnp.ones(3))
        Array([1., 1., 1.], dtype=float32)
    """
    if f is MISSING:
        return functools.partial(
            shard_map,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=axis_names,
            check_vma=check_vma,
            graph=graph,
            graph_updates=graph_updates,
        )
    mapped = lifting.shard_map(
        ObjectKind("shard_map", *references_and_structure(graph, graph_updates)),
        recorded(f),
        mesh=mesh,
        in_specs=as_roles(in_specs),
        out_specs=as_roles(out_specs),
        axis_names=frozenset(axis_names),
        check_vma=check_vma,
    )
    return transformed(
        "shard_map", f, only_by_position("shard_map", mapped), ("in_specs", "out_specs"), in_specs
    )
