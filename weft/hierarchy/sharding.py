"""How activations lie over the mesh."""

from jax.sharding import PartitionSpec

from weft.core.layout import axes_of, constrain, get_global_mesh
from weft.core.logical import names_to_mesh_axes
from weft.typing import MeshAxes, Tensor


def maybe_shard(x: Tensor, partition_spec: PartitionSpec | MeshAxes | None) -> Tensor:
    """Asks the compiler to lay an array over the mesh of `jax.set_mesh`.

    Args:
      x: the array.
      partition_spec: the mesh axes of each axis, or logical names for which the context has rules.
        Without it, or without a mesh, `x` comes back as it is.

    Raises:
      MeshError: if the mesh has no axis of a name, or the layout more axes than the array.

    Warns:
      ShardingWarning: if a mesh axis does not divide an axis of the array, which then is not split.
        An axis of size 1, as of one row or one position in decoding, is not split and not said.
    """
    mesh = get_global_mesh()
    if partition_spec is None or mesh is None:
        return x
    known = set(mesh.axis_names)
    sizes = (*x.shape, *[0] * len(partition_spec))
    entries = [
        None if size == 1 and known.issuperset(axes_of(entry)) else entry
        for entry, size in zip(names_to_mesh_axes(partition_spec), sizes, strict=False)
    ]
    return constrain(x, PartitionSpec(*entries))
