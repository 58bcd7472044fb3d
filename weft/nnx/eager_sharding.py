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
from weft.typing import PyTree

SHARDING_ALIASES = ("sharding", "sharding_names")


class use_eager_sharding(
    Setting[bool], process_setting="always_shard_variable"
):
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


def with_out_sharding(
    metadata: dict[str, Any], type_name: str
) -> dict[str, Any]:
    """Returns metadata in which the layout of the value is called `out_sharding`.

    A name alone is that of the first axis. Raises AxisMetadataError if the layout has a wrong type.
    """
    for alias in SHARDING_ALIASES:
        if alias in metadata:
            warn_deprecated(f"the metadata {alias}", "call it out_sharding")
            metadata = dict(metadata)
            metadata["out_sharding"] = metadata.pop(alias)
    layout = metadata.get("out_sharding")
    if layout is None:
        return metadata
    if isinstance(layout, str):
        return {**metadata, "out_sharding": (layout,)}
    if isinstance(layout, list):
        return {**metadata, "out_sharding": tuple(layout)}
    layout_types = tuple | PartitionSpec | NamedSharding
    if not isinstance(without_format(layout), layout_types):
        raise AxisMetadataError(
            f"a {type_name} was given out_sharding={layout!r}; expected a tuple with a name or "
            "None for each axis of the value, a PartitionSpec, a NamedSharding, or a Format with "
            "one."
        )
    return metadata


def shard_new_value(
    value: PyTree, metadata: dict[str, Any], type_name: str
) -> PyTree:
    """Places the value of a new variable on its mesh; `type_name` names it in errors.

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
            f"a {type_name} has the layout {tuple(layout)}, and there is no mesh; make it under "
            "jax.set_mesh(mesh), give it mesh=mesh, or, to shard it later, make it under "
            "nnx.use_eager_sharding(False)."
        )
    try:
        value = spmd.shard_value(
            value, layout, metadata.get("sharding_rules"), metadata.get("mesh")
        )
        if isinstance(layout, Format) and layout.layout is not None:
            value = _with_memory_order(value, layout)
        return with_abstract_shardings(value, metadata)
    except Exception as error:
        error.add_note(f"Raised while making a {type_name} with {metadata!r}.")
        raise


def _with_memory_order(value: PyTree, layout: Format) -> PyTree:
    def with_order(leaf: PyTree) -> PyTree:
        # The compiler decides about the arrays of a trace.
        is_concrete = isinstance(leaf, jax.Array) and not isinstance(
            leaf, jax.core.Tracer
        )
        if not is_concrete:
            return leaf
        return jax.device_put(leaf, Format(layout.layout, leaf.sharding))

    return jax.tree.map(with_order, value)


def pspec_of(metadata: dict[str, Any]) -> PartitionSpec | None:
    """Returns the layout in metadata, in mesh axes."""
    return spmd.get_pspec(
        metadata.get("out_sharding"), metadata.get("sharding_rules")
    )


def is_eagerly_sharded(metadata: dict[str, Any]) -> bool:
    """Returns whether a variable is sharded as soon as it is made."""
    return metadata.get("eager_sharding", using_eager_sharding())


def mesh_of(metadata: dict[str, Any]) -> AnyMesh | None:
    """Returns the mesh of a variable, from its metadata or else from `jax.set_mesh`."""
    mesh = metadata.get("mesh")
    if mesh is None:
        mesh = get_mesh(metadata.get("out_sharding"))
    if mesh is None:
        mesh = get_global_mesh()
    return mesh


def with_abstract_shardings(value: PyTree, metadata: dict[str, Any]) -> PyTree:
    """Adds the metadata's layout to the shapes in a variable's value that have none."""
    mesh = mesh_of(metadata)
    if mesh is None:
        return value

    def with_sharding(leaf: PyTree) -> PyTree:
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
            return abstract_value(leaf, pspec_of(metadata), mesh)
        return leaf

    return jax.tree.map(with_sharding, value)


def abstract_value(
    value: jax.ShapeDtypeStruct, spec: PartitionSpec | None, mesh: AnyMesh
) -> jax.ShapeDtypeStruct:
    """Returns a shape with its layout over a mesh.

    Raises MeshError if the layout does not fit the mesh or the shape.
    """
    entries = spmd.fitting_spec(spec or PartitionSpec(), value.shape, mesh)
    sharding = NamedSharding(mesh, PartitionSpec(*entries))
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
