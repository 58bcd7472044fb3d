"""Host memory that saving and restoring a state of 4 GB take beyond the state itself."""

import shutil
import subprocess

import pytest

from tests.flags import xla_flags

pytestmark = pytest.mark.soak

SCRIPT = """
import sys
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from weft.trainer.checkpointer import Checkpointer

directory, use, *axes = sys.argv[1:]
mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
spec = PartitionSpec(*(axis if axis == "data" else None for axis in axes))
sharding = NamedSharding(mesh, spec)
shape = (32 * 1024, 1024)
cfg = Checkpointer.default_config().set(name="checkpointer", dir=directory, asynchronous=False)
checkpointer = cfg.instantiate(parent=None)
make = jax.jit(lambda x: jnp.full(shape, x), out_shardings=sharding)
if use == "save":
    state = {f"w{i}": make(float(i)) for i in range(32)}
    jax.block_until_ready(state)


def memory(name):
    (line,) = [line for line in open("/proc/self/status") if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


open("/proc/self/clear_refs", "w").write("5")
before = memory("VmRSS")
state_bytes = 32 * 32 * 1024 * 1024 * 4
if use == "save":
    checkpointer.save(step=1, state=state)
    grown = memory("VmHWM") - before
else:
    target = {f"w{i}": jax.ShapeDtypeStruct(shape, "float32", sharding=sharding) for i in range(32)}
    _, state = checkpointer.restore(state=target)
    jax.block_until_ready(state)
    grown = memory("VmHWM") - before - state_bytes
    assert all(float(state[f"w{i}"][-1, -1]) == i for i in range(32))
print(f"{use} {axes}: {grown / state_bytes:.3f} of the state")
assert grown <= 0.25 * state_bytes
"""


@pytest.fixture
def directory(tmp_path):
    yield tmp_path / "checkpoints"
    # pytest would keep it, in memory.
    shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)


def test_save_and_restore_take_a_quarter_of_the_state_at_most(python_server, directory):
    for words in (["save", "data"], ["restore", "data"], ["restore", "none", "data"]):
        process = python_server.start(
            "-c",
            SCRIPT,
            directory,
            *words,
            env={"XLA_FLAGS": xla_flags(8)},
            stderr=subprocess.PIPE,
        )
        output, errors = process.communicate(timeout=600)
        assert process.returncode == 0, output + errors
        print(output)
