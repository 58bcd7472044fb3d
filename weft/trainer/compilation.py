"""Compilation of a run's programs: the persistent cache, options, and how hard the compiler tries.

A run keeps its compiled programs, so that the next start of the same config compiles nothing. On a
CPU, programs with little to compute are compiled without optimizations: compiling the steps of a
small model would take longer than all of its steps. What is compiled how depends on sizes and
`max_step` alone, so an interrupted run still ends with the same bits.
"""

import contextlib
import functools
import glob
import logging
import math
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from weft.errors import InvalidConfigValueError, did_you_mean
from weft.serialization.untrusted import check_local_path
from weft.typing import PyTree

logger = logging.getLogger(__name__)

MAX_CACHE_BYTES = 2 * 2**30
_MIN_FREE_BYTES = 2**28
# JAX's settings of the default cache where the user has not chosen others: JAX's value, and ours.
_DEFAULTS = {
    "jax_compilation_cache_max_size": (-1, MAX_CACHE_BYTES),
    "jax_persistent_cache_min_compile_time_secs": (1.0, 0.0),
}


def default_cache_dir() -> str:
    """Returns the directory of compiled programs in the user's cache directory.

    It is "", for no cache, without `XDG_CACHE_HOME`, `HOME` and an entry of the user in the list of
    accounts, as in some containers.
    """
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA", "")
    elif sys.platform == "darwin":
        base = os.path.expanduser("~/Library/Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.cache")
    if not os.path.isabs(base):
        return ""
    return os.path.join(base, "weft/xla")


@contextlib.contextmanager
def compilation_cache(directory: str | None) -> Iterator[None]:
    """Uses a directory as JAX's persistent compilation cache within the block.

    Several processes and runs may share a directory. A directory that cannot be written is logged,
    and programs are then compiled as without one.

    Args:
        directory: None for the one of JAX's settings, such as `JAX_COMPILATION_CACHE_DIR`; if they
            name none, for `default_cache_dir`, which holds 2 GiB of the programs used last. An
            empty string for no cache. In a directory that is named here, programs that compile
            within a second are not stored, unless JAX's setting
            `jax_persistent_cache_min_compile_time_secs` differs.
    """
    if directory and "://" not in directory:  # JAX has storages of its own
        check_local_path(directory, "compilation_cache_dir")
    jax_settings = jax.config.values
    settings: dict[str, Any] = {}
    cache_dir = directory
    if directory is None:
        has_jax_cache = jax_settings["jax_compilation_cache_dir"]
        if has_jax_cache or not jax_settings["jax_enable_compilation_cache"]:
            yield
            return
        cache_dir = default_cache_dir()
        for name, (jax_default, default) in _DEFAULTS.items():
            if jax_settings[name] == jax_default:
                settings[name] = default
    if cache_dir and not _is_usable(cache_dir, is_default=directory is None):
        settings = {}
        cache_dir = None
    settings["jax_compilation_cache_dir"] = cache_dir or None
    previous_settings = {name: jax_settings[name] for name in settings}
    _update(settings)
    try:
        with warnings.catch_warnings():
            # A program that cannot be read or written is compiled as without a cache.
            warnings.filterwarnings(
                "ignore", r"Error \w+ persistent compilation cache entry"
            )
            yield
    finally:
        _update(previous_settings)


def _update(settings: dict[str, Any]) -> None:
    jax_cache.reset_cache()  # the open one belongs to the previous directory
    for name, value in settings.items():
        jax.config.update(name, value)


def _is_usable(directory: str, *, is_default: bool) -> bool:
    """Returns whether programs can be stored in a directory; logs a warning if not."""
    if "://" in directory:
        return True
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
        if is_default:
            _check_owner(directory)
            _drop_partial_entries(directory)
        if shutil.disk_usage(directory).free < _MIN_FREE_BYTES:
            raise OSError("the disk is almost full")
    except OSError as error:
        logger.warning(
            "Compiled programs are not kept in %s: %s. Name another directory with "
            "compilation_cache_dir, or none with compilation_cache_dir=''.",
            directory,
            error,
        )
        return False
    return True


def _check_owner(directory: str) -> None:
    # Programs are code: nobody else may have put them there.
    status = os.stat(directory)
    if hasattr(os, "getuid") and (
        status.st_uid != os.getuid() or status.st_mode & 0o022
    ):
        raise OSError("others may write to it")


def _drop_partial_entries(directory: str) -> None:
    """Removes programs that a killed process or a full disk has left without their time of use.

    With a bound of the size, JAX could store nothing after such a program.
    """
    for path in glob.glob(os.path.join(glob.escape(directory), "*-cache")):
        with contextlib.suppress(
            FileNotFoundError
        ):  # another process removes them too
            is_whole = os.path.exists(path.removesuffix("-cache") + "-atime")
            if not is_whole and time.time() - os.path.getmtime(path) > 60:
                os.remove(path)


# Options by name.

XLA_OPTIONS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "latency_hiding": {
        # TPUs do this by default.
        "gpu": {
            "xla_gpu_enable_latency_hiding_scheduler": True,
            "xla_gpu_enable_pipelined_all_gather": True,
            "xla_gpu_enable_pipelined_reduce_scatter": True,
            "xla_gpu_enable_pipelined_all_reduce": True,
        },
        "tpu": {"xla_tpu_enable_latency_hiding_scheduler": True},
    },
    "collective_matmul": {
        "gpu": {
            "xla_gpu_threshold_for_windowed_einsum_mib": 0,
            "xla_gpu_multi_streamed_windowed_einsum": True,
        },
        "tpu": {
            "xla_tpu_all_gather_collective_matmul_mode": "post_spmd",
            "xla_tpu_reduce_scatter_collective_matmul_mode": "post_spmd",
        },
    },
    "no_collective_matmul": {
        # More than any array has.
        "gpu": {"xla_gpu_threshold_for_windowed_einsum_mib": 2**30},
        "tpu": {
            "xla_tpu_all_gather_collective_matmul_mode": "none",
            "xla_tpu_reduce_scatter_collective_matmul_mode": "none",
        },
    },
    "collective_fusion": {
        "tpu": {
            "xla_tpu_enable_async_collective_fusion": True,
            "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
            "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
            "xla_tpu_overlap_compute_collective_tc": True,
            "xla_enable_async_all_gather": True,
        },
    },
}
"""Options of XLA by name and platform of the devices, about communication between devices.

- latency_hiding: schedules operations so that communication runs while they compute.
- collective_matmul: splits each product with a gathered or scattered array into parts, and computes
  one while the next one moves; by default, TPUs do so on some meshes.
- no_collective_matmul: never does so.
- collective_fusion: fuses communication with the computation that runs at the same time.
"""


def check_options(names: Sequence[str], where: str) -> None:
    """Raises an InvalidConfigValueError for a name that `XLA_OPTIONS` lacks."""
    for name in names:
        if name not in XLA_OPTIONS:
            raise InvalidConfigValueError(
                f"{where} has {name!r}; expected some of "
                f"{', '.join(map(repr, XLA_OPTIONS))}. "
                f"{did_you_mean(str(name), XLA_OPTIONS)} Other options of XLA are set by the "
                "environment variable XLA_FLAGS (LIBTPU_INIT_ARGS for TPUs)."
            )


def named_options(names: Sequence[str], platform: str) -> dict[str, Any]:
    """Returns the options of some names of `XLA_OPTIONS` for devices such as "gpu".

    >>> named_options(["latency_hiding"], "tpu")
    {'xla_tpu_enable_latency_hiding_scheduler': True}
    """
    options: dict[str, Any] = {}
    for name in names:
        options |= XLA_OPTIONS[name].get(platform, {})
    return options


# The effort of the compiler.

_NO_OPTIMIZATIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
_FEW_OPTIMIZATIONS = {**_NO_OPTIMIZATIONS, "xla_backend_optimization_level": 1}
_MAX_PARAMETERS = 10**6
_MAX_STEPS = 300
# Measured with the recipe lm-tiny: what a program without optimizations takes longer, per parameter
# and number of a batch, and per number of an initial state.
_SECONDS_PER_PRODUCT = 1.6e-9
_SECONDS_PER_INITIAL_NUMBER = 1e-7
# A few seconds of compilation are saved.
_MAX_SECONDS = 2.0


def options_for_steps(
    platform: str, params: PyTree, batch: Callable[[], PyTree], steps: float
) -> dict[str, Any] | None:
    """Returns the options for compiling a step that runs a number of times.

    Args:
        platform: of the devices, such as "cpu".
        params: arrays, or anything with their `shape`.
        batch: returns the arrays of a batch, or their shapes; called if few steps of a small model
            run on a CPU.
    """
    seconds_per_number = _SECONDS_PER_PRODUCT * count(params) * steps
    has_little_work = (
        platform == "cpu"
        and steps <= _MAX_STEPS
        and seconds_per_number <= _MAX_SECONDS
        and seconds_per_number * count(batch()) <= _MAX_SECONDS
    )
    return _options(platform, _NO_OPTIMIZATIONS, has_little_work)


def options_for_init(platform: str, state: PyTree) -> dict[str, Any] | None:
    """Returns the options for compiling the initialization of a state."""
    seconds = _SECONDS_PER_INITIAL_NUMBER * count(state)
    return _options(platform, _NO_OPTIMIZATIONS, seconds <= _MAX_SECONDS)


def options_for_evaluation(
    platform: str, parameters: int
) -> dict[str, Any] | None:
    """Returns the options for compiling an evaluation of an unknown number of batches."""
    return _options(platform, _FEW_OPTIMIZATIONS, parameters <= _MAX_PARAMETERS)


def count(tree: PyTree) -> int:
    """Returns the number of numbers in a tree of arrays or of their shapes.

    >>> count({"a": jnp.zeros((2, 3)), "b": jax.ShapeDtypeStruct((4,), "int32")})
    10
    """
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def _options(
    platform: str, options: dict[str, Any], has_little_work: bool
) -> dict[str, Any] | None:
    if not has_little_work or platform != "cpu":
        return None
    return {
        name: value
        for name, value in options.items()
        if name not in _unknown_options()
    }


@functools.cache
def _unknown_options() -> frozenset[str]:
    """Returns the options that this version of XLA does not have; it names one at a time."""
    options = dict(_NO_OPTIMIZATIONS)
    while options:
        try:
            jax.jit(lambda: 0).lower().compile(compiler_options=options)
            break
        except jax.errors.JaxRuntimeError as error:
            refused_names = [
                name for name in options if f"'{name}'" in str(error)
            ]
            for name in refused_names or list(options):
                del options[name]
    return frozenset(_NO_OPTIMIZATIONS.keys() - options.keys())
