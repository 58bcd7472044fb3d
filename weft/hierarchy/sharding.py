"""How activations lie over the mesh."""

import jax
from jax.sharding import PartitionSpec

from weft.errors import MeshError
from weft.typing import MeshAxes, Tensor

# Outside of a compiled function the constraint would refuse arrays that are on one device only.
_constrained = jax.jit(jax.lax.with_sharding_constraint, static_argnums=1, inline=True)


def maybe_shard(x: Tensor, partition_spec: PartitionSpec | MeshAxes | None) -> Tensor:
    """Asks the compiler to lay an array over the mesh of `jax.set_mesh`.

    Args:
      x: the array.
      partition_spec: the mesh axes of each axis. Without it, or without a mesh, `x` comes back
        as it is.

    Raises:
      MeshError: if the mesh has no axis of a name.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if partition_spec is None or mesh.empty:
        return x
    axes = [tuple(a) if isinstance(a, list) else a for a in partition_spec]
    names = {name for a in axes for name in (a if isinstance(a, tuple) else (a,))}
    unknown = sorted(n for n in names if isinstance(n, str) and n not in mesh.axis_names)
    if unknown:
        raise MeshError(
            f"an activation of shape {x.shape} is to be laid out as {tuple(axes)}, and the mesh "
            f"has no axis {', '.join(map(repr, unknown))}; it has "
            f"{', '.join(map(repr, mesh.axis_names))}."
        )
    return _constrained(x, PartitionSpec(*axes))
