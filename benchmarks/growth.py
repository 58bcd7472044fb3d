"""What grows with the number of arrays, of devices, and with the size of a checkpoint?

Each answer is a curve; `depth` has those of deeper models.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import _devices
from benchmarks._growth import Points, in_rounds, words
from benchmarks.checkpoints import Saves, load_plain, save_plain
from benchmarks.harness import Curve
from benchmarks.libraries import libraries
from benchmarks.libraries.raw import RAW, chain_values

ARRAYS = (10, 100, 1_000, 10_000)
# What XLA takes to compile 10,000 arrays, half a minute, is spent on Weft and the base alone.
_TO_THE_END = (RAW.name, "Weft NNX")
MEGABYTES = (1, 8, 64, 512)
_ROUNDS = 3


def _by_arrays() -> Curve:
    """A jitted function that changes each array and gives away what it is given."""
    lines: dict[str, Points] = {}
    for n in ARRAYS:
        values, times = chain_values(n // 2, 2), max(2, 2_000 // n)
        for library in (RAW, *libraries()):
            if n > 1_000 and library.name not in _TO_THE_END:
                continue
            if (step := library.shrinking(values, plain=True).get("")) is None:
                continue

            def many(step: Any = step, times: int = times) -> None:
                for _ in range(times):
                    result = step()
                jax.block_until_ready(result)

            seconds = in_rounds({"": many}, rounds=7)[""] / times
            lines.setdefault(library.name, []).append((n, seconds * 1e6))
    return Curve(
        "dispatch_by_arrays",
        "A call of a jitted function that changes every array",
        "arrays",
        "CPU time of Python, µs",
        lines,
        words(lines, "µs per array"),
    )


def _by_devices() -> list[Curve]:
    dispatch = {
        name: [(int(n), seconds * 1e6) for n, seconds in of.items()]
        for name, of in _devices.asked("dispatch").items()
    }
    held = [(int(n), size / 1e3) for n, size in _devices.asked("shards")["bytes"].items()]
    sizes = {"Weft, FSDP": held, "a part of n": [(n, held[0][1] / n) for n, _ in held]}
    return [
        Curve(
            "dispatch_by_devices",
            "A call of a jitted function that changes 100 sharded arrays",
            "virtual devices",
            "CPU time of Python, µs",
            dispatch,
            words(dispatch, "µs per device"),
        ),
        Curve(
            "bytes_by_devices",
            "Parameters and optimizer state of the device that holds most",
            "virtual devices",
            "kB",
            sizes,
            f"as 1/n: {held[0][1] / held[-1][1]:.2f} times less on {held[-1][0]} devices than on "
            "one",
        ),
    ]


def _checkpoint_times(base: Path, megabytes: int) -> dict[str, float]:
    """Seconds of what can be done with a checkpoint of a size."""
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
    return {**times, "Weft, asynchronous, blocking": statistics.median(blocked[1:])}


def _by_size() -> Curve:
    """Elapsed time, of Weft and of plain files that are flushed to the disk."""
    lines: dict[str, Points] = {}
    for size in MEGABYTES:
        with tempfile.TemporaryDirectory() as name:
            for what, seconds in _checkpoint_times(Path(name), size).items():
                lines.setdefault(what, []).append((size, seconds * 1e3))
    return Curve(
        "checkpoint_by_size",
        "Saving and restoring",
        "MB",
        "elapsed time, ms",
        lines,
        words(lines, "ms per MB"),
    )


def run() -> list[Curve]:
    """By number of arrays, by number of devices, by size."""
    return [_by_arrays(), *_by_devices(), _by_size()]
