import json
import struct
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.trainer.language_models import Bigrams
from weft.config import config_for_function
from weft.errors import MissingExtraError
from weft.hierarchy.metrics import AudioSummary, ImageSummary
from weft.recipes.lm import lm_tiny
from weft.trainer.hooks import Hook
from weft.trainer.summary_writer.trackers import MLflowWriter, WandBWriter


class Shown:
    def __init__(self, value, **kwargs):
        self.value, self.kwargs = value, kwargs


class FakeWandb(types.ModuleType):
    """Records what wandb is asked to do, for what only an account at its server would show."""

    def __init__(self):
        super().__init__("wandb")
        self.run = None
        self.init_kwargs, self.logged, self.configs, self.exit_codes = [], [], [], []
        self.Image, self.Audio, self.Histogram, self.Settings = (
            type(name, (Shown,), {}) for name in ("Image", "Audio", "Histogram", "Settings")
        )
        self.Settings.__init__ = lambda self, **kwargs: setattr(self, "kwargs", kwargs)
        self.config = types.SimpleNamespace(
            update=lambda config, allow_val_change: self.configs.append(config)
        )

    def init(self, **kwargs):
        self.run = object()
        self.init_kwargs.append(kwargs)

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self, exit_code):
        self.run = None
        self.exit_codes.append(exit_code)


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def make(path, **kwargs):
    cfg = WandBWriter.default_config().set(**{"name": "writer", "dir": str(path)} | kwargs)
    return cfg.instantiate(parent=None)


def test_missing_wandb_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        MissingExtraError, match=r"writer: WandBWriter.*pip install 'weft-jax\[wandb\]"
    ):
        make(tmp_path)


def test_run_starts_with_config_arguments(tmp_path, wandb):
    writer = make(
        tmp_path,
        exp_name="first",
        project="p",
        tags=("a", "b"),
        mode="offline",
        wandb_settings_kwargs={"silent": True},
    )
    assert not wandb.init_kwargs
    writer(1, {"loss": 1.0})
    (kwargs,) = wandb.init_kwargs
    assert kwargs["settings"].kwargs == {"silent": True}
    assert (kwargs["name"], kwargs["project"], kwargs["tags"]) == ("first", "p", ["a", "b"])
    assert (kwargs["mode"], kwargs["dir"], kwargs["entity"]) == ("offline", str(tmp_path), None)


def test_restarted_training_continues_its_wandb_run(tmp_path, wandb):
    for cfg in ({}, {}, {"dir": str(tmp_path / "other"), "resume": "must", "wandb_dir": "/w"}):
        writer = make(tmp_path, **cfg)
        writer(1, {"loss": 1.0})
        writer.close()
    first, again, other = wandb.init_kwargs
    assert first["id"] == again["id"] != other["id"]
    assert (again["resume"], other["resume"], other["dir"]) == ("allow", "must", "/w")


def test_summaries_of_every_kind(tmp_path, wandb):
    writer = make(tmp_path, prefix="train", write_every_n_steps=5)
    values = {
        "loss": jnp.array(2.0),
        "model": {"w": np.ones((2, 2)), "text": "hi"},
        "image": ImageSummary(jnp.zeros((2, 3, 3, 1))),
        "sound": AudioSummary(jnp.zeros((1, 9, 1)), sample_rate=100),
    }
    writer(4, values)
    writer(5, values)
    ((step, logged),) = wandb.logged
    assert step == 5
    assert (logged["train/loss"], logged["train/model/text"]) == (2.0, "hi")
    assert isinstance(logged["train/model/w"], wandb.Histogram)
    assert [image.value.shape for image in logged["train/image"]] == [(3, 3, 1), (3, 3, 1)]
    assert logged["train/sound"][0].kwargs == {"sample_rate": 100}


def test_config_step_times_and_the_end(tmp_path, wandb):
    writer = make(tmp_path)
    cfg = WandBWriter.default_config().set(
        tags=["a", "b"],
        wandb_settings_kwargs={"inner": config_for_function(round), "dtype": jnp.float32},
    )
    writer.log_config(cfg)
    (config,) = wandb.configs
    assert config["klass"] == "'weft.trainer.summary_writer.trackers.WandBWriter'"
    assert (config["dir"], config["tags"], config["prefix"]) == ("REQUIRED", ["a", "b"], None)
    assert config["wandb_settings_kwargs"]["inner"]["number"] == "REQUIRED"
    assert isinstance(config["wandb_settings_kwargs"]["dtype"], str)
    writer.log_average_step_time(3, [1.0, 2.0])
    writer.log_average_step_time(4, [])
    assert wandb.logged == [(3, {"average_step_time": 1.5})]
    writer.close()
    writer(5, {"loss": 1.0})
    writer.close(failed=True)
    assert wandb.exit_codes == [0, 1]


def test_run_started_by_the_program_stays_open(tmp_path, wandb):
    wandb.run = mine = object()
    writer = make(tmp_path)
    writer(1, {"loss": 1.0})
    writer.close()
    assert wandb.run is mine
    assert not wandb.init_kwargs and not wandb.exit_codes


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """Runs wandb offline, which then writes to files, and returns a reader of them."""
    wandb = pytest.importorskip("wandb", reason="needs the extra wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name))
    # It installs its own hooks there.
    monkeypatch.setattr(sys, "exit", sys.exit)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def written():
        """Yields the records of all runs: small LevelDB log frames, after a header of 7 bytes."""
        wandb.teardown()  # which waits for its service, and that may still be writing
        for path in sorted(tmp_path.glob("**/*.wandb")):
            data, at = path.read_bytes(), 7
            while at < len(data):
                _, size, kind = struct.unpack_from("<IHB", data, at)
                assert kind == 1, "a record in several frames"
                yield Record.FromString(data[at + 7 : at + 7 + size])
                at += 7 + size

    yield written
    wandb.teardown()


def test_wandb_itself_keeps_a_run_of_two_writers(tmp_path, offline):
    def writer(name):
        settings = {"silent": True, "console": "off"}
        return make(
            tmp_path / name,
            prefix=name,
            mode="offline",
            project="p",
            exp_name="a name",
            tags=("a", "b"),
            wandb_settings_kwargs=settings,
        )

    train, evaler = writer("train"), writer("eval")
    train.log_config(config_for_function(round).set(number=2.5))
    values = {
        "loss": jnp.array(2.0),
        "layer": {"w": np.ones((2, 2)), "text": "hi", "undefined": float("nan")},
        "image": ImageSummary(jnp.zeros((2, 3, 3, 1))),
        "sound": AudioSummary(jnp.zeros((1, 9, 1)), sample_rate=100),
    }
    train(1, values)
    evaler(1, {"accuracy": 0.5})
    evaler.close()
    train(2, {"loss": 1.5})
    train.close()

    records = {kind: [] for kind in ("run", "config", "history", "exit")}
    for record in offline():
        kind = record.WhichOneof("record_type")
        if kind in records:
            records[kind].append(getattr(record, kind))
    (run,) = records["run"]
    assert run.run_id == (tmp_path / "train" / "wandb_id").read_text(encoding="utf-8")
    assert (run.project, run.display_name, list(run.tags)) == ("p", "a name", ["a", "b"])
    config = {item.key: item.value_json for record in records["config"] for item in record.update}
    assert config["number"] == "2.5"
    rows = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row.item}
        for row in records["history"]
    ]
    assert [(row["_step"], row["train/loss"]) for row in rows] == [(1, 2.0), (2, 1.5)]
    assert rows[0]["eval/accuracy"] == 0.5
    assert rows[0]["train/layer/text"] == "hi"
    assert np.isnan(rows[0]["train/layer/undefined"])
    assert sum(rows[0]["train/layer/w/values"]) == 4
    assert (rows[0]["train/image/count"], rows[0]["train/sound/durations"]) == (2, [0.09])
    assert len(list(tmp_path.glob("**/media/**/*.png"))) == 1
    assert [record.exit_code for record in records["exit"]] == [0]


def make_mlflow(path, **kwargs):
    cfg = MLflowWriter.default_config().set(
        name="writer", dir=str(path), tracking_uri=f"file://{path}/store"
    )
    return cfg.set(**kwargs).instantiate(parent=None)


def test_missing_mlflow_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingExtraError, match=r"writer: MLflowWriter.*'weft-jax\[mlflow\]'"):
        make_mlflow(tmp_path)


@pytest.fixture
def client(tmp_path, monkeypatch):
    """Returns a client of MLflow on a directory, without a server."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow", reason="needs the extra mlflow")
    return mlflow.MlflowClient(tracking_uri=f"file://{tmp_path}/store")


def test_numbers_texts_and_config_are_logged(tmp_path, client):
    writer = make_mlflow(
        tmp_path, experiment_name="e", run_name="r", tags={"a": "b"}, prefix="train"
    )
    writer(1, {"loss": jnp.float32(2.5), "sub": {"x": 1, "note": "a text"}, "image": jnp.ones(3)})
    writer(2, {"loss": float("nan")})
    writer.log_average_step_time(2, [1.0, 3.0])
    writer.log_config(config_for_function(round).set(number=2.5))
    writer.close()
    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert (run.info.run_name, run.info.status, run.data.tags["a"]) == ("r", "FINISHED", "b")
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(metric.step, str(metric.value)) for metric in history] == [(1, "2.5"), (2, "nan")]
    assert run.data.metrics["train/average_step_time"] == 2.0
    assert set(run.data.metrics) == {"train/loss", "train/sub/x", "train/average_step_time"}
    artifacts = client.download_artifacts(run.info.run_id, "", str(tmp_path))
    with open(f"{artifacts}/train/sub/note/step_00000001.txt", encoding="utf-8") as file:
        assert file.read() == "a text"
    with open(f"{artifacts}/config/step_00000000.txt", encoding="utf-8") as file:
        assert "number: 2.5" in file.read()


def test_restarted_training_continues_its_mlflow_run(tmp_path, client):
    for step in (1, 2):
        writer = make_mlflow(tmp_path)
        writer(step, {"loss": 1.0})
        writer.close()
    (run,) = client.search_runs(["0"])
    assert len(client.get_metric_history(run.info.run_id, "loss")) == 2
    other = make_mlflow(tmp_path / "other", tracking_uri=f"file://{tmp_path}/store")
    other.close()
    assert len(client.search_runs(["0"])) == 1
    other.log_average_step_time(1, [1.0])
    assert len(client.search_runs(["0"])) == 2


def test_server_outage_does_not_end_training(tmp_path, client, monkeypatch, caplog):
    mlflow = pytest.importorskip("mlflow", reason="needs the extra mlflow")
    writer = make_mlflow(tmp_path)
    writer(1, {"loss": 1.0})

    def gone(*args, **kwargs):
        raise mlflow.MlflowException("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(mlflow.MlflowClient, "log_batch", gone)
        writer(2, {"loss": 1.0})
        writer.log_average_step_time(2, [1.0])
    writer(3, {"loss": 1.0})
    (run,) = client.search_runs(["0"])
    assert [m.step for m in client.get_metric_history(run.info.run_id, "loss")] == [1, 3]
    said = [record.getMessage() for record in caplog.records if "write to" in record.getMessage()]
    assert len(said) == 2
    assert "cannot write to" in said[0] and "no answer" in said[0]


@pytest.mark.long
def test_training_leaves_its_final_status(tmp_path, client):
    cfg = lm_tiny().set(dir=str(tmp_path / "run"), evalers={}, max_step=2, mesh_shape=(1, 1))
    cfg.model = Bigrams.default_config()
    cfg.summary_writer = MLflowWriter.default_config().set(tracking_uri=f"file://{tmp_path}/store")
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:1])

    class Fails(Hook):
        def on_step(self, step, outputs, batch):
            if step == 1:
                raise ValueError("as a listener's error ends a training")

    with pytest.raises(ValueError, match="ends a training"):
        trainer.run(listener=Fails())
    (run,) = client.search_runs(["0"])
    assert run.info.status == "FAILED"
    trainer.run()
    (run,) = client.search_runs(["0"])
    assert run.info.status == "FINISHED"
    assert run.data.metrics["loss"] > 0
