"""A run resumes elsewhere, with dropout, shuffled data and averages, as if uninterrupted.

Bits are the same since the arithmetic is: two devices add the same two halves of a batch whether
one process has both or each of two has one. tests/trainer/test_trainer.py has other meshes.
"""

import contextlib

import jax
import pytest

from tests import checkpoint_files
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
        self.step = resumed_from


def train(run_dir, max_step):
    """Trains in this process on two devices; returns the step that it went on from."""
    words = [f"dir={run_dir}", f"max_step={max_step}", "mesh_shape=(2, 1)", *_WORDS]
    trainer = load_config("lm-tiny", words).instantiate(parent=None, devices=jax.devices()[:2])
    begin = Begin()
    trainer.run(listener=begin)
    return begin.step


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
    path = step_dirs(str(run_dir / "checkpoints"))[step]
    files = read_manifest(path).files
    positions = {e[0].digest for p, e in files.items() if p.startswith("python/process")}
    return checkpoint_files.values(path), positions


def test_run_resumes_on_two_and_one_process_bitwise_equal(python_server, tmp_path):
    uncut, cut = tmp_path / "uncut", tmp_path / "cut"
    train(uncut, 6)
    train(cut, 2)
    out = train_as_two(python_server, cut, 4)
    assert "resuming from step 2" in out and "Unprompted text from the model" in out
    assert train(cut, 6) == 4
    arrays, positions = digests(cut, 6)
    assert any("ema" in path for path in arrays)
    assert (arrays, positions) == digests(uncut, 6)
