"""Features of a run other than plain steps, through the trainer: on a model of two weights."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from weft.config import config_for_function
from weft.errors import EarlyStoppingError, InputDispatchError, ShardingWarning
from weft.hierarchy.base_layer import BaseModel
from weft.hierarchy.layers import Linear
from weft.hierarchy.metrics import WeightedScalar
from weft.input import ArrayInput, Arrays, InputDispatcher
from weft.input.fake import fake_source
from weft.input.grain import Input, per_feed_batch
from weft.trainer.checkpointer import every_n_steps_policy as save_every_n_steps_policy
from weft.trainer.checkpointer.policy import EvalMetric
from weft.trainer.evaler import (
    AtEndPolicy,
    BestMetricEvalPolicy,
    EarlyStopping,
    SpmdEvaler,
    every_n_steps_policy,
)
from weft.trainer.gradients import with_minibatch_steps
from weft.trainer.hooks import Hook
from weft.trainer.learner import DynamicLossScale, Learner
from weft.trainer.optimizers import adamw_optimizer
from weft.trainer.optimizers.transformations import param_ema
from weft.trainer.summary_writer import JsonLinesWriter, read_json_lines
from weft.trainer.throughput import Throughput
from weft.trainer.trainer import SpmdTrainer


class Regression(BaseModel):
    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("linear", Linear.default_config().set(input_dim=2, output_dim=1))

    def forward(self, input_batch):
        errors = self.linear(input_batch["x"])[:, 0] - input_batch["y"]
        loss = jnp.mean(errors**2)
        self.add_summary("loss", WeightedScalar(loss, errors.size))
        return loss, {}


def examples_of(is_training):
    """Returns noise, so that memorizing it does not generalize."""
    rng = np.random.default_rng(int(is_training))
    return rng.normal(size=(16, 2)).astype(np.float32), rng.normal(size=16).astype(np.float32)


def points(is_training: bool):
    examples = [{"x": x, "y": y} for x, y in zip(*examples_of(is_training), strict=True)]
    source = fake_source(is_training, examples, repeat=None if is_training else 1)

    def build_dataset(dispatch_config):
        return per_feed_batch(
            source(dispatch_config), global_batch_size=8, dispatch_config=dispatch_config
        )

    return build_dataset


def input_config(is_training):
    source = config_for_function(points).set(is_training=is_training)
    return Input.default_config().set(source=source)


def evaler(policy):
    return SpmdEvaler.default_config().set(
        input=input_config(False),
        eval_policy=policy,
        summary_writer=JsonLinesWriter.default_config(),
    )


SAVE_EVERY = 5
EVERY_STEP = config_for_function(every_n_steps_policy).set(n=1)
HELD_OUT = EvalMetric("held_out", "loss")


def config(directory, **kwargs):
    optimizer = config_for_function(adamw_optimizer).set(
        learning_rate=0.1, b1=0.9, b2=0.95, eps=1e-8
    )
    cfg = SpmdTrainer.default_config().set(
        name="trainer",
        dir=str(directory),
        max_step=8,
        model=Regression.default_config(),
        learner=Learner.default_config().set(optimizer=optimizer),
        input=input_config(True),
        summary_writer=JsonLinesWriter.default_config(),
        mesh_shape=(1, 1),
        mesh_axis_names=("data", "model"),
    )
    cfg.checkpointer.save_policy = config_for_function(save_every_n_steps_policy).set(n=10**6)
    return cfg.set(**kwargs)


class Recorder(Hook):
    def __init__(self):
        self.losses, self.evals = [], []

    def on_step(self, step, outputs, batch):
        self.losses.append(float(outputs["loss"]))

    def on_eval(self, name, step, summaries):
        self.evals.append((name, step, float(summaries["loss"].mean)))

    def on_end(self, step, reason):
        self.end = (step, reason)


def run(cfg, **kwargs):
    trainer, recorder = cfg.instantiate(parent=None, devices=jax.devices()[:1]), Recorder()
    result = trainer.run(listener=recorder, **kwargs)
    return trainer, recorder, result


def weights(trainer):
    return np.asarray(trainer.trainer_state.model["linear"]["weight"])


def reported(directory, name):
    lines = read_json_lines(str(Path(directory, "summaries", name)))
    return {line["step"]: line["values"] for line in lines if "values" in line}


def everything(directory, **kwargs):
    """Returns all features at once; with "max", evaluating a model that learns is not an
    improvement.
    """
    evalers = {
        "held_out": evaler(EVERY_STEP),
        "best": evaler(BestMetricEvalPolicy.default_config().set(metric=HELD_OUT, mode="max")),
        "at_end": evaler(AtEndPolicy.default_config()),
    }
    cfg = config(
        directory,
        evalers=evalers,
        early_stopping=EarlyStopping.default_config().set(metric=HELD_OUT, mode="max", patience=3),
        throughput=Throughput.default_config().set(every_n_steps=3, peak_flops_per_device=1e12),
    )
    cfg.checkpointer.keep_last_n = 50
    cfg.checkpointer.save_policy.n = SAVE_EVERY
    cfg.learner.set(
        ema=config_for_function(param_ema).set(decay=0.5),
        loss_scale=DynamicLossScale.default_config().set(growth_interval=3),
        forward_fn_transformation=config_for_function(with_minibatch_steps).set(steps=2),
    )
    return cfg.set(**kwargs)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Returns a run with everything that stops early, where its programs are kept, and what it
    returned.
    """
    directory = tmp_path_factory.mktemp("straight")
    cache = str(directory / "cache")
    cfg = everything(directory / "run", compilation_cache_dir=cache, max_step=50)
    least = jax.config.jax_persistent_cache_min_compile_time_secs
    # A quick machine compiles all of them within a second.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    try:
        return *run(cfg, return_evaler_summaries={"at_end"}), directory
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", least)


def evaluated(recorder, wanted):
    return {step: loss for name, step, loss in recorder.evals if name == wanted}


def assert_equal_bits(a, b):
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    np.testing.assert_array_equal(a, b)


def better_steps(losses):
    """Returns the steps whose loss is above all before."""
    return [s for s in losses if losses[s] > max([-np.inf, *(losses[t] for t in range(1, s))])]


@pytest.mark.long
def test_run_stops_early_and_evaluates_at_its_end(straight):
    _, recorder, result, _ = straight
    (step, reason), losses = recorder.end, evaluated(recorder, "held_out")
    assert reason == "early stopping"
    assert list(losses) == list(range(1, step + 1))
    assert step == better_steps(losses)[-1] + 4 < 50  # three may pass, the fourth stops
    assert list(evaluated(recorder, "at_end")) == [step]
    assert float(result["evaler_summaries"]["at_end"]["loss"].mean) == losses[step]
    assert list(evaluated(recorder, "best")) == better_steps(losses)


@pytest.mark.long
def test_resumed_run_has_equal_counters(straight, tmp_path):
    whole, one, _, directory = straight
    step = one.end[0]
    cut_at = (step - 1) // SAVE_EVERY * SAVE_EVERY
    # Killed: nothing saved after this step exists.
    run_dir = shutil.copytree(directory / "run", tmp_path / "run")
    for checkpoint in (run_dir / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step_")) > cut_at:
            shutil.rmtree(checkpoint)
    resumed, second, _ = run(everything(run_dir, max_step=50))
    assert second.end == one.end
    assert second.losses == one.losses[cut_at:]
    late = [at for at in evaluated(one, "best") if at > cut_at]
    assert list(evaluated(second, "best")) == late
    for of_one, of_other in zip(whole.trainer_state, resumed.trainer_state, strict=True):
        jax.tree.map(assert_equal_bits, of_one, of_other)
    marks = json.loads(Path(run_dir, "run.json").read_text(encoding="utf-8"))["goodput"]
    assert [mark["step"] for mark in marks] == [*range(SAVE_EVERY, step, SAVE_EVERY), step]
    seconds = [mark["productive_seconds"] for mark in marks]
    assert seconds == sorted(seconds)


@pytest.mark.long
def test_state_after_run_with_all_features(straight):
    trainer, recorder, _, directory = straight
    step = recorder.end[0]
    state = trainer.trainer_state.learner
    assert float(state["loss_scale"]["scale"]) == 2.0 ** (15 + step // 3)

    averaged = state["ema"].ema["linear"]
    assert not np.array_equal(averaged["weight"], weights(trainer))
    xs, ys = examples_of(is_training=False)
    loss = np.mean((np.add(xs @ averaged["weight"], averaged["bias"])[:, 0] - ys) ** 2)
    np.testing.assert_allclose(evaluated(recorder, "held_out")[step], loss, rtol=1e-5)

    values = reported(directory / "run", "train_train")
    with_speed = [at for at, v in values.items() if "throughput/goodput" in v]
    assert with_speed == [at for at in range(1, step + 1) if at % 3 == 0]
    for at in with_speed:
        speed = {n.removeprefix("throughput/"): v for n, v in values[at].items()}
        assert speed["examples_per_second"] == pytest.approx(8 * speed["steps_per_second"])
        assert 0 < speed["mfu"] < 1
        assert 0 <= speed["goodput"] <= 1

    assert list((directory / "cache").iterdir())


def test_early_stopping_needs_an_evaler_of_the_run(tmp_path):
    cfg = everything(tmp_path, evalers={})
    with pytest.raises(
        EarlyStoppingError, match=r"'held_out', which the run does not have; it has none"
    ):
        cfg.instantiate(parent=None, devices=jax.devices()[:1])


class Mapped(Regression):
    """Model whose devices need equally many rows."""

    def forward(self, input_batch):
        x = jax.shard_map(lambda x: 2 * x, in_specs=P("data"), out_specs=P("data"))(
            input_batch["x"]
        )
        return super().forward(input_batch | {"x": x})


def test_layers_that_need_equal_parts_refuse_other_rows(tmp_path):
    arrays = Arrays(dict(zip("xy", examples_of(True), strict=True)))
    input_cfg = ArrayInput.default_config().set(arrays=arrays, global_batch_size=7)
    input_cfg.input_dispatcher = InputDispatcher.default_config().set(
        global_logical_batch_size=7, global_physical_batch_size=8
    )
    cfg = config(tmp_path, model=Mapped.default_config(), input=input_cfg, mesh_shape=(2, 1))
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:2])
    message = "7 rows does not divide over 2 devices.*; set global_batch_size to a multiple of 2"
    with pytest.warns(ShardingWarning), pytest.raises(InputDispatchError, match=message):
        trainer.compile_train_step()
