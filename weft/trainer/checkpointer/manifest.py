"""Manifest of a checkpoint: a digest of every file, so that all damage is detected.

Array storage detects a missing or truncated file, but returns wrong numbers if a byte changed. The
manifest is the last file of a checkpoint to be written, and the first to be read. It also holds the
facts by which retention chooses checkpoints, and the step, so that a renamed directory is detected.

The digest is the 128-bit XXH3, which is as fast as reading memory. It detects damage, not forgery.
"""

import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from weft._lazy import import_extra
from weft.errors import FileRefusedError
from weft.serialization.directory import Directory
from weft.serialization.untrusted import MAX_JSON_BYTES, check_json
from weft.trainer.checkpointer import retries
from weft.trainer.checkpointer.dirs import exists, fsync, list_files

MANIFEST = "manifest.json"
_VERSION = 2
_DIGEST = "xxh3_128"
_CHANGED = "its content has changed"
_THREADS = 4
_BLOCK_BYTES = (
    1 << 18
)  # stays in the cache between being read and being digested


_FORM = {
    "facts": {
        "step?": int,
        "saved_at?": float,
        "metrics?": {str: {str: float}},
    },
    "files": {str: {"size": int, _DIGEST: str}},
}


class Manifest:
    """Content of a manifest that was read and verified.

    Attributes:
        facts: noted when the checkpoint was written: "step", "saved_at" in seconds since
            1970, "metrics" by name of the evaler and path.
        files: size and digest of each file by its path.
    """

    def __init__(self, ckpt_dir: str, content: Mapping[str, Any]):
        check_json(content, _FORM)
        self._dir = ckpt_dir
        self.facts: dict[str, Any] = dict(content["facts"])
        self.files: dict[str, dict[str, Any]] = {}
        for path, entry in content["files"].items():
            # A stranger's manifest may name anything.
            if os.path.isabs(path) or ".." in path.split("/"):
                raise ValueError(f"{path!r} is not below the checkpoint")
            self.files[path] = dict(entry)

    def damage_of(
        self, path: str, buffer: memoryview | None = None
    ) -> str | None:
        """Returns the damage of one of `files`, or None; fills a buffer of its exact size."""
        if path not in self.files:
            return "is not in the manifest"
        return find_file_damage(self._dir, path, buffer, self.files[path])

    def damage_of_all(self, paths: Iterable[str]) -> list[str]:
        """Returns one line for each damaged file."""
        paths = list(paths)
        lines: list[str] = []
        with ThreadPoolExecutor(_THREADS) as pool:
            for path, damage in zip(
                paths, pool.map(self.damage_of, paths), strict=True
            ):
                if damage is not None:
                    lines.append(f"{path}: {damage}")
        return lines


def write_manifest(
    ckpt_dir: str, *, facts: Mapping[str, Any] | None = None
) -> None:
    """Syncs a complete checkpoint's files to the disk; writes its manifest with JSON `facts`."""
    paths = [path for path in list_files(ckpt_dir) if path != MANIFEST]

    def sync_and_describe(path: str) -> dict[str, Any]:
        full_path = os.path.join(ckpt_dir, path)
        fsync(full_path)
        with Directory(ckpt_dir).open(path, buffering=0) as file:
            return {
                "size": os.path.getsize(full_path),
                _DIGEST: _digest_of_file(file),
            }

    with ThreadPoolExecutor(_THREADS) as pool:
        files = dict(
            zip(paths, pool.map(sync_and_describe, paths), strict=True)
        )
    content: dict[str, Any] = {
        "version": _VERSION,
        "facts": dict(facts or {}),
        "files": files,
    }
    content[_DIGEST] = _digest_of_json(content)
    Directory(ckpt_dir).write(MANIFEST, json.dumps(content))
    # The names of files are on the disk only when their directories are.
    for folder, _, _ in os.walk(ckpt_dir):
        fsync(folder)


def has_manifest(ckpt_dir: str) -> bool:
    """Returns whether a checkpoint is complete; it may be damaged nevertheless."""
    return exists(os.path.join(ckpt_dir, MANIFEST))


def read_manifest(ckpt_dir: str, *, step: int | None = None) -> Manifest | str:
    """Returns the manifest of a checkpoint, or its damage; checks the step if one is given."""
    try:
        path = os.path.join(ckpt_dir, MANIFEST)
        content = retries.read(
            path, lambda: Directory(ckpt_dir).read_json(MANIFEST)
        )
        digest = content.pop(_DIGEST)
        if content["version"] != _VERSION:
            return f"{MANIFEST}: is of version {content['version']}, not {_VERSION}"
        manifest = Manifest(ckpt_dir, content)
    except FileNotFoundError:
        return f"{MANIFEST}: is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST}: cannot be read ({type(error).__name__}: {error})"
    if _digest_of_json(content) != digest:
        return f"{MANIFEST}: {_CHANGED}"
    written_step = manifest.facts.get("step", step)
    if step is not None and written_step != step:
        return f"{MANIFEST}: was written for step {written_step}, not {step}"
    return manifest


def find_damage(
    ckpt_dir: str, *, step: int | None = None, except_below: str | None = None
) -> list[str]:
    """Returns one line per damaged file of a checkpoint.

    Any `step` is accepted if None. Files below `except_below`, which ends in "/", are not checked;
    the others are then taken to be JSON, and those that are too large for it are not read.
    """
    odd_file = find_odd_file(ckpt_dir)
    if odd_file is not None:
        return [odd_file]
    manifest = read_manifest(ckpt_dir, step=step)
    if isinstance(manifest, str):
        return [manifest]
    if except_below is None:
        return manifest.damage_of_all(sorted(manifest.files))
    json_paths = sorted(
        path for path in manifest.files if not path.startswith(except_below)
    )
    for path in json_paths:
        size = manifest.files[path]["size"]
        if size > MAX_JSON_BYTES:
            return [
                f"{path}: has {size:,} bytes; at most {MAX_JSON_BYTES:,} are read"
            ]
    return manifest.damage_of_all(json_paths)


def recorded_bytes(ckpt_dir: str) -> int:
    """Returns how many bytes `find_damage` reads at most, 0 without a readable manifest."""
    manifest = read_manifest(ckpt_dir)
    if isinstance(manifest, str):
        return 0
    return sum(file["size"] for file in manifest.files.values())


def find_odd_file(ckpt_dir: str) -> str | None:
    """Returns a line about a link, FIFO, device or socket in a checkpoint, None if it has none."""
    directory = Directory(ckpt_dir)
    try:
        retries.read(ckpt_dir, lambda: directory.check(directory.walk()))
    except FileRefusedError as error:
        return str(error)
    except NotADirectoryError:
        return f"{ckpt_dir!r} is a file, where a folder was expected."
    return None


def find_file_damage(
    ckpt_dir: str,
    path: str,
    buffer: memoryview | None,
    expected: Mapping[str, Any] | None = None,
) -> str | None:
    """Returns the damage of a file, or None, and leaves its content in a buffer of its exact size.

    `expected` is its entry in a manifest. Raises CheckpointReadError for what may be no damage.
    """

    def find() -> str | None:
        with Directory(ckpt_dir).open(path, buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if expected is not None and size != expected["size"]:
                return f"has {size} bytes instead of {expected['size']}"
            if buffer is not None and len(buffer) != size:
                return f"has {size} bytes, where the array takes {len(buffer)}"
            digest = _digest_of_file(file, buffer)
        if expected is not None and digest != expected[_DIGEST]:
            return _CHANGED
        return None

    try:
        return retries.read(os.path.join(ckpt_dir, path), find)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error})"


def _digest_of_file(file: Any, buffer: memoryview | None = None) -> str:
    """Returns the digest of an unbuffered file and leaves its content in the buffer."""
    # One pass over the file, in blocks that are digested while they are in the processor's cache.
    digest = _xxh3()
    position = 0
    scratch = memoryview(bytearray(_BLOCK_BYTES if buffer is None else 0))
    while True:
        block = scratch
        if buffer is not None:
            block = buffer[position : position + _BLOCK_BYTES]
        num_read = 0
        if len(block) > 0:
            num_read = file.readinto(block)
        if not num_read:
            return digest.hexdigest()
        digest.update(block[:num_read])
        position += num_read


def _digest_of_json(value: Mapping[str, Any]) -> str:
    return _xxh3(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _xxh3(data: bytes = b"") -> Any:
    return import_extra("xxhash", "train", needed_by="a checkpoint").xxh3_128(
        data
    )
