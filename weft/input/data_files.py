"""Digests of files of data, by which a run notices that they have changed.

Up to a gigabyte in all, a digest is that of every byte. Of more, whose reading would delay each
start by minutes, it is that of the sizes and of evenly spaced parts: it notices files that were
cut, extended, exchanged or written again, and may miss an edit that keeps the size.
"""

import functools
import hashlib
import os
from collections.abc import Sequence

from weft.input.record_files import file_fingerprint
from weft.input.records import read_errors
from weft.serialization.untrusted import open_file

_WHOLE_BYTES = 2**30
_NUM_PARTS = 16
_PART_BYTES = 2**16
_READ_BYTES = 2**20


def files_record(files: Sequence[str]) -> dict[str, str | int]:
    """Returns a description of files for a run's record, as JSON values.

    The digest depends on their names without folders, their order and their contents, such that
    each machine may have them in a folder of its own. "sampled" is true if it is that of parts.

    Raises InputReadError if a file cannot be read.
    """
    fingerprints = [file_fingerprint(file) for file in files]
    num_bytes = sum(size for _, size, _ in fingerprints)
    reads_all = num_bytes <= _WHOLE_BYTES
    total = hashlib.sha256()
    for file, (path, size, mtime) in zip(files, fingerprints, strict=True):
        name = os.path.basename(file)
        digest = _contents_digest(path, size, mtime, reads_all=reads_all)
        total.update(
            f"{len(name)} {name} {size} {digest}\n".encode(
                errors="surrogatepass"
            )
        )
    name = os.path.basename(files[0])
    if len(files) > 1:
        name += f" and {len(files) - 1} more"
    record: dict[str, str | int] = {
        "name": name,
        "sha256": total.hexdigest(),
        "files": len(files),
        "bytes": num_bytes,
    }
    if not reads_all:
        record["sampled"] = True
    return record


@functools.lru_cache(2**14)
def _contents_digest(
    path: str, size: int, mtime: int, *, reads_all: bool
) -> str:
    """Returns the digest of a file; size and time of change tell when to read it again."""
    del mtime
    digest = hashlib.sha256()
    with (
        read_errors(f"cannot read {path}"),
        open_file(path, buffering=0) as file,
    ):
        if reads_all or size <= _NUM_PARTS * _PART_BYTES:
            while data := file.read(_READ_BYTES):
                digest.update(data)
        else:
            for part in range(_NUM_PARTS):
                file.seek((size - _PART_BYTES) * part // (_NUM_PARTS - 1))
                digest.update(file.read(_PART_BYTES))
    return digest.hexdigest()
