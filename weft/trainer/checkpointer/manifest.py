"""Manifest of a checkpoint: a digest of every file, so that all damage is detected.

Array storage detects a missing or truncated file, but returns wrong numbers if a byte changed. The
manifest is the last file of a checkpoint to be written, and the first to be read. It also holds the
facts by which retention chooses checkpoints, and the step, so that a renamed directory is detected.

Each process computes the digests of the files that it has written, and leaves them for process 0,
which writes the manifest:

    step_00000300.tmp/digests/1.json       until the manifest is written

A file that holds many values has a digest for each block, so that one value can be read and checked
without the others.

The digest is the 128-bit XXH3, which is as fast as reading memory. It detects damage, not forgery.
"""

import bisect
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, NamedTuple

import jax

from weft._lazy import import_extra
from weft.errors import FileRefusedError
from weft.serialization.directory import Directory
from weft.serialization.untrusted import (
    MAX_JSON_BYTES,
    check_json,
    check_json_size,
    parse_json,
)
from weft.trainer.checkpointer import retries
from weft.trainer.checkpointer.dirs import exists, fsync, list_files

MANIFEST = "manifest.json"
_DIGESTS = "digests"
_VERSION = 3
_READ_VERSIONS = (2, 3)  # in version 2, each file is one block
_DIGEST = "xxh3_128"
CHANGED = "its content has changed"
"""Damage of a file whose bytes are not those that were written."""
_THREADS = 4
_BLOCK_BYTES = (
    1 << 18
)  # stays in the cache between being read and being digested


_FORM = {
    "facts": {
        "step?": int,
        "saved_at?": float,
        "metrics?": {str: {str: float}},
        # Of local checkpoints.
        "run?": int,
        "start?": int,
        "after?": int,
    },
    "files": {str: {"size": int, "blocks?": [int], _DIGEST: (str, [str])}},
}


class Block(NamedTuple):
    """Part of a file that has a digest, from an offset on."""

    offset: int
    size: int
    digest: str


class Manifest:
    """Content of a manifest that was read and verified.

    Attributes:
        facts: noted when the checkpoint was written: "step", "saved_at" in seconds since
            1970, "metrics" by name of the evaler and path.
        files: the blocks of each file, from its beginning to its end, by its path.
    """

    def __init__(self, ckpt_dir: str, content: Mapping[str, Any]):
        check_json(content, _FORM)
        self._dir = ckpt_dir
        self.facts: dict[str, Any] = dict(content["facts"])
        self.files: dict[str, list[Block]] = {}
        for path, entry in content["files"].items():
            # A stranger's manifest may name anything.
            if os.path.isabs(path) or ".." in path.split("/"):
                raise ValueError(f"{path!r} is not below the checkpoint")
            sizes, digests = [entry["size"]], [entry[_DIGEST]]
            if "blocks" in entry:
                sizes, digests = entry["blocks"], entry[_DIGEST]
            offsets = itertools.accumulate(sizes, initial=0)
            self.files[path] = [
                Block(*block)
                for block in zip(offsets, sizes, digests, strict=False)
            ]
            if self.size_of(path) != entry["size"]:
                raise ValueError(f"the blocks of {path!r} are not all of it")

    def size_of(self, path: str) -> int:
        """Returns the size of one of `files`."""
        return sum(block.size for block in self.files[path])

    def damage_of(self, path: str) -> str | None:
        """Returns the damage of one of `files`, or None."""
        blocks = self.files[path]
        return find_file_damage(
            self._dir, path, blocks, size=self.size_of(path)
        )

    def damage_of_block(
        self, path: str, offset: int, buffer: memoryview
    ) -> str | None:
        """Returns the damage of a block, or None; fills a buffer of its exact size."""
        if path not in self.files:
            return "is not in the manifest"
        block = self._block_at(path, offset)
        if block is None or block.size != len(buffer):
            return (
                f"has no block of {len(buffer)} bytes at {offset} in the "
                "manifest"
            )
        return find_file_damage(
            self._dir, path, [block], buffer, size=self.size_of(path)
        )

    def _block_at(self, path: str, offset: int) -> Block | None:
        blocks = self.files[path]
        i = bisect.bisect_left(blocks, (offset,))
        if i < len(blocks) and blocks[i].offset == offset:
            return blocks[i]
        return None

    def damage_of_blocks(
        self, blocks: Iterable[tuple[str, Block]]
    ) -> list[str]:
        """Returns one line for each damaged one of some blocks, given with their files."""

        def damage_line(path_and_block: tuple[str, Block]) -> str | None:
            path, block = path_and_block
            damage = find_file_damage(
                self._dir, path, [block], size=self.size_of(path)
            )
            return damage and f"{path}: {damage}"

        with ThreadPoolExecutor(_THREADS) as pool:
            lines = pool.map(damage_line, blocks)
            # A file may have several damaged blocks.
            return sorted({line for line in lines if line is not None})

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


def write_digests(
    ckpt_dir: str,
    paths: Iterable[str],
    block_sizes: Mapping[str, Sequence[int]],
) -> None:
    """Syncs files of this process to the disk, and leaves their digests for `write_manifest`.

    Args:
        block_sizes: of the files that are not one block.
    """
    files = _sync_and_describe(ckpt_dir, paths, block_sizes)
    name = f"{_DIGESTS}/{jax.process_index()}.json"
    Directory(ckpt_dir).write(name, _json_text(name, files), sync=False)


def _sync_and_describe(
    ckpt_dir: str,
    paths: Iterable[str],
    block_sizes: Mapping[str, Sequence[int]],
) -> dict[str, dict[str, Any]]:
    """Returns the entries of files in the manifest by path, when they are on the disk."""
    paths = list(paths)

    def describe(path: str) -> dict[str, Any]:
        fsync(os.path.join(ckpt_dir, path))
        with Directory(ckpt_dir).open(path, buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            sizes = block_sizes.get(path, [size])
            digests = [_digest_of_next(file, size) for size in sizes]
        if path not in block_sizes:
            return {"size": size, _DIGEST: digests[0]}
        return {"size": size, "blocks": sizes, _DIGEST: digests}

    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(paths, pool.map(describe, paths), strict=True))


def write_manifest(
    ckpt_dir: str, *, facts: Mapping[str, Any] | None = None
) -> None:
    """Writes the manifest of a complete checkpoint with JSON `facts`.

    Files without a digest of the process that wrote them are synced to the disk and read.
    """
    digests_dir = os.path.join(ckpt_dir, _DIGESTS)
    files: dict[str, dict[str, Any]] = {}
    if exists(digests_dir):
        for name in os.listdir(digests_dir):
            files |= Directory(digests_dir).read_json(name)
    other_paths: list[str] = []
    for path in list_files(ckpt_dir):
        is_of_digests = path.startswith(f"{_DIGESTS}/")
        if path not in files and path != MANIFEST and not is_of_digests:
            other_paths.append(path)
    files |= _sync_and_describe(ckpt_dir, other_paths, {})
    content: dict[str, Any] = {
        "version": _VERSION,
        "facts": dict(facts or {}),
        "files": dict(sorted(files.items())),
    }
    content[_DIGEST] = _digest_of_json(content)
    Directory(ckpt_dir).write(MANIFEST, _json_text(MANIFEST, content))
    # The names of files are on the disk only when their directories are.
    for folder, _, _ in os.walk(ckpt_dir):
        fsync(folder)
    shutil.rmtree(digests_dir, ignore_errors=True)


def _json_text(name: str, content: Mapping[str, Any]) -> str:
    """Returns the text of a file of digests; raises a ValueError if it could not be read again."""
    text = json.dumps(content)
    try:
        check_json_size(text)
    except ValueError as error:
        raise ValueError(
            f"{name} cannot be written: {error}. It has about 45 bytes for each chunk of an "
            "array: write fewer chunks, by a larger checkpointer.storage.max_chunk_bytes, or by "
            "sharding the state over fewer devices"
        ) from None
    return text


def has_manifest(ckpt_dir: str) -> bool:
    """Returns whether a checkpoint is complete; it may be damaged nevertheless."""
    return exists(os.path.join(ckpt_dir, MANIFEST))


def read_manifest(ckpt_dir: str, *, step: int | None = None) -> Manifest | str:
    """Returns the manifest of a checkpoint, or its damage; checks the step if one is given."""
    path = os.path.join(ckpt_dir, MANIFEST)
    try:
        data = retries.read(
            path,
            lambda: Directory(ckpt_dir).read_bytes(
                MANIFEST, at_most=MAX_JSON_BYTES
            ),
        )
    except FileNotFoundError:
        return f"{MANIFEST}: is missing"
    except OSError as error:
        return _unreadable(error)
    return parse_manifest(ckpt_dir, data, step=step)


def parse_manifest(
    ckpt_dir: str, data: bytes, *, step: int | None = None
) -> Manifest | str:
    """Returns the manifest of a checkpoint from its bytes, or its damage, as `read_manifest`."""
    try:
        content = parse_json(data)
        check_json(content, {"version": int, _DIGEST: str})
        digest = content.pop(_DIGEST)
        if content["version"] not in _READ_VERSIONS:
            return f"{MANIFEST}: is of version {content['version']}, not {_VERSION}"
        manifest = Manifest(ckpt_dir, content)
    except ValueError as error:
        return _unreadable(error)
    if _digest_of_json(content) != digest:
        return f"{MANIFEST}: {CHANGED}"
    written_step = manifest.facts.get("step", step)
    if step is not None and written_step != step:
        return f"{MANIFEST}: was written for step {written_step}, not {step}"
    return manifest


def _unreadable(error: Exception) -> str:
    return f"{MANIFEST}: cannot be read ({error})"


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
        size = manifest.size_of(path)
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
    return sum(map(manifest.size_of, manifest.files))


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
    blocks: Iterable[Block],
    buffer: memoryview | None = None,
    *,
    size: int | None = None,
) -> str | None:
    """Returns the damage of blocks of a file, or None; leaves the last one in a buffer of its size.

    Blocks with an empty digest are not compared, and files of any size are read if that is None.
    Raises CheckpointReadError for what may be no damage.
    """

    def find() -> str | None:
        with Directory(ckpt_dir).open(path, buffering=0) as file:
            file_size = os.fstat(file.fileno()).st_size
            if size is not None and file_size != size:
                return f"has {file_size} bytes instead of {size}"
            for block in blocks:
                end = block.offset + block.size
                if end > file_size:
                    return f"has {file_size} bytes instead of {end} and more"
                file.seek(block.offset)
                digest = _digest_of_next(file, block.size, buffer)
                if block.digest and digest != block.digest:
                    return CHANGED
        return None

    try:
        return retries.read(os.path.join(ckpt_dir, path), find)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error})"


def _digest_of_next(
    file: BinaryIO, size: int, buffer: memoryview | None = None
) -> str:
    """Returns the digest of the next bytes of an unbuffered file; leaves them in the buffer."""
    # One pass over the file, in blocks that are digested while they are in the processor's cache.
    digest = _xxh3()
    position = 0
    scratch = memoryview(
        bytearray(min(size, _BLOCK_BYTES) if buffer is None else 0)
    )
    while position < size:
        length = min(size - position, _BLOCK_BYTES)
        block = scratch[:length]
        if buffer is not None:
            block = buffer[position : position + length]
        num_read = file.readinto(block)  # pyright: ignore[reportAttributeAccessIssue]
        if not num_read:
            break
        digest.update(block[:num_read])
        position += num_read
    return digest.hexdigest()


def _digest_of_json(value: Mapping[str, Any]) -> str:
    return _xxh3(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _xxh3(data: bytes = b"") -> Any:
    return import_extra("xxhash", "train", needed_by="a checkpoint").xxh3_128(
        data
    )
