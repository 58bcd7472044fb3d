"""Real processes and real signals: a run that was cut ends with the bits of one that was not."""

import json
import os
import signal

import jax
import numpy as np
import pytest

from tests.weft_process import (
    PATIENCE_SECONDS,
    finish,
    newest_step,
    wait_for_save,
    weft_processes,
)
from weft.trainer.checkpointer import Checkpointer, CheckpointValidationType, read_state_spec

pytestmark = pytest.mark.long


@pytest.fixture
def start(python_server, tmp_path):
    """Starts `weft train lm-tiny dir=NAME …`."""
    with weft_processes(python_server, tmp_path) as start:
        yield lambda name, *words: start("train", "lm-tiny", f"dir={name}", *words)


def saved_state(run_dir, step):
    """Returns every array of a checkpoint by its path, as bytes."""
    base_dir = str(run_dir / "checkpoints")
    spec = read_state_spec(os.path.join(base_dir, f"step_{step:08d}"))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(
        lambda s: (
            jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=device) if hasattr(s, "shape") else s
        ),
        spec,
        is_leaf=lambda x: hasattr(x, "shape"),
    )
    cfg = Checkpointer.default_config().set(
        name="checkpointer", dir=base_dir, validation=CheckpointValidationType.CONTAINS_STATE
    )
    with cfg.instantiate(parent=None) as checkpointer:
        found, state = checkpointer.restore(state=target)
    assert found == step
    return {
        jax.tree_util.keystr(path): _bytes(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def _bytes(leaf):
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


# Of a process that trains as the others do: what was cut from its last step, and the whole.
FINISH = """
import sys
from weft.cli.configs import load_config

for name in ("cut", "whole"):
    load_config("lm-tiny", [f"dir={name}", *sys.argv[1:]]).instantiate(parent=None).run()
"""


def test_interrupted_run_continues_and_ends_bitwise_equal(python_server, start, tmp_path):
    run_dir = tmp_path / "cut"
    same = [
        "evalers={}",
        "learner.optimizer.inner.learning_rate.max_step=60",
        "learner.ema.decay=0.9",
        "model.decoder.transformer.layer.feed_forward.dropout.rate=0.1",
    ]
    endless = ["max_step=1000000", "checkpointer.save_policy.n=5", *same]

    # Killed, it continues from what was saved.
    process = start("cut", *endless)
    wait_for_save(run_dir, process)
    process.kill()
    assert process.wait(timeout=PATIENCE_SECONDS) == -signal.SIGKILL

    # Asked to stop, it saves where it stops; without a reader, as of `weft train | head`, too.
    process = start("cut", *endless)
    wait_for_save(run_dir, process, after=newest_step(run_dir))
    process.stdout.close()
    wait_for_save(run_dir, process, after=newest_step(run_dir))  # its end would print
    process.send_signal(signal.SIGHUP)  # the terminal is gone
    assert process.wait(timeout=PATIENCE_SECONDS) == 129
    step = newest_step(run_dir)
    record = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    assert record["end"] == {"step": step, "reason": "SIGHUP"}
    assert (run_dir / "report.html").is_file()

    out = finish(python_server.start("-c", FINISH, f"max_step={step + 3}", *same, cwd=tmp_path))
    assert f"resuming from step {step:,}" in out
    whole, cut = (saved_state(tmp_path / name, step + 3) for name in ("whole", "cut"))
    assert any("ema" in path for path in whole) and whole == cut
