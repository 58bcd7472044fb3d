"""Comparison of the processes of a run: what they must have in common.

Each process makes its trainer on its own: from a config, code, data and libraries that lie on its
machine. Processes that differ in one of these would train to a wrong result, or wait for each other
without end. So when they meet, before the first step, process 0 sends what it has to the others,
and each compares:

    learner.optimizer.learning_rate    the fields of the config
    input.source.corpus                digests of the data that the config names
    the source of my_model             digests of the code of the classes in the config
    the recipe                         and of the recipe that made it, with modules next to it
    jax_enable_x64                     settings of JAX that decide about numbers
    dir                                the directory itself, by the lock that process 0 has in it

The versions of Weft, JAX and Python are compared earlier, at the rendezvous.
"""

import hashlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from weft.config import ConfigBase
from weft.config.text_writer import value_text
from weft.distributed.peers import StopRequest
from weft.distributed.preemption import GracefulStop
from weft.errors import ProcessesDifferError
from weft.serialization.untrusted import open_file
from weft.trainer.run_dir import data_records, data_text
from weft.trainer.run_lock import RunLock, lock_token
from weft.typing import Tensor

logger = logging.getLogger(__name__)

# Fields that concern one process and its machine only.
_MAY_DIFFER = re.compile(
    r"(compilation_cache_dir|status_port|host_tracer_level|python_tracer_level)$"
    r"|(watchdog|crash_on_hang)_timeout_seconds$"
    # Compared by the directory itself, whose path may differ between machines.
    r"|(.*summary_writer(\..*)?\.|.*checkpointer\.)?dir$"
)
_JAX_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)
_MAX_DIFFERENCES = 5
_MAX_LETTERS = 300
_ABSENT = "absent"
_NEIGHBOR = "the recipe's module "
# A network file system shows a new file to other machines after up to a minute.
_SAME_PATH_SECONDS, _OTHER_PATH_SECONDS = 90.0, 5.0
_POLL_SECONDS = 0.5


class Facts(NamedTuple):
    """Description of what a process has.

    Attributes:
        values: texts by the name of a field, code or setting.
        data: descriptions of the data by the path of the field that names it.
        directory: the absolute path of the run's directory.
        lock: text that only this run's lock in the directory has; None in processes without lock.
    """

    values: dict[str, str]
    data: dict[str, dict[str, Any]]
    directory: str
    lock: str | None


def check_processes_agree(
    stop: GracefulStop,
    cfg: ConfigBase,
    *,
    lock: RunLock | None,
    recipe: Mapping[str, Any] | None = None,
    prng_key: Tensor | None = None,
) -> None:
    """Compares this process with process 0; all must call it, and all raise the same error.

    Raises ProcessesDifferError if one differs; names the process, the field and both values.
    """
    if not stop.has_peers:
        return
    local_facts = facts(cfg, lock=lock, recipe=recipe, prng_key=prng_key)
    encoded_facts = stop.from_first(json.dumps(local_facts).encode())
    request = None
    if jax.process_index() != 0:
        differences = _differences(
            Facts(*json.loads(encoded_facts)), local_facts
        )
        if differences:
            request = StopRequest("error", _error_text(differences))
    agreed_request = stop.agreed("preparing the state", request)
    if agreed_request is not None and agreed_request.kind == "error":
        raise ProcessesDifferError(agreed_request.text)


def facts(
    cfg: ConfigBase,
    *,
    lock: RunLock | None = None,
    recipe: Mapping[str, Any] | None = None,
    prng_key: Tensor | None = None,
) -> Facts:
    """Returns what this process has; see `check_processes_agree`."""
    values: dict[str, str] = {}
    modules: set[str] = set()

    def add(path: str, value: object) -> None:
        if not _MAY_DIFFER.match(path):
            values[path] = value_text(value)
        module = getattr(value, "__module__", None)
        if isinstance(module, str) and not module.startswith(
            ("weft.", "builtins")
        ):
            modules.add(module)

    cfg.visit(add)
    for name in modules:
        digest = _source_digest(
            getattr(sys.modules.get(name), "__file__", None)
        )
        if digest is not None:
            values[f"the source of {name}"] = digest
    if recipe is not None:
        values["the recipe"] = (
            f"{recipe['name']} with the SHA-256 {recipe['sha256'][:12]}…"
        )
        for path, digest in recipe.get("neighbors", {}).items():
            values[f"{_NEIGHBOR}{path}"] = f"of the SHA-256 {digest[:12]}…"
    for setting in _JAX_SETTINGS:
        values[setting] = str(getattr(jax.config, setting, None))
    if isinstance(prng_key, jax.Array) and prng_key.is_fully_addressable:
        key_data = prng_key
        if jax.numpy.issubdtype(prng_key.dtype, jax.dtypes.prng_key):
            key_data = jax.random.key_data(prng_key)
        values["the key of the run"] = str(np.asarray(key_data).tolist())
    token = None
    if lock is not None and jax.process_index() == 0:
        token = lock.token
    return Facts(values, data_records(cfg), os.path.abspath(cfg.dir), token)


def _source_digest(file: str | None) -> str | None:
    """Returns a short digest of a file of code; None for what has none, such as a library in C."""
    if file is None or not file.endswith(".py"):
        return None
    try:
        with open_file(file) as source:
            return f"{file} with the SHA-256 {hashlib.sha256(source.read()).hexdigest()[:12]}…"
    except OSError:
        return None


def _differences(first: Facts, local: Facts) -> list[str]:
    """Returns a text for each difference to process 0."""
    if not _is_same_directory(first, local):
        return [_directory_text(first, local)]
    texts: list[str] = []
    # Pairs of texts, here and in process 0, that name the same data: each machine may have it in a
    # folder of its own.
    same_data: set[tuple[str, str]] = set()
    for path in sorted(first.data.keys() & local.data.keys()):
        local_record, first_record = local.data[path], first.data[path]
        if local_record["sha256"] != first_record["sha256"]:
            texts.append(
                f"{path} is {data_text(local_record)}, there {data_text(first_record)}"
            )
            continue
        for name, value in local.values.items():
            if name == path or name.startswith((f"{path}.", f"{path}[")):
                same_data.add((value, first.values.get(name, _ABSENT)))
    for name in sorted(first.values.keys() | local.values.keys()):
        local_value = local.values.get(name, _ABSENT)
        first_value = first.values.get(name, _ABSENT)
        if name.startswith(_NEIGHBOR) and _ABSENT in (local_value, first_value):
            continue  # imported by process 0 only, as for its logs
        if _comparable(local_value) == _comparable(first_value):
            continue
        if (local_value, first_value) not in same_data:
            texts.append(
                f"{name} is {_shorten(local_value)}, there {_shorten(first_value)}"
            )
    return texts


def _comparable(text: str) -> str:
    """Returns the text without the folder of a file of code, which machines may have elsewhere."""
    return re.sub(r"^/.*(?= with the SHA-256 )", "", text)


def _is_same_directory(first: Facts, local: Facts) -> bool:
    """Returns whether the lock of process 0 is in this process's directory."""
    is_same_path = first.directory == local.directory
    seconds = _SAME_PATH_SECONDS if is_same_path else _OTHER_PATH_SECONDS
    deadline = time.monotonic() + seconds
    while True:
        token = lock_token(local.directory)
        if token == first.lock:
            return True
        is_of_another_run = token is not None and not is_same_path
        if is_of_another_run or time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)


def _directory_text(first: Facts, local: Facts) -> str:
    if first.directory != local.directory:
        return f"dir is {local.directory}, there {first.directory}, which is another directory"
    return (
        f"dir is {local.directory} in both, but on this machine it is another directory: the file "
        "that locks it there is not here. The processes of a run share one directory"
    )


def _shorten(text: str) -> str:
    half = _MAX_LETTERS // 2
    if len(text) <= 2 * half:
        return text
    return f"{text[:half]}…{text[-half:]}"


def _error_text(differences: list[str]) -> str:
    texts = differences[:_MAX_DIFFERENCES]
    if len(differences) > _MAX_DIFFERENCES:
        texts.append(f"and {len(differences) - _MAX_DIFFERENCES} more")
    lines = "".join(f"\n  {text}" for text in texts)
    return (
        f"process {jax.process_index()} of {jax.process_count()} differs from process 0:{lines}\n"
        "Start all processes of a run with the same command, code, data and settings."
    )
