"""What several processes find out each for itself, and have to act on alike.

A process that goes another way than the others leaves them waiting in the next collective. So what
only one can see (a full disk, a damaged file, its clock) is exchanged before anyone acts on it. All
processes have to call these functions at the same points; with one process they cost nothing. In a
run they wait where one that is late is named, and only then in a collective.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from weft.trainer.interruption import wait_for_all


def number_of_first(number: int) -> int:
    """The number that the first process gives.

    Args:
        number: of this process, with 32 bits.

    >>> number_of_first(3)
    3
    """
    if jax.process_count() == 1:
        return number
    wait_for_all()
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def largest_number(number: int) -> int:
    """The largest of the numbers that the processes give.

    Args:
        number: of this process, with 32 bits.

    >>> largest_number(3)
    3
    """
    if jax.process_count() == 1:
        return number
    wait_for_all()
    return int(np.max(multihost_utils.process_allgather(np.int32(number))))


class LargestNumberLater:
    """The largest number of all processes, one call late, so that no step waits for it.

    Example:
        >>> later = LargestNumberLater()
        >>> later(3), later(0)
        (3, 0)
    """

    def __init__(self) -> None:
        self._told: Any = None  # by all processes in the call before
        self._largest: Any = None  # of what the processes tell, compiled

    def __call__(self, number: int) -> int:
        """Tells the others a number.

        Args:
            number: of this process, with 32 bits.

        Returns:
            The largest that was told in the call before, 0 in the first call; with one process,
            `number`.
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
