import os

import pytest

from weft.errors import CheckpointNotFoundError
from weft.trainer import checkpoint_dirs as dirs


def make(base, *names):
    for name in names:
        (base / name).mkdir(parents=True)
        (base / name / "file").write_text(name)


def test_names_and_steps():
    assert dirs.build_step_dir("/run", step=7) == "/run/step_00000007"
    assert dirs.build_step_dir("/run", step=123456789012) == "/run/step_123456789012"
    for step in (0, 7, 123456789012):
        assert dirs.parse_step_from_dir(dirs.build_step_dir("/run", step=step)) == step
    assert dirs.parse_step_from_dir("/run/step_00000007/") == 7


@pytest.mark.parametrize("name", ["step_7", "step_00000007.tmp", "checkpoint", "step_0000000x"])
def test_other_names_are_refused(name):
    with pytest.raises(CheckpointNotFoundError, match=f"{name}.*a name such as 'step_00000200'"):
        dirs.parse_step_from_dir(f"/run/{name}")


def test_only_directories_of_checkpoints_are_listed_in_order(tmp_path):
    names = ["step_00000100", "step_100000000", "step_00000020", "step_00000030.tmp", "other"]
    make(tmp_path, *names)
    found = dirs.step_dirs(str(tmp_path))
    assert list(found) == [20, 100, 100000000]
    assert found[20] == str(tmp_path / "step_00000020")
    assert dirs.step_dirs(str(tmp_path / "nowhere")) == {}


def test_what_is_not_found_is_said_with_what_is(tmp_path):
    assert "no checkpoint in" in str(dirs.not_found(str(tmp_path), 3))
    make(tmp_path, "step_00000100", "step_00000200")
    assert "no checkpoint of step 3 in" in str(dirs.not_found(str(tmp_path), 3))
    assert "There are: 100, 200" in str(dirs.not_found(str(tmp_path), 3))


def test_publishing_replaces_an_older_one(tmp_path):
    final = str(tmp_path / "step_00000010")
    for content in ("first", "second"):
        make(tmp_path, "step_00000010.tmp")
        (tmp_path / "step_00000010.tmp" / "file").write_text(content)
        assert dirs.dir_being_written(final) == final + ".tmp"
        dirs.publish_dir(final)
        assert os.listdir(tmp_path) == ["step_00000010"]
        assert (tmp_path / "step_00000010" / "file").read_text() == content


def test_removing(tmp_path):
    make(tmp_path, "step_00000010", "step_00000020", "step_00000010.trash")
    dirs.remove_dir(str(tmp_path / "step_00000010"))
    assert os.listdir(tmp_path) == ["step_00000020"]


def test_tidying_up_after_a_kill(tmp_path):
    make(
        tmp_path,
        "step_00000010",
        "step_00000020.tmp",  # was being written
        "step_00000030.trash",  # was being removed
        "step_00000040.old",  # was being replaced, and the new one had come
        "step_00000040",
        "step_00000050.old",  # was being replaced, and the new one had not come
        "notes.tmp",
    )
    dirs.tidy(str(tmp_path))
    found = sorted(os.listdir(tmp_path))
    assert found == ["notes.tmp", "step_00000010", "step_00000040", "step_00000050"]
    assert (tmp_path / "step_00000040" / "file").read_text() == "step_00000040"


def test_files_and_links_with_such_names_make_way(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "step_00000020.old").symlink_to(tmp_path / "elsewhere")
    for suffix in (".tmp", ".old", ".trash"):
        (tmp_path / f"step_00000010{suffix}").touch()
    dirs.tidy(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "step_00000020"]

    make(tmp_path, "step_00000010", "step_00000010.tmp")
    for suffix in (".old", ".trash"):
        (tmp_path / f"step_00000010{suffix}").touch()
    dirs.publish_dir(str(tmp_path / "step_00000010"))
    dirs.remove_dir(str(tmp_path / "step_00000010"))
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "step_00000020"]


def test_files_below_are_listed_by_path(tmp_path):
    make(tmp_path, "b", "a/c")
    (tmp_path / "x").write_text("")
    assert list(dirs.files_below(str(tmp_path))) == ["a/c/file", "b/file", "x"]
