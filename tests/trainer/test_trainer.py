"""The trainer on the tiny language model: real data, real checkpoints, virtual devices."""

import glob
import json
import shutil
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.config import config_for_function
from weft.errors import (
    BatchShardingError,
    CheckpointSaveError,
    InputReadError,
    MeshError,
    RunDirError,
    UndefinedLossException,
)
from weft.hierarchy.causal_lm import Model
from weft.hierarchy.layers import Embedding
from weft.recipes.lm import lm_tiny
from weft.trainer.checkpointer import CheckpointValidationType, every_n_steps_policy
from weft.trainer.progress import RunListener
from weft.trainer.state_builder import (
    MergeStateConverter,
    MergeStateSelection,
    RestoreAndConvertBuilder,
    TensorStoreStateStorageBuilder,
)
from weft.trainer.trainer import aot_model_analysis


def config(directory, **kwargs):
    cfg = lm_tiny().set(dir=str(directory), evalers={}, max_step=4, mesh_shape=(1, 1))
    cfg.checkpointer.save_policy = config_for_function(every_n_steps_policy).set(n=10**6)
    for writer in cfg.summary_writer.writers.values():
        writer.write_every_n_steps = 1
    return cfg.set(**kwargs)


def trainer_of(cfg, devices=1):
    if jax.device_count() < devices:
        pytest.skip(f"needs {devices} devices; WEFT_TEST_DEVICES gives {jax.device_count()}")
    return cfg.instantiate(parent=None, devices=jax.devices()[:devices])


class Recorder(RunListener):
    def __init__(self, at_step=None):
        self.losses, self.saved, self.evals, self.at_step = {}, [], [], at_step
        self.failed = []

    def on_start(self, trainer, resumed_from):
        self.resumed_from = resumed_from

    def on_step(self, step, outputs, batch):
        self.losses[step] = float(outputs["loss"])
        if self.at_step is not None:
            self.at_step(step)

    def on_eval(self, name, step, summaries):
        self.evals.append((name, step))

    def on_checkpoint(self, step):
        self.saved.append(step)

    def on_save_failed(self, step, error):
        self.failed.append(step)

    def on_end(self, step, reason):
        self.end = (step, reason)


def run(cfg, devices=1, at_step=None, **kwargs):
    trainer, recorder = trainer_of(cfg, devices), Recorder(at_step)
    result = trainer.run(listener=recorder, **kwargs)
    return trainer, recorder, result


def assert_equal_states(a, b):
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.tree.map(lambda x: x, (a.trainer_state.model, a.trainer_state.learner)),
        (b.trainer_state.model, b.trainer_state.learner),
    )
    np.testing.assert_array_equal(*(jax.random.key_data(t.trainer_state.prng_key) for t in (a, b)))


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of four steps on one device, from start to end."""
    return run(config(tmp_path_factory.mktemp("straight")))


def test_a_run_learns_saves_and_reports(straight):
    trainer, recorder, result = straight
    assert list(recorder.losses) == [1, 2, 3, 4]
    assert recorder.losses[4] < recorder.losses[1]
    assert recorder.saved == [4]
    assert recorder.end == (4, "max_step")
    assert recorder.resumed_from is None
    assert trainer.step == 4
    assert result is None
    text = Path(trainer.config.dir, "summaries/train_train/summaries.jsonl").read_text()
    assert any("loss" in json.loads(line).get("values", {}) for line in text.splitlines())


def test_a_run_that_was_cut_ends_with_the_same_bits(straight, tmp_path):
    _, first, _ = run(config(tmp_path, max_step=2))
    trainer, second, _ = run(config(tmp_path))
    assert second.resumed_from == 2
    assert {**first.losses, **second.losses} == straight[1].losses
    assert_equal_states(trainer, straight[0])
    # A run that is at its end already does nothing more.
    assert run(config(tmp_path))[1].losses == {}


@pytest.mark.parametrize("shape", [(8, 1), (4, 2)])
def test_a_mesh_changes_neither_losses_nor_parameters(straight, tmp_path, shape):
    trainer, recorder, _ = run(config(tmp_path, mesh_shape=shape), devices=8)
    np.testing.assert_allclose(
        list(recorder.losses.values()), list(straight[1].losses.values()), rtol=1e-4
    )
    model, specs = trainer.trainer_state.model, trainer.trainer_state_partition_specs.model
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=2e-3),
        model,
        straight[0].trainer_state.model,
    )
    weight = model["decoder"]["emb"]["token_emb"]["weight"]
    assert weight.sharding.spec == specs["decoder"]["emb"]["token_emb"]["weight"]
    assert weight.addressable_shards[0].data.size == weight.size // shape[1]


def test_a_checkpoint_is_restored_onto_another_mesh(straight, tmp_path):
    run(config(tmp_path, max_step=2))
    _, recorder, _ = run(config(tmp_path, mesh_shape=(4, 2)), devices=8)
    assert recorder.resumed_from == 2
    np.testing.assert_allclose(recorder.losses[4], straight[1].losses[4], rtol=1e-4)


def test_a_signal_saves_and_stops(straight, tmp_path):
    def at_step(step):
        if step == 2:
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    _, recorder, _ = run(config(tmp_path), at_step=at_step)
    assert recorder.end == (2, "SIGTERM")
    assert recorder.saved == [2]
    assert signal.getsignal(signal.SIGTERM) is before
    assert_equal_states(run(config(tmp_path))[0], straight[0])


def test_the_step_is_traced_once_and_evaluation_is_returned(tmp_path, monkeypatch):
    traces = []
    forward = Model.forward
    monkeypatch.setattr(
        Model,
        "forward",
        lambda self, *args, **kwargs: (
            traces.append(self.is_training) or forward(self, *args, **kwargs)
        ),
    )
    cfg = config(tmp_path, evalers=lm_tiny().evalers)
    _, recorder, result = run(cfg, return_evaler_summaries=True)
    assert traces == [True, False]
    assert recorder.evals == [("held_out", 4)]
    assert set(result) == {"held_out"}
    assert 0 < float(jax.tree.leaves(result["held_out"]["loss"])[0]) < 8
    events = glob.glob(str(tmp_path / "summaries/held_out/**/*tfevents*"), recursive=True)
    assert events


def test_a_run_that_is_stopped_in_its_last_evaluation_ends_once(straight, tmp_path):
    class Stopped(Recorder):
        ends = ()

        def on_eval(self, name, step, summaries):
            super().on_eval(name, step, summaries)
            signal.raise_signal(signal.SIGTERM)

        def on_end(self, step, reason):
            self.ends = (*self.ends, (step, reason))

    shutil.copytree(straight[0].config.dir, tmp_path / "run")
    evaler = lm_tiny().evalers["held_out"]
    cfg = config(tmp_path / "run", evalers={"first": evaler, "second": evaler.clone()})
    listener = Stopped()
    assert trainer_of(cfg).run(listener=listener, return_evaler_summaries=True) is None
    assert listener.evals == [("first", 4)]
    assert listener.ends == ((4, "SIGTERM"),)


def test_the_model_may_compute_in_another_dtype(straight, tmp_path):
    trainer, recorder, _ = run(config(tmp_path, train_dtype=jnp.bfloat16))
    weights = jax.tree.leaves(trainer.trainer_state.model)
    assert {w.dtype for w in weights} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(recorder.losses[1], straight[1].losses[1], rtol=2e-2)
    assert recorder.losses[1] != straight[1].losses[1]


def test_what_fails_in_the_input_is_raised_and_the_rest_saved(straight, tmp_path, monkeypatch):
    trainer = trainer_of(config(tmp_path))
    batches = trainer.input.batches

    def failing(it):
        for i, batch in enumerate(batches(it)):
            if i == 2:
                raise InputReadError("trainer.input: record 2 of a.txt is bad")
            yield batch

    monkeypatch.setattr(trainer.input, "batches", failing, raising=False)
    with pytest.raises(InputReadError, match=r"record 2 of a.txt is bad"):
        trainer.run()
    assert_equal_states(run(config(tmp_path))[0], straight[0])


@pytest.fixture
def failing_at(tmp_path, monkeypatch):
    """A trainer that saves every second step; some saves fail."""

    def make(*steps, lacks_room):
        cfg = config(tmp_path)
        cfg.checkpointer.save_policy.n = 2
        trainer = trainer_of(cfg)
        save = trainer.checkpointer.save

        def failing(*, step, **kwargs):
            if step in steps:
                raise CheckpointSaveError(f"{step} cannot be saved: full.", lacks_room=lacks_room)
            return save(step=step, **kwargs)

        monkeypatch.setattr(trainer.checkpointer, "save", failing, raising=False)
        return trainer

    return make


def test_a_full_disk_ends_no_training_and_is_reported(failing_at, tmp_path, caplog):
    trainer, recorder = failing_at(2, lacks_room=True), Recorder()
    trainer.run(listener=recorder)
    assert "2 cannot be saved: full. Training continues from step 2." in caplog.text
    assert recorder.failed == [2]
    assert trainer.checkpointer.checkpoint_steps(trainer.checkpointer.config.dir) == [4]
    text = (tmp_path / "summaries/train_train/summaries.jsonl").read_text()
    assert next(json.loads(x) for x in text.splitlines() if "failed_saves" in x)["step"] == 2


def test_a_run_whose_last_step_is_not_saved_fails(failing_at, caplog):
    trainer = failing_at(4, lacks_room=True)
    with pytest.raises(CheckpointSaveError, match="4 cannot be saved"):
        trainer.run()
    assert trainer.checkpointer.checkpoint_steps(trainer.checkpointer.config.dir) == [2]


def test_a_save_that_fails_for_another_reason_fails_the_run(failing_at):
    trainer = failing_at(2, lacks_room=False)
    with pytest.raises(CheckpointSaveError, match="2 cannot be saved"):
        trainer.run()
    assert trainer.step == 2


def test_a_new_run_begins_with_parts_of_another(straight, tmp_path):
    """Its decoder but for one layer; the rest is drawn, and the run begins at step 0."""
    cfg = config(tmp_path, seed=5)
    cfg.init_state_builder = RestoreAndConvertBuilder.default_config().set(
        builder=TensorStoreStateStorageBuilder.default_config().set(
            base_dir=f"{straight[0].config.dir}/checkpoints",
            validation=CheckpointValidationType.CONTAINS_STATE,
        ),
        converter=MergeStateConverter.default_config().set(
            selection_regexes=[
                ("model/decoder/output_norm/.*", MergeStateSelection.TARGET),
                (r"(model/decoder/.*)", r"\1"),
            ]
        ),
    )
    trainer = trainer_of(cfg)
    assert trainer.restore_checkpoint() is None
    trainer.init(jax.random.key(5))
    assert trainer.step == 0
    found, source = trainer.trainer_state, straight[0].trainer_state
    scale = {
        name: state.model["decoder"]["output_norm"]
        for name, state in {"found": found, "source": source}.items()
    }
    assert float(jnp.abs(scale["found"]["scale"] - 1).max()) == 0  # as it is drawn
    assert float(jnp.abs(scale["source"]["scale"] - 1).max()) > 0
    jax.tree.map(
        np.testing.assert_array_equal,
        found.model["decoder"]["transformer"],
        source.model["decoder"]["transformer"],
    )
    assert all(not np.any(x) for x in jax.tree.leaves(found.learner))


def test_a_loss_that_is_no_number_ends_the_run(tmp_path):
    cfg = config(tmp_path, log_every_n_steps=1)
    cfg.model.decoder.emb.token_emb.set(scale=Embedding.Scale.CONSTANT, scale_constant=float("nan"))
    with pytest.raises(UndefinedLossException, match="the loss after step 1 is nan; the last"):
        run(cfg)


def test_what_does_not_fit_is_said_before_a_directory_is_made(tmp_path):
    with pytest.raises(MeshError, match=r"\(data=3, model=1\) needs 3 devices and there are 1"):
        run(config(tmp_path / "a", mesh_shape=(3, 1)))
    cfg = config(tmp_path / "b", mesh_shape=(8, 1))
    cfg.input.source.global_batch_size = 12
    with pytest.raises(BatchShardingError, match="12"):
        run(cfg, devices=8)
    wide = config(tmp_path / "c", mesh_shape=(1, 8))
    with pytest.raises(MeshError, match=r"does not divide over model = 8"):
        run(wide, devices=8)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_of_another_config_is_left_alone(straight):
    trainer = straight[0]
    other = config(trainer.config.dir)
    other.model.decoder.dim = 32
    with pytest.raises(RunDirError, match=r"model\.decoder\.dim"):
        run(other)


def test_the_step_can_be_compiled_ahead_and_analysed(tmp_path):
    compiled = trainer_of(config(tmp_path)).compile_train_step()
    text = aot_model_analysis(compiled)
    assert "argument: " in text
    assert "floating-point operations: " in text


def test_the_step_that_was_compiled_ahead_is_the_step(tmp_path):
    trainer = trainer_of(config(tmp_path))
    compiled = trainer.compile_train_step()
    trainer.init(jax.random.key(trainer.config.seed))
    batch = next(iter(trainer.input.batches(iter(trainer.input.dataset()))))
    with trainer.mesh():
        state, outputs = compiled(trainer.trainer_state, batch)
    assert np.isfinite(outputs["loss"])
    before = jax.tree.leaves(trainer.trainer_state_specs.model)
    assert [x.shape for x in jax.tree.leaves(state.model)] == [tuple(s.shape) for s in before]


def test_a_profile_is_written_for_the_steps_that_are_named(tmp_path):
    run(config(tmp_path, start_trace_steps=[2], n_steps_for_each_trace=1))
    assert list(tmp_path.glob("trace/step_00000002/**/*.xplane.pb"))


def test_an_error_of_the_model_shows_the_users_frames(tmp_path, monkeypatch, caplog):
    def forward(self, x):
        raise ZeroDivisionError("of the model")

    monkeypatch.setattr(Embedding, "forward", forward)
    trainer = trainer_of(config(tmp_path))
    raises = pytest.raises(ZeroDivisionError, match="of the model")
    with caplog.at_level("WARNING"), jax.log_compiles(), raises as caught:
        trainer.run(jax.random.key(0))
    frames = [entry.name for entry in caught.traceback if "/weft/" in str(entry.path)]
    # The calls of layers say where it was; only `run` itself is left of the trainer.
    assert frames[0] == "call" and set(frames[1:]) == {"forward", "__call__"}, frames
    assert len(frames) < 10
    assert caught.traceback[-1].name == "forward"
    assert "jit(new_state)" in caplog.text and "_init_state" not in caplog.text
