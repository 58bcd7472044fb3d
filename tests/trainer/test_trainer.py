"""The trainer on small language models: real data, real checkpoints, virtual devices."""

import glob
import json
import os
import shutil
import signal
import time
import urllib.request
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.sockets import connected, reading
from tests.trainer.language_models import Bigrams
from tests.trainer.test_state import OPTIMIZER
from weft.config import REQUIRED, config_class, config_for_function
from weft.debug.anomalies import AnomalyPolicy
from weft.distributed.peers import Peers, StopRequest, use_peers
from weft.distributed.preemption import StopRun
from weft.errors import (
    ArgumentValueError,
    BatchShardingError,
    CheckpointSaveError,
    InputReadError,
    MeshError,
    ProcessesNotReadyError,
    RunDirError,
    RunDirMovedError,
    RunDirTakenError,
    UndefinedLossException,
)
from weft.hierarchy.base_layer import BaseModel
from weft.hierarchy.causal_lm import Model
from weft.hierarchy.layers import Embedding, Linear
from weft.input import Input
from weft.input.fake import FakeLmInput
from weft.recipes.lm import lm_tiny
from weft.report.live import RunStatus
from weft.trainer import mesh, run_dir
from weft.trainer.aot_compilation import aot_model_analysis
from weft.trainer.base import jit_train_step
from weft.trainer.checkpointer import CheckpointValidationType, every_n_steps_policy, retries
from weft.trainer.checkpointer.dirs import step_dirs
from weft.trainer.checkpointer.saving import CheckpointHook
from weft.trainer.compilation import compilation_cache
from weft.trainer.hooks import Hook, Hooks
from weft.trainer.learner import Learner
from weft.trainer.state_builder import (
    MergeStateConverter,
    MergeStateSelection,
    RestoreAndConvertBuilder,
    TensorStoreStateStorageBuilder,
)
from weft.trainer.trainer import SpmdTrainer, run_context


def config(directory, **kwargs):
    cfg = lm_tiny().set(dir=str(directory), evalers={}, max_step=4, mesh_shape=(1, 1))
    cfg.learner.optimizer.inner.learning_rate.max_step = 60
    cfg.checkpointer.save_policy = config_for_function(every_n_steps_policy).set(n=10**6)
    for writer in cfg.summary_writer.writers.values():
        writer.write_every_n_steps = 1
    return cfg.set(**kwargs)


def small_config(directory, **kwargs):
    return config(directory, model=Bigrams.default_config(), **kwargs)


def trainer_of(cfg, devices=1):
    if jax.device_count() < devices:
        pytest.skip(f"needs {devices} devices; WEFT_TEST_DEVICES gives {jax.device_count()}")
    return cfg.instantiate(parent=None, devices=jax.devices()[:devices])


class Recorder(Hook):
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
    """Returns a run of four steps on one device, from start to end."""
    return run(config(tmp_path_factory.mktemp("straight")))


def test_run_learns_saves_and_reports(straight):
    trainer, recorder, result = straight
    assert list(recorder.losses) == [1, 2, 3, 4]
    assert recorder.losses[4] < recorder.losses[1]
    assert recorder.saved == [4]
    assert recorder.end == (4, "max_step")
    assert recorder.resumed_from is None
    assert trainer.step == 4
    assert float(result["loss"]) == recorder.losses[4] and "aux" in result
    text = Path(trainer.config.dir, "summaries/train_train/summaries.jsonl").read_text(
        encoding="utf-8"
    )
    assert any("loss" in json.loads(line).get("values", {}) for line in text.splitlines())


def test_unknown_evalers_are_refused(straight):
    with pytest.raises(ArgumentValueError, match="names 'held_in', which is not one of the eval"):
        straight[0].run(return_evaler_summaries={"held_in"})


def test_run_calls_overridden_save_method(tmp_path):
    class Counting(SpmdTrainer):
        saves = 0

        def save_checkpoint(self, evaler_summaries, *, force=False):
            self.saves += 1
            return super().save_checkpoint(evaler_summaries, force=force)

    cfg = small_config(tmp_path, max_step=1)
    items = {name: value for name, value in cfg.items() if name != "klass"}
    trainer, recorder, _ = run(Counting.default_config().set(**items))
    assert recorder.saved == [1]
    assert trainer.saves > 0


def test_interrupted_run_ends_bitwise_equal(straight, tmp_path):
    _, first, _ = run(config(tmp_path, max_step=2))
    trainer, second, _ = run(config(tmp_path))
    assert second.resumed_from == 2
    assert {**first.losses, **second.losses} == straight[1].losses
    assert_equal_states(trainer, straight[0])
    # A run that is at its end already does nothing more.
    assert run(config(tmp_path))[1].losses == {}


def copied_config(directory, url, **kwargs):
    cfg = small_config(directory, **kwargs)
    cfg.checkpointer.copy_to = url
    return cfg


def test_run_without_directory_continues_from_its_copy(small, tmp_path):
    url = "memory://bucket/continued"
    run(copied_config(tmp_path, url, max_step=2))
    shutil.rmtree(tmp_path)
    trainer, recorder, _ = run(copied_config(tmp_path, url))
    assert recorder.resumed_from == 2
    assert_equal_states(trainer, small)
    assert len(run_dir.read_record(tmp_path)["starts"]) == 2


def test_run_continues_from_its_copy_with_the_schedule_it_began_with(tmp_path):
    def longer(max_step):
        cfg = copied_config(tmp_path, "memory://bucket/longer", max_step=max_step)
        cfg.learner.optimizer.inner.learning_rate.max_step = REQUIRED
        return cfg

    run(longer(2))
    shutil.rmtree(tmp_path)
    with pytest.raises(RunDirError, match="its run began with another max_step"):
        run(longer(3))
    assert run(longer(3))[1].resumed_from == 2
    assert run_dir.read_record(tmp_path)["schedule_steps"] == 2


def test_checkpoint_is_restored_onto_another_mesh(straight, tmp_path):
    run(config(tmp_path, max_step=2))
    trainer, recorder, _ = run(config(tmp_path, mesh_shape=(4, 2)), devices=8)
    assert recorder.resumed_from == 2
    for step in (3, 4):
        np.testing.assert_allclose(recorder.losses[step], straight[1].losses[step], rtol=1e-4)
    model, specs = trainer.trainer_state.model, trainer.trainer_state_partition_specs.model
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=2e-3),
        model,
        straight[0].trainer_state.model,
    )
    weight = model["decoder"]["emb"]["token_emb"]["weight"]
    assert weight.sharding.spec == specs["decoder"]["emb"]["token_emb"]["weight"]
    assert weight.addressable_shards[0].data.size == weight.size // 2


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Returns a trainer after four steps of the smallest model, from start to end."""
    return run(small_config(tmp_path_factory.mktemp("small")))[0]


def test_signal_saves_and_stops(small, tmp_path):
    def at_step(step):
        if step == 2:
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    _, recorder, _ = run(small_config(tmp_path), at_step=at_step)
    assert recorder.end == (2, "SIGTERM")
    assert recorder.saved == [2]
    assert signal.getsignal(signal.SIGTERM) is before
    assert_equal_states(run(small_config(tmp_path))[0], small)


def test_step_is_traced_once_and_evaluation_is_returned(tmp_path, monkeypatch):
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
    assert set(result) == {"loss", "aux", "evaler_summaries"}
    assert 0 < float(result["loss"]) < 8
    assert set(result["evaler_summaries"]) == {"held_out"}
    assert 0 < float(jax.tree.leaves(result["evaler_summaries"]["held_out"]["loss"])[0]) < 8
    events = glob.glob(str(tmp_path / "summaries/held_out/**/*tfevents*"), recursive=True)
    assert events


def test_run_stopped_in_last_evaluation_ends_once(straight, tmp_path):
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


def test_input_error_is_raised_after_saving(small, tmp_path, monkeypatch):
    trainer = trainer_of(small_config(tmp_path))
    batches = trainer.input.batches

    def failing(it):
        for i, batch in enumerate(batches(it)):
            if i == 2:
                raise InputReadError("trainer.input: record 2 of a.txt is bad")
            yield batch

    monkeypatch.setattr(trainer.input, "batches", failing, raising=False)
    with pytest.raises(InputReadError, match=r"record 2 of a.txt is bad"):
        trainer.run()
    assert_equal_states(run(small_config(tmp_path))[0], small)


@pytest.fixture
def failing_at(tmp_path, monkeypatch):
    """Returns a trainer that saves every second step; some saves fail."""
    monkeypatch.setattr(retries, "PAUSES_SECONDS", (0.0, 0.0, 0.0))

    def make(*steps, **how):
        cfg = small_config(tmp_path)
        cfg.checkpointer.save_policy.n = 2
        trainer = trainer_of(cfg)
        save = trainer.checkpointer.save

        def failing(*, step, **kwargs):
            if step in steps:
                raise CheckpointSaveError(f"{step} cannot be saved: full.", **how)
            return save(step=step, **kwargs)

        monkeypatch.setattr(trainer.checkpointer, "save", failing, raising=False)
        return trainer

    return make


@pytest.mark.parametrize("progress", [True, False])
@pytest.mark.parametrize("why", ["lacks_room", "of_file_system"])
def test_training_continues_on_a_full_disk(progress, why, failing_at, tmp_path, caplog, capsys):
    trainer, recorder = failing_at(2, **{why: True}), Recorder()
    trainer.run(listener=recorder, progress=progress)
    text = "2 cannot be saved: full."
    assert (f"{text} Training continues from step 2." in caplog.text) == (not progress)
    assert (f"step 2  NOT SAVED: {text}" in capsys.readouterr().err) == progress
    assert recorder.failed == [2]
    assert trainer.checkpointer.checkpoint_steps(trainer.checkpointer.config.dir) == [4]
    text = (tmp_path / "summaries/train_train/summaries.jsonl").read_text(encoding="utf-8")
    assert next(json.loads(x) for x in text.splitlines() if "failed_saves" in x)["step"] == 2


def test_renamed_directory_ends_the_run_before_its_next_save(small, tmp_path):
    def rename(step):
        if step == 3:
            os.rename(tmp_path / "run", tmp_path / "renamed")

    cfg = small_config(tmp_path / "run")
    cfg.checkpointer.set(asynchronous=False).save_policy.n = 2
    with pytest.raises(RunDirMovedError, match=rf"was renamed to '{tmp_path}/renamed' while this"):
        trainer_of(cfg).run(listener=Recorder(at_step=rename))
    assert not (tmp_path / "run" / "checkpoints").exists()
    # It continues there.
    trainer, recorder, _ = run(small_config(tmp_path / "renamed"))
    assert recorder.resumed_from == 2
    assert_equal_states(trainer, small)


def test_run_without_saved_last_step_fails(failing_at, caplog):
    trainer = failing_at(4, lacks_room=True)
    with pytest.raises(CheckpointSaveError, match="4 cannot be saved"):
        trainer.run()
    assert trainer.checkpointer.checkpoint_steps(trainer.checkpointer.config.dir) == [2]


def test_initial_state_from_another_run(straight, tmp_path):
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


@pytest.mark.parametrize("chosen", ["", "JAX_PLATFORMS=cpu", "CUDA_VISIBLE_DEVICES="])
def test_run_on_the_cpu_beside_a_gpu(chosen, tmp_path, monkeypatch, caplog):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(mesh, "_GPU_FILES", str(tmp_path / "nvidia[0-9]*"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen.startswith("CUDA"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", "cpu" if chosen.startswith("JAX") else None)
    try:
        run(small_config(tmp_path / "run", max_step=0))
    finally:
        jax.config.update("jax_platforms", before)
    command = f'-m pip install "jax[cuda12]=={jax.__version__}"'
    assert caplog.text.count(command) == (not chosen)
    assert ("This machine has a GPU, but this run uses the CPU" in caplog.text) == (not chosen)


class Undefined(Bigrams):
    def forward(self, input_batch):
        loss, aux = super().forward(input_batch)
        return loss * jnp.nan, aux


def test_nan_loss_ends_the_run(tmp_path):
    cfg = config(tmp_path, log_every_n_steps=1, model=Undefined.default_config())
    with pytest.raises(UndefinedLossException, match="the loss after step 1 is nan; the last"):
        run(cfg)


def test_config_errors_precede_the_run_directory(tmp_path):
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


def test_directory_of_other_config_is_rejected(straight):
    trainer = straight[0]
    other = config(trainer.config.dir)
    other.model.decoder.dim = 32
    with pytest.raises(RunDirError, match=r"model\.decoder\.dim"):
        run(other)


def test_run_whose_directory_was_taken_saves_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr("weft.trainer.run_lock._BEAT_SECONDS", 0.01)

    def take(step):
        if step == 3:
            owner = {"host": "gpu07", "pid": 1, "started": "now", "machine": "", "token": ""}
            (tmp_path / "run.lock").write_text(json.dumps(owner), encoding="utf-8")
            time.sleep(0.1)

    cfg = small_config(tmp_path)
    with pytest.raises(RunDirTakenError, match="was taken by a run on host gpu07, pid 1"):
        run(cfg, at_step=take)
    assert not step_dirs(str(tmp_path / "checkpoints"))
    assert (tmp_path / "run.lock").exists()


def test_step_compiled_ahead_of_time_is_analyzed_and_runs(tmp_path):
    trainer = trainer_of(config(tmp_path))
    compiled = trainer.compile_train_step()
    text = aot_model_analysis(compiled)
    assert "argument: " in text
    assert "floating-point operations: " in text
    trainer.init(jax.random.key(trainer.config.seed))
    batch = next(iter(trainer.input.batches(iter(trainer.input.dataset()))))
    with trainer.mesh():
        state, outputs = compiled(trainer.trainer_state, batch)
    assert np.isfinite(outputs["loss"])
    before = jax.tree.leaves(trainer.trainer_state_specs.model)
    assert [x.shape for x in jax.tree.leaves(state.model)] == [tuple(s.shape) for s in before]


def test_trace_of_the_last_step_ends_with_the_run(tmp_path):
    # A trace of Python as well would take seconds.
    tracing = {"start_trace_process_indices": "all", "python_tracer_level": 0}
    run(small_config(tmp_path, start_trace_steps=[4], n_steps_for_each_trace=10, **tracing))
    assert list(tmp_path.glob("trace/step_00000004/**/*.xplane.pb"))


def test_error_of_the_model_shows_the_users_frames(tmp_path, monkeypatch, caplog):
    def forward(self, x):
        raise ZeroDivisionError("of the model")

    monkeypatch.setattr(Embedding, "forward", forward)
    trainer = trainer_of(config(tmp_path))
    raises = pytest.raises(ZeroDivisionError, match="of the model")
    with caplog.at_level("WARNING"), jax.log_compiles(), raises as caught:
        trainer.run(jax.random.key(0))
    frames = [entry.name for entry in caught.traceback if "/weft/" in str(entry.path)]
    # Only calls of layers remain.
    assert set(frames) == {"forward"}, frames
    assert len(frames) < 10
    assert caught.traceback[-1].name == "forward"
    assert "jit(new_state)" in caplog.text and "_init_state" not in caplog.text


def test_status_page_shows_the_current_activity(tmp_path, capsys):
    cfg = lm_tiny().set(dir=str(tmp_path), status_port=0)
    with run_context(cfg) as (stop, (status,)):
        assert isinstance(status, RunStatus)
        stop.doing("running step 7")
        url = capsys.readouterr().err.split()[-1]
        with urllib.request.urlopen(f"{url}json", timeout=10) as answer:
            assert json.load(answer)["doing"] == "running step 7"
        signal.raise_signal(signal.SIGTERM)
        assert stop.stop_requested


def test_missing_process_is_named_before_the_first_collective(tmp_path, monkeypatch):
    monkeypatch.setattr("weft.distributed.peers._ACTIVITY_SECONDS", 0.1)
    cfg = lm_tiny().set(dir=str(tmp_path), readiness_timeout_seconds=0.3)
    here, there = connected()
    reading(there)
    names = {1: "process 1 of 2 (host h, pid 7)"}
    with (
        pytest.raises(ProcessesNotReadyError, match=r"within 0\.3 s: process 1 of 2 .*starting"),
        use_peers(Peers(0, {1: here}, names, end_seconds=1e6)),
        run_context(cfg),
    ):
        raise AssertionError("the run continues without it")


def test_stop_before_the_first_step_ends_the_run(tmp_path, monkeypatch):
    recorder = Recorder()

    def stopped(*args, **kwargs):
        raise StopRun(StopRequest("signal", "SIGTERM"))

    monkeypatch.setattr("weft.trainer.agreement.check_processes_agree", stopped)
    assert trainer_of(config(tmp_path)).run(jax.random.key(0), listener=recorder) is None
    assert recorder.end == (0, "SIGTERM")


class LinearModel(BaseModel):
    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        linear = Linear.default_config().set(input_dim=4, output_dim=6, bias=False)
        self._add_child("linear", linear.set(param_partition_spec=(None, "model")))

    def forward(self, input_batch):
        return self.linear(jax.nn.one_hot(input_batch["input_ids"], 4)).mean(), {}


class Program:
    """A step on a mesh of two devices, and the state before the first one."""

    def __init__(self, **fields):
        cfg = SpmdTrainer.default_config().set(
            name="trainer",
            dir="",
            model=LinearModel.default_config(),
            learner=Learner.default_config().set(optimizer=OPTIMIZER),
            input=FakeLmInput.default_config().set(
                is_training=True, global_batch_size=2, source_length=2, max_token_id=4
            ),
            mesh_shape=(1, 2),
            mesh_axis_names=("data", "model"),
        )
        self.trainer = trainer_of(cfg.set(**fields), devices=2)
        self.mesh, self.step = self.trainer.mesh, jit_train_step(self.trainer)

    def state(self):
        self.trainer.init(jax.random.key(0))
        return self.trainer.trainer_state


def test_step_donates_the_state_and_keeps_shardings():
    program = Program()
    state = program.state()
    weight = state.model["linear"]["weight"]
    first = np.asarray(weight)
    with program.mesh():
        ids = np.ones((2, 2), np.int32)
        after, outputs = program.step(state, {"input_ids": ids, "target_labels": ids})
    assert weight.is_deleted()
    moved = after.model["linear"]["weight"]
    assert moved.sharding.spec == P(None, "model")
    assert np.all(np.asarray(moved)[1] < first[1])
    assert outputs["loss"].sharding.is_fully_replicated


@pytest.mark.parametrize("policy", [None, AnomalyPolicy.default_config()], ids=["plain", "guarded"])
def test_lowered_step_names_modules_and_arguments(policy):
    program = Program(anomaly_policy=policy)
    ids = np.ones((2, 2), np.int32)
    with program.mesh():
        batch = {"input_ids": ids, "target_labels": ids}
        lowered = program.step.trace(program.state(), batch).lower()
    text = lowered.as_text(debug_info=True)
    assert "module @jit_train_step" in text
    assert "model['linear']['weight']\"" in text and "\"batch['input_ids']\"" in text
    compiled = lowered.compile().as_text()
    assert 'op_name="jit(train_step)/' in compiled
    for path in ("jvp(model)/linear/", "transpose(jvp(model))/linear/", "learner/optimizer"):
        assert path in compiled


def test_gradient_indivisible_by_mesh_is_named():
    with pytest.raises(MeshError, match=r"gradients\.linear\.weight .* no axis \['fsdp'\]"):
        kinds = SpmdTrainer.default_config().rules_by_kind.set(gradients=[("model", "fsdp")])
        Program(rules_by_kind=kinds)


FULL = CheckpointSaveError("full", lacks_room=True)
BROKEN = CheckpointSaveError("broken")


class Saving:
    """A trainer and a checkpointer whose saves and waits have these results."""

    step = 0

    def __init__(self, saves, waits, hooks):
        self.saves, self.waits = list(saves), list(waits)
        self.hooks = Hooks(hooks)

    def save_checkpoint(self, evaler_summaries, *, force=False):
        return self.take(self.saves)

    def wait_until_finished(self):
        return self.take(self.waits)

    @staticmethod
    def take(results):
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result


def checkpoints(saves, recorder, waits=()):
    trainer = Saving(saves, waits, {"recorder": recorder})
    return CheckpointHook(trainer, trainer, logs_failures=False)


def test_state_of_an_undone_step_is_not_saved():
    checkpoints([], Recorder()).after_step(7, {}, {})


@pytest.mark.parametrize(
    ("saves", "waits", "saved", "reported"),
    [
        ([True], [None], True, 0),
        ([False], [None], False, 0),
        ([FULL, False], [None], False, 1),  # an earlier one had failed, the last has begun
        ([False, True], [FULL, None], True, 1),  # the last one itself failed, and is tried again
        ([FULL, FULL, FULL, True], [None], True, 1),  # it may pass
        ([True, FULL, FULL, FULL], [FULL], None, 1),
        ([BROKEN], [], None, 0),
        ([True], [BROKEN], None, 0),
    ],
)
def test_last_step_is_saved_or_the_run_fails(monkeypatch, saves, waits, saved, reported):
    monkeypatch.setattr(retries, "PAUSES_SECONDS", (0.0, 0.0, 0.0))
    recorder = Recorder()
    hook = checkpoints(saves, recorder, waits)
    if saved is None:
        with pytest.raises(CheckpointSaveError, match=r"full|broken"):
            hook.save_last()
    else:
        hook.save_last()
    assert (bool(recorder.saved), len(recorder.failed)) == (bool(saved), reported)


@pytest.fixture(autouse=True)
def cache_small_programs():
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


def test_compilation_cache_stores_programs_while_open(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    with compilation_cache(str(tmp_path)):
        jax.jit(lambda x: jnp.sin(x) + 17.25)(jnp.ones(3))
    kept = list(tmp_path.iterdir())
    assert kept
    assert jax.config.jax_compilation_cache_dir == before
    jax.jit(lambda x: jnp.sin(x) + 18.25)(jnp.ones(3))
    assert list(tmp_path.iterdir()) == kept


class GeneratedInput(Input):
    """The batches of a fake input, from a generator."""

    @config_class
    class Config(Input.Config):
        is_training: bool = False

    def dataset(self):
        fake = FakeLmInput.default_config().set(name="fake", is_training=self.config.is_training)
        fake.set(global_batch_size=8, source_length=32, max_token_id=100)
        yield from fake.instantiate(parent=None).dataset()


def test_position_in_a_generator_is_counted(tmp_path, caplog):
    cfgs = [
        small_config(tmp_path / name, input=GeneratedInput.default_config())
        for name in ("one", "two")
    ]
    _, whole, _ = run(cfgs[0])
    run(cfgs[1].clone(max_step=2))
    trainer, rest, _ = run(cfgs[1])
    assert trainer.input.config.is_training  # else the fake input refuses to be endless
    assert {step: whole.losses[step] for step in (3, 4)} == rest.losses
    assert "trainer.input: iterators of dataset() have no get_state" in caplog.text


def test_run_describes_its_state(straight):
    trainer = straight[0]
    tree, analysis = (
        Path(trainer.config.dir, name).read_text(encoding="utf-8").splitlines()
        for name in ("trainer_state_tree.txt", "model_analysis.txt")
    )
    state = trainer.trainer_state
    assert len(tree) == len(jax.tree.leaves(state))
    first = jax.tree.leaves(state.model)[0]
    assert any(line.startswith("model/") and f"{[*first.shape]}" in line for line in tree)
    total = sum(x.size for x in jax.tree.leaves(state.model))
    assert analysis[-1] == f"total: {total:,} elements"
    assert len(analysis) == len(jax.tree.leaves(state.model)) + 1
