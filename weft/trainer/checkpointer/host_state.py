"""Host-side state in a checkpoint: that of objects such as the iterator over the data.

States are JSON or bytes; reading one runs no code. Each process writes files for its own objects.
"""

import base64
import contextlib
import functools
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable
from urllib.parse import quote

import jax
import numpy as np

from weft.errors import (
    CheckpointStateError,
    CheckpointStructureError,
    WeftError,
)
from weft.input.prefetch import PARTS
from weft.serialization.directory import Directory
from weft.serialization.untrusted import check_json_size
from weft.trainer.checkpointer import dirs, retries

_POLICY_STATE = "save_policy.json"
_BYTES = "base64"
_INNER_BYTES = "__bytes_in_base64__"
"""Only key of a dict that is written in place of bytes within a state."""


@runtime_checkable
class PythonSavable(Protocol):
    """Object whose state is a JSON value or bytes.

    In a dict within it whose only key is `weft.input.prefetch.PARTS`, each process may have the
    parts that it holds, by names. If another number of processes restores, it gets all of them.
    """

    def get_state(self) -> Any:
        """Returns the current state."""
        ...

    def set_state(self, state: Any) -> None:
        """Continues from a state that `get_state` returned."""
        ...


def maybe_save_python_savables(
    value_map: Mapping[str, object], *, dir: str
) -> None:
    """Writes the states of this process's savable objects, below a shared directory.

    Other values are skipped. Raises CheckpointStateError if a state is neither JSON nor bytes, and
    a ValueError if it is too large to be read again.
    """
    for path, value in value_map.items():
        if not isinstance(value, PythonSavable):
            continue
        state = value.get_state()
        content: dict[str, Any] = {"state": state}
        if isinstance(state, bytes):
            content = {_BYTES: base64.b64encode(state).decode()}
        try:
            text = json.dumps(content, default=_plain)
        except (TypeError, ValueError) as error:
            raise CheckpointStateError(
                f"the state of {path!r}, an object of type {type(value).__qualname__}, is not a "
                f"JSON value: {error}. Return dicts, lists, numbers, strings or bytes from its "
                "`get_state`."
            ) from None
        try:
            check_json_size(text)
        except ValueError as error:
            # No CheckpointStateError, which is the same in all processes.
            raise ValueError(
                f"the state of {path!r}, an object of type {type(value).__qualname__}, cannot be "
                f"written: {error}. Return less from its `get_state`, or put large arrays into "
                "the state of the model"
            ) from None
        file = _file(path, jax.process_index(), jax.process_count())
        retries.retried(functools.partial(_write, dir, file, text))


def _write(directory: str, file: str, text: str) -> None:
    os.makedirs(directory, exist_ok=True)
    Directory(directory).write(
        file, text, sync=False
    )  # the manifest's writer waits for the disk


def maybe_restore_python_savables(
    value_map: Mapping[str, object], *, dir: str
) -> None:
    """Restores the states of this process's savable objects; skips other values.

    Raises:
        CheckpointStructureError: If a state is missing, or a different number of processes wrote
            states that differ.
        DamagedCheckpointError: If a file is not the text of a state.
    """
    for path, value in value_map.items():
        if not isinstance(value, PythonSavable):
            continue
        file, content = _read(path, dir)
        try:
            if _BYTES in content:
                value.set_state(base64.b64decode(content[_BYTES]))
            else:
                value.set_state(_with_bytes(content["state"]))
        except WeftError:
            raise
        except (
            Exception
        ) as error:  # whatever an object makes of a state that is not its own
            raise dirs.unreadable_error(
                dir, file, "the state of an object", error
            ) from error


def _read(path: str, directory: str) -> tuple[str, dict[str, Any]]:
    """Returns this process's file and state; if others wrote states, what they have in common."""
    process_file = _file(path, jax.process_index(), jax.process_count())
    if dirs.exists(os.path.join(directory, process_file)):
        return process_file, _load(directory, process_file)
    contents: dict[str, dict[str, Any]] = {}  # by file
    process_dirs = dirs.names(directory)
    for process_dir in process_dirs:
        file = f"{process_dir}/{os.path.basename(process_file)}"
        if dirs.exists(os.path.join(directory, file)):
            contents[file] = _load(directory, file)
    if contents:
        with contextlib.suppress(_DifferError):
            return next(iter(contents)), _merged([*contents.values()])
    raise CheckpointStructureError(
        f"{directory!r} has no state of {path!r} for process {jax.process_index()} of "
        f"{jax.process_count()}, but {process_dirs}, and their states differ. Restore with the "
        "number of processes that saved it."
    )


class _DifferError(Exception):
    """States of several processes cannot be merged."""


def _merged(states: Sequence[Any]) -> Any:
    """Returns the state that several processes agree on, with the parts of all of them."""
    first = states[0]
    if all(other == first for other in states):
        return first
    if not all(isinstance(state, dict) for state in states):
        raise _DifferError
    if all(state.keys() == {PARTS} for state in states):
        parts: dict[str, Any] = {}
        for state in states:
            for name, part in state[PARTS].items():
                if parts.setdefault(name, part) != part:
                    raise _DifferError
        return {PARTS: parts}
    if any(state.keys() != first.keys() for state in states):
        raise _DifferError
    return {name: _merged([state[name] for state in states]) for name in first}


def _load(directory: str, file: str) -> dict[str, Any]:
    def check(content: Any) -> dict[str, Any]:
        if isinstance(content, dict) and content.keys() & {_BYTES, "state"}:
            return content
        raise ValueError(f"it holds neither {_BYTES!r} nor 'state'")

    return dirs.read_json(directory, file, "the state of an object", check)


def _file(path: str, process: int, count: int) -> str:
    return f"process_{process}_of_{count}/{quote(path, safe='')}.json"


def _plain(x: object) -> object:
    if isinstance(x, np.generic):
        return x.item()
    if isinstance(x, bytes):
        return {_INNER_BYTES: base64.b64encode(x).decode()}
    raise TypeError(f"it holds an object of type {type(x).__qualname__}")


def _with_bytes(state: Any) -> Any:
    """Returns a state with the bytes that it had when it was saved."""
    if isinstance(state, dict):
        if state.keys() == {_INNER_BYTES}:
            return base64.b64decode(state[_INNER_BYTES], validate=True)
        return {name: _with_bytes(x) for name, x in state.items()}
    if isinstance(state, list):
        return [_with_bytes(x) for x in state]
    return state


class RunState:
    """States of a run's policies by name, for a checkpoint; policies without a state are omitted.

    Policies may change between two starts of a run: a policy without a saved state starts fresh,
    and saved states of removed policies are ignored.
    """

    def __init__(self, parts: Mapping[str, object]):
        self._parts: dict[str, PythonSavable] = {}
        for name, part in parts.items():
            if isinstance(part, PythonSavable):
                self._parts[name] = part

    def get_state(self) -> dict[str, Any]:
        """Returns the states by name."""
        return {name: part.get_state() for name, part in self._parts.items()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores states that `get_state` returned in this or an earlier start of the run."""
        for name, part in self._parts.items():
            if name in state:
                part.set_state(state[name])


def state_of_policy(policy: object) -> Any:
    """Returns the state of a policy that decides about saves; None if it has none."""
    if isinstance(policy, PythonSavable):
        return policy.get_state()
    return None


def write_policy_state(ckpt_dir: str, state: Any) -> None:
    """Writes the state of a policy into a checkpoint, unless it is None.

    Raises a ValueError if it is too large to be read again.
    """
    if state is not None:
        text = json.dumps(state)
        try:
            check_json_size(text)
        except ValueError as error:
            raise ValueError(
                f"the state of the save policy cannot be written: {error}. Return less from its "
                "`get_state`"
            ) from None
        Directory(ckpt_dir).write(_POLICY_STATE, text, sync=False)


def read_policy_state(ckpt_dir: str) -> dict[str, Any] | None:
    """Returns the state of a policy in a checkpoint; None if it has none."""
    if not dirs.exists(os.path.join(ckpt_dir, _POLICY_STATE)):
        return None
    return dirs.read_json(
        ckpt_dir, _POLICY_STATE, "the state of a policy", lambda x: dict(**x)
    )
