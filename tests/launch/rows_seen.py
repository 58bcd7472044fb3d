"""Recipe of a small run whose processes write which rows they have trained on."""

import json
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from weft.config import config_for_class, config_for_function
from weft.hierarchy.base_layer import BaseModel
from weft.hierarchy.layers import Linear
from weft.hierarchy.metrics import WeightedScalar
from weft.input import ArrayInput, Arrays
from weft.input.dispatch import LOGICAL_ROW_KEY, global_to_host_array
from weft.trainer.checkpointer import every_n_steps_policy
from weft.trainer.hooks import Hook
from weft.trainer.learner import Learner
from weft.trainer.optimizers import adamw_optimizer
from weft.trainer.schedule import cosine_with_linear_warmup
from weft.trainer.summary_writer import JsonLinesWriter
from weft.trainer.trainer import SpmdTrainer
from weft.trainer.trainer_config_modifier import GradientAccumulationModifier

NUM_ROWS, BATCH_SIZE = 42, 8  # an epoch does not end with a batch


class RowsSeen(Hook):
    """Hook that writes a line for each step of a process, with the numbers of its rows."""

    def on_start(self, trainer, resumed_from):
        directory = Path(trainer.config.dir, "rows")
        directory.mkdir(exist_ok=True)
        start = os.environ.get("WEFT_RENDEZVOUS_TOKEN", "alone")
        path = directory / f"{start}-{jax.process_index()}"
        self._file = path.open("a", encoding="utf-8")
        self._write(time.time(), [])

    def before_step(self, step):
        if jax.process_count() > 1:
            time.sleep(0.01)

    def on_step(self, step, outputs, batch):
        batch = global_to_host_array(batch)
        numbers = batch["number"]
        if LOGICAL_ROW_KEY in batch:
            numbers = numbers[batch[LOGICAL_ROW_KEY] >= 0]
        self._write(step, numbers.tolist())

    def _write(self, number, rows):
        self._file.write(json.dumps([number, rows]) + "\n")
        self._file.flush()

    def close(self):
        self._file.close()


class Regression(BaseModel):
    """Two layers."""

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("linear1", Linear.default_config().set(input_dim=4, output_dim=12))
        self._add_child("linear2", Linear.default_config().set(input_dim=12, output_dim=1))

    def forward(self, input_batch):
        errors = self.linear2(jnp.tanh(self.linear1(input_batch["x"])))[:, 0] - input_batch["y"]
        # Rows count differently, as texts of different lengths do.
        weights = 1 + input_batch["number"] % 3
        loss = jnp.sum(weights * errors**2) / jnp.sum(weights)
        self.add_summary("loss", WeightedScalar(loss, jnp.sum(weights)))
        return loss, {}


def recipe():
    """Returns the config of a run with batches of 8; a device takes 2 rows at a time."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_ROWS, 4)).astype(np.float32)
    arrays = {"x": x, "y": np.sin(x).sum(axis=1), "number": np.arange(NUM_ROWS, dtype=np.int32)}
    rate = config_for_function(cosine_with_linear_warmup)
    optimizer = config_for_function(adamw_optimizer).set(
        learning_rate=rate.set(peak_lr=1e-2, warmup_steps=10, max_step=1000, alpha=0.1),
        b1=0.9,
        b2=0.95,
        eps=1e-8,
    )
    cfg = SpmdTrainer.default_config().set(
        name="trainer",
        dir="run",
        model=Regression.default_config(),
        learner=Learner.default_config().set(optimizer=optimizer),
        input=ArrayInput.default_config().set(arrays=Arrays(arrays), global_batch_size=BATCH_SIZE),
        summary_writer=JsonLinesWriter.default_config(),
        mesh_shape=(-1, 1),
        mesh_axis_names=("data", "model"),
        config_modifiers=[
            GradientAccumulationModifier.default_config().set(
                grad_acc_steps=1, max_rows_per_device=2
            )
        ],
    )
    cfg.hooks["rows"] = config_for_class(RowsSeen)
    cfg.checkpointer.save_policy = config_for_function(every_n_steps_policy).set(n=3)
    return cfg


def rows_by_step(run_dir):
    """Returns the sorted numbers of the rows of each step, of the last start that ran it whole."""
    starts = {}  # by token: the time, and the rows of each step
    for path in Path(run_dir, "rows").iterdir():
        (start_time, _), *steps = read_lines(path)
        token = path.name.rpartition("-")[0]
        _, rows = starts.setdefault(token, (start_time, {}))
        for step, numbers in steps:
            rows.setdefault(step, []).extend(numbers)
    found = {}
    for _, rows in sorted(starts.values(), key=lambda start: start[0]):
        for step, numbers in rows.items():
            if len(numbers) >= BATCH_SIZE:  # else a process was killed before it wrote
                found[step] = sorted(numbers)
    return found


def read_lines(path):
    """Returns the lines of a process; its last one is torn if it was killed as it wrote."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]
