"""Utilities for training loops: replicated devices, reading ahead, learning rates by epoch.

Use `weft.input.PrefetchingIterator`, on which it is based, if the position must survive a restart.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from weft.errors import ArgumentShapeError, ArgumentValueError, warn_deprecated
from weft.functional.arrays import positions
from weft.input.prefetch import CountingIterator, PrefetchingIterator

Step = int | jax.Array
Schedule = Callable[[Step], float | jax.Array]


def shard(xs: Any) -> Any:
    """Splits arrays `(batch, ...)` over local devices to `(devices, batch / devices, ...)`.

    Raises an ArgumentShapeError if a batch dimension is not divisible.

    >>> shard({"x": jnp.ones((4 * jax.local_device_count(), 3))})["x"].shape[1:]
    (4, 3)
    """
    n = jax.local_device_count()

    def split(path: jax.tree_util.KeyPath, x: jax.Array) -> jax.Array:
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
    labels: Int[Array, "*batch"],
    num_classes: int,
    on_value: float = 1.0,
    off_value: float = 0.0,
) -> Float[Array, "*batch num_classes"]:
    """Returns `on_value` at each label that is a class and `off_value` elsewhere, in float32.

    >>> onehot(jnp.array([0, 2]), 3, 0.75, 0.25).tolist()
    [[0.75, 0.25, 0.25], [0.25, 0.25, 0.75]]
    """
    labels = jnp.asarray(labels)
    hot = labels[..., None] == positions(num_classes, labels.ndim + 1)
    return jnp.where(hot, jnp.float32(on_value), jnp.float32(off_value))


class PrefetchIterator:
    """Iterator that reads up to `buffer_size` elements ahead in a thread, from the first `next` on.

    An error of the iterator is raised in place of the element, and at every later `next`.
    Deprecated: the datasets of `weft.input` and Grain read ahead.

    >>> with PrefetchIterator([1, 2, 3], buffer_size=2) as elements:
    ...     list(elements)
    [1, 2, 3]
    """

    def __init__(self, data_iter: Iterable[Any], buffer_size: int = 1):
        warn_deprecated(
            "PrefetchIterator", "use the prefetching of the dataset"
        )
        if buffer_size < 1:
            raise ArgumentValueError(
                f"buffer_size={buffer_size}: at least one element must be able to wait; use 1 or "
                "more."
            )
        self.buffer_size = buffer_size
        # `chain` leaves the iterator's own `close` to the caller; the count is not used.
        elements = CountingIterator(
            itertools.chain(data_iter), lambda: data_iter
        )
        self._elements = PrefetchingIterator(elements, buffer_size=buffer_size)
        self._closed = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._closed:
            raise StopIteration
        return next(self._elements)

    def close(self) -> None:
        """Ends the thread and drops the elements read ahead; there are no further elements."""
        self._closed = True
        self._elements.close()

    def __enter__(self) -> "PrefetchIterator":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _with_warmup(
    schedule: Schedule, steps_per_epoch: int, warmup_length: float
) -> Schedule:
    if warmup_length <= 0:
        return schedule
    return lambda step: (
        schedule(step)
        * jnp.minimum(1.0, step / (steps_per_epoch * warmup_length))
    )


def create_constant_learning_rate_schedule(
    base_learning_rate: float, steps_per_epoch: int, warmup_length: float = 0.0
) -> Schedule:
    """Returns a constant learning rate.

    >>> float(create_constant_learning_rate_schedule(1.0, 10, warmup_length=2.0)(5))
    0.25
    """
    return _with_warmup(
        lambda step: base_learning_rate, steps_per_epoch, warmup_length
    )


def create_stepped_learning_rate_schedule(
    base_learning_rate: float,
    steps_per_epoch: int,
    lr_sched_steps: Sequence[Sequence[float]],
    warmup_length: float = 0.0,
) -> Schedule:
    """Returns a learning rate that changes after the first step of some epochs.

    Args:
        lr_sched_steps: pairs of an epoch, ascending, and the factor of the base rate from then on.

    >>> schedule = create_stepped_learning_rate_schedule(1.0, 10, [(3, 0.5), (5, 0.25)])
    >>> [float(schedule(step)) for step in (30, 31, 51)]
    [1.0, 0.5, 0.25]
    """
    starts = jnp.array([epoch * steps_per_epoch for epoch, _ in lr_sched_steps])
    rates = (
        jnp.array([1.0, *(factor for _, factor in lr_sched_steps)])
        * base_learning_rate
    )
    return _with_warmup(
        lambda step: rates[jnp.sum(step > starts)],
        steps_per_epoch,
        warmup_length,
    )


def create_cosine_learning_rate_schedule(
    base_learning_rate: float,
    steps_per_epoch: int,
    halfcos_epochs: float,
    warmup_length: float = 0.0,
) -> Schedule:
    """Returns a learning rate that falls to 0 within `halfcos_epochs`, as half a cosine.

    >>> schedule = create_cosine_learning_rate_schedule(1.0, 10, halfcos_epochs=4)
    >>> [round(float(schedule(step)), 3) for step in (0, 20, 40)]
    [1.0, 0.5, 0.0]
    """

    def schedule(step: Step) -> jax.Array:
        return (
            base_learning_rate
            * (1 + jnp.cos(jnp.pi * step / steps_per_epoch / halfcos_epochs))
            / 2
        )

    return _with_warmup(schedule, steps_per_epoch, warmup_length)
