"""Copies of checkpoints in stores: one in memory and, where its packages are, a server of S3."""

import json
import os
import shutil
import sys
import threading
import uuid

import fsspec
import numpy as np
import pytest

from weft.cli import main
from weft.config import config_for_function
from weft.errors import (
    ArgumentValueError,
    CheckpointReadError,
    DamagedCheckpointError,
    MissingExtraError,
    RunDirError,
)
from weft.trainer.checkpointer import (
    Checkpointer,
    EvalMetric,
    KeepBest,
    every_n_steps_policy,
    stores,
)
from weft.trainer.checkpointer import manifest as manifest_lib


@pytest.fixture(scope="module")
def server():
    """A bucket of a local server of S3."""
    moto_server = pytest.importorskip("moto.server", reason="needs moto[server]")
    s3fs = pytest.importorskip("s3fs")
    patch = pytest.MonkeyPatch()
    moto = moto_server.ThreadedMotoServer(port=0)
    moto.start()
    host, port = moto.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        patch.setenv(name, value)
    s3fs.S3FileSystem().mkdir("bucket")
    yield "s3://bucket"
    patch.undo()
    moto.stop()


@pytest.fixture(params=["memory", "s3"])
def url(request, monkeypatch):
    """The URL of a run in an empty store."""
    monkeypatch.setattr(stores.retries, "PAUSES_SECONDS", ())
    root = "memory://bucket"
    if request.param == "s3":
        root = request.getfixturevalue("server")
    return f"{root}/{uuid.uuid4().hex}"


@pytest.fixture
def memory_url(monkeypatch):
    monkeypatch.setattr(stores.retries, "PAUSES_SECONDS", ())
    return f"memory://bucket/{uuid.uuid4().hex}"


def checkpointer(run, url, **kwargs):
    cfg = Checkpointer.default_config().set(name="checkpointer", dir=str(run / "checkpoints"))
    policy = config_for_function(every_n_steps_policy)
    cfg = cfg.set(save_policy=policy, copy_to=url, asynchronous=False, **kwargs)
    return cfg.instantiate(parent=None)


def state_of(step):
    return {"w": np.arange(8.0) + step, "folder/b": np.full((2, 3), step), "step": step}


def saved(run, url, *steps, number=1, **kwargs):
    """A run with a record that has saved some steps."""
    run.mkdir(exist_ok=True)
    (run / "run.json").write_text(json.dumps({"run": number}), encoding="utf-8")
    (run / "config.txt").write_text("a config\n", encoding="utf-8")
    for step in steps:
        with checkpointer(run, url, **kwargs) as c:
            c.save(step=step, state=state_of(step), evaler_summaries={"e": {"loss": step % 3}})
    return run


def restored(run):
    with checkpointer(run, None) as c:
        step, state = c.restore(state=state_of(0))
    if step is not None:
        np.testing.assert_array_equal(state["w"], state_of(step)["w"])
    return step


def fetched(run, url):
    with checkpointer(run, url) as c:
        return c.fetch_copy()


def objects(url):
    """The paths of objects below a URL."""
    files, root = fsspec.core.url_to_fs(url)
    files.invalidate_cache()
    return sorted(path.partition(f"{root}/")[2] for path in files.find(root))


def change(url, path, data):
    files, root = fsspec.core.url_to_fs(url)
    files.pipe_file(f"{root}/{path}", data)


def manifests(url):
    return [path.split("/")[1] for path in objects(url) if path.endswith("manifest.json")]


def test_run_without_directory_continues_from_its_newest_copy(url, tmp_path):
    run = saved(tmp_path / "run", url, 1, 2, 3, keep_last_n=2)
    assert manifests(url) == ["step_00000002", "step_00000003"]
    assert {"config.txt", "run.json"} <= set(objects(url))
    names = {str(p.relative_to(run)) for p in run.rglob("*") if p.is_file()}
    assert names == set(objects(url)), "the store has what the file system has"

    other = tmp_path / "other"
    assert fetched(other, url) == 3
    assert (other / "config.txt").read_text(encoding="utf-8") == "a config\n"
    assert os.listdir(other / "checkpoints") == ["step_00000003"]
    assert restored(other) == 3
    assert fetched(other, url) is None, "nothing is newer"

    saved(run, url, 4)
    assert fetched(other, url) == 4
    assert restored(other) == 4


def test_best_copy_is_kept_where_only_the_newest_was_fetched(memory_url, tmp_path):
    best = KeepBest.default_config().set(metric=EvalMetric("e", "loss"), mode="max")
    saved(tmp_path / "run", memory_url, 1, 2, 3, keep_best=best)
    other = tmp_path / "other"
    assert fetched(other, memory_url) == 3
    saved(other, memory_url, 4, keep_best=best)
    assert manifests(memory_url) == ["step_00000002", "step_00000004"]


def test_copy_without_manifest_is_never_used(url, tmp_path, monkeypatch, caplog):
    run = saved(tmp_path / "run", url, 1)
    upload = stores._Store.upload

    def broken(self, directory, name, path):
        if name == "index":
            raise ConnectionError("the store is away")
        upload(self, directory, name, path)

    with monkeypatch.context() as patch:
        patch.setattr(stores._Store, "upload", broken)
        saved(run, url, 2)
    assert "cannot be copied" in caplog.text and "the store is away" in caplog.text
    assert any("step_00000002" in path for path in objects(url))
    assert restored(run) == 2, "the run has gone on"
    other = tmp_path / "other"
    assert fetched(other, url) == 1
    assert restored(other) == 1

    saved(run, url, 3)
    assert manifests(url) == ["step_00000003"]
    assert not any("step_00000002" in path for path in objects(url))


def test_operations_are_tried_again(memory_url, tmp_path, monkeypatch):
    monkeypatch.setattr(stores.retries, "PAUSES_SECONDS", (0.0,))
    files, _ = fsspec.core.url_to_fs(memory_url)
    failed = set()
    pipe_file = type(files).pipe_file

    def sometimes(self, path, *args, **kwargs):
        if path not in failed:
            failed.add(path)
            raise ConnectionError("later")
        return pipe_file(self, path, *args, **kwargs)

    monkeypatch.setattr(type(files), "pipe_file", sometimes)
    saved(tmp_path / "run", memory_url, 1)
    assert len(failed) == 3
    assert manifests(memory_url) == ["step_00000001"]


def test_copy_that_failed_is_made_when_the_run_ends(memory_url, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(stores.StoreCopies, "_copy", lambda *_: 1 / 0)
        run = saved(tmp_path / "run", memory_url, 1)
    assert not objects(memory_url)
    with checkpointer(run, memory_url) as c:
        c.restore(state=state_of(0))
        assert not c.save(step=1, state=state_of(1), force=True)
    assert manifests(memory_url) == ["step_00000001"]


def test_checkpoint_stays_until_it_is_copied(memory_url, tmp_path, monkeypatch):
    begun, may_end = threading.Event(), threading.Event()
    upload = stores._Store.upload

    def slow(self, *args):
        begun.set()
        assert may_end.wait(30)
        upload(self, *args)

    monkeypatch.setattr(stores._Store, "upload", slow)
    with checkpointer(tmp_path, memory_url) as c:
        for step in (1, 2, 3):
            c.save(step=step, state=state_of(step))
            assert begun.wait(30)
        assert Checkpointer.checkpoint_steps(c.config.dir) == [1, 3]
        may_end.set()
    assert manifests(memory_url) == ["step_00000003"]


def test_damaged_copy_is_not_used(url, tmp_path, caplog):
    saved(tmp_path / "run", url, 1, 2, keep_last_n=2)
    change(url, "checkpoints/step_00000002/index", b"{}")
    other = tmp_path / "other"
    assert fetched(other, url) == 1
    assert "index: has 2 bytes instead of" in caplog.text
    assert os.listdir(other / "checkpoints") == ["step_00000001"]

    change(url, "checkpoints/step_00000001/manifest.json", b"{}")
    with pytest.raises(DamagedCheckpointError, match=f"every checkpoint in '{url}' is damaged"):
        fetched(tmp_path / "third", url)
    assert fetched(other, url) is None, "it has a checkpoint of its own"


@pytest.mark.parametrize("name", ["../../x", "/tmp/x", "a/./x", "a//x"])
def test_names_in_a_store_lead_nowhere_else(name, memory_url, tmp_path):
    run = saved(tmp_path / "run", memory_url, 1)
    path = run / "checkpoints/step_00000001/manifest.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["files"][name] = content["files"]["index"]
    del content["xxh3_128"]
    content["xxh3_128"] = manifest_lib._digest_of_json(content)
    change(memory_url, "checkpoints/step_00000001/manifest.json", json.dumps(content).encode())
    change(memory_url, f"checkpoints/step_00000001/{name}", b"x")
    with pytest.raises(DamagedCheckpointError if name[0] in "./" else OSError):
        fetched(tmp_path / "a" / "other", memory_url)
    assert not list(tmp_path.rglob("x"))
    assert not (tmp_path / "a/other/checkpoints/step_00000001").exists()


def test_checkpoint_larger_than_the_disk_is_refused(memory_url, tmp_path, monkeypatch):
    saved(tmp_path / "run", memory_url, 1)
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(stores.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointReadError, match=r"has .* bytes, and the disk of .* has 100 left"):
        fetched(tmp_path / "other", memory_url)


def test_copies_of_another_run_are_refused(memory_url, tmp_path):
    saved(tmp_path / "run", memory_url, 5)
    other = saved(tmp_path / "other", None, 1, number=2)
    with pytest.raises(RunDirError, match="has the checkpoints of another run than dir="):
        fetched(other, memory_url)


def test_store_that_cannot_be_read(memory_url, tmp_path, monkeypatch, caplog):
    run = saved(tmp_path / "run", None, 1)
    files, _ = fsspec.core.url_to_fs(memory_url)

    def away(self, path, **kwargs):
        raise TimeoutError("no answer")

    monkeypatch.setattr(type(files), "ls", away)
    with pytest.raises(CheckpointReadError, match=r"no answer.*There may be a checkpoint"):
        fetched(tmp_path / "other", memory_url)
    assert fetched(run, memory_url) is None
    assert "The run continues from its own checkpoint" in caplog.text


def test_missing_packages_are_named(tmp_path, monkeypatch):
    for module, match in (("gcsfs", "gcsfs"), ("fsspec.core", r"weft-jax\[stores\]")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(MissingExtraError, match=match):
            fetched(tmp_path, "gs://bucket/run")


@pytest.mark.parametrize("copy_to", ["runs/copies", "file:///tmp/copies", "s3:/bucket"])
def test_other_places_are_refused(copy_to, tmp_path):
    with pytest.raises(ArgumentValueError, match="is not the URL of an object store"):
        checkpointer(tmp_path, copy_to)
    with pytest.raises(ArgumentValueError, match="is of no store that fsspec knows"):
        fetched(tmp_path, "nostore://bucket/run")


def test_fresh_run_takes_no_store_of_another(memory_url, tmp_path, monkeypatch, capsys):
    run = saved(tmp_path / "run", memory_url, 1)
    words = [f"dir={run}", "--fresh", f"checkpointer.copy_to={memory_url}"]
    assert main(["train", "lm-tiny", *words]) == 2
    assert "from which the fresh one would continue" in capsys.readouterr().err
    assert restored(run) == 1


def test_processes_other_than_the_first_copy_nothing(memory_url, tmp_path, monkeypatch):
    saved(tmp_path / "run", memory_url, 1)
    with checkpointer(tmp_path / "other", memory_url) as c:
        monkeypatch.setattr("jax.process_index", lambda: 1)
        assert c.fetch_copy() is None
        c._start_copies()
        assert c._copies._pool is None
