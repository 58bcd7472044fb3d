"""How activations lie over the mesh."""

from jax.sharding import PartitionSpec

from weft.core.layout import constrain, global_mesh_defined
from weft.typing import MeshAxes, Tensor


def maybe_shard(x: Tensor, partition_spec: PartitionSpec | MeshAxes | None) -> Tensor:
    """Asks the compiler to lay an array over the mesh of `jax.set_mesh`.

    Args:
      x: the array.
      partition_spec: the mesh axes of each axis. Without it, or without a mesh, `x` comes back
        as it is.

    Raises:
      MeshError: if the mesh has no axis of a name, or the layout more axes than the array.

    Warns:
      ShardingWarning: if a mesh axis does not divide an axis of the array, which then is not split.
    """
    if partition_spec is None or not global_mesh_defined():
        return x
    return constrain(
        x, PartitionSpec(*(tuple(a) if isinstance(a, list) else a for a in partition_spec))
    )
