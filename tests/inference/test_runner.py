import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from weft.errors import CheckpointNotFoundError, InferenceError
from weft.hierarchy.base_layer import BaseModel
from weft.hierarchy.layers import Linear
from weft.hierarchy.metrics import WeightedScalar
from weft.inference.runner import InferenceRunner
from weft.trainer.checkpointer import Checkpointer
from weft.trainer.learner import Learner
from weft.trainer.trainer import SpmdTrainer

W = np.arange(8.0, dtype=np.float32).reshape(2, 4)
X = np.random.default_rng(0).normal(size=(4, 8, 2)).astype(np.float32)
AXES = ("data", "model")


class Predictor(BaseModel):
    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child(
            "linear",
            Linear.default_config().set(
                input_dim=2, output_dim=4, bias=False, param_partition_spec=(None, "model")
            ),
        )

    def forward(self, input_batch):
        raise NotImplementedError

    def predict(self, input_batch, *, factor=1.0):
        y = factor * self.linear(input_batch["x"])
        self.add_summary("mean", WeightedScalar(jnp.mean(y), 1.0))
        self.add_module_output("hidden", y)
        self.add_module_output("other", y)
        return {"y": y, "total": jnp.sum(y), "noise": jax.random.normal(self.prng_key)}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Returns the checkpoint of a run whose parameters are W and whose moving average is 2 W."""
    path = tmp_path_factory.mktemp("run")
    cfg = Checkpointer.default_config().set(name="checkpointer", dir=str(path / "checkpoints"))
    state = {
        "prng_key": jax.random.key(0),
        "model": {"linear": {"weight": jnp.asarray(W)}},
        "learner": {"ema": {"ema": {"linear": {"weight": jnp.asarray(2 * W)}}}},
    }
    with cfg.instantiate(parent=None) as checkpointer:
        checkpointer.save(step=7, state=state)
        checkpointer.wait_until_finished()
    return path


def config(directory, shape=(1, 1)):
    trainer_cfg = SpmdTrainer.default_config().set(
        dir=str(directory),
        model=Predictor.default_config(),
        learner=Learner.default_config(),
        mesh_shape=shape,
        mesh_axis_names=AXES,
    )
    return InferenceRunner.config_from_trainer(trainer_cfg).set(name="runner")


def runner_of(cfg):
    count = int(np.prod(cfg.mesh_shape))
    if jax.device_count() < count:
        pytest.skip(f"needs {count} devices; WEFT_TEST_DEVICES gives {jax.device_count()}")
    return cfg.instantiate(parent=None, devices=jax.devices()[:count])


def batches():
    return [{"x": x} for x in X]


def test_method_runs_on_each_batch_with_run_parameters(directory):
    runner = runner_of(config(directory))
    results = list(runner.run(batches(), method="predict", factor=2.0))
    assert len(results) == 4
    for x, result in zip(X, results, strict=True):
        np.testing.assert_allclose(result.output_batch["y"], 2 * x @ W, rtol=1e-5)
        np.testing.assert_array_equal(result.input_batch["x"], x)
        np.testing.assert_allclose(result.summaries["mean"].mean, np.mean(2 * x @ W), rtol=1e-4)
        assert result.module_outputs == {}
    # Each batch has its own randomness, derived from the first key.
    noise = [float(result.output_batch["noise"]) for result in results]
    assert len(set(noise)) == 4
    again = runner.run(batches(), method="predict", prng_key=jax.random.key(0))
    assert [float(result.output_batch["noise"]) for result in again] == noise
    np.testing.assert_array_equal(runner.inference_runner_state.model["linear"]["weight"], W)


def test_outputs_of_modules_are_kept_by_their_paths(directory):
    runner = runner_of(config(directory)).create_method_runner(
        method="predict", drop_module_outputs=lambda path: path != "hidden"
    )
    assert list(runner(batches()[0]).module_outputs) == ["hidden"]


def test_batches_and_parameters_are_sharded(directory):
    cfg = config(directory, shape=(2, 2))
    runner = runner_of(cfg)
    weight = runner.inference_runner_state.model["linear"]["weight"]
    assert weight.sharding.spec == PartitionSpec(None, "model")
    (result,) = runner.run(batches()[:1], method="predict")
    assert result.input_batch["x"].sharding.spec[0] == AXES
    y, total = result.output_batch["y"], result.output_batch["total"]
    assert y.addressable_shards[0].data.shape[0] == 4
    assert total.sharding.is_fully_replicated
    np.testing.assert_allclose(y, X[0] @ W, rtol=1e-5)


def test_moving_average_is_used(directory):
    trainer_cfg = SpmdTrainer.default_config().set(
        dir=str(directory),
        model=Predictor.default_config(),
        learner=Learner.default_config(),
        mesh_shape=(1, 1),
        mesh_axis_names=AXES,
    )
    trainer_cfg.learner.ema.decay = 0.9
    runner = runner_of(InferenceRunner.config_from_trainer(trainer_cfg).set(name="runner"))
    np.testing.assert_array_equal(runner.inference_runner_state.model["linear"]["weight"], 2 * W)
    # It is in float32 also where the parameters are not.
    trainer_cfg.precision = "bfloat16"
    runner = runner_of(InferenceRunner.config_from_trainer(trainer_cfg).set(name="runner"))
    weight = runner.inference_runner_state.model["linear"]["weight"]
    np.testing.assert_array_equal(weight, (2 * W).astype(jnp.bfloat16))
    assert weight.dtype == jnp.bfloat16


def test_missing_items_are_named(directory, tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        runner_of(config(tmp_path))
    with pytest.raises(InferenceError, match=r"runner is to call 'predic' of the model.*predict"):
        runner_of(config(directory)).create_method_runner(method="predic")
