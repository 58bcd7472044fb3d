"""The manifest of a checkpoint: a digest of every file, so that no damage goes unnoticed.

Array storage notices a file that is cut short or missing, but not a byte that changed: it hands out
wrong numbers without a word. The manifest is the last file of a checkpoint to be written, and the
first to be read.
"""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from weft.trainer.checkpoint_dirs import files_below, fsync

MANIFEST = "manifest.json"
_ALGORITHM = "sha256"
_THREADS = 4


def write_manifest(ckpt_dir: str) -> None:
    """Brings the files of a checkpoint to the disk and describes them in its manifest.

    Args:
        ckpt_dir: The checkpoint, complete but for its manifest.

    Raises:
        OSError: If the disk refuses.
    """
    paths = [path for path in files_below(ckpt_dir) if path != MANIFEST]

    def describe(path: str) -> dict[str, Any]:
        full_path = os.path.join(ckpt_dir, path)
        fsync(full_path)
        return {"size": os.path.getsize(full_path), _ALGORITHM: _digest_of_file(full_path)}

    with ThreadPoolExecutor(_THREADS) as pool:
        files = dict(zip(paths, pool.map(describe, paths), strict=True))
    with open(os.path.join(ckpt_dir, MANIFEST), "w", encoding="utf-8") as file:
        json.dump({"version": 1, "files": files, _ALGORITHM: _digest_of_json(files)}, file)
        file.flush()
        os.fsync(file.fileno())
    for root, _, _ in os.walk(ckpt_dir):
        fsync(root)


def has_manifest(ckpt_dir: str) -> bool:
    """Whether a checkpoint was completed, which does not mean that it is undamaged."""
    return os.path.isfile(os.path.join(ckpt_dir, MANIFEST))


def find_damage(ckpt_dir: str) -> list[str]:
    """What is wrong with the files of a checkpoint.

    Args:
        ckpt_dir: The checkpoint.

    Returns:
        One line per file that is not as it was written; none if all are.
    """
    manifest = os.path.join(ckpt_dir, MANIFEST)
    try:
        with open(manifest, encoding="utf-8") as file:
            content = json.load(file)
        files, digest = dict(content["files"]), content[_ALGORITHM]
    except FileNotFoundError:
        return [f"{MANIFEST}: is missing"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{MANIFEST}: cannot be read ({type(error).__name__}: {error})"]
    if _digest_of_json(files) != digest:
        return [f"{MANIFEST}: its content has changed"]

    def check(path: str) -> str | None:
        return _damage_of_file(os.path.join(ckpt_dir, path), files[path])

    with ThreadPoolExecutor(_THREADS) as pool:
        faults = dict(zip(files, pool.map(check, files), strict=True))
    return [f"{path}: {fault}" for path, fault in faults.items() if fault is not None]


def _damage_of_file(path: str, entry: dict[str, Any]) -> str | None:
    try:
        size = os.path.getsize(path)
        if size != entry["size"]:
            return f"has {size} bytes instead of {entry['size']}"
        if _digest_of_file(path) != entry[_ALGORITHM]:
            return "its content has changed"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error})"
    return None


def _digest_of_file(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, _ALGORITHM).hexdigest()


def _digest_of_json(value: Any) -> str:
    return hashlib.new(_ALGORITHM, json.dumps(value, sort_keys=True).encode()).hexdigest()
