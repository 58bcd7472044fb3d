import json
import os
import sys

import pytest

from weft.errors import MissingExtraError
from weft.serialization import untrusted
from weft.trainer.checkpointer.manifest import (
    MANIFEST,
    find_damage,
    has_manifest,
    write_digests,
    write_manifest,
)


@pytest.fixture
def ckpt_dir(tmp_path):
    path = tmp_path / "step_00000010"
    (path / "arrays" / "w").mkdir(parents=True)
    (path / "index").write_text("[]", encoding="utf-8")
    (path / "arrays" / "w" / "0.0").write_bytes(bytes(range(256)) * 64)
    (path / "arrays" / "w" / "empty").write_bytes(b"")
    write_manifest(str(path))
    return path


def overwrite(path, at, data):
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def flip(path, at, bit):
    overwrite(path, at, bytes([path.read_bytes()[at] ^ 1 << bit]))


def test_whole_files_have_no_damage(ckpt_dir):
    assert has_manifest(str(ckpt_dir))
    assert find_damage(str(ckpt_dir)) == []
    # Extra files of the operating system or users are not damage.
    (ckpt_dir / ".DS_Store").write_text("x", encoding="utf-8")
    assert find_damage(str(ckpt_dir)) == []


@pytest.mark.parametrize(
    ("harm", "found"),
    [
        (lambda file: flip(file, 5000, 3), "its content has changed"),
        (lambda file: overwrite(file, 4096, bytes(4096)), "its content has changed"),
        (lambda file: os.truncate(file, 1000), "has 1000 bytes instead of 16384"),
        (lambda file: overwrite(file, 16384, b"x"), "has 16385 bytes instead of 16384"),
        (os.unlink, "is missing"),
    ],
    ids=["flipped bit", "zeroed block", "truncated", "extended", "deleted"],
)
def test_each_kind_of_damage_is_found_and_named(ckpt_dir, harm, found):
    harm(ckpt_dir / "arrays" / "w" / "0.0")
    assert find_damage(str(ckpt_dir)) == [f"arrays/w/0.0: {found}"]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (None, "manifest.json: is missing"),
        ("", "manifest.json: cannot be read (Expecting value"),
        ("[]", "manifest.json: cannot be read (it is []; expected an object)"),
        ("{}", "manifest.json: cannot be read (it has no 'version')"),
        ('{"version": 1, "files": {}, "xxh3_128": ""}', "manifest.json: is of version 1, not 3"),
        (
            '{"version": 3, "facts": {}, "files": {}, "xxh3_128": ""}',
            "manifest.json: its content has changed",
        ),
    ],
)
def test_invalid_manifest(ckpt_dir, content, found):
    if content is None:
        (ckpt_dir / MANIFEST).unlink()
        assert not has_manifest(str(ckpt_dir))
    else:
        (ckpt_dir / MANIFEST).write_text(content, encoding="utf-8")
    (damage,) = find_damage(str(ckpt_dir))
    assert damage.startswith(found)


def test_every_manifest_byte_is_verified(ckpt_dir):
    path = ckpt_dir / MANIFEST
    whole = path.read_bytes()
    for at in range(len(whole)):
        flip(path, at, 1)
        try:
            same = json.loads(path.read_bytes())["files"] == json.loads(whole)["files"]
        except (ValueError, KeyError, TypeError):
            same = False
        # Insignificant bytes such as spaces do no harm.
        assert find_damage(str(ckpt_dir)) or same
        path.write_bytes(whole)
    assert find_damage(str(ckpt_dir)) == []


def test_every_file_and_directory_is_synced(ckpt_dir, monkeypatch):
    synced = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino))
    write_manifest(str(ckpt_dir))
    paths = [os.path.join(root, n) for root, dirs, names in os.walk(ckpt_dir) for n in dirs + names]
    assert synced == {os.stat(path).st_ino for path in [ckpt_dir, *paths]}


@pytest.mark.parametrize(
    "write", [write_manifest, lambda directory: write_digests(directory, ["index"], {})]
)
def test_digests_that_could_not_be_read_again_are_not_written(ckpt_dir, monkeypatch, write):
    monkeypatch.setattr(untrusted, "MAX_JSON_BYTES", 50)
    with pytest.raises(ValueError, match=r"json cannot .* have \d+ bytes, and at most 50 .*chunks"):
        write(str(ckpt_dir))


def test_missing_xxhash_names_the_extra(ckpt_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(
        MissingExtraError, match=r"package xxhash, .*pip install 'weft-jax\[train\]'"
    ):
        write_manifest(str(ckpt_dir))
