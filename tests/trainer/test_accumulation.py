"""A step with gradient accumulation equals one without, whatever the model is written in."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import weft
from weft import linen as nn
from weft import nnx
from weft.config import config_for_class, config_for_function
from weft.errors import LossWeightWarning
from weft.hierarchy import BaseModel, Linear, WeightedScalar
from weft.metrics import AllRows
from weft.trainer import with_minibatch_steps
from weft.trainer.summary_writer import read_json_lines

pytestmark = pytest.mark.usefixtures("one_device")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 6, 4)).astype(np.float32)
Y = RNG.normal(size=(8, 6)).astype(np.float32)
# Rows have from one token to all that count, so no two microbatches have equally many.
LIVE = (np.arange(6)[None] < np.array([1, 6, 2, 6, 1, 5, 1, 4])[:, None]).astype(np.float32)
DATA = {"x": X, "y": Y, "live": LIVE}
ROW_WEIGHT = np.array([0.1, 1, 0.1, 2, 0, 1, 0.5, 3], np.float32)


def mean_of_tokens(out, batch):
    errors = (out[..., 0] - batch["y"]) ** 2
    count = batch["live"].sum()
    return WeightedScalar((errors * batch["live"]).sum() / count, count)


class InLinen(nn.Module):
    @nn.compact
    def __call__(self, batch):
        return mean_of_tokens(nn.Dense(1)(batch["x"]), batch), {}


class Sows(nn.Module):
    @nn.compact
    def __call__(self, batch):
        loss = mean_of_tokens(nn.Dense(1)(batch["x"]), batch)
        self.sow("summaries", "loss", loss)
        return loss.mean, {}


class InNNX(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.dense = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, batch):
        return mean_of_tokens(self.dense(batch["x"]), batch), {}


class SowsInNNX(InNNX):
    def __call__(self, batch):
        loss = mean_of_tokens(self.dense(batch["x"]), batch)
        self.sow("summaries", "loss", loss)
        return loss.mean, {}


class InHierarchy(BaseModel):
    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("linear", Linear.default_config().set(input_dim=4, output_dim=1))

    def forward(self, input_batch):
        return mean_of_tokens(self.linear(input_batch["x"]), input_batch), {}


class Reports(InHierarchy):
    def forward(self, input_batch):
        loss, aux = super().forward(input_batch)
        self.add_summary("loss", loss)
        return loss.mean, aux


class Silent(InHierarchy):
    def forward(self, input_batch):
        return mean_of_tokens(self.linear(input_batch["x"]), input_batch).mean, {}


class Outputs(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(x["x"] if isinstance(x, dict) else x)


def per_row(out, batch):
    return ((out[..., 0] - batch["y"]) ** 2).mean(-1)


def steps(model, loss=None, data=DATA):
    """Returns the variables before a step, after it, and after one with accumulation."""
    kwargs = {"steps": 1, "batch_size": 8, "optimizer": optax.sgd(0.5), "progress": False}
    result = weft.fit(model, data, loss, **kwargs)
    return result, result.last.variables


def accumulated(result, directory):
    cfg = result.config.clone(dir=str(directory))
    cfg.learner.forward_fn_transformation = config_for_function(with_minibatch_steps).set(steps=4)
    trainer = cfg.instantiate(parent=None)
    trainer.run(progress=False)
    state = trainer.trainer_state.model
    return state.get("model", state)


@pytest.mark.parametrize(
    ("model", "loss", "data"),
    [
        (InLinen(), None, DATA),
        (Sows(), None, DATA),
        (config_for_class(InNNX), None, DATA),
        (config_for_class(SowsInNNX), None, DATA),
        (InHierarchy.default_config(), None, DATA),
        (Reports.default_config(), None, DATA),
        (Outputs(), mean_of_tokens, DATA),
        (Outputs(), "mse", {"x": X, "y": Y[..., None], "row_weight": ROW_WEIGHT}),
        (Outputs(), per_row, {"x": X, "y": Y, "row_weight": ROW_WEIGHT}),
    ],
    ids=str.split("linen linen-sows nnx nnx-sows hierarchy reports function name rows"),
)
def test_microbatches_of_unequal_weight(model, loss, data, tmp_path):
    result, whole = steps(model, loss, data)
    in_parts = accumulated(result, tmp_path)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), in_parts, whole
    )


def test_microbatches_without_targets_do_not_count(tmp_path):
    def mean(out, batch):
        total = jnp.sum(batch["live"])
        error = jnp.square(out[..., 0] - batch["y"]).mean(-1)
        return WeightedScalar(jnp.sum(error * batch["live"]) / total, total)  # 0 / 0 without any

    live = (np.arange(len(Y)) < 2).astype(np.float32)
    result, whole = steps(Outputs(), mean, {"x": X, "y": Y, "live": live})
    in_parts = accumulated(result, tmp_path)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), in_parts, whole
    )


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (Silent.default_config(), None),
        (Outputs(), lambda out, batch: mean_of_tokens(out, batch).mean),
    ],
    ids=["hierarchy", "function"],
)
def test_a_loss_without_a_weight_is_said(model, loss, tmp_path):
    result, _ = steps(model, loss)
    with pytest.warns(
        LossWeightWarning, match=r"Return the loss as WeightedScalar\(loss, weight\)"
    ):
        accumulated(result, tmp_path)


def test_an_evaluation_weights_the_loss_that_is_returned():
    held_out = [{name: x[rows] for name, x in DATA.items()} for rows in (slice(3), slice(3, 8))]
    kwargs = {"steps": 1, "optimizer": optax.sgd(0.5), "progress": False}
    losses = [
        weft.fit(InHierarchy.default_config(), DATA, validation=data, **kwargs).history.validation
        for data in (held_out, [DATA])
    ]
    np.testing.assert_allclose(losses[0]["loss"], losses[1]["loss"], rtol=1e-6)


def test_metrics_are_those_of_the_whole_batch(tmp_path):
    data = {"x": X[:, 0], "y": (X[:, 0, 0] > 0).astype(np.int32)}
    metrics = {"f1": "f1", "auc": "auc", "size": AllRows(lambda out, batch: len(out))}
    kwargs = {"steps": 1, "batch_size": 8, "optimizer": optax.sgd(0.5), "progress": False}
    result = weft.fit(nn.Dense(2), data, "cross_entropy", metrics=metrics, **kwargs)
    accumulated(result, tmp_path)
    (record,) = read_json_lines(str(tmp_path / "summaries" / "train_train"))[-1:]
    for name in metrics:
        value = result.history.train[name][-1]
        np.testing.assert_allclose(record["values"][f"model/{name}"], value, rtol=1e-6)
    assert record["values"]["model/size"] == 8
