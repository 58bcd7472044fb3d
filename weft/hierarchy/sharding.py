"""Sharding of activations."""

from jax.sharding import PartitionSpec

from weft.core.layout import axes_of, constrain, get_global_mesh
from weft.core.logical import names_to_mesh_axes
from weft.typing import MeshAxes, Tensor


def maybe_shard(x: Tensor, partition_spec: PartitionSpec | MeshAxes | None) -> Tensor:
    """Constrains the sharding of an array on the mesh of `jax.set_mesh`.

    Args:
      x: the array.
      partition_spec: mesh axes of each axis, or logical names with rules in the context. Without
        it, or without a mesh, `x` is returned as it is.

    Raises:
      MeshError: if the mesh lacks an axis, or the spec has more axes than the array.

    Warns:
      ShardingWarning: if a mesh axis does not divide an axis of the array, which then is not split.
        Axes of size 1, such as a single decoding position, are not split without a warning.
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
