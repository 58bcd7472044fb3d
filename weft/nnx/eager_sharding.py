"""New variables laid out over a mesh as their metadata says, as soon as they are made.

The metadata `out_sharding` names the axes of a value (`sharding` and `sharding_names` are other
names for it); `sharding_rules` and those of `logical_axis_rules` say what the names stand for, and
`mesh` or `jax.set_mesh` over which devices. A model that is made under a mesh has its parameters on
their devices then, and never all of them on one.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.core
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec

from weft.core.layout import AnyMesh, fitting, get_global_mesh
from weft.core.spmd import get_mesh, get_pspec, shard_value, without_format
from weft.errors import AxisMetadataError, NoMeshError
from weft.nnx.settings import Setting

NAMES = ("sharding", "sharding_names")


class use_eager_sharding(Setting, default=True):
    """Whether new variables with the metadata `out_sharding` are laid out at once.

    Args:
        value: whether they are, from now on in this thread; in a `with` statement, and on a
            function that it decorates, for so long. The metadata `eager_sharding` of a variable
            comes first.

    Example:
        >>> import jax.numpy as jnp
        >>> from weft import nnx
        >>> with use_eager_sharding(False):
        ...     nnx.Param(jnp.ones((4, 8)), out_sharding=("embed", None)).sharding_names
        ('embed', None)
    """


def using_eager_sharding() -> bool:
    """Whether new variables are laid out at once.

    Example:
        >>> using_eager_sharding()
        True
    """
    return use_eager_sharding.current()


def named_layout(metadata: dict[str, Any], what: str) -> dict[str, Any]:
    """Metadata in which the layout of the value is called `out_sharding`.

    Args:
        metadata: of a variable.
        what: the variable, for errors.

    Raises:
        AxisMetadataError: if the layout is none.
    """
    for name in NAMES:
        if name in metadata:
            rest = {k: v for k, v in metadata.items() if k != name}
            metadata = {**rest, "out_sharding": metadata[name]}
    layout = metadata.get("out_sharding")
    if layout is None:
        return metadata
    if isinstance(layout, list):
        metadata = {**metadata, "out_sharding": tuple(layout)}
    elif not isinstance(without_format(layout), tuple | PartitionSpec | NamedSharding):
        raise AxisMetadataError(
            f"a {what} was given out_sharding={layout!r}; expected one entry for each axis of the "
            f"value, as ({layout!r},), a PartitionSpec, a NamedSharding, or a Format with one."
        )
    return metadata


def laid_out(value: Any, metadata: dict[str, Any], what: str) -> Any:
    """The value of a new variable, over its mesh.

    Args:
        value: the value.
        metadata: of the variable.
        what: the variable, for errors.

    Raises:
        NoMeshError: if there is no mesh.
        MeshError: if the mesh has no axis of a name, or there are more names than axes.
        LogicalAxisError: if the rules are not in form, or fight with those of the context.
    """
    layout = metadata["out_sharding"]
    if not layout or not is_laid_out(metadata):
        return value
    mesh = metadata.get("mesh")
    if mesh is None and get_mesh(layout) is None and get_global_mesh() is None:
        raise NoMeshError(
            f"a {what} is to be laid out as {tuple(layout)}, and there is no mesh; make it inside "
            "of jax.set_mesh(mesh), give it mesh=mesh, or, to lay it out later, make it inside of "
            "nnx.use_eager_sharding(False)."
        )
    try:
        value = shard_value(value, layout, metadata.get("sharding_rules"), mesh)
        if isinstance(layout, Format) and layout.layout is not None:
            value = jax.tree.map(lambda x: _ordered(x, layout.layout), value)
        return with_abstract_layouts(value, metadata)
    except Exception as error:
        error.add_note(f"This is about a {what} that was being made with {metadata!r}.")
        raise


def _ordered(value: Any, order: Any) -> Any:
    """A value whose axes lie in memory as a `Format` says, which a compiled function decides."""
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return value
    return jax.device_put(value, Format(order, value.sharding))


def layout_of(metadata: dict[str, Any]) -> PartitionSpec | None:
    """What metadata says of the layout, with its names as mesh axes."""
    return get_pspec(metadata.get("out_sharding"), metadata.get("sharding_rules"))


def is_laid_out(metadata: dict[str, Any]) -> bool:
    """Whether a variable is laid out as soon as it is made."""
    return metadata.get("eager_sharding", using_eager_sharding())


def mesh_of(metadata: dict[str, Any]) -> AnyMesh | None:
    """The mesh of a variable, by its metadata or else by `jax.set_mesh`."""
    known = (metadata.get("mesh"), get_mesh(metadata.get("out_sharding")), get_global_mesh())
    return next((mesh for mesh in known if mesh is not None), None)


def with_abstract_layouts(value: Any, metadata: dict[str, Any]) -> Any:
    """The value of a variable, in which each shape without a layout has that of the metadata."""
    mesh = mesh_of(metadata)
    if mesh is None:
        return value

    def laid(x: Any) -> Any:
        is_open = isinstance(x, jax.ShapeDtypeStruct) and x.sharding is None
        return abstractly_laid_out(x, layout_of(metadata), mesh) if is_open else x

    return jax.tree.map(laid, value)


def abstractly_laid_out(
    value: jax.ShapeDtypeStruct, spec: PartitionSpec | None, mesh: AnyMesh
) -> jax.ShapeDtypeStruct:
    """A shape with its layout over a mesh.

    Raises:
        MeshError: if the layout does not fit to the mesh or to the shape.
    """
    entries = fitting(spec or PartitionSpec(), value.shape, mesh)
    sharding = NamedSharding(mesh, PartitionSpec(*entries))
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
