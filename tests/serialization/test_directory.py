"""Directories from elsewhere: links, pipes, devices and large files in them."""

import os
import pathlib
import socket
import stat

import pytest

from weft.errors import FileRefusedError, WeftError
from weft.serialization.directory import Directory

LARGE = 40 * 10**9


@pytest.fixture
def victim(tmp_path):
    """A file outside of the directory, which must keep its contents."""
    file = tmp_path / "victim"
    file.write_text("private\n", encoding="utf-8")
    yield file
    assert file.read_text(encoding="utf-8") == "private\n" and not file.is_symlink()


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run" / "folder").mkdir(parents=True)
    return Directory(str(tmp_path / "run"))


def odd_entries(path, victim):
    """Puts each odd kind of file at a path, one after the other."""
    os.symlink(victim, path)
    yield "is a symbolic link"
    path.unlink()
    os.symlink("/dev/zero", path)
    yield "is a symbolic link"
    path.unlink()
    os.symlink("nowhere", path)
    yield "is a symbolic link"
    path.unlink()
    os.mkfifo(path)
    yield "is a FIFO"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
        yield "is a socket"
    path.unlink()
    path.mkdir()
    yield "is a directory"
    path.rmdir()


@pytest.mark.parametrize(
    "use",
    [
        lambda run, name: run.read_text(name),
        lambda run, name: run.read_json(name),
        lambda run, name: run.open(name),
        lambda run, name: run.open_to_append(name),
        lambda run, name: run.open_to_change(name),
        lambda run, name: run.has_file(name),
    ],
    ids=["text", "json", "open", "append", "change", "has_file"],
)
def test_odd_entries_are_refused_by_name(run, victim, use, tmp_path):
    path = tmp_path / "run" / "folder" / "file"
    for why in odd_entries(path, victim):
        with pytest.raises(FileRefusedError, match=rf"run/folder/file' {why}, where .* expected"):
            use(run, "folder/file")


def test_folder_on_the_way_may_not_be_a_link(run, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("private\n", encoding="utf-8")
    os.symlink(outside, tmp_path / "run" / "link")
    uses = [
        lambda: run.read_text("link/file"),
        lambda: run.write("link/file", "x"),
        lambda: run.open_to_append("link/new"),
        lambda: run.make_folder("link/new"),
        lambda: run.remove("link/file"),
        lambda: run.rename("link/file", "file"),
        lambda: run.names("link"),
        lambda: run.has_folder("link"),
    ]
    for use in uses:
        with pytest.raises(FileRefusedError, match=r"run/link' is a symbolic link, where a dir"):
            use()
    assert os.listdir(outside) == ["file"]
    assert (outside / "file").read_text(encoding="utf-8") == "private\n"
    run.remove("link")
    assert outside.exists() and not os.path.lexists(tmp_path / "run" / "link")


@pytest.mark.parametrize("name", ["../victim", "folder/../../victim", "/etc/passwd", "a//b", ""])
def test_names_stay_below(run, victim, name):
    for use in (run.read_text, lambda name: run.write(name, "x"), run.remove):
        with pytest.raises(FileRefusedError, match="is not a path below the directory"):
            use(name)


def test_names_that_no_file_has(run):
    for name in ("a\0b", "\ud800"):
        with pytest.raises(FileRefusedError, match="is not a path: "):
            run.read_text(name)
    with pytest.raises(FileNotFoundError, match="run/folder/missing"):
        run.read_text("folder/missing")
    assert not run.has_file("missing/file") and not run.has_folder("missing")


def test_large_files_are_refused_before_they_are_read(run, tmp_path):
    with open(tmp_path / "run" / "file", "wb") as file:
        file.truncate(LARGE)
    with pytest.raises(FileRefusedError, match=r"has 40,000,000,000 bytes; at most 67,108,864"):
        run.read_text("file")
    with pytest.raises(FileRefusedError, match=r"at most 268,435,456 are read"):
        run.read_json("file")


def test_texts_are_utf8(run, tmp_path):
    run.write("file", "zażółć ×\n")
    assert (tmp_path / "run" / "file").read_bytes() == "zażółć ×\n".encode()
    assert run.read_text("file") == "zażółć ×\n"
    (tmp_path / "run" / "file").write_bytes(b"za\xbf")
    with pytest.raises(FileRefusedError, match="is not text in UTF-8: byte 2 is 0xbf"):
        run.read_text("file")


def test_write_replaces_links_and_leaves_nothing_behind(run, victim, tmp_path):
    path = tmp_path / "run" / "file"
    os.symlink(victim, path)
    run.write("file", "new")
    assert path.read_text(encoding="utf-8") == "new" and not path.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask()
    with pytest.raises(ZeroDivisionError), run.replacing("file"):
        raise ZeroDivisionError
    assert path.read_text(encoding="utf-8") == "new"
    assert run.names() == ["file", "folder"]


def test_written_files_survive_a_power_loss(run, monkeypatch):
    """The file is synced before it gets its name, and the folder afterwards."""
    synced = []

    def fsync(descriptor):
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        synced.append("folder" if is_folder else "file")
        if is_folder:
            assert run.read_text("new") == "text"

    monkeypatch.setattr(os, "fsync", fsync)
    run.write("new", "text")
    assert synced == ["file", "folder"]
    run.write("new", "text", sync=False)
    assert synced == ["file", "folder"]


def test_names_in_place_of_temporary_files_are_not_written_through(run, victim, tmp_path):
    os.symlink(victim, tmp_path / "run" / f".file.{os.getpid()}")
    run.write("file", "new")
    assert run.read_text("file") == "new"


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the system has no such paths")
def test_steady_path_leads_to_the_folder_that_was_there(run, victim, tmp_path):
    with run.steady_path("folder/arrays") as path:
        run.rename("folder/arrays", "folder/moved")
        os.symlink(victim.parent, tmp_path / "run" / "folder" / "arrays")
        pathlib.Path(path, "x").write_text("1", encoding="utf-8")
    assert run.read_text("folder/moved/x") == "1"
    with pytest.raises(FileRefusedError, match="arrays' is a symbolic link"):
        run.steady_path("folder/arrays").__enter__()


def test_hard_links_are_parted_before_a_change(run, victim, tmp_path):
    os.link(victim, tmp_path / "run" / "file")
    with run.open_to_append("file") as file:
        file.write(b"more\n")
    assert run.read_text("file") == "private\nmore\n"
    os.link(victim, tmp_path / "run" / "other")
    os.close(run.open_to_change("other"))
    run.write("other", "new")
    assert run.read_text("other") == "new"


def test_walk_does_not_follow(run, tmp_path):
    os.symlink(tmp_path, tmp_path / "run" / "folder" / "loop")
    run.write("folder/below/file", "x")
    found = {entry.name: (entry.is_folder, entry.is_file) for entry in run.walk()}
    assert found == {
        "folder": (True, False),
        "folder/below": (True, False),
        "folder/below/file": (False, True),
        "folder/loop": (False, False),
    }
    run.check(run.walk("folder/below"))
    with pytest.raises(FileRefusedError, match="folder/loop' is a symbolic link"):
        run.check(run.walk())


def test_folders_that_are_too_deep_are_refused(run, tmp_path):
    (tmp_path / "run" / "/".join(["folder", *["d" * 9] * 99])).mkdir(parents=True)
    with pytest.raises(FileRefusedError, match=r"run/folder' has something more than 64 folders"):
        list(run.walk())
    run.remove("folder")


def test_directory_itself_may_be_a_link(run, tmp_path):
    os.symlink(tmp_path / "run", tmp_path / "mine")
    Directory(str(tmp_path / "mine")).write("file", "x")
    assert run.read_text("file") == "x"


def test_error_is_one_of_weft_and_of_the_system(run):
    assert issubclass(FileRefusedError, WeftError) and issubclass(FileRefusedError, OSError)


def umask():
    before = os.umask(0)
    os.umask(before)
    return before
