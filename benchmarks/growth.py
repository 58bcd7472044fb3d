"""What grows with the number of arrays, of devices, and with the size of a checkpoint?

Each answer is a curve; `depth` has those of deeper models.
"""

import functools
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import _devices
from benchmarks._growth import Growth, in_rounds
from benchmarks.checkpoints import Saves, load_plain, save_plain
from benchmarks.harness import Curve
from benchmarks.libraries import libraries
from benchmarks.libraries.raw import RAW, chain_values

ARRAYS = (10, 100, 1_000, 10_000)
# XLA compiles 10,000 arrays for half a minute, so only Weft and the base are measured there.
_TO_THE_END = (RAW.name, "Weft Linen", "Weft NNX", "Weft hierarchy")
MEGABYTES = (1, 8, 64, 512)
_ROUNDS = 5


def _by_arrays() -> Curve:
    """Returns a jitted function that changes each array and gives away what it is given."""
    growth = Growth(RAW.name)
    for n in ARRAYS:
        values, times = chain_values(n // 2, 2), max(2, 2_000 // n)

        def many(step: Any, times: int = times) -> None:
            for _ in range(times):
                result = step()
            jax.block_until_ready(result)

        fns = {}
        for library in (RAW, *libraries()):
            step = None
            if n <= 1_000 or library.name in _TO_THE_END:
                step = library.shrinking(values, plain=True).get("")
            if step is not None:
                fns[library.name] = functools.partial(many, step)
        measured = in_rounds(fns, rounds=7)
        growth.add(n, {name: [x / times for x in of] for name, of in measured.items()})
    return growth.curve(
        "dispatch_by_arrays",
        "A call of a jitted function that changes every array",
        x="arrays",
        per="array",
        clock="CPU time of Python",
        unit="µs",
    )


def _by_devices() -> list[Curve]:
    growth = Growth(RAW.name)
    for n, times in _devices.asked("dispatch").items():
        growth.add(int(n), times)
    dispatch = growth.curve(
        "dispatch_by_devices",
        "A call of a jitted function that changes 100 sharded arrays",
        x="virtual devices",
        per="device",
        clock="CPU time of Python",
        unit="µs",
    )
    held = [(int(n), size) for n, size in _devices.asked("shards")["bytes"].items()]
    parts = {n: held[0][1] / n for n, _ in held}
    lines = {"a part of n": parts.items(), "Weft, FSDP": held}
    shares = {n: size / parts[n] for n, size in held}
    of_bytes = Curve(
        "bytes_by_devices",
        "Parameters and optimizer state of the device that holds most",
        "virtual devices",
        "kB",
        {line: [(n, size / 1e3) for n, size in points] for line, points in lines.items()},
        [
            f"Weft, FSDP: as 1/n, {held[0][1] / held[-1][1]:.2f} times less on {held[-1][0]} "
            "devices than on one"
        ],
        {"Weft, FSDP": [(n, share, share, share) for n, share in shares.items()]},
    )
    return [dispatch, of_bytes]


def _checkpoint_times(base: Path, megabytes: int) -> dict[str, list[float]]:
    """Returns seconds, by round, of what can be done with a checkpoint of a size."""
    state = {f"w{i}": jnp.full(megabytes * 10**6 // 16, float(i)) for i in range(4)}
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    at_once = Saves(base / "a", state, asynchronous=False)
    behind, blocked = Saves(base / "b", state), []
    for _ in range(_ROUNDS + 1):
        start = time.perf_counter()
        behind.begin()
        blocked.append(time.perf_counter() - start)
        behind.wait()
    times = in_rounds(
        {
            "Weft, save": at_once.begin,
            "numpy.save with fsync": lambda: save_plain(base / "c", state),
            "Weft, restore": lambda: at_once.restore(like),
            "numpy.load": lambda: load_plain(base / "c", state),
        },
        rounds=_ROUNDS,
        clock=time.perf_counter,
    )
    return {**times, "Weft, asynchronous, blocking": blocked[1:]}


def _by_size() -> Curve:
    """Returns elapsed time, of Weft and of plain files that are flushed to the disk."""
    growth = Growth(
        {
            "Weft, save": "numpy.save with fsync",
            "Weft, restore": "numpy.load",
            "Weft, asynchronous, blocking": "Weft, save",
        }
    )
    for size in MEGABYTES:
        with tempfile.TemporaryDirectory() as name:
            growth.add(size, _checkpoint_times(Path(name), size))
    return growth.curve(
        "checkpoint_by_size",
        "Saving and restoring",
        x="MB",
        per="MB",
        clock="elapsed time",
        unit="ms",
    )


def run() -> list[Curve]:
    """Measures by number of arrays, by number of devices, and by size."""
    return [_by_arrays(), *_by_devices(), _by_size()]
