"""Two real processes with two devices each, from reading to the step."""

import pytest

from tests.flags import xla_flags
from tests.sockets import free_port
from tests.weft_process import finish

PROGRAM = """
import os
import sys
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from weft.errors import BatchShardingError
from weft.input import grain
from weft.input.datasets import json_lines_dataset
from weft.input.grain import DispatchConfig
from weft.input.prefetch import PARTS
from weft.input.text import lm_stream_source
from weft.input.text import lm_documents_source
from weft.input import (InputDispatcher, SpmdInputDispatcher, global_to_host_array,
                        host_to_global_device_array)
from weft.input.fake import FakeLmInput

other = os.fork()  # both have imported everything, and neither has used JAX
me = int(not other)
jax.distributed.initialize("localhost:" + sys.argv[1], 2, me)
devices = np.array(jax.devices()).reshape(2, 2)  # a row per process

def run(mesh, rows, partition_spec=None, dispatcher=None):
    cfg = FakeLmInput.default_config().set(
        name="fake", is_training=True, global_batch_size=rows, source_length=5)
    whole = cfg.clone(input_dispatcher=InputDispatcher.default_config().set(
        global_logical_batch_size=rows, num_physical_feeds=1, physical_feed_index=0))
    want = next(iter(whole.instantiate(parent=None).dataset()))["input_ids"]
    cfg.set(partition_spec=partition_spec, input_dispatcher=dispatcher)
    fake = cfg.instantiate(parent=None)
    with jax.set_mesh(mesh):
        host = next(fake.batches(iter(fake.dataset())))
        batch = host_to_global_device_array(host, partition=fake.partition_spec)
        jax.tree.map(np.testing.assert_array_equal, global_to_host_array(batch), host)
        everywhere = jax.jit(fake.dispatch_global_batch, out_shardings=NamedSharding(mesh, P()))
        got = np.asarray(everywhere(batch)["input_ids"].addressable_data(0))
    np.testing.assert_array_equal(got, want)
    return host["input_ids"].shape[0]

data = Mesh(devices.reshape(4), ("data",))
assert run(data, 8) == 4

# Fewer rows than processes: the second brings padding.
one = InputDispatcher.default_config().set(global_logical_batch_size=1)
assert run(data, 1, dispatcher=one) == 2

# The second process's rows come first in the global array.
turned = Mesh(devices[::-1].reshape(4), ("data",))
assert run(turned, 2, dispatcher=one.clone(global_logical_batch_size=2)) == 2

# A model over both processes: they read the same rows, even a single one.
for mesh in (Mesh(devices.T, ("data", "model")), Mesh(devices, ("data", "model"))):
    spmd = SpmdInputDispatcher.default_config().set(
        global_logical_batch_size=6, partition_spec=P("data"))
    run(mesh, 6, dispatcher=spmd)
    run(mesh, 6, dispatcher=spmd.set(partition_spec=P()))

# A run of one process resumes as two, which see the batches that it would have seen.
for make in (lm_documents_source, lm_stream_source):
    source = make(documents=json_lines_dataset(sys.argv[2]), sequence_length=8,
                  global_batch_size=4, is_training=True)
    alone = iter(source(DispatchConfig(0, 1)))
    before = [next(alone) for _ in range(3)]
    text = grain.Input.default_config().set(name="text", source=source).instantiate(parent=None)
    mine = iter(text.dataset())
    mine.set_state(alone.get_state())
    for host in (next(mine), next(mine)):
        want = next(alone)["input_ids"]
        batch = host_to_global_device_array(host, mesh=data, partition=P("data"))["input_ids"]
        assert host["input_ids"].shape == (2, 8) and batch.shape == (4, 8)
        everywhere = jax.jit(lambda x: x, out_shardings=NamedSharding(data, P()))(batch)
        np.testing.assert_array_equal(np.asarray(everywhere.addressable_data(0)), want)
    if make is lm_documents_source:
        assert mine.get_state() == alone.get_state()
    else:
        parts, whole = (it.get_state()["positions"][PARTS] for it in (mine, alone))
        assert len(parts) == 2 and parts.items() <= whole.items()
    mine.close(), alone.close()

try:
    run(data, 6)
except BatchShardingError as error:
    assert "of size 6 over 2 process(es)" in str(error), error
else:
    raise AssertionError("6 rows over 4 devices")
multihost_utils.sync_global_devices("end")
os.write(1, b"done %d " % me)  # whole, as both write to one pipe
jax.distributed.shutdown()
if other:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


@pytest.mark.long
def test_two_processes_make_one_batch(python_server, tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text(
        "\n".join('{"text": "%s"}' % (chr(97 + i) * (i + 3)) for i in range(26)), encoding="utf-8"
    )
    env = {"XLA_FLAGS": xla_flags(2)}
    out = finish(python_server.start("-c", PROGRAM, free_port(), path, env=env))
    assert "done 0" in out and "done 1" in out
