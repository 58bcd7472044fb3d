"""Checkpoints whose files are damaged at random: what is restored was saved, or an error says why.

Three steps are saved, damaged, and restored. What comes back is one of the steps, bit by bit, and
no older one than the newest that is whole; what was passed over is named. Otherwise a WeftError is
raised. After a new save the new step is restored, whatever else is in the directory.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from weft.errors import FileRefusedError, WeftError
from weft.trainer.checkpointer import Checkpointer, CheckpointValidationType

STEPS = (1, 2, 3)
CONTENTS = (
    b"",
    b"\n",
    b"{}",
    b"[]",
    b"null",
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b'"\\ud800"',
    b"\xff\xfe\x00",
    b"1e999",
    b"-1",
    b"9" * 5000,
    b'{"version": 99}',
)
Kind = Literal[
    "flip", "zero", "truncate", "delete", "insert", "replace", "swap", "copy", "empty", "directory",
    "fifo", "link", "without", "double", "extra",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Damage:
    """Damage to a file or directory.

    Attributes:
        kind: what.
        step: the step of the damaged checkpoint.
        file: the number of the file in it, in the order of their paths; as often around as needed.
            -1 is the directory of the step.
        at: where in the file, from 0 to 1.
        other: another number, such as that of another file.
    """

    kind: Kind
    step: int = 3
    file: int = 0
    at: float = 0.5
    other: int = 1


@dataclasses.dataclass(frozen=True)
class Case:
    """Damages, and which step is restored then, None for the newest.

    Attributes:
        damages: one after the other.
        step: the step.
        part: whether the state that is restored is a part of what was saved.
    """

    damages: tuple[Damage, ...] = ()
    step: int | None = None
    part: bool = False


damages = st.builds(
    Damage,
    st.sampled_from(Kind.__args__),
    st.sampled_from([3, 2, 1]),
    st.integers(-1, 15),
    st.sampled_from([0.5, 0.0, 1.0]) | st.floats(0, 1),
    st.integers(0, 15),
)
CASES = st.builds(
    Case,
    st.lists(damages, max_size=4).map(tuple),
    st.sampled_from([None, None, None, *STEPS, 7]),
    st.booleans(),
)
SHORT = 4


class Position:
    """State that is not an array."""

    def __init__(self, at: int = 0):
        self.at = at

    def get_state(self) -> dict[str, int]:
        return {"at": self.at}

    def set_state(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def state_of(step: int) -> dict[str, Any]:
    return {
        "w": jnp.asarray(np.random.default_rng(step).random((4, 3), np.float32)),
        "half": jnp.full((5,), step, jnp.bfloat16),
        "empty": jnp.zeros((0, 2)),
        "key": jax.random.key(step),
        "position": Position(step),
        "next_step": step + 1,
    }


def parts_of(state: dict[str, Any], part: bool) -> dict[str, Any]:
    return {name: state[name] for name in ("half", "position")} if part else state


def checkpointer(directory: Path, part: bool = False) -> Checkpointer:
    kind = "CONTAINS_STATE" if part else "EXACT"
    cfg = Checkpointer.default_config().set(
        name="c", dir=str(directory), keep_last_n=9, validation=CheckpointValidationType[kind]
    )
    return cfg.instantiate(parent=None)


@functools.cache
def whole() -> tuple[tempfile.TemporaryDirectory, Path]:
    """Returns a directory with all steps, which lives as long as the process."""
    kept = tempfile.TemporaryDirectory(prefix="weft-fuzz-")
    directory = Path(kept.name) / "checkpoints"
    with checkpointer(directory) as saving:
        for step in STEPS:
            saving.save(step=step, state=state_of(step))
    return kept, directory


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Keeps what is logged about damage from the terminal."""
    logger = logging.getLogger("weft")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@silenced()
def check(case: Case) -> None:
    with tempfile.TemporaryDirectory(prefix="weft-fuzz-") as scratch:
        directory = Path(scratch) / "checkpoints"
        shutil.copytree(whole()[1], directory)
        for damage in case.damages:
            harm(directory, damage)
        steps = directory.glob("step_????????")
        if any(path.is_symlink() or path.is_fifo() for path in steps):
            # Not damage: such a directory is a stranger's, and the entry is refused by name.
            with (
                checkpointer(directory) as refusing,
                pytest.raises(FileRefusedError, match="step_"),
            ):
                refusing.restore(state=state_of(0))
            return
        restored(case, directory)
        with checkpointer(directory) as saving:
            saving.save(step=11, state=state_of(11))
        with checkpointer(directory) as restoring:
            step, state = restoring.restore(state=state_of(0))
        assert step == 11, f"step 11 was saved after the damage, and {step} is restored"
        same(state, 11, False)


def restored(case: Case, directory: Path) -> None:
    """Restores, and compares with what was saved."""
    untouched = [step for step in STEPS if is_like_saved(directory, step)]
    with checkpointer(directory, case.part) as restoring:
        target = parts_of(state_of(0), case.part)
        try:
            step, state = restoring.restore(step=case.step, state=target)
        except WeftError as error:
            assert str(error), "an error without a text"
            lost = case.step is None and untouched
            assert not lost and case.step not in untouched, f"refused a whole step: {error}"
            return
        if step is None:
            assert not any(directory.glob("step_*")), (
                f"starts from scratch although there are {list(directory.iterdir())}"
            )
            return
        passed = restoring.damaged_checkpoints
    same(state, step, case.part)
    assert case.step in (None, step), f"{step} for {case.step}"
    if case.step is None:
        assert step >= max(untouched, default=0), f"{step} for {untouched}"
        newer = {path.name for path in directory.glob("step_????????")}
        newer = {name for name in newer if name > f"step_{step:08}"}
        named = {Path(d.path).name for d in passed}
        assert newer <= named, f"{newer} are passed over, {named} are named"


def is_like_saved(directory: Path, step: int) -> bool:
    before, after = (files(d / f"step_{step:08}") for d in (whole()[1], directory))
    return before == after


def files(directory: Path) -> dict[str, bytes | None] | None:
    if directory.is_symlink() or not directory.is_dir():
        return None
    found = {}
    for path in sorted(directory.rglob("*")):
        plain = path.is_file() and not path.is_symlink()
        if plain or not path.is_dir():
            found[str(path.relative_to(directory))] = path.read_bytes() if plain else None
    return found


def same(state: dict[str, Any], step: int, part: bool) -> None:
    right = parts_of(state_of(step), part)
    assert sorted(state) == sorted(right)
    for name, value in right.items():
        found = state[name]
        if name == "position":
            assert found.at == value.at, f"{name} is {found.at}, saved was {value.at}"
        elif name == "next_step":
            assert found == value, f"{name} is {found}, saved was {value}"
        else:
            assert found.dtype == value.dtype and found.shape == value.shape, name
            assert bool((found == value).all()), f"{name} is {found}, saved was {value}"


def harm(directory: Path, damage: Damage) -> None:
    """Does one damage; nothing where there is nothing left to damage."""
    step_dir = directory / f"step_{damage.step:08}"
    paths = sorted(p for p in step_dir.rglob("*") if p.is_file()) if step_dir.is_dir() else []
    if damage.file < 0:
        path = step_dir
    elif paths:
        path = paths[damage.file % len(paths)]
    else:
        return
    if not os.path.lexists(path):
        return
    if damage.kind in ("flip", "zero", "truncate", "insert"):
        if path.is_file():
            change(path, damage)
        return
    REPLACED[damage.kind](path, damage, paths)


def change(path: Path, damage: Damage) -> None:
    content = bytearray(path.read_bytes())
    at = min(int(damage.at * len(content)), max(len(content) - 1, 0))
    if damage.kind == "truncate":
        del content[at:]
    elif damage.kind == "insert":
        content[at:at] = bytes([damage.other]) * (damage.other + 1)
    elif damage.kind == "zero":
        end = min(at + 1 + 8 * damage.other, len(content))
        content[at:end] = bytes(end - at)
    elif content:
        content[at] ^= 1 << damage.other % 8
    path.write_bytes(content)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def delete(path: Path, damage: Damage, paths: list[Path]) -> None:
    remove(path)


def replace(path: Path, damage: Damage, paths: list[Path]) -> None:
    remove(path)
    path.write_bytes(CONTENTS[damage.other % len(CONTENTS)])


def swap(path: Path, damage: Damage, paths: list[Path]) -> None:
    if path.is_dir() or not paths:
        other = path.with_name(f"step_{STEPS[damage.other % len(STEPS)]:08}")
    else:
        other = paths[damage.other % len(paths)]
    if other != path and other.exists():
        aside = path.with_name("aside")
        path.rename(aside)
        other.rename(path)
        aside.rename(other)


def copy(path: Path, damage: Damage, paths: list[Path]) -> None:
    """Copies from another step, or a step to another number."""
    other = STEPS[damage.other % len(STEPS)]
    if path.is_dir():
        target = path.with_name(f"step_{damage.other + 4:08}")
        if not target.exists():
            with contextlib.suppress(shutil.Error):  # all but named pipes is copied
                shutil.copytree(path, target, symlinks=True)
        return
    source = Path(str(path).replace(f"step_{damage.step:08}", f"step_{other:08}"))
    if source.is_file() and source != path:
        shutil.copyfile(source, path)


def empty(path: Path, damage: Damage, paths: list[Path]) -> None:
    remove(path)
    path.write_bytes(b"") if damage.other % 2 else path.mkdir()


def fifo(path: Path, damage: Damage, paths: list[Path]) -> None:
    remove(path)
    os.mkfifo(path)


def link(path: Path, damage: Damage, paths: list[Path]) -> None:
    remove(path)
    path.symlink_to([path, path.parent, "nowhere", "/dev/null", "/dev/zero"][damage.other % 5])


def without(path: Path, damage: Damage, paths: list[Path]) -> None:
    """Truncates a copy: only the first files are there."""
    for p in paths[damage.other :]:
        p.unlink()


def double(path: Path, damage: Damage, paths: list[Path]) -> None:
    if path.is_file():
        path.write_bytes(path.read_bytes() * 2)


def extra(path: Path, damage: Damage, paths: list[Path]) -> None:
    """Adds an unexpected file."""
    names = ["extra", "step_00000009", "step_x", "step_00000009.tmp", "step_3"]
    where = path if path.is_dir() else path.parent
    new = (where if damage.other % 2 else path.parent) / names[damage.other % len(names)]
    if not new.exists():
        new.write_bytes(b"x")


REPLACED = {
    "delete": delete,
    "replace": replace,
    "swap": swap,
    "copy": copy,
    "empty": empty,
    "directory": empty,
    "fifo": fifo,
    "link": link,
    "without": without,
    "double": double,
    "extra": extra,
}


def source(case: Case) -> str:
    return f"from tests.fuzz.fuzz_checkpoints import Case, Damage, check\n\ncheck({case!r})\n"
