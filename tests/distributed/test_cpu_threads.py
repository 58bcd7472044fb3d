"""Virtual devices get threads, or their user learns how to give them some."""

import logging
import os
import signal
import subprocess

import pytest

from weft.distributed import cpu_threads
from weft.distributed.cpu_threads import missing_threads, provide_threads

DEVICES = 8
FLAGS = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}", "NPROC": ""}
PATIENCE_SECONDS = 120


@pytest.fixture
def environment(monkeypatch):
    cpu_threads._say.cache_clear()
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    return lambda **variables: [monkeypatch.setenv(*item) for item in variables.items()]


@pytest.mark.parametrize(
    ("variables", "advice"),
    [
        ({}, f"NPROC={4 * DEVICES} python train.py"),
        ({"NPROC": "1"}, "virtual CPU devices share 1 threads"),
        ({"NPROC": str(DEVICES)}, None),
        ({"XLA_FLAGS": ""}, None),
        ({"JAX_PLATFORMS": "cuda"}, None),
    ],
    ids=["default", "too few", "enough", "one device", "no CPU"],
)
def test_advice(environment, variables, advice):
    environment(**FLAGS | variables)
    found = missing_threads()
    assert found is None if advice is None else advice in found


def test_it_is_too_late_once_there_are_devices(environment, caplog):
    import jax

    jax.devices()
    environment(**FLAGS)
    with caplog.at_level(logging.WARNING):
        provide_threads()
        provide_threads()
    assert caplog.text.count("in the environment before JAX uses a device") == 1
    assert os.environ["NPROC"] == ""


ONE_CORE = """
import os
os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
"""
TRAINS = """
from weft.cli import main

small = "evalers={} model.decoder.transformer.num_layers=1"
code = main(f"train lm-tiny --mesh fsdp=8 max_step=1 dir=run {small}".split())
print(code, os.environ["NPROC"], len(os.listdir("/proc/self/task")))
"""


@pytest.mark.long
def test_training_on_one_core_has_threads(python_server, tmp_path):
    with python_server.start("-c", ONE_CORE + TRAINS, env=FLAGS, cwd=tmp_path) as process:
        printed = process.stdout.read()
    code, variable, threads = printed.splitlines()[-1].split()
    assert (code, variable) == ("0", str(4 * DEVICES)), printed
    assert int(threads) > 4 * DEVICES


HANGS = """
import threading
import jax, jax.numpy as jnp, numpy as np, optax
import weft
from weft.hierarchy import BaseModel, Linear

class Waits(BaseModel):
    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("linear", Linear.default_config().set(input_dim=1, output_dim=1))

    def forward(self, input_batch):
        def wait(x):
            print("waiting", flush=True)
            threading.Event().wait()
            return x
        x = jax.pure_callback(wait, jax.ShapeDtypeStruct((), "float32"), jnp.float32(0))
        return jnp.mean(self.linear(input_batch["x"])) + x, {}

rows = jax.device_count()
weft.fit(Waits.default_config(), {"x": np.ones((rows, 1))}, steps=1, batch_size=rows,
         optimizer=optax.sgd(0.1), progress=False)
"""


@pytest.mark.long
def test_a_signal_ends_a_first_step_that_hangs(python_server):
    env = FLAGS | {"NPROC": "1"}
    with python_server.start("-c", ONE_CORE + HANGS, env=env, stderr=subprocess.PIPE) as process:
        for line in process.stdout:
            if "waiting" in line:
                process.send_signal(signal.SIGTERM)
                break
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 128 + signal.SIGTERM
    assert f"The first step is stopped while it waits. {DEVICES} virtual CPU devices" in errors
    assert f"Set NPROC={4 * DEVICES} in the environment" in errors
