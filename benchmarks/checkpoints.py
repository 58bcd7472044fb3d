"""What a checkpoint costs, against plain files with the same bytes.

Does an asynchronous save hold up the loop, against a synchronous one? How long does a restore take
that checks every file, and how long a save, against `numpy.load` and `numpy.save` with fsync?
"""

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.harness import Row, ratios, row
from weft.trainer.checkpointer import Checkpointer
from weft.trainer.checkpointer.manifest import write_manifest

ARRAYS, SHAPE = 32, (1024, 4096)
PAIRS = 15
_NOTE = f"{ARRAYS * int(np.prod(SHAPE)) * 4 / 1e6:.0f} MB"


class Saves:
    """Saves a state again and again, each time as another step."""

    def __init__(self, directory: Path, state: Any, **kwargs: Any):
        cfg = Checkpointer.default_config().set(name="checkpointer", dir=str(directory), **kwargs)
        self.checkpointer = cfg.instantiate(parent=None)
        self._state, self._step = state, 0

    def begin(self) -> None:
        self._step += 1
        self.checkpointer.save(step=self._step, state=self._state)

    def wait(self) -> None:
        self.checkpointer.wait_until_finished()

    def restore(self, like: Any) -> None:
        """Restores the newest one; `like` gives shapes, dtypes and layouts."""
        jax.block_until_ready(self.checkpointer.restore(state=like)[1])


def save_plain(directory: Path, state: Any) -> None:
    """Saves plain files, flushed to the disk."""
    directory.mkdir(exist_ok=True)
    for name, x in state.items():
        with open(directory / f"{name}.npy", "wb") as file:
            np.save(file, np.asarray(x))
            file.flush()
            os.fsync(file.fileno())


def load_plain(directory: Path, state: Any) -> Any:
    """Loads plain files onto the device."""
    loaded = {name: jax.device_put(np.load(directory / f"{name}.npy")) for name in state}
    return jax.block_until_ready(loaded)


def _beyond_plain(directory: Path, state: Any) -> tuple[str, str]:
    """Describes the cost of the work that plain files do not need."""
    times = []
    for _ in range(5):
        marks = [time.perf_counter()]
        for do in (
            lambda: save_plain(directory, state),
            lambda: write_manifest(str(directory)),
            lambda: load_plain(directory, state),
            lambda: shutil.rmtree(directory),
        ):
            do()
            marks.append(time.perf_counter())
        times.append(np.diff(marks))
    saving, digests, loading, removing = map(statistics.median, zip(*times, strict=True))
    return (
        f"writing new plain files takes {saving:.2g} s here; computing the digests takes "
        f"another {digests:.2g} s, and removing the previous checkpoint {removing:.2g} s",
        f"reading plain files takes {loading:.2g} s here; computing the digests takes another "
        f"{digests:.2g} s",
    )


def run() -> list[Row]:
    """Saves and restores against each other and against plain files."""
    keys = jax.random.split(jax.random.key(0), ARRAYS)
    state = {f"w{i}": jax.random.normal(key, SHAPE) for i, key in enumerate(keys)}
    jax.block_until_ready(state)
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        behind, at_once = Saves(base / "a", state), Saves(base / "b", state, asynchronous=False)

        blocked = []
        for _ in range(PAIRS + 1):
            one = ratios(behind.begin, at_once.begin, pairs=1, warmup=0)
            behind.wait()  # not while the other one is measured
            blocked.append(one)
        quotients, begins, waits = ([one[i][0] for one in blocked[1:]] for i in range(3))
        saving = ratios(at_once.begin, lambda: save_plain(base / "c", state), pairs=PAIRS)

        restoring = ratios(
            lambda: at_once.restore(like),
            lambda: load_plain(base / "c", state),
            pairs=3 * PAIRS,  # of a fifth of a second, in which others' use of memory is felt
        )
        beyond_saves, beyond_reads = _beyond_plain(base / "d", state)
    return [
        row(
            "an asynchronous save, blocking / a synchronous one",
            (quotients, begins, waits),
            at_most=0.1,
        ),
        row(
            "a save with digests / numpy.save with fsync",
            saving,
            at_most=1 / 0.8,
            note=_NOTE,
            why=beyond_saves,
        ),
        row(
            "a restore, every file checked / numpy.load",
            restoring,
            at_most=1 / 0.8,
            note=_NOTE,
            why=beyond_reads,
        ),
    ]
