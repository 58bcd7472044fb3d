"""The manifest of a checkpoint: a digest of every file, so that no damage goes unnoticed.

Array storage notices a file that is cut short or missing, but not a byte that changed: it hands out
wrong numbers without a word. The manifest is the last file of a checkpoint to be written, and the
first to be read. Beside the digests it holds facts that decide which checkpoints are kept, and the
step, so that a directory under another's name is noticed too.

The digest is XXH3 with 128 bits, which is computed as fast as memory is read. It tells damage, not
forgery: who can write files can write a manifest for them.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from weft.errors import MissingExtraError
from weft.serialization.foreign import open_file, read_json_file
from weft.trainer.checkpoint_dirs import files_below, fsync

MANIFEST = "manifest.json"
_VERSION = 2
_DIGEST = "xxh3_128"
_THREADS = 4
_BLOCK_BYTES = 1 << 18  # stays in the cache between being read and being digested


class Manifest:
    """What a manifest says, once it was read and found whole.

    Attributes:
        facts: what was noted when the checkpoint was written: "step", "saved_at" in seconds since
            1970, "metrics" by name of the evaler and path.
        files: size and digest of each file by its path.
    """

    def __init__(self, ckpt_dir: str, content: Mapping[str, Any]):
        self._dir = ckpt_dir
        self.facts: dict[str, Any] = dict(content["facts"])
        self.files: dict[str, Any] = {path: dict(e) for path, e in content["files"].items()}
        for path, entry in self.files.items():
            if type(entry.get("size")) is not int or not isinstance(entry.get(_DIGEST), str):
                raise ValueError(f"it does not say what {path!r} holds")
            if os.path.isabs(path) or ".." in path.split("/"):
                raise ValueError(f"{path!r} is not below the checkpoint")

    def damage_of(self, path: str, into: memoryview | None = None) -> str | None:
        """Reads a file and says what is wrong with it.

        Args:
            path: of one of `files`.
            into: where its content goes, exactly as large; None to look only.

        Returns:
            A few words, or None if it is as it was written.
        """
        entry = self.files.get(path)
        if entry is None:
            return "is not in the manifest"
        try:
            return _damage_of_file(os.path.join(self._dir, path), entry, into)
        except FileNotFoundError:
            return "is missing"
        except OSError as error:
            return f"cannot be read ({error})"

    def damage_of_all(self, paths: Iterable[str]) -> list[str]:
        """What is wrong with files: one line for each that is not as it was written."""
        paths = list(paths)
        with ThreadPoolExecutor(_THREADS) as pool:
            faults = list(pool.map(self.damage_of, paths))
        return [f"{p}: {fault}" for p, fault in zip(paths, faults, strict=True) if fault]


def write_manifest(ckpt_dir: str, *, facts: Mapping[str, Any] | None = None) -> None:
    """Brings the files of a checkpoint to the disk and describes them in its manifest.

    Args:
        ckpt_dir: The checkpoint, complete but for its manifest.
        facts: JSON values to be noted in it.

    Raises:
        OSError: If the disk refuses.
    """
    paths = [path for path in files_below(ckpt_dir) if path != MANIFEST]

    def describe(path: str) -> dict[str, Any]:
        full_path = os.path.join(ckpt_dir, path)
        fsync(full_path)
        return {"size": os.path.getsize(full_path), _DIGEST: _digest_of_file(full_path)}

    with ThreadPoolExecutor(_THREADS) as pool:
        files = dict(zip(paths, pool.map(describe, paths), strict=True))
    content = {"version": _VERSION, "facts": dict(facts or {}), "files": files}
    with open(os.path.join(ckpt_dir, MANIFEST), "w", encoding="utf-8") as file:
        json.dump({**content, _DIGEST: _digest_of_json(content)}, file)
        file.flush()
        os.fsync(file.fileno())
    for root, _, _ in os.walk(ckpt_dir):
        fsync(root)


def has_manifest(ckpt_dir: str) -> bool:
    """Whether a checkpoint was completed, which does not mean that it is undamaged."""
    return os.path.isfile(os.path.join(ckpt_dir, MANIFEST))


def read_manifest(ckpt_dir: str, *, step: int | None = None) -> Manifest | str:
    """Reads a manifest.

    Args:
        ckpt_dir: The checkpoint.
        step: The step that it is to be of; None to take any.

    Returns:
        The manifest, or what is wrong with it.
    """
    try:
        content = read_json_file(os.path.join(ckpt_dir, MANIFEST))
        digest = content.pop(_DIGEST)
        if content["version"] != _VERSION:
            return f"{MANIFEST}: is of version {content['version']}, not {_VERSION}"
        manifest = Manifest(ckpt_dir, content)
    except FileNotFoundError:
        return f"{MANIFEST}: is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST}: cannot be read ({type(error).__name__}: {error})"
    if _digest_of_json(content) != digest:
        return f"{MANIFEST}: its content has changed"
    written = manifest.facts.get("step", step)
    if step is not None and written != step:
        return f"{MANIFEST}: was written for step {written}, not {step}"
    return manifest


def find_damage(
    ckpt_dir: str,
    *,
    step: int | None = None,
    wanted: Callable[[str], bool] = lambda path: True,
    part: tuple[int, int] = (0, 1),
) -> list[str]:
    """What is wrong with the files of a checkpoint.

    Args:
        ckpt_dir: The checkpoint.
        step: The step that it is to be of; None to take any.
        wanted: Says of a path whether to look at the file.
        part: i and n, to look at one in n of those files, beginning with the i-th.

    Returns:
        One line per file that is not as it was written; none if all are.
    """
    manifest = read_manifest(ckpt_dir, step=step)
    if isinstance(manifest, str):
        return [manifest]
    paths = [path for path in sorted(manifest.files) if wanted(path)]
    return manifest.damage_of_all(paths[part[0] :: part[1]])


def _damage_of_file(path: str, entry: Mapping[str, Any], into: memoryview | None) -> str | None:
    size = os.path.getsize(path)
    if size != entry["size"]:
        return f"has {size} bytes instead of {entry['size']}"
    if into is not None and len(into) != size:
        return f"has {size} bytes, where the array takes {len(into)}"
    if _digest_of_file(path, into) != entry[_DIGEST]:
        return "its content has changed"
    return None


def _digest_of_file(path: str, into: memoryview | None = None) -> str:
    """The digest of a file, whose content is left in `into` if that is given."""
    digest, at = _xxh3(), 0
    block = memoryview(bytearray(_BLOCK_BYTES)) if into is None else None
    with open_file(path, buffering=0) as file:
        while True:
            place = into[at : at + _BLOCK_BYTES] if into is not None else block
            assert place is not None
            read = file.readinto(place) if len(place) else 0
            if not read:
                return digest.hexdigest()
            digest.update(place[:read])
            at += read


def _digest_of_json(value: Any) -> str:
    digest = _xxh3()
    digest.update(json.dumps(value, sort_keys=True).encode())
    return digest.hexdigest()


def _xxh3() -> Any:
    try:
        import xxhash
    except ImportError as error:
        raise MissingExtraError(
            "checkpoints need the package 'xxhash', which is not installed. Install it with the "
            'rest of what training takes: pip install "weft[train]".'
        ) from error
    return xxhash.xxh3_128()
