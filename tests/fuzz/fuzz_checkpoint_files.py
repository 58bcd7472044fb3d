"""A checkpoint from a stranger, whose manifest fits its files: restored, or refused by name."""

import functools
import json
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import jax.numpy as jnp

from tests.checkpoint_files import split
from tests.fuzz.readers import damaged, damaged_json, read, source_of
from weft.errors import WeftError
from weft.trainer.checkpointer import Checkpointer, read_state_spec
from weft.trainer.checkpointer.manifest import MANIFEST, find_damage, write_manifest

_FILES = ["index", "arrays/w/.zarray", "python/process_0_of_1/it.json", MANIFEST]


class _Iterator:
    position = 1

    def get_state(self) -> dict[str, int]:
        return {"position": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        if not (isinstance(state, dict) and type(state.get("position")) is int):
            raise WeftError("another iterator's state")
        self.position = state["position"]


def _state() -> dict[str, object]:
    return {"w": jnp.arange(6.0).reshape(2, 3), "it": _Iterator(), "count": 1}


def _config(folder: str) -> Checkpointer.Config:
    return Checkpointer.default_config().set(name="checkpointer", dir=folder)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory()
    with _config(folder.name).instantiate(parent=None) as checkpointer:
        checkpointer.save(step=1, state=_state())
    split(f"{folder.name}/step_00000001")
    return folder


def _whole() -> Path:
    return Path(_folder().name)


@st.composite
def _case(draw: st.DrawFn) -> tuple[str, bytes]:
    name = draw(st.sampled_from(_FILES))
    data = (_whole() / "step_00000001" / name).read_bytes()
    if draw(st.integers(0, 3)):
        return name, draw(damaged_json([json.loads(data)]))
    return name, draw(damaged([data]))


CASES = _case()
SHORT = 12


def check(case: tuple[str, bytes]) -> None:
    name, data = case
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(_whole(), folder, dirs_exist_ok=True)
        step_dir = Path(folder, "step_00000001")
        (step_dir / name).write_bytes(data)
        if name != MANIFEST:
            write_manifest(str(step_dir), facts={"step": 1})
        read(lambda: read_state_spec(str(step_dir)), WeftError)
        read(lambda: find_damage(str(step_dir), step=1), WeftError)
        with _config(folder).instantiate(parent=None) as checkpointer:
            read(lambda: checkpointer.restore(state=_state()), WeftError)


def source(case: tuple[str, bytes]) -> str:
    return source_of("fuzz_checkpoint_files", case)
