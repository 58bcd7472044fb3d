"""The persistent cache of compiled programs, and the effort of the compiler."""

import logging
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from weft.debug.anomalies import AnomalyPolicy
from weft.errors import InvalidConfigValueError, TopologyError
from weft.recipes.digits import digits
from weft.trainer import compilation
from weft.trainer.aot_compilation import get_devices_for_topology
from weft.trainer.compilation import (
    XLA_OPTIONS,
    compilation_cache,
    default_cache_dir,
    named_options,
    options_for_evaluation,
    options_for_init,
    options_for_steps,
)

SETTINGS = (*compilation._DEFAULTS, "jax_compilation_cache_dir")


@pytest.fixture
def unset(monkeypatch, tmp_path):
    """Sets JAX's settings as in a program without any, and the user's cache to a new directory."""
    before = {name: jax.config.values[name] for name in SETTINGS}
    values = {name: old for name, (old, _) in compilation._DEFAULTS.items()}
    compilation._update({**values, "jax_compilation_cache_dir": None})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "platform", "linux")
    yield tmp_path / "cache/weft/xla"
    compilation._update(before)


def compiled(number):
    jax.jit(lambda x: jnp.sin(x) + number)(jnp.ones(3))


def test_default_is_bounded_and_in_the_cache_of_the_user(unset):
    with compilation_cache(None):
        assert jax.config.values["jax_compilation_cache_dir"] == str(unset)
        assert jax.config.values["jax_compilation_cache_max_size"] == compilation.MAX_CACHE_BYTES
        compiled(17.5)
    assert list(unset.glob("*-cache"))
    assert jax.config.values["jax_compilation_cache_dir"] is None
    assert jax.config.values["jax_compilation_cache_max_size"] == -1


def test_relative_directory_of_the_user_is_ignored(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == str(tmp_path / ".cache/weft/xla")


def test_settings_of_the_user_are_kept(unset, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    with compilation_cache(None):
        assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path)
        assert jax.config.values["jax_compilation_cache_max_size"] == -1
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        with compilation_cache(None):
            assert jax.config.values["jax_compilation_cache_dir"] is None
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert not unset.exists()


@pytest.mark.parametrize("why", ["a file", "full", "of others"])
def test_directory_that_cannot_be_used_is_logged_once(unset, caplog, monkeypatch, why):
    unset.parent.mkdir(parents=True)
    if why == "a file":
        unset.write_text("", encoding="utf-8")
    elif why == "full":
        monkeypatch.setattr(compilation, "_MIN_FREE_BYTES", 2**80)
    else:
        unset.mkdir()
        unset.chmod(0o777)
    with caplog.at_level(logging.WARNING), compilation_cache(None):
        compiled(18.5)
        assert jax.config.values["jax_compilation_cache_dir"] is None
    (record,) = caplog.records
    assert f"not kept in {unset}" in record.message
    assert "compilation_cache_dir=''" in record.message


def test_partial_programs_are_dropped(unset):
    unset.mkdir(parents=True, mode=0o700)
    for name in ("old-cache", "new-cache", "whole-cache", "whole-atime"):
        (unset / name).write_bytes(b"12345678")
    for name in ("old-cache", "whole-cache"):
        os.utime(unset / name, (0, time.time() - 100))
    with compilation_cache(None):
        pass
    assert sorted(x.name for x in unset.iterdir()) == ["new-cache", "whole-atime", "whole-cache"]


PROGRAM = """
import jax, numpy as np, weft
from weft import linen as nn
seen = []
jax.monitoring.register_event_listener(lambda name, **kwargs: seen.append(name))
x = np.ones((8, 3), np.float32)
weft.fit(nn.Dense(1), (x, x[:, :1]), loss="mse", steps=1, progress=False)
print(seen.count("/jax/compilation_cache/cache_hits"))
"""


def test_second_process_compiles_nothing(tmp_path):
    unset = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    env = {k: v for k, v in os.environ.items() if k not in unset}
    env |= {"XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    hits, stored = [], []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=env, capture_output=True, encoding="utf-8"
        )
        assert done.returncode == 0 and "warn" not in done.stderr.lower(), done.stderr
        hits.append(int(done.stdout))
        stored.append({path.name for path in tmp_path.rglob("*-cache")})
    assert stored[0] == stored[1]
    assert hits[1] - hits[0] == len(stored[0]) > 0


SMALL, BATCH = {"w": jnp.zeros((10, 10))}, lambda: {"x": jnp.zeros((8, 32))}


def test_little_work_is_compiled_without_optimizations():
    options = options_for_steps("cpu", SMALL, BATCH, steps=60)
    assert options is not None and options["xla_backend_optimization_level"] == 0
    compiled_step = jax.jit(lambda x: x + 1, compiler_options=options)
    assert compiled_step(1) == 2
    assert options_for_init("cpu", SMALL) == options
    evaluation = options_for_evaluation("cpu", 100)
    assert evaluation is not None and evaluation["xla_backend_optimization_level"] == 1


def test_much_work_is_compiled_as_usual():
    large = {"w": jax.ShapeDtypeStruct((10_000, 10_000), "float32")}
    assert options_for_steps("cpu", SMALL, BATCH, steps=1000) is None
    assert options_for_steps("cpu", SMALL, BATCH, steps=float("inf")) is None
    assert options_for_steps("cpu", large, BATCH, steps=1) is None
    much = {"x": jax.ShapeDtypeStruct((10_000, 10_000), "float32")}
    assert options_for_steps("cpu", SMALL, lambda: much, steps=1) is None
    assert options_for_init("cpu", large) is None
    assert options_for_evaluation("cpu", 10**8) is None
    assert options_for_steps("gpu", SMALL, BATCH, steps=1) is None
    assert options_for_evaluation("gpu", 100) is None


def test_options_that_xla_does_not_know_are_left_out(monkeypatch):
    known = {"xla_backend_optimization_level": 0}
    unknown = {"xla_cpu_no_such_option": 1}
    monkeypatch.setattr(compilation, "_NO_OPTIMIZATIONS", known | unknown)
    compilation._unknown_options.cache_clear()
    try:
        assert options_for_init("cpu", SMALL) == known
    finally:
        compilation._unknown_options.cache_clear()


def test_options_by_name_are_those_of_the_devices():
    names = ["latency_hiding", "collective_fusion"]
    on_gpus, on_tpus = named_options(names, "gpu"), named_options(names, "tpu")
    assert on_gpus["xla_gpu_enable_latency_hiding_scheduler"]
    assert on_tpus["xla_tpu_enable_async_collective_fusion"]
    assert not any("tpu" in name for name in on_gpus)
    assert named_options(names, "cpu") == named_options([], "tpu") == {}


@pytest.mark.parametrize("name", XLA_OPTIONS)
def test_options_for_gpus_are_known_to_xla(name):
    # Its options are the same in a build for CPUs.
    jax.jit(lambda x: x + 1).lower(1).compile(compiler_options=named_options([name], "gpu"))


@pytest.mark.long
@pytest.mark.parametrize("name", XLA_OPTIONS)
def test_options_for_tpus_are_known_to_their_compiler(name):
    try:
        devices = get_devices_for_topology("v5p-8")
    except TopologyError:
        pytest.skip("libtpu is not installed")
    sharding = jax.NamedSharding(jax.make_mesh((4,), ("x",), devices=devices), jax.P())
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    jax.jit(lambda x: x + 1).lower(x).compile(compiler_options=named_options([name], "tpu"))


@pytest.mark.parametrize("policy", [None, AnomalyPolicy.default_config()])
def test_named_options_reach_the_step(monkeypatch, policy):
    options = {"of a test": {"cpu": {"xla_no_such_option": True}}}
    monkeypatch.setattr(compilation, "XLA_OPTIONS", options)
    cfg = digits(batch_size=8).set(dir="", evalers={}, anomaly_policy=policy)
    trainer = cfg.set(xla_options=["of a test"]).instantiate(parent=None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="'xla_no_such_option'"):
        trainer.compile_train_step()


def test_unknown_options():
    cfg = digits().set(dir="", xla_options=["collective_matmull"])
    with pytest.raises(
        InvalidConfigValueError,
        match=r"xla_options has 'collective_matmull'; expected some of 'latency_hiding', .*"
        "Did you mean 'collective_matmul'",
    ):
        cfg.instantiate(parent=None)
