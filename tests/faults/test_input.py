"""A record that cannot be used, in a real run over files: named, nothing lost, mended, gone on."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.config import config_for_function
from weft.errors import InputReadError
from weft.hierarchy.base_layer import BaseModel
from weft.hierarchy.layers import Linear
from weft.input.datasets import json_lines_dataset
from weft.input.grain import Input, per_feed_batch, shard_dataset_with_proportion
from weft.trainer.hooks import Hook
from weft.trainer.learner import Learner
from weft.trainer.optimizers import adamw_optimizer
from weft.trainer.summary_writer import JsonLinesWriter, read_json_lines
from weft.trainer.throughput import Throughput
from weft.trainer.trainer import SpmdTrainer


class Regression(BaseModel):
    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("linear", Linear.default_config().set(input_dim=1, output_dim=1))

    def forward(self, input_batch):
        return jnp.mean((self.linear(input_batch["x"])[:, 0] - input_batch["y"]) ** 2), {}


def to_example(record):
    return {"x": np.float32([record["x"]]), "y": np.float32(record["y"])}


def points(paths, global_batch_size=4):
    def build_dataset(dispatch_config):
        ds = json_lines_dataset(paths).map(to_example).seed(0).shuffle()
        ds = shard_dataset_with_proportion(ds, range_start=0, range_end=4, period=4)
        return per_feed_batch(
            ds, global_batch_size=global_batch_size, dispatch_config=dispatch_config
        )

    return build_dataset


class Seen(Hook):
    def __init__(self):
        self.batches = []

    def on_start(self, trainer, resumed_from):
        self.resumed_from = resumed_from

    def on_step(self, step, outputs, batch):
        self.batches.append(np.asarray(batch["x"])[:, 0].tolist())


def trained(directory, paths):
    optimizer = config_for_function(adamw_optimizer).set(
        learning_rate=0.1, b1=0.9, b2=0.95, eps=1e-8
    )
    cfg = SpmdTrainer.default_config().set(
        name="trainer",
        dir=str(directory),
        max_step=100,
        model=Regression.default_config(),
        learner=Learner.default_config().set(optimizer=optimizer),
        input=Input.default_config().set(source=config_for_function(points).set(paths=paths)),
        summary_writer=JsonLinesWriter.default_config(),
        throughput=Throughput.default_config().set(every_n_steps=2),
        mesh_shape=(1, 1),
        mesh_axis_names=("data", "model"),
    )
    seen = Seen()
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:1])
    try:
        trainer.run(listener=seen)
    except InputReadError as error:
        return trainer, seen, error
    return trainer, seen, None


def weights(trainer):
    return jax.tree.leaves(jax.device_get(trainer.trainer_state.model))


@pytest.mark.long
def test_broken_record_is_named_and_run_resumes_once_fixed(tmp_path):
    records = [json.dumps({"x": i, "y": 2 * i}) for i in range(32)]
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text("\n".join(records), encoding="utf-8")
    whole, seen, _ = trained(tmp_path / "whole", str(good))
    assert len(seen.batches) == 8

    # The record that comes in the sixth batch; its line stays as long as it was.
    line = int(seen.batches[5][0])
    broken = [*records]
    broken[line] = records[line].replace('"y"', '"z"')
    bad.write_text("\n".join(broken), encoding="utf-8")
    _, before, error = trained(tmp_path / "cut", str(bad))
    assert f"line {line + 1} of {bad}: KeyError: 'y'" in str(error)
    assert "trainer.input: the batch after state {'next_index': 5}" in str(error)
    assert before.batches == seen.batches[:5]

    bad.write_text("\n".join(records), encoding="utf-8")
    mended, after, error = trained(tmp_path / "cut", str(bad))
    assert (after.resumed_from, error) == (5, None)
    assert before.batches + after.batches == seen.batches
    for got, want in zip(weights(mended), weights(whole), strict=True):
        np.testing.assert_array_equal(got, want)

    lines = read_json_lines(str(tmp_path / "whole" / "summaries" / "train_train"))
    waits = [line.get("values", {}).get("throughput/input_wait_seconds") for line in lines]
    waits = [wait for wait in waits if wait is not None]
    assert len(waits) == 4
    assert min(waits) >= 0
