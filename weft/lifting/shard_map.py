"""One program per device, on its shards: shard_map and pmap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from weft.errors import AxisSizeError, TransformArgumentError
from weft.lifting import axes
from weft.lifting.crossing import Cargo, Kind, Results, Units, commit, depart, in_results, run
from weft.lifting.names import named_after
from weft.lifting.roles import FORK


def shard_map(
    kind: Kind,
    fn: Callable[..., Any],
    *,
    mesh: Mesh | jax.sharding.AbstractMesh,
    in_specs: Any,
    out_specs: Any,
    axis_names: frozenset[str] = frozenset(),
    check_vma: bool = True,
) -> Callable[..., Any]:
    """Applies `jax.shard_map` to a function that takes carriers.

    Args:
        fn: the function, of one device's shards.
        in_specs: a prefix of the arguments: a `PartitionSpec`, or `Roles` for a carrier. There, the
            role of a group is a `PartitionSpec`, which also applies to the results, or FORK for
            separate keys of each device.
        out_specs: a prefix of the results.
        axis_names: mesh axes that `fn` sees; by default all.
    """
    names = tuple(axis_names or mesh.axis_names)
    n = int(np.prod([mesh.shape[name] for name in names]))

    def call(*args: Any) -> Any:
        outer, cargo = depart(kind, args, in_specs, "in_specs")
        units = Units.of_cargo(cargo)

        def of_device(packed: Any) -> Results:
            parts = Units.of_packed(packed, units.layout.flat_roles)
            values = [
                jax.tree.map(lambda x: x[0], value) if role is FORK else value
                for value, role in parts.pairs()
            ]
            cargo_here = Cargo(cargo.static, parts.having(values).packed())
            return run(kind, lambda args: fn(*args), cargo_here, out_specs)

        mapped = jax.shard_map(
            named_after(fn, of_device),
            mesh=mesh,
            in_specs=(
                units.having(
                    [PartitionSpec(names) if r is FORK else r for r in units.roles]
                ).packed(),
            ),
            out_specs=axes.results_prefix(cargo, out_specs, _spec_or_shared),
            axis_names=frozenset(names),
            check_vma=check_vma,
        )

        def forked(group: Any) -> Any:
            return _laid_out(kind.fork(group, n), mesh, names)

        values = [forked(v) if role is FORK else v for v, role in units.pairs()]
        return commit(kind, outer, mapped(units.having(values).packed()))

    return call


def pmap(
    kind: Kind,
    fn: Callable[..., Any],
    *,
    axis_name: str = "devices",
    in_axes: Any = 0,
    out_axes: Any = 0,
    devices: Sequence[Any] | None = None,
    metadata: axes.Metadata | None = None,
) -> Callable[..., Any]:
    """Runs a function on several devices, each with one index of the mapped axes.

    Args:
        axis_name: name of the mapped axis for collectives.
        in_axes, out_axes: see `vmap`, with axes from 0.
        devices: by default as many of `jax.devices()` as needed.
        metadata: passed to axis metadata that gains or loses the axis.

    Raises:
        AxisSizeError: if the mapped axes do not agree, or there are too few devices.
        TransformArgumentError: under `jax.set_mesh` of a mesh with explicit axes, or inside
            `shard_map` or `pmap`.
    """
    metadata = metadata or {}

    def call(*args: Any) -> Any:
        _check_context()
        outer, cargo = depart(kind, args, in_axes)
        units = Units.of_cargo(cargo)
        axes.refuse_roles(units, "pmap", (FORK,))
        size = None if devices is None else len(devices)
        n, entered = axes.enter_axis(kind, cargo, units, size, "pmap", metadata)
        there = jax.devices() if devices is None else devices
        if n > len(there):
            raise AxisSizeError(
                f"pmap: the mapped axes have size {n}, and there are {len(there)} devices; each "
                "index needs one. Map over fewer, or use vmap for what one device can do alone."
            )
        mesh = Mesh(np.asarray(there[:n]), (axis_name,))

        def of_device(values: list[Any]) -> Results:
            inside = [_squeezed(*pair) for pair in zip(values, units.roles, strict=True)]
            args = Cargo(cargo.static, units.having(inside).packed())
            results = run(kind, lambda args: fn(*args), args, out_axes)
            returned = in_results(cargo, results, out_axes)
            outside = [_expanded(*pair) for pair in returned.pairs()]
            return Results(results.static, *returned.having(outside).packed())

        mapped = jax.shard_map(
            named_after(fn, of_device),
            mesh=mesh,
            in_specs=([_spec(role, axis_name) for role in units.roles],),
            out_specs=axes.results_prefix(cargo, out_axes, lambda r: _spec(r, axis_name)),
            check_vma=False,
        )
        shardings = [NamedSharding(mesh, _spec(role, axis_name)) for role in units.roles]
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            values = [_moved(*pair) for pair in zip(entered.values, shardings, strict=True)]
            results = jax.jit(named_after(fn, mapped))(values)
        return commit(kind, outer, axes.leave_axis(kind, cargo, results, out_axes, metadata))

    return call


def _check_context() -> None:
    """Rejects a context mesh under which results of another mesh cannot be used."""
    context = jax.sharding.get_abstract_mesh()
    kinds = {kind.name.lower() for kind in context.axis_types if kind is not AxisType.Auto}
    if kinds:
        raise TransformArgumentError(
            f"pmap uses a mesh of its own, and the mesh in the context has the "
            f"{' and '.join(sorted(kinds))} axes {context.axis_names}; call pmap outside of "
            "jax.set_mesh, shard_map and pmap, or use shard_map with that mesh, or vmap with "
            "spmd_axis_name."
        )


def _laid_out(keys: Any, mesh: Mesh | jax.sharding.AbstractMesh, names: tuple[str, ...]) -> Any:
    """Lays out keys, one for each device, as JAX requires for explicit axes of a mesh."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = tuple(name for name in names if types[name] is AxisType.Explicit)
    if not explicit:
        return keys
    return jax.sharding.reshard(keys, NamedSharding(mesh, PartitionSpec(explicit)))


def _moved(value: Any, sharding: NamedSharding) -> Any:
    """Returns a group on the mesh of `sharding`, moved from another mesh if needed."""
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())

    def moved(x: Any) -> Any:
        if not isinstance(x, jax.core.Tracer):
            return jax.device_put(x, sharding)
        mesh = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None)
        if mesh is None or AxisType.Explicit not in mesh.axis_types:
            return x
        # Under `jax.vmap` there are more axes than the type says, so none of them is named.
        return jax.device_put(x, everywhere)

    return jax.tree.map(moved, value)


def _spec_or_shared(role: Any) -> PartitionSpec:
    return role if isinstance(role, PartitionSpec) else PartitionSpec()


def _spec(role: Any, axis_name: str) -> PartitionSpec:
    """Returns the layout of a value whose mapped axis is `role`."""
    if role is FORK:
        return PartitionSpec(axis_name)
    return PartitionSpec() if role is None else PartitionSpec(*(None,) * role, axis_name)


def _squeezed(value: Any, role: Any) -> Any:
    """Removes the mapped axis from a device's shard."""
    if role is None:
        return value
    return jax.tree.map(lambda x: jnp.squeeze(x, 0 if role is FORK else role), value)


def _expanded(value: Any, role: Any) -> Any:
    """Adds the mapped axis to a device's shard."""
    return (
        jax.tree.map(lambda x: jnp.expand_dims(x, role), value) if isinstance(role, int) else value
    )
