"""Eager sharding: new variables are placed on a mesh as their metadata says.

The metadata `out_sharding` names the axes of a value (deprecated: `sharding`, `sharding_names`);
`sharding_rules` and `logical_axis_rules` map logical names to mesh axes; the mesh is `mesh` or that
of `jax.set_mesh`. Parameters of a model created under a mesh are never all on one device.
"""

from __future__ import annotations

from typing import Any

import jax.core
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec

from weft.core import spmd
from weft.core.spmd import AnyMesh, get_global_mesh, get_mesh, without_format
from weft.errors import AxisMetadataError, NoMeshError, warn_deprecated
from weft.nnx.settings import Setting

SHARDING_ALIASES = ("sharding", "sharding_names")


class use_eager_sharding(Setting, process_setting="always_shard_variable"):
    """Setting: whether new variables with the metadata `out_sharding` are sharded at once.

    It applies to this thread, or to the block or call as a context manager or decorator. A
    variable's metadata `eager_sharding` takes precedence.

    >>> with use_eager_sharding(False):
    ...     nnx.Param(jnp.ones((4, 8)), out_sharding=("embed", None)).out_sharding
    ('embed', None)
    """


def using_eager_sharding() -> bool:
    """Returns whether new variables are sharded at once.

    >>> using_eager_sharding()
    True
    """
    return use_eager_sharding.current()


def with_out_sharding(metadata: dict[str, Any], what: str) -> dict[str, Any]:
    """Returns metadata in which the layout of the value is called `out_sharding`.

    A name alone is that of the first axis. Raises AxisMetadataError if the layout has a wrong type.
    """
    for name in SHARDING_ALIASES:
        if name in metadata:
            warn_deprecated(f"the metadata {name}", "call it out_sharding")
            rest = {k: v for k, v in metadata.items() if k != name}
            metadata = {**rest, "out_sharding": metadata[name]}
    layout = metadata.get("out_sharding")
    if layout is None:
        return metadata
    if isinstance(layout, str | list):
        layout = (layout,) if isinstance(layout, str) else tuple(layout)
        metadata = {**metadata, "out_sharding": layout}
    elif not isinstance(without_format(layout), tuple | PartitionSpec | NamedSharding):
        raise AxisMetadataError(
            f"a {what} was given out_sharding={layout!r}; expected a tuple with a name or None for "
            "each axis of the value, a PartitionSpec, a NamedSharding, or a Format with one."
        )
    return metadata


def shard_new_value(value: object, metadata: dict[str, Any], what: str) -> Any:
    """Places the value of a new variable on its mesh; `what` names it in errors.

    Raises:
        NoMeshError: if there is no mesh.
        MeshError: if the mesh lacks an axis, or there are more names than axes.
        LogicalAxisError: if the rules are malformed, or contradict those of the context.
    """
    layout = metadata["out_sharding"]
    if not layout or not is_eagerly_sharded(metadata):
        return value
    if mesh_of(metadata) is None:
        raise NoMeshError(
            f"a {what} has the layout {tuple(layout)}, and there is no mesh; make it under "
            "jax.set_mesh(mesh), give it mesh=mesh, or, to shard it later, make it under "
            "nnx.use_eager_sharding(False)."
        )
    try:
        value = spmd.shard_value(
            value, layout, metadata.get("sharding_rules"), metadata.get("mesh")
        )
        if isinstance(layout, Format) and layout.layout is not None:
            value = jax.tree.map(lambda x: _with_memory_order(x, layout.layout), value)
        return with_abstract_shardings(value, metadata)
    except Exception as error:
        error.add_note(f"Raised while making a {what} with {metadata!r}.")
        raise


def _with_memory_order(value: Any, order: Any) -> Any:
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return value
    return jax.device_put(value, Format(order, value.sharding))


def pspec_of(metadata: dict[str, Any]) -> PartitionSpec | None:
    """Returns the layout in metadata, in mesh axes."""
    return spmd.get_pspec(metadata.get("out_sharding"), metadata.get("sharding_rules"))


def is_eagerly_sharded(metadata: dict[str, Any]) -> bool:
    """Returns whether a variable is sharded as soon as it is made."""
    return metadata.get("eager_sharding", using_eager_sharding())


def mesh_of(metadata: dict[str, Any]) -> AnyMesh | None:
    """Returns the mesh of a variable, from its metadata or else from `jax.set_mesh`."""
    known = (metadata.get("mesh"), get_mesh(metadata.get("out_sharding")), get_global_mesh())
    return next((mesh for mesh in known if mesh is not None), None)


def with_abstract_shardings(value: object, metadata: dict[str, Any]) -> Any:
    """Adds the metadata's layout to the shapes in a variable's value that have none."""
    mesh = mesh_of(metadata)
    if mesh is None:
        return value

    def laid(x: Any) -> Any:
        is_open = isinstance(x, jax.ShapeDtypeStruct) and x.sharding is None
        return abstract_value(x, pspec_of(metadata), mesh) if is_open else x

    return jax.tree.map(laid, value)


def abstract_value(
    value: jax.ShapeDtypeStruct, spec: PartitionSpec | None, mesh: AnyMesh
) -> jax.ShapeDtypeStruct:
    """Returns a shape with its layout over a mesh.

    Raises MeshError if the layout does not fit the mesh or the shape.
    """
    entries = spmd.fitting_spec(spec or PartitionSpec(), value.shape, mesh)
    sharding = NamedSharding(mesh, PartitionSpec(*entries))
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
