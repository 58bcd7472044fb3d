"""Sharding constraints over a mesh, with errors and warnings.

A layout is a `PartitionSpec`: for each axis of an array, the mesh axes that split it. Its effect
depends on the type of each mesh axis: automatic axes get a constraint, explicit axes are resharded,
and manual axes of a `shard_map` are ignored.
"""

import math
import warnings
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from weft.errors import MeshError, ShardingWarning

AnyMesh = Mesh | AbstractMesh

# Outside of a compiled function, a constraint with an abstract mesh would reject arrays on a single
# device, and one with a mesh would lose the layout over explicit axes.
_constrained = jax.jit(jax.lax.with_sharding_constraint, static_argnums=1, inline=True)


def get_global_mesh() -> AbstractMesh | None:
    """Returns the mesh of `jax.set_mesh`, or None.

    Example:
        >>> with jax.set_mesh(jax.make_mesh((1,), ("data",))):
        ...     get_global_mesh().axis_names
        ('data',)
    """
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def global_mesh_defined() -> bool:
    """Returns whether `jax.set_mesh` has set a mesh.

    Example:
        >>> global_mesh_defined()
        False
    """
    return get_global_mesh() is not None


def axes_of(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes in an entry of a layout."""
    if isinstance(entry, str):
        return (entry,)
    return tuple(entry) if isinstance(entry, tuple | list) else ()


def constrain(value: Any, spec: PartitionSpec, mesh: AnyMesh | None = None) -> Any:
    """Lays out every array of a tree over a mesh.

    Args:
        value: a pytree; leaves that are not arrays, such as `jax.ShapeDtypeStruct`, are unchanged.
        spec: mesh axes of each axis.
        mesh: by default that of `jax.set_mesh`; without either, `value` is returned unchanged.

    Raises:
        MeshError: if the mesh lacks an axis, or the layout has more axes than an array.

    Warns:
        ShardingWarning: if a mesh axis does not divide an array's axis, which then is not split.

    Example:
        >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
        >>> constrain(jax.numpy.ones(4), PartitionSpec("data"), mesh).sharding.spec
        P('data',)
    """
    here = get_global_mesh()
    if mesh is None or (here is not None and here.shape_tuple == mesh.shape_tuple):
        # Inside of a shard_map, only the mesh of the context knows the manual axes.
        mesh = here
    if mesh is None or all(kind is AxisType.Manual for kind in mesh.axis_types):
        return value  # inside of a shard_map over the whole mesh, all axes are manual
    return jax.tree.map(lambda x: _place(x, spec, mesh), value)


def constrain_like_jit(value: Any, sharding: Any) -> Any:
    """Lays out an array in a compiled function as `in_shardings` of `jax.jit`.

    Unlike `jax.lax.with_sharding_constraint`, accepts explicit axes.
    """
    named = isinstance(sharding, NamedSharding)
    mesh = sharding.mesh if named else get_global_mesh()
    spec = sharding.spec if named else sharding
    is_spec = isinstance(spec, PartitionSpec)
    if is_spec and mesh is not None and AxisType.Explicit in mesh.axis_types:
        return constrain(value, spec, mesh)
    return jax.lax.with_sharding_constraint(value, sharding)


def _place(x: Any, spec: PartitionSpec, mesh: AnyMesh) -> Any:
    if not isinstance(x, jax.Array | np.ndarray):
        return x
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    entries = fitting(spec, x.shape, mesh)

    def only(kind: AxisType) -> PartitionSpec:
        kept = [tuple(a for a in axes_of(entry) if types[a] is kind) for entry in entries]
        return PartitionSpec(
            *(
                entry if entry is PartitionSpec.UNCONSTRAINED else _entry(axes)
                for entry, axes in zip(entries, kept, strict=True)
            )
        )

    apply = jax.lax.with_sharding_constraint if isinstance(mesh, Mesh) else _constrained
    if AxisType.Explicit in types.values():
        apply = _constrained
        present = jax.typeof(x).sharding.spec
        asked = [
            old if new is PartitionSpec.UNCONSTRAINED else new
            for new, old in zip(only(AxisType.Explicit), present, strict=False)
        ]
        x = jax.sharding.reshard(x, _sharding(mesh, PartitionSpec(*asked)))
    if AxisType.Auto in types.values():
        x = apply(x, _sharding(mesh, only(AxisType.Auto)))
    return x


def _entry(axes: tuple[str, ...]) -> Any:
    return axes if len(axes) > 1 else axes[0] if axes else None


def _sharding(mesh: AnyMesh, spec: PartitionSpec) -> Any:
    return NamedSharding(mesh, spec) if isinstance(mesh, Mesh) else spec


def fitting(spec: PartitionSpec, shape: tuple[int, ...], mesh: AnyMesh) -> list[Any]:
    """Returns the entries of a layout, with a warning and None where a shape cannot be split."""
    if len(spec) > len(shape):
        raise MeshError(
            f"a value of shape {shape} has {len(shape)} axes, and the layout {tuple(spec)} names "
            f"{len(spec)}; name each axis once, None for one that is not split."
        )
    sizes = {
        name: 1 if kind is AxisType.Manual else mesh.shape[name]
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
    }
    entries = list(spec)
    named = [name for entry in spec for name in axes_of(entry)]
    twice = sorted({name for name in named if named.count(name) > 1})
    if twice:
        raise MeshError(
            f"the layout {tuple(spec)} of a value of shape {shape} names "
            f"{', '.join(map(repr, twice))} more than once, and a mesh axis splits one axis of a "
            "value; leave it at one, and write None at the others."
        )
    for axis, entry in enumerate(spec):
        unknown = [name for name in axes_of(entry) if name not in sizes]
        if unknown:
            raise MeshError(
                f"axis {axis} of a value of shape {shape} is to be split over "
                f"{', '.join(map(repr, unknown))}, and the mesh has the axes "
                f"{', '.join(map(repr, sizes))}; use one of those, or None, or give rules that "
                "map the logical name to a mesh axis."
            )
        parts = math.prod(sizes[name] for name in axes_of(entry))
        if shape[axis] % parts:
            warnings.warn(
                f"axis {axis} of a value of shape {shape} cannot be split into {parts} equal parts "
                f"over {entry!r}, so it is not split; change its size or its layout.",
                ShardingWarning,
                stacklevel=2,
            )
            entries[axis] = None
    return entries
