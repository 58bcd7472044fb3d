"""Exchange of numbers between processes, so that all act on the same value.

A process that diverges leaves the others waiting in the next collective, so an observation of one
process (a full disk, a damaged file, its clock) is exchanged before any process acts on it. All
processes must call these functions at the same points; with one process they cost nothing. In a
run, they wait first where a late process is named, and then in a collective.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from weft.trainer.interruption import wait_for_all


def number_of_first(number: int) -> int:
    """Returns process 0's number, an int32.

    >>> number_of_first(3)
    3
    """
    if jax.process_count() == 1:
        return number
    wait_for_all()
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def largest_number(number: int) -> int:
    """Returns the largest of all processes' numbers, which are int32.

    >>> largest_number(3)
    3
    """
    if jax.process_count() == 1:
        return number
    wait_for_all()
    return int(np.max(multihost_utils.process_allgather(np.int32(number))))


class LargestNumberLater:
    """Largest number of all processes, one call late, so that no step waits for it.

    Example:
        >>> later = LargestNumberLater()
        >>> later(3), later(0)
        (3, 0)
    """

    def __init__(self) -> None:
        self._told: Any = None  # result of the previous call
        self._largest: Any = None  # the compiled reduction

    def __call__(self, number: int) -> int:
        """Sends this process's int32 to the others; returns the largest of the previous call.

        The first call returns 0; with one process, each call returns `number`.
        """
        if jax.process_count() == 1:
            return number
        before, self._told = self._told, self._tell(number)
        return 0 if before is None else int(before)

    def _tell(self, number: int) -> Any:
        mesh = Mesh(np.array(jax.devices()), ("devices",))
        if self._largest is None:
            self._largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
        mine = np.full(len(jax.local_devices()), number, np.int32)
        sharding = NamedSharding(mesh, PartitionSpec("devices"))
        return self._largest(jax.make_array_from_process_local_data(sharding, mine))
