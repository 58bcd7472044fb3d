"""Injected faults: batches that make the loss NaN, or large, at chosen steps of a real training."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from weft import nnx
from weft.config import config_class, config_for_class, config_for_function
from weft.debug import anomalies
from weft.debug.anomalies import AnomalyPolicy
from weft.errors import AnomalyPolicyError, LossSpikeError, UndefinedLossException
from weft.hierarchy.base_layer import BaseLayer, BaseModel, ParameterSpec
from weft.input.fake import EmptyInput
from weft.trainer.checkpointer import every_n_steps_policy
from weft.trainer.hooks import Hook
from weft.trainer.learner import Learner
from weft.trainer.optimizers import chain, sgd_optimizer
from weft.trainer.optimizers.clipping import clip_by_global_norm
from weft.trainer.trainer import SpmdTrainer


class Weighted(BaseLayer):
    def _create_layer_parameter_specs(self):
        return {"scale": ParameterSpec(shape=(4,), mesh_axes=(None,))}

    def forward(self, x):
        return x * self.state["scale"][None]


class Rooted(BaseLayer):
    """Of negative numbers it makes NaN; its gradient at 0 is infinite."""

    def forward(self, x):
        return jnp.sqrt(x)


class Fitted(BaseModel):
    @config_class
    class Config(BaseModel.Config):
        pass

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("weighted", Weighted.default_config())
        self._add_child("rooted", Rooted.default_config())
        self._add_child("last", Weighted.default_config())

    def forward(self, input_batch):
        y = self.weighted(input_batch["x"]) ** 2 + input_batch["below"][:, None]
        return jnp.mean(self.last(self.rooted(y)) ** 2), {}


class Root(nnx.Module):
    def __call__(self, x):
        return jnp.sqrt(x)


class FittedOfNNX(nnx.Module):
    def __init__(self, *, rngs):
        self.first = nnx.Linear(4, 4, use_bias=False, rngs=rngs)
        self.rooted = Root()
        self.last = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, input_batch):
        y = self.rooted(self.first(input_batch["x"]) ** 2)
        return jnp.mean(self.last(y) ** 2), {}


def plain_sgd():
    return config_for_function(sgd_optimizer).set(learning_rate=0.01, decouple_weight_decay=True)


def finite_parts_only():
    """Drops what of a gradient is undefined, and says nothing."""

    def finite(updates, params):
        return jax.tree.map(lambda u: jnp.where(jnp.isfinite(u), u, 0), updates)

    return optax.chain(optax.stateless(finite), optax.sgd(0.01))


class Faulty(EmptyInput):
    """Input whose batch k is always the k-th; `faults` gives the fault of each batch."""

    @config_class
    class Config(EmptyInput.Config):
        faults: dict = {}

    def _global_batch(self, rng):
        k = int(rng.bit_generator.seed_seq.entropy)
        size = self.config.global_batch_size
        x = rng.uniform(0.5, 1.0, size=(size, 4)).astype(np.float32)
        fault = self.config.faults.get(str(k))
        below = np.full(size, -1e3 if fault == "negative" else 0.0, np.float32)
        scale = {"large": 30.0, "steep": 1e10, "zero": 0.0, "nan": np.nan}.get(fault, 1.0)
        return {"x": (x * scale).astype(np.float32), "below": below}


class Recorder(Hook):
    def __init__(self):
        self.losses, self.steps, self.saved, self.dispatched = {}, [], [], []

    def on_start(self, trainer, resumed_from):
        self.trainer, self.resumed_from = trainer, resumed_from

    def on_step(self, step, outputs, batch):
        self.steps.append(step)
        self.dispatched.append(self.trainer.step)
        self.losses[step] = float(outputs["loss"])

    def on_checkpoint(self, step):
        self.saved.append(step)


def run(
    directory,
    faults,
    *,
    devices=1,
    save_every=10**6,
    max_step=10,
    model=None,
    optimizer=None,
    **policy,
):
    cfg = SpmdTrainer.default_config().set(
        name="trainer",
        dir=str(directory),
        max_step=max_step,
        model=model or Fitted.default_config().set(dtype=jnp.float32),
        learner=Learner.default_config().set(optimizer=optimizer or plain_sgd()),
        input=Faulty.default_config().set(
            is_training=True, global_batch_size=8, faults={str(k): v for k, v in faults.items()}
        ),
        mesh_shape=(devices,),
        mesh_axis_names=("data",),
    )
    cfg.checkpointer.save_policy = config_for_function(every_n_steps_policy).set(n=save_every)
    if policy:
        cfg.anomaly_policy = AnomalyPolicy.default_config().set(**policy)
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:devices])
    recorder = Recorder()
    trainer.recorder = recorder
    trainer.run(listener=recorder)
    return trainer


def weights(trainer):
    return jax.tree.map(np.asarray, trainer.trainer_state.model)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, weights(a), weights(b))


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (
            "negative",
            "step 4 is undefined: its loss is nan. The first module with an undefined output is "
            "trainer.model.rooted, a Rooted (forward). Parameters undefined by its update: "
            "last/scale, weighted/scale. Its update was not applied; the last checkpoint",
        ),
        (
            "zero",
            "step 4 is undefined: its loss is 0. The outputs of all modules are finite. In the "
            "backward pass the first module with an undefined gradient is trainer.model.rooted, a "
            "Rooted (forward). Undefined gradients, in backward order: weighted/scale. Parameters "
            "undefined by its update: weighted/scale. Its update",
        ),
        (
            "nan",
            "its loss is nan. The batch has undefined numbers in x. The first module with an "
            "undefined output is trainer.model.weighted, a Weighted (forward). Parameters",
        ),
    ],
)
def test_error_names_step_module_and_parameters(tmp_path, fault, told):
    with pytest.raises(UndefinedLossException) as stopped:
        run(tmp_path, {3: fault}, on_undefined="stop")
    assert told in str(stopped.value)
    first = {
        "negative": "The first loss of the run was finite, so look first at the learning rate: low",
        "zero": "Look there first for a root or norm of 0, whose derivative is infinite, and",
        "nan": "The batch has undefined numbers in x: look at the input first. Look then at the le",
    }
    assert f"the last checkpoint predates it. {first[fault]}" in str(stopped.value)
    assert "anomaly_policy.on_undefined='skip' skips such steps." in str(stopped.value)


@pytest.mark.parametrize("step", [0, 3])
def test_undefined_gradients_of_the_first_step_are_not_due_to_the_learning_rate(tmp_path, step):
    with pytest.raises(UndefinedLossException, match="derivative is infinite") as stopped:
        run(tmp_path, {step: "zero"}, on_undefined="stop")
    assert ("Look then at the learning rate" in str(stopped.value)) == (step > 0)


def test_undefined_gradient_with_a_finite_loss_is_named(tmp_path):
    hidden = config_for_function(finite_parts_only)
    with pytest.raises(UndefinedLossException) as stopped:
        run(
            tmp_path,
            {3: "zero"},
            model=config_for_class(FittedOfNNX),
            optimizer=hidden,
            on_undefined="stop",
        )
    assert (
        "The outputs of all modules are finite. In the backward pass the first module with an "
        "undefined gradient is trainer.model.rooted, a Root (__call__). Undefined gradients, in "
        "backward order: params/first/kernel. Its update was not applied"
    ) in str(stopped.value)


def test_undefined_update_with_finite_gradients_is_named(tmp_path):
    too_far = config_for_function(sgd_optimizer).set(
        learning_rate=float("inf"), decouple_weight_decay=True
    )
    with pytest.raises(UndefinedLossException) as stopped:
        run(tmp_path, {}, optimizer=too_far, on_undefined="stop")
    told = "The gradients are finite too; the learner's update is not. Parameters undefined by its"
    assert f"outputs of all modules are finite. {told} update: last/scale, wei" in str(
        stopped.value
    )


def test_gradient_norm_is_computed_once():
    clip = clip_by_global_norm(1.0)

    def clipped(gradient):
        return clip.update(gradient, clip.init(gradient), gradient)[0]

    def apply_to_step(gradient):
        return clipped(gradient), anomalies._undefined_leaves(gradient)

    def passes(f):
        text = jax.jit(f).lower({"w": jnp.ones((64, 64))}).compile().as_text()
        return text[text.index("ENTRY ") :].count('/reduce_sum"')

    # Branches for values beyond float32 are next to the program's entry.
    assert [passes(f) for f in (clipped, apply_to_step)] == [1, 1]


def test_large_gradients_are_clipped_and_count_as_gradients(tmp_path):
    clipped = config_for_function(chain).set(
        args=[config_for_function(clip_by_global_norm).set(max_norm=1.0), plain_sgd()]
    )
    faults = {2: "steep"}
    before = run(tmp_path, faults, max_step=2, optimizer=clipped, on_undefined="stop")
    after = run(tmp_path, faults, max_step=3, optimizer=clipped, on_undefined="stop")
    assert 1e19 < after.recorder.losses[3] < np.inf
    change = jax.tree.map(np.subtract, weights(after), weights(before))
    np.testing.assert_allclose(optax.tree.norm(change), 0.01, rtol=1e-4)


@pytest.fixture(scope="module")
def skipped(tmp_path_factory):
    return run(tmp_path_factory.mktemp("skip"), {3: "nan", 5: "zero"}, on_undefined="skip")


def test_skipped_step_changes_nothing_and_is_counted(skipped, caplog, tmp_path):
    assert skipped.recorder.steps == list(range(1, 11))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(weights(skipped)))
    assert skipped._run_state.get_state()["anomalies"]["skipped"] == 2
    # On eight devices all decide the same.
    with caplog.at_level(logging.WARNING):
        wide = run(tmp_path, {3: "nan", 5: "zero"}, devices=8, on_undefined="skip")
    assert "The step is skipped; 1 so far." in caplog.text and "; 2 so far." in caplog.text
    assert "step 6 is undefined: its loss is 0. The outputs of all modules are fini" in caplog.text
    assert wide._run_state.get_state()["anomalies"]["skipped"] == 2
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), weights(wide), weights(skipped)
    )


def test_skipped_steps_are_counted_across_restarts(skipped, tmp_path):
    faults = {3: "nan", 5: "zero"}
    run(tmp_path, faults, max_step=5, on_undefined="skip")
    again = run(tmp_path, faults, on_undefined="skip")
    assert again.recorder.resumed_from == 5
    assert_same(again, skipped)
    assert again._run_state.get_state() == skipped._run_state.get_state()


def test_too_many_skips_stop_the_run(tmp_path):
    with pytest.raises(UndefinedLossException, match=r" 2 consecutive steps were skipped\."):
        run(tmp_path, {2: "nan", 3: "nan"}, on_undefined="skip", max_skips_in_a_row=2)


def test_spikes_are_detected_from_earlier_losses(tmp_path):
    spikes = {"spike_factor": 3.0, "spike_min_steps": 4, "spike_decay": 0.5}
    # Before there were enough steps nothing is known of the loss.
    early = run(tmp_path / "early", {1: "large"}, on_spike="stop", **spikes)
    assert early.recorder.losses[2] > 100 * early.recorder.losses[1]
    with pytest.raises(LossSpikeError, match=r"the loss of step 8 is \d+.*, and was 0\.\d+ on av"):
        run(tmp_path / "stop", {7: "large"}, on_spike="stop", **spikes)
    skipped = run(tmp_path / "skip", {7: "large"}, on_spike="skip", **spikes)
    assert skipped._run_state.get_state()["anomalies"]["skipped"] == 1
    by_stddev = {"spike_stddevs": 20.0, "spike_min_steps": 4, "spike_decay": 0.5}
    again = run(tmp_path / "stddev", {7: "large"}, on_spike="skip", **by_stddev)
    assert_same(again, skipped)


def test_rewind_restores_the_state_but_not_the_data_position(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        run_ = run(tmp_path / "a", {5: "nan"}, save_every=4, on_undefined="rewind")
    # The sixth batch is bad; the steps after the checkpoint are run with the batches behind it.
    assert run_.recorder.steps == [1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10]
    assert "restores its last checkpoint and continues with later batches: rewind 1 of" in (
        caplog.text
    )
    # Before the first checkpoint it goes back to the start.
    start = run(tmp_path / "c", {1: "nan"}, on_undefined="rewind")
    assert start.recorder.steps == [1, *range(1, 11)]
    # Cut while it is past a rewind, the run ends with the same bits.
    run(tmp_path / "d", {5: "nan"}, save_every=4, max_step=7, on_undefined="rewind")
    again = run(tmp_path / "d", {5: "nan"}, save_every=4, on_undefined="rewind")
    assert again.recorder.resumed_from == 7
    assert_same(again, run_)


@pytest.mark.parametrize("max_step", [4, 10])
def test_bad_step_is_not_saved_if_a_save_is_due(tmp_path, max_step):
    run_ = run(tmp_path, {3: "nan"}, save_every=4, max_step=max_step, on_undefined="rewind")
    assert run_.recorder.steps == [1, 2, 3, *range(1, max_step + 1)]
    assert run_.recorder.saved == [x for x in (4, 8, 10) if x <= max_step]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(weights(run_)))


def test_next_step_runs_while_the_host_judges_the_last(tmp_path):
    run_ = run(tmp_path, {}, max_step=6, save_every=4, on_undefined="skip")
    # Before a save, it waits.
    assert run_.recorder.dispatched == [2, 3, 4, 4, 6, 6]


def test_too_many_rewinds_stop_the_run(tmp_path):
    faults = dict.fromkeys(range(3, 50), "nan")
    with pytest.raises(UndefinedLossException, match=r"The run was already rewound 2 times\."):
        run(tmp_path, faults, save_every=2, on_undefined="rewind", max_rewinds=2)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"on_spike": "skip"}, r"no threshold is set\. Set spike_stddevs=8\.0 or"),
        ({"spike_decay": 1.0}, r"spike_decay=1; expected a number between 0 and 1, such as 0\.98"),
    ],
    ids=["threshold", "decay"],
)
def test_contradictory_fields_are_rejected(fields, told):
    with pytest.raises(AnomalyPolicyError, match=told):
        AnomalyPolicy.default_config().set(**fields).instantiate()
