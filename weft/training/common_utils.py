"""Utilities for loops over replicated devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.functional.ranks import positions


def shard(xs: Any) -> Any:
    """Splits arrays `(batch, ...)` over local devices to `(devices, batch / devices, ...)`.

    Raises an ArgumentShapeError if a batch dimension is not divisible.

    >>> shard({"x": jnp.ones((4 * jax.local_device_count(), 3))})["x"].shape[1:]
    (4, 3)
    """
    n = jax.local_device_count()

    def split(path: Any, x: Any) -> Any:
        if not x.ndim or x.shape[0] % n:
            raise ArgumentShapeError(
                f"the array at {jax.tree_util.keystr(path) or 'the root'} has shape {x.shape}; its "
                f"first axis must be a multiple of the {n} local devices: drop the rest, or use "
                "weft.jax_utils.pad_shard_unpad."
            )
        return x.reshape(n, x.shape[0] // n, *x.shape[1:])

    return jax.tree_util.tree_map_with_path(split, xs)


def shard_prng_key(prng_key: Key[Array, ""]) -> Key[Array, " devices"]:
    """Returns a key for each of this process's devices.

    >>> shard_prng_key(jax.random.key(0)).shape == (jax.local_device_count(),)
    True
    """
    return jax.random.split(prng_key, jax.local_device_count())


def stack_forest(forest: Sequence[Any]) -> Any:
    """Stacks the arrays of several pytrees, at least one, with equal structure.

    >>> stack_forest([{"loss": 1.0}, {"loss": 2.0}])["loss"].tolist()
    [1.0, 2.0]
    """
    if not forest:
        raise ArgumentValueError(
            f"stack_forest was given {forest!r}; expected at least one tree, since the result of "
            "none has no structure."
        )
    return jax.tree.map(lambda *xs: jnp.stack(xs), *forest)


def get_metrics(device_metrics: Sequence[Any]) -> Any:
    """Stacks the metrics of several steps on the host, from those of the first device.

    Each step has a pytree of arrays `(devices, ...)`, equal along the first axis.

    >>> get_metrics([{"loss": jnp.full(8, 3.0)}, {"loss": jnp.full(8, 2.0)}])["loss"].tolist()
    [3.0, 2.0]
    """
    first = jax.tree.map(lambda x: x[0], device_metrics)
    return stack_forest(jax.device_get(first))


def onehot(
    labels: Int[Array, "*batch"], num_classes: int, on_value: float = 1.0, off_value: float = 0.0
) -> Float[Array, "*batch num_classes"]:
    """Returns `on_value` at each label that is a class and `off_value` elsewhere, in float32.

    >>> onehot(jnp.array([0, 2]), 3, 0.75, 0.25).tolist()
    [[0.75, 0.25, 0.25], [0.25, 0.25, 0.75]]
    """
    labels = jnp.asarray(labels)
    hot = labels[..., None] == positions(num_classes, labels.ndim + 1)
    return jnp.where(hot, jnp.float32(on_value), jnp.float32(off_value))
