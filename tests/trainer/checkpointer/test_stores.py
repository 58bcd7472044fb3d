"""Copies of checkpoints in stores: one in memory and, by `make stores`, servers of S3 and GCS."""

import json
import os
import shutil
import sys
import threading
import uuid

import fsspec
import numpy as np
import pytest

from tests.trainer.checkpointer.store_servers import StoreServer
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

# `make stores` sets it to the stores that have a server on this machine.
SCHEMES = os.environ.get("WEFT_TEST_STORES", "memory").split()

needs_server = pytest.mark.skipif(SCHEMES == ["memory"], reason="`make stores` has its servers")


@pytest.fixture(scope="module", params=SCHEMES)
def bucket(request):
    """The URL of a bucket that exists, and its server, None for the store in memory."""
    if request.param == "memory":
        yield "memory://bucket", None
        return
    server = StoreServer(request.param)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        try:
            server.start()
            yield server.url, server
        finally:
            server.stop()


@pytest.fixture
def url(bucket, monkeypatch):
    """The URL of a run in an empty store."""
    monkeypatch.setattr(stores.retries, "PAUSES_SECONDS", ())
    return f"{bucket[0]}/{uuid.uuid4().hex}"


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


def opened(url):
    """The store of a URL as another process sees it, and the path there."""
    return fsspec.core.url_to_fs(url, skip_instance_cache=True)


def forget_stores(url):
    """Lets the next to open the store begin without what this process knows of it."""
    files, _ = opened(url)
    type(files).clear_instance_cache()


def objects(url):
    """The paths of objects below a URL."""
    files, root = opened(url)
    return sorted(path.partition(f"{root}/")[2] for path in files.find(root))


def change(url, path, data):
    files, root = opened(url)
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


@pytest.mark.parametrize("name", ["lr=[1e-3]", "run? ü#1%20&+"])
def test_old_copies_are_removed_from_a_run_of_any_name(name, url, tmp_path):
    # Its name fits the second one, taken for a pattern.
    neighbor = "run1 ü#1%20&+"
    saved(tmp_path / "neighbor", f"{url}/{neighbor}", 1)
    saved(tmp_path / "run", f"{url}/{name}", 1, 2)
    assert [path for path in objects(url) if path.endswith("manifest.json")] == sorted(
        [
            f"{neighbor}/checkpoints/step_00000001/manifest.json",
            f"{name}/checkpoints/step_00000002/manifest.json",
        ]
    )
    assert fetched(tmp_path / "other", f"{url}/{name}") == 2


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # by gcsfs
def test_file_of_several_parts(url, tmp_path, monkeypatch):
    files, _ = fsspec.core.url_to_fs(url)
    if hasattr(files, "default_block_size"):
        monkeypatch.setattr(type(files), "default_block_size", 5 * 2**20)  # S3's smallest part
    state = {"w": np.random.default_rng(0).random((2, 2**20))}
    with checkpointer(tmp_path / "run", url) as c:
        c.save(step=1, state=state)
    other = tmp_path / "other"
    assert fetched(other, url) == 1
    with checkpointer(other, None) as c:
        step, restored_state = c.restore(state=state)
    assert step == 1
    np.testing.assert_array_equal(restored_state["w"], state["w"])


def test_copy_of_another_process_is_seen(url, tmp_path):
    run = saved(tmp_path / "run", url, 1)
    with checkpointer(tmp_path / "other", url) as c:
        assert c.fetch_copy() == 1
        assert c.fetch_copy() is None
        forget_stores(url)
        saved(run, url, 2)
        assert c.fetch_copy() == 2


def test_start_is_refused_if_the_store_takes_no_objects(memory_url, tmp_path, monkeypatch, caplog):
    files, _ = fsspec.core.url_to_fs(memory_url)

    def refuse(self, path, *args, **kwargs):
        raise PermissionError("only reading is allowed")

    monkeypatch.setattr(type(files), "pipe_file", refuse)
    with pytest.raises(CheckpointReadError, match=r"cannot be used: .* only reading.*credentials"):
        fetched(tmp_path / "run", memory_url)
    run = saved(tmp_path / "other", None, 1)
    assert fetched(run, memory_url) is None
    assert "only reading is allowed. The run continues from its own checkpoint" in caplog.text


@needs_server
def test_bucket_that_does_not_exist(bucket, tmp_path):
    url = bucket[0].replace("bucket", "absent") + "/run"
    with pytest.raises(CheckpointReadError, match=r"cannot be used: FileNotFoundError: .*bucket"):
        fetched(tmp_path / "run", url)


@needs_server
def test_missing_credentials_of_s3(tmp_path, monkeypatch):
    monkeypatch.setattr(stores.retries, "PAUSES_SECONDS", ())
    # Nor are there any in the home directory, or given by the machine.
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    forget_stores("s3://")
    with pytest.raises(CheckpointReadError, match=r"Unable to locate credentials.*Check the URL"):
        fetched(tmp_path / "run", "s3://bucket/run")
    forget_stores("s3://")


@pytest.fixture
def impatient(url, monkeypatch):
    """Lets the packages of stores give up at once; they try and wait for minutes."""
    with monkeypatch.context() as patch:
        patch.setenv("AWS_MAX_ATTEMPTS", "1")
        patch.setattr("s3fs.S3FileSystem.retries", 1)
        patch.setattr("s3fs.S3FileSystem.read_timeout", 3.0)
        patch.setattr("gcsfs.retry.min", lambda *seconds: 0.0, raising=False)
        patch.setattr(stores, "_ANSWER_SECONDS", 3.0)
        forget_stores(url)
        yield
    forget_stores(url)


@needs_server
def test_server_that_is_away_for_a_while(url, bucket, impatient, tmp_path, caplog):
    _, server = bucket
    run = saved(tmp_path / "run", url, 1)
    server.stop()
    with checkpointer(run, url, keep_last_n=2) as c:
        c.save(step=2, state=state_of(2))
        c._copies.stop()
        assert "cannot be copied" in caplog.text
        assert restored(run) == 2
        server.start()
        c.save(step=3, state=state_of(3))
    assert manifests(url) == ["step_00000002", "step_00000003"]


@needs_server
def test_server_that_never_answers(url, bucket, impatient, tmp_path):
    saved(tmp_path / "run", url, 1)
    _, server = bucket
    with server.frozen(), pytest.raises(CheckpointReadError, match=r"cannot be used: .*Timeout"):
        fetched(tmp_path / "other", url)
    assert fetched(tmp_path / "other", url) == 1


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


def test_package_that_tried_for_long_itself_is_not_asked_again(memory_url, tmp_path, monkeypatch):
    monkeypatch.setattr(stores.retries, "PAUSES_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(stores, "_RETRY_SECONDS", 0.0)
    files, _ = fsspec.core.url_to_fs(memory_url)
    attempts = []

    def away(self, path, **kwargs):
        attempts.append(path)
        raise TimeoutError("no answer for a minute")

    monkeypatch.setattr(type(files), "ls", away)
    with pytest.raises(CheckpointReadError, match="no answer for a minute"):
        fetched(tmp_path / "run", memory_url)
    assert len(attempts) == 1


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
