"""A run resumes elsewhere, with dropout, shuffled data and averages, as if uninterrupted.

Bits are the same where the arithmetic is: two devices add the same two halves of a batch whether
one process has both or each of two has one. Over other meshes sums are taken in another order, and
float32 rounds otherwise; then values agree to a tolerance.
"""

import contextlib
import re

import jax
import numpy as np
import pytest

from tests.sockets import free_port
from tests.weft_process import finish, weft_processes
from weft.cli.configs import load_config
from weft.trainer.checkpointer.dirs import step_dirs
from weft.trainer.checkpointer.manifest import read_manifest
from weft.trainer.hooks import Hook

pytestmark = pytest.mark.long

_WORDS = [
    "evalers={}",
    "learner.optimizer.inner.learning_rate.max_step=60",
    "learner.ema.decay=0.9",
    "model.decoder.transformer.layer.feed_forward.dropout.rate=0.1",
    "model.decoder.transformer.layer.self_attention.attention.num_heads=4",
    "checkpointer.save_policy.n=1000000",
]


class Begin(Hook):
    """Record of a run's start."""

    def on_start(self, trainer, resumed_from):
        self.step, self.state = resumed_from, on_host(trainer.trainer_state)


def on_host(state):
    return jax.tree.map(np.asarray, (state.model, state.learner))


def train(run_dir, max_step, mesh):
    """Trains in this process; returns what it began and ended with."""
    devices = jax.devices()[: int(np.prod(mesh))]
    words = [f"dir={run_dir}", f"max_step={max_step}", f"mesh_shape={mesh}", *_WORDS]
    trainer = load_config("lm-tiny", words).instantiate(parent=None, devices=devices)
    begin = Begin()
    trainer.run(listener=begin)
    return begin, on_host(trainer.trainer_state)


def train_as_two(server, run_dir, max_step):
    """Trains in two processes with a device each; returns what they print."""
    words = [f"dir={run_dir}", f"max_step={max_step}", "mesh_shape=(2, 1)", *_WORDS]
    together = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": "2"}
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(weft_processes(server, **together, JAX_PROCESS_ID=str(i)))(
                "train", "lm-tiny", *words
            )
            for i in (0, 1)
        ]
        return "".join([finish(process) for process in processes])


def digests(run_dir, step):
    """Returns digests of all arrays of a checkpoint, and of the position in the data."""
    files = read_manifest(step_dirs(str(run_dir / "checkpoints"))[step]).files
    kept = {
        path: entry
        for path, entry in files.items()
        if path.startswith("arrays/") and not re.search(r"/(_|\.)", path)
    }
    positions = {e["xxh3_128"] for p, e in files.items() if p.startswith("python/process")}
    return kept, positions


@pytest.fixture(scope="module")
def uncut(tmp_path_factory):
    """Trains six steps on two devices."""
    directory = tmp_path_factory.mktemp("uncut")
    return directory, train(directory, 6, (2, 1))[1]


def test_run_resumes_on_two_and_one_process_bitwise_equal(uncut, python_server, tmp_path):
    train(tmp_path, 2, (2, 1))
    out = train_as_two(python_server, tmp_path, 4)
    assert "resuming from step 2" in out and "Unprompted text from the model" in out
    begin, _ = train(tmp_path, 6, (2, 1))
    assert begin.step == 4
    arrays, positions = digests(tmp_path, 6)
    assert any("ema" in path for path in arrays)
    assert (arrays, positions) == digests(uncut[0], 6)


def test_mesh_changes_between_restarts(uncut, tmp_path):
    _, left = train(tmp_path, 3, (4, 2))
    begin, ended = train(tmp_path, 6, (2, 4))
    assert begin.step == 3
    jax.tree.map(np.testing.assert_array_equal, begin.state, left)  # bit by bit
    # Halves of products and of the batch are added in another order than on two devices: float32
    # rounds by 1e-7, and six steps of Adam with a rate of 1e-2 make that 1e-3 where a gradient is
    # near zero.
    for values, expected in zip(jax.tree.leaves(ended), jax.tree.leaves(uncut[1]), strict=True):
        np.testing.assert_allclose(values, expected, rtol=2e-2, atol=2e-3)
    _, positions = digests(tmp_path, 6)
    assert positions == digests(uncut[0], 6)[1]
