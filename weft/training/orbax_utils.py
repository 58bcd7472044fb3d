"""Arguments of Orbax's checkpointers for trees such as a `TrainState`."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from weft import traverse_util
from weft._lazy import import_extra
from weft.serialization import to_state_dict


def _orbax() -> Any:
    return import_extra("orbax.checkpoint", "train", needed_by=__name__, package="orbax-checkpoint")


def is_multi_device_array(value: object) -> bool:
    """Returns whether devices hold different parts of an array.

    >>> is_multi_device_array(jax.numpy.ones(2))
    False
    """
    return isinstance(value, jax.Array) and not value.is_fully_replicated


def save_args_from_target(target: object) -> Any:
    """Returns a tree like `target` with an `orbax.checkpoint.SaveArgs` for each leaf.

    >>> jax.tree.map(lambda args: type(args).__name__, save_args_from_target({"w": np.ones(2)}))
    {'w': 'SaveArgs'}
    """
    ocp = _orbax()
    return jax.tree.map(lambda _: ocp.SaveArgs(), target)


def restore_args_from_target(target: object, mesh: Mesh | None = None) -> Any:
    """Returns a tree like `target` with `orbax.checkpoint.RestoreArgs`, which restore its layout.

    Args:
        target: its JAX arrays are restored with their dtype and sharding, other leaves by their
            types; if there are no JAX arrays, all leaves as NumPy arrays.
        mesh: replaces the mesh of the arrays; an array without a `PartitionSpec` is replicated.

    >>> args = restore_args_from_target({"w": jax.numpy.ones(2), "n": 1})
    >>> args["w"].dtype.name, args["n"].restore_type.__name__
    ('float32', 'int')
    """
    ocp = _orbax()

    def layout(leaf: object) -> Any:
        sharding = getattr(leaf, "sharding", None)
        if sharding is None or mesh is None:
            return sharding
        return NamedSharding(mesh, getattr(sharding, "spec", PartitionSpec()))

    layouts = jax.tree.map(layout, target)
    if not jax.tree.leaves(layouts):
        return jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), target)
    return ocp.checkpoint_utils.construct_restore_args(target, layouts, set_global_shape=False)


def maybe_construct_transformations(target: object, transforms: Any | None) -> Any:
    """Returns `transforms`, by default those that keep entries of `target` that are None.

    >>> list(maybe_construct_transformations({"a": {"b": None}, "c": 1}, None))
    ['a/b']
    """
    if transforms is not None:
        return transforms
    flat = traverse_util.flatten_dict(to_state_dict(target), keep_empty_nodes=True, sep="/")
    keep = _orbax().Transform(use_fallback=True)
    return {path: keep for path, leaf in flat.items() if leaf is None}
