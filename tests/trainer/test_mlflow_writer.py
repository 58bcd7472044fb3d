import sys

import jax
import jax.numpy as jnp
import pytest

from weft.config import config_for_function
from weft.errors import MissingExtraError
from weft.recipes.lm import lm_tiny
from weft.trainer.mlflow_writer import MLflowWriter
from weft.trainer.progress import RunListener


def make(path, **kwargs):
    cfg = MLflowWriter.default_config().set(
        name="writer", dir=str(path), tracking_uri=f"file://{path}/store"
    )
    return cfg.set(**kwargs).instantiate(parent=None)


def test_without_the_package_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingExtraError, match=r"writer: MLflowWriter.*'weft\[mlflow\]'"):
        make(tmp_path)


@pytest.fixture
def client(tmp_path, monkeypatch):
    """MLflow itself, on a directory: it needs no server."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow", reason="needs the extra mlflow")
    return mlflow.MlflowClient(tracking_uri=f"file://{tmp_path}/store")


def test_numbers_texts_and_the_config_are_there(tmp_path, client):
    writer = make(tmp_path, experiment_name="e", run_name="r", tags={"a": "b"}, prefix="train")
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
    with open(f"{artifacts}/train/sub/note/step_00000001.txt") as file:
        assert file.read() == "a text"
    with open(f"{artifacts}/config/step_00000000.txt") as file:
        assert "number: 2.5" in file.read()


def test_training_that_is_started_again_goes_on_with_its_run(tmp_path, client):
    for step in (1, 2):
        writer = make(tmp_path)
        writer(step, {"loss": 1.0})
        writer.close()
    (run,) = client.search_runs(["0"])
    assert len(client.get_metric_history(run.info.run_id, "loss")) == 2
    other = make(tmp_path / "other", tracking_uri=f"file://{tmp_path}/store")
    other.close()
    assert len(client.search_runs(["0"])) == 1
    other.log_average_step_time(1, [1.0])
    assert len(client.search_runs(["0"])) == 2


def test_a_server_that_is_gone_for_a_while_ends_no_training(tmp_path, client, monkeypatch, caplog):
    mlflow = pytest.importorskip("mlflow", reason="needs the extra mlflow")
    writer = make(tmp_path)
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


def test_summaries_that_are_not_due_are_left_out(tmp_path, client):
    writer = make(tmp_path, write_every_n_steps=2)
    for step in (1, 2, 3):
        writer(step, {"loss": 1.0})
    (run,) = client.search_runs(["0"])
    assert [m.step for m in client.get_metric_history(run.info.run_id, "loss")] == [2]


# Of the use that MLflow makes of SQLAlchemy.
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning")
def test_a_database_tells_how_a_training_ended(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="needs the extra mlflow")
    monkeypatch.chdir(tmp_path)  # where it makes a directory for texts
    uri = f"sqlite:///{tmp_path}/runs.db"
    cfg = lm_tiny().set(dir=str(tmp_path), evalers={}, max_step=2, mesh_shape=(1, 1))
    cfg.summary_writer = MLflowWriter.default_config().set(tracking_uri=uri)
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:1])

    class Fails(RunListener):
        def on_step(self, step, outputs, batch):
            if step == 1:
                raise ValueError("as a listener's error ends a training")

    with pytest.raises(ValueError, match="ends a training"):
        trainer.run(listener=Fails())
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs(["0"])
    assert run.info.status == "FAILED"
    trainer.run()
    (run,) = client.search_runs(["0"])
    assert run.info.status == "FINISHED"
    assert run.data.metrics["loss"] > 0
