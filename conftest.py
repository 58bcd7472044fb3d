"""Every test runs on the CPU, on eight virtual devices unless WEFT_TEST_DEVICES says otherwise.

It is at the root, so that the examples in weft/ run under it as the tests do.
"""

import functools
import gc
import hashlib
import importlib
import io
import os
import sys
import tempfile
import threading
import time
from importlib.metadata import version

import pytest

# The import of the first replaces Flax, which the other tests compare with. The fakes of clusters
# are programs, which have their folder in the environment.
collect_ignore = [
    "weft/compat/flax/as_flax.py",
    "weft/compat/flax/startup",
    "tests/clients/programs",
    "tests/launch/clusters",
]

# JAX reads both when it is first used, which is after pytest has read this file.
devices = os.environ.get("WEFT_TEST_DEVICES", "8")
flags = [f"--xla_force_host_platform_device_count={devices}"]
# Compiling takes most of the suite's time, and the programs are too small to gain by being fast.
# These halve it. XLA ends the process at a flag that it does not know, so versions in which they
# were not tried go without.
if version("jaxlib").startswith("0.10."):
    flags += [
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), *flags]
).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Else the devices may wait for each other's threads forever, see `weft.distributed.cpu_threads`.
os.environ.setdefault("NPROC", "32")
# Else each process that a test starts would compile all of Weft's sources again, for a second, and
# pytest all tests, for seven.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Else each operation of a program names all frames of the stack where it was traced: a tenth of the
# time, and a program that two tests trace is two programs.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "1")
# Users run Weft with it, and the first layer that adds axes silently would stop their program.
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")

_MEMORY = "/dev/shm"
# Tests write, flush and remove ten thousands of small files, and a disk would make them wait: they
# are written to memory, where it may hold them all and programs may be started from there.
if "TMPDIR" not in os.environ and os.access(_MEMORY, os.W_OK):
    _file_system = os.statvfs(_MEMORY)
    _free_bytes = _file_system.f_bavail * _file_system.f_frsize
    if _free_bytes >= 4 * 2**30 and not _file_system.f_flag & os.ST_NOEXEC:
        tempfile.tempdir = os.environ["TMPDIR"] = _MEMORY

_KEPT_FROM = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
# Many tests compile the same small programs, some in processes of their own: each is compiled once
# for all of them. The cache begins empty and goes with the temporary directory, so nothing is ever
# taken from an earlier version.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="weft-test-cache-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache.name
    os.environ[_KEPT_FROM] = "0.2"


_STARTED = pytest.StashKey[float]()
_SETTINGS = (
    "jax_disable_most_optimizations",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Pauses garbage collection while ten thousand tests are collected."""
    gc.disable()
    _repeat_less_work()
    _share_programs()
    result = yield
    _freeze_objects()
    # Tracing makes many objects, few of them garbage in cycles.
    gc.set_threshold(20_000, 20)
    gc.enable()
    # JAX has read it here. The processes that tests start compile the same again in each start.
    if os.environ.get(_KEPT_FROM) == "0.2":
        os.environ[_KEPT_FROM] = "0"
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Lets the tests marked `rank_promotion("allow")` add axes silently, in their processes too.

    A hook and not a fixture, so that it holds for fixtures of a whole module as well.
    """
    marker = item.get_closest_marker("rank_promotion")
    if marker is None:
        return (yield)
    import jax

    name, (value,) = "jax_numpy_rank_promotion", marker.args
    before = jax.config.values[name], os.environ[name.upper()]
    jax.config.update(name, value)
    os.environ[name.upper()] = value
    try:
        return (yield)
    finally:
        jax.config.update(name, before[0])
        os.environ[name.upper()] = before[1]


@pytest.fixture(autouse=True, scope="module")
def settings_are_restored():
    """Checks that each module restores JAX's settings; later tests would compile for longer.

    Restores `sys.path`, to which commands add the directories of recipes.
    """
    import jax

    paths = sys.path[:]
    before = {name: jax.config.values[name] for name in _SETTINGS}
    yield
    sys.path[:] = paths
    assert {name: jax.config.values[name] for name in _SETTINGS} == before
    assert _traces_in_two_threads() == 1, (
        "a test left a mesh or a setting of its thread behind"
    )
    _freeze_objects()


@pytest.fixture(autouse=True, scope="session")
def names_in_examples(request, doctest_namespace):
    """Defines the names that examples in docstrings use without importing them."""
    if any(
        isinstance(item, pytest.DoctestItem) for item in request.session.items
    ):
        import jax
        import numpy as np
        import optax

        from weft import linen, nnx

        names = {
            "jax": jax,
            "jnp": jax.numpy,
            "nn": linen,
            "nnx": nnx,
            "np": np,
            "optax": optax,
        }
        doctest_namespace.update(names)


def _repeat_less_work():
    """Lets JAX keep what it would compute again for each program and each error."""
    import jax
    from jax._src import config, core, dispatch, profiler, traceback_util, util
    from jax._src.interpreters import mlir

    # Compares paths on disk, some hundred times for each error.
    traceback_util._path_starts_with = functools.cache(
        traceback_util._path_starts_with
    )

    compiled = dispatch.xla_primitive_callable.__wrapped__

    @functools.lru_cache(4096)
    def kept(_, primitive, **params):
        return compiled(primitive, **params)

    # While JAX checks leaks, it would compile x + 1 outside jit again in each call.
    util.register_cache(kept, "xla_primitive_callable")
    dispatch.xla_primitive_callable = lambda primitive, **params: kept(
        config.trace_context(), primitive, **params
    )

    find = core.maybe_find_leaked_tracers

    def found(trace):
        """Searches all objects only if something but the caller still holds `trace`."""
        for generation in (0, 1):
            gc.collect(generation)
            # The caller, this function and getrefcount hold it.
            if sys.getrefcount(trace) == 3:
                return []
        return find(trace)

    core.maybe_find_leaked_tracers = found

    make, of_thread = mlir.make_ir_context, threading.local()

    def shared():
        """Returns the MLIR context of this thread; a new one for each program would take 4 ms."""
        if not hasattr(of_thread, "context"):
            of_thread.context = make()
            of_thread.context.enable_multithreading(False)
        return of_thread.context

    mlir.make_ir_context = shared

    start_trace = profiler.start_trace

    def start_small_trace(
        log_dir, link=False, perfetto=False, profiler_options=None
    ):
        """Leaves out the programs of all tests before, which take seconds to write."""
        options = profiler_options or jax.profiler.ProfileOptions()
        options.enable_hlo_proto = False
        start_trace(log_dir, link, perfetto, options)

    profiler.start_trace = jax.profiler.start_trace = start_small_trace


def _share_programs():
    """Lets JAX compile equal programs once, whatever their names and the lines that they come from.

    Many come from several tests, or from Weft and from Flax.
    """
    from jax import stages
    from jax._src import compiler
    from jax._src.config import compilation_cache_dir
    from jaxlib.mlir import ir, passmanager

    compile_one, compile_ahead = (
        compiler.compile_or_get_cached,
        stages.Lowered.compile,
    )
    programs, of_thread, directory = (
        {},
        threading.local(),
        compilation_cache_dir.value,
    )

    def compile_shared(backend, module, devices, options, callbacks, *args):
        compiled = functools.partial(
            compile_one, backend, module, devices, options, callbacks, *args
        )
        if (
            callbacks or compilation_cache_dir.value != directory
        ):  # the test counts its files
            return compiled()
        is_ahead = getattr(of_thread, "is_ahead", False)
        operation, text = module.operation, io.BytesIO()
        with module.context:
            if not is_ahead:
                operation = operation.clone()
                operation.attributes["sym_name"] = ir.StringAttr.get("shared")
                passes = passmanager.PassManager.parse(
                    "builtin.module(strip-debuginfo)"
                )
                passes.run(operation)
            operation.write_bytecode(file=text)
        digest = hashlib.sha256(text.getvalue()).digest()
        ids = tuple(device.id for device in devices.flat)
        key = backend, digest, options.SerializeAsString(), ids, is_ahead
        program = programs.get(key)
        if program is None:
            program = compiled()
            if len(programs) >= 2000:  # about 400 MB
                programs.clear()
            programs[key] = program
        return program

    def compile_with_names(lowered, *args, **kwargs):
        """Compiles for callers who may read the names and lines in the program, if these agree."""
        of_thread.is_ahead = True
        try:
            return compile_ahead(lowered, *args, **kwargs)
        finally:
            of_thread.is_ahead = False

    compiler.compile_or_get_cached = compile_shared
    stages.Lowered.compile = compile_with_names  # pyright: ignore[reportAttributeAccessIssue]


def _traces_in_two_threads() -> int:
    """Counts the traces of a function in this thread and a new one: 2 if their settings differ."""
    import jax

    traces = []
    fn = jax.jit(lambda: traces.append(None))
    fn.trace()
    thread = threading.Thread(target=fn.trace)
    thread.start()
    thread.join()
    return len(traces)


def pytest_collectstart(collector):
    """Imports the package of a module with examples before the module.

    Else pytest runs a module a second time that its own package imports, and the examples see two
    classes of one name.
    """
    root = collector.config.rootpath
    if isinstance(collector, pytest.File) and collector.path.is_relative_to(
        root / "weft"
    ):
        folder = collector.path.relative_to(root).parent
        importlib.import_module(".".join(folder.parts))


def pytest_configure(config):
    config.stash[_STARTED] = time.monotonic()


def pytest_sessionfinish(session, exitstatus):
    """Keeps how long the whole suite took, for `make house`."""
    config = session.config
    whole = not (
        config.option.file_or_dir
        or config.option.keyword
        or config.option.markexpr
    )
    if (
        whole
        and not exitstatus
        and hasattr(config, "cache")
        and not hasattr(config, "workerinput")
    ):
        config.cache.set(
            "weft/suite_seconds", time.monotonic() - config.stash[_STARTED]
        )


def _freeze_objects():
    """Modules and caches stay to the end, and each search of all objects would go through them.

    JAX searches for each leak that it suspects, Weft for the name of an object in an error.
    """
    gc.collect()
    gc.freeze()
