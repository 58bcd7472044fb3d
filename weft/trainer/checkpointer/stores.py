"""Copies of a run's checkpoints in an object store, by fsspec.

    s3://bucket/run/               has the same parts as the directory of the run
        config.txt
        run.json
        checkpoints/
            step_00000200/
                index, arrays/…, python/…
                manifest.json      the last object to be written, and the first to be removed

Stores have no rename: a copy is complete if it has a manifest. A thread makes the copies, after a
checkpoint is complete on the file system, so that training waits for no store.

What is in a store may have been made by others. Its names and sizes are those of a manifest, which
is checked, and every file is compared with its digest before the run may use it.
"""

import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO

from weft._lazy import import_extra
from weft.errors import (
    ArgumentValueError,
    CheckpointNotFoundError,
    CheckpointReadError,
    DamagedCheckpointError,
    MissingExtraError,
    RunDirError,
    WeftError,
    describe_error,
)
from weft.serialization.directory import MAX_ENTRIES, MAX_TEXT_BYTES, Directory
from weft.serialization.untrusted import MAX_JSON_BYTES
from weft.trainer import run_dir
from weft.trainer.checkpointer import dirs, manifest, retries
from weft.typing import T

logger = logging.getLogger(__name__)

_URL = re.compile(r"(?!file:|local:)[A-Za-z][A-Za-z0-9+.-]+://[^/].*")
_THREADS = 4
_BLOCK_BYTES = 2**22
# No attempt begins later after the first. The packages of stores try again themselves: gcsfs takes
# a minute until a server that is away is an error, s3fs ten seconds.
_RETRY_SECONDS = 30.0
# How long gcsfs waits for the answer to a request, which has no more than a few MB.
_ANSWER_SECONDS = 300.0
_PROBE = "weft-writes-here"
# The record has a number that distinguishes two runs.
_RECORDS = (run_dir.RECORD_FILE, run_dir.CONFIG_FILE)

KeptSteps = Callable[[Mapping[int, Mapping[str, Any]]], set[int]]
"""Function from the facts of the manifests of steps, ascending, to the steps to keep."""


class StoreCopies:
    """Copies of the checkpoints of a run in a store.

    Args:
        url: of the copy of the run's directory, such as `s3://bucket/run`.
        directory: of the checkpoints on the file system.
        kept_steps: the rules by which old copies are removed.
    """

    def __init__(self, url: str, directory: str, kept_steps: KeptSteps):
        if not _URL.fullmatch(url):
            raise ArgumentValueError(
                f"copy_to={url!r} is not the URL of an object store; expected one such as "
                "'s3://bucket/run' or 'gs://bucket/run'."
            )
        self._store = _Store(url)
        self._dir = directory
        self._run = Directory(os.path.dirname(os.path.abspath(directory)))
        self._kept_steps = kept_steps
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: Future[None] | None = None
        self._facts: dict[int, Mapping[str, Any]] = {}  # of complete copies
        self.step_in_progress: int | None = None
        """Step that is being copied, whose checkpoint must stay on the file system."""

    # To the store.

    def start(self) -> None:
        """Begins to copy, in a thread, the checkpoints that the store lacks."""
        self._store.open()
        waiting = self._waiting
        if waiting is not None and not (waiting.running() or waiting.done()):
            return  # it will find the new checkpoint
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "weft-store-copies")
        self._waiting = self._pool.submit(self._update)

    def stop(self) -> None:
        """Waits for the copies that were begun."""
        if self._pool is None:
            return
        if self._waiting is not None and not self._waiting.done():
            logger.info("Waiting for the copies in %s.", self._store.url)
        self._pool.shutdown()
        self._pool, self._waiting = None, None

    def _update(self) -> None:
        try:
            paths = dirs.step_dirs(self._dir)
            for step in sorted(paths, reverse=True):
                self.step_in_progress = step
                try:
                    self._copy(step, paths[step])
                except FileNotFoundError:
                    if dirs.exists(paths[step]):
                        raise
                    # It was removed in the meantime, for a newer one.
            self.step_in_progress = None
            self._remove_old(newest_step=max(paths))
        # Stores have errors of their own, which have no common base.
        except Exception as error:
            logger.warning(
                "Checkpoints cannot be copied to %s: %s: %s. Training continues; the next save "
                "tries again.",
                self._store.url,
                type(error).__name__,
                error,
            )
        finally:
            self.step_in_progress = None

    def _copy(self, step: int, path: str) -> None:
        checkpoint = Directory(path)
        data = checkpoint.read_bytes(manifest.MANIFEST, at_most=MAX_JSON_BYTES)
        content = manifest.parse_manifest(path, data, step=step)
        if isinstance(content, str):
            return  # it is damaged
        manifest_path = f"{_folder(step)}/{manifest.MANIFEST}"
        if self._store.read(manifest_path, at_most=MAX_JSON_BYTES) == data:
            self._facts[step] = content.facts
            return
        # What is left of another attempt, or of another course of the run.
        self._remove(step)
        for name in _RECORDS:
            if self._run.has_file(name):
                record = self._run.read_bytes(name, at_most=MAX_TEXT_BYTES)
                self._store.write(name, record)

        def upload(name: str) -> None:
            self._store.upload(checkpoint, name, f"{_folder(step)}/{name}")

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(upload, content.files))
        self._store.write(manifest_path, data)
        self._facts[step] = content.facts

    def _remove_old(self, newest_step: int) -> None:
        """Removes copies that no rule keeps, and incomplete ones, up to a step."""
        facts: dict[int, Mapping[str, Any]] = {}
        for step in self._store.steps():
            if step > newest_step:
                break  # from another course of the run; it must not cause removals
            step_facts = self._facts.get(step)
            if step_facts is None:
                step_facts = self._read_facts(step)
            if step_facts is None:
                self._remove(step)
            else:
                facts[step] = self._facts[step] = step_facts
        for step in facts.keys() - self._kept_steps(facts):
            self._remove(step)

    def _read_facts(self, step: int) -> Mapping[str, Any] | None:
        """Returns the facts of a copy, none if it is damaged; None if it is incomplete."""
        data = self._read_manifest(step)
        if data is None:
            return None
        content = manifest.parse_manifest(_folder(step), data, step=step)
        return {} if isinstance(content, str) else content.facts

    def _read_manifest(self, step: int) -> bytes | None:
        path = f"{_folder(step)}/{manifest.MANIFEST}"
        return self._store.read(path, at_most=MAX_JSON_BYTES)

    def _remove(self, step: int) -> None:
        self._facts.pop(step, None)
        self._store.remove(f"{_folder(step)}/{manifest.MANIFEST}")
        self._store.remove(_folder(step))

    # From the store.

    def fetch_newer(self) -> int | None:
        """Fetches the newest checkpoint if the file system has only older ones, or none.

        Returns its step, None if nothing was fetched.

        Raises:
            MissingExtraError: if a package is missing.
            RunDirError: if the store has the checkpoints of another run.
            CheckpointReadError: if the store cannot be read, or has no copies and takes none, and
                the file system has no checkpoint.
            DamagedCheckpointError: if all copies are damaged, and the file system has no
                checkpoint.
        """
        self._store.open()
        local_steps = list(dirs.step_dirs(self._dir))
        newest_step = max(local_steps, default=-1)
        try:
            steps = [s for s in self._store.steps() if s > newest_step]
            if not steps:
                self._store.check_writable()
            if local_steps:
                self._check_owner()
            damage = self._fetch_first(list(reversed(steps)))
        except WeftError:
            raise
        # Stores have errors of their own, which have no common base.
        except Exception as error:
            text = (
                f"the store of copy_to={self._store.url!r} cannot be used: "
                f"{describe_error(error)}"
            )
            if local_steps:
                logger.warning(
                    "%s. The run continues from its own checkpoint.", text
                )
                return None
            raise CheckpointReadError(
                f"{text}. There may be a checkpoint to continue from. Check the URL, that its "
                "bucket exists, and the credentials; start again when the store can be used, or "
                "without copy_to to begin at step 0."
            ) from error
        if isinstance(damage, int):
            return damage
        if damage and not local_steps:
            raise DamagedCheckpointError(
                f"every checkpoint in {self._store.url!r} is damaged: {'; '.join(damage[:8])}. "
                "Choose another URL to start over.",
                damage=damage,
            )
        return None

    def _fetch_first(self, steps: list[int]) -> int | list[str]:
        """Fetches the first of some steps that is not damaged; or returns the damage of all."""
        damage: list[str] = []
        for step in steps:
            data = self._read_manifest(step)
            if data is None:
                continue  # it was never completed
            damage_of_step = self._fetch(step, data)
            if not damage_of_step:
                logger.info(
                    "Fetched the checkpoint of step %d from %s.",
                    step,
                    self._store.url,
                )
                return step
            logger.warning(
                "The checkpoint of step %d in %s is damaged: %s. Fetching the one before.",
                step,
                self._store.url,
                "; ".join(damage_of_step[:3]),
            )
            damage += damage_of_step
        return damage

    def _fetch(self, step: int, data: bytes) -> list[str]:
        """Fetches a checkpoint if it is not damaged, else returns its damage."""
        final_dir = dirs.build_step_dir(self._dir, step=step)
        content = manifest.parse_manifest(final_dir, data, step=step)
        if isinstance(content, str):
            return [content]
        if len(content.files) > MAX_ENTRIES:
            return [f"{manifest.MANIFEST}: has more than {MAX_ENTRIES:,} files"]
        os.makedirs(self._run.path, exist_ok=True)
        for name in _RECORDS:
            record = self._store.read(name, at_most=MAX_TEXT_BYTES)
            if record is not None:
                self._run.write(name, record)
        dirs.make_temporary_dir(final_dir)
        folder = Directory(dirs.temporary_dir(final_dir))
        try:
            size = sum(map(content.size_of, content.files))
            free_bytes = shutil.disk_usage(folder.path).free
            if size > free_bytes:
                raise CheckpointReadError(
                    f"the checkpoint of step {step} in {self._store.url!r} has {size:,} bytes, "
                    f"and the disk of {self._dir!r} has {free_bytes:,} left. Free disk space."
                )

            def download(name: str) -> None:
                path = f"{_folder(step)}/{name}"
                self._store.download(path, folder, name, content.size_of(name))

            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(download, content.files))
            folder.write(manifest.MANIFEST, data)
            damage = manifest.find_damage(folder.path, step=step)
            if not damage:
                dirs.commit_dir(final_dir)
            return damage
        except CheckpointNotFoundError as error:
            return [str(error)]
        finally:
            shutil.rmtree(folder.path, ignore_errors=True)

    def _check_owner(self) -> None:
        """Raises a RunDirError if the copies are those of another run."""
        if not self._run.has_file(run_dir.RECORD_FILE) or not self.has_copies():
            return
        own_record = self._run.read_bytes(
            run_dir.RECORD_FILE, at_most=MAX_TEXT_BYTES
        )
        record = self._store.read(run_dir.RECORD_FILE, at_most=MAX_TEXT_BYTES)
        own_number = run_dir.number_in_record(own_record)
        number = run_dir.number_in_record(record or b"")
        if own_number is not None and number != own_number:
            raise RunDirError(
                f"copy_to={self._store.url!r} has the checkpoints of another run than "
                f"dir={self._run.path!r}. Choose another URL, one for each run."
            )

    def has_copies(self) -> bool:
        """Returns whether the store has a complete checkpoint."""
        self._store.open()
        return any(
            self._read_manifest(step) is not None
            for step in self._store.steps()
        )


def check_unused(url: str, directory: str) -> None:
    """Raises a RunDirError if a store has checkpoints, from which a fresh run would continue."""
    if StoreCopies(url, directory, lambda facts: set(facts)).has_copies():
        raise RunDirError(
            f"copy_to={url!r} has checkpoints of a run, from which the fresh one would continue. "
            "Choose another URL, or delete them."
        )


def _folder(step: int) -> str:
    """Returns the path of a copy in the store."""
    return dirs.build_step_dir(run_dir.CHECKPOINTS_DIR, step=step)


class _Store:
    """Objects of a store, by their paths below a URL; operations are tried again after errors."""

    def __init__(self, url: str):
        self.url = url
        self._files: Any = None
        self._root = ""

    def open(self) -> None:
        """Finds the package for the URL; raises MissingExtraError if there is none."""
        if self._files is not None:
            return
        fsspec = import_extra(
            "fsspec.core",
            "stores",
            needed_by=f"copy_to={self.url!r}",
            package="fsspec",
        )
        try:
            self._files, root = fsspec.url_to_fs(self.url)
        except ImportError as error:
            raise MissingExtraError(
                f"copy_to={self.url!r} needs fsspec's package for its store, such as s3fs "
                f"for s3:// and gcsfs for gs://: {error}."
            ) from error
        except ValueError as error:
            raise ArgumentValueError(
                f"copy_to={self.url!r} is of no store that fsspec knows: {error}."
            ) from error
        self._root = root.rstrip("/")
        # Unless a user has set a limit, gcsfs has none, and a start or an end would wait for ever.
        if getattr(self._files, "requests_timeout", 0.0) is None:
            self._files.requests_timeout = _ANSWER_SECONDS

    def steps(self) -> list[int]:
        """Returns the steps with copies, complete or not, ascending."""

        def list_folder() -> list[str]:
            self._files.invalidate_cache()
            return self._files.ls(
                self._path(run_dir.CHECKPOINTS_DIR), detail=False
            )

        steps: list[int] = []
        for path in self._found(list_folder) or []:
            try:
                steps.append(dirs.parse_step_from_dir(path))
            except CheckpointNotFoundError:
                continue
        return sorted(steps)

    def check_writable(self) -> None:
        """Writes an object and removes it; raises the store's error if that is not possible.

        To all that is read, a bucket that does not exist is the same as an empty one.
        """
        self.write(_PROBE, b"")
        self.remove(_PROBE)

    def read(self, path: str, *, at_most: int) -> bytes | None:
        """Returns an object of `at_most` so many bytes, None if there is none."""

        def read() -> bytes:
            with self._files.open(self._path(path), "rb") as file:
                return file.read(at_most + 1)

        data = self._found(read)
        if data is not None and len(data) > at_most:
            raise CheckpointReadError(
                f"{self.url}/{path} has more than {at_most:,} bytes, which are not read. Remove it."
            )
        return data

    def write(self, path: str, data: bytes) -> None:
        """Writes an object at once."""
        self._retried(lambda: self._files.pipe_file(self._path(path), data))

    def upload(self, directory: Directory, name: str, path: str) -> None:
        """Copies a file to an object."""

        def copy() -> None:
            with (
                directory.open(name) as file,
                self._files.open(self._path(path), "wb") as store_file,
            ):
                shutil.copyfileobj(file, store_file, _BLOCK_BYTES)

        self._retried(copy)

    def download(
        self, path: str, directory: Directory, name: str, size: int
    ) -> None:
        """Copies so many bytes of an object to a file."""

        def copy() -> bool:
            with (
                self._files.open(self._path(path), "rb") as store_file,
                directory.replacing(name) as file,
            ):
                _copy_bytes(store_file, file, size)
            return True

        if not self._found(copy):
            raise CheckpointNotFoundError(f"{name}: is missing")

    def remove(self, path: str) -> None:
        """Removes an object, or all in a folder."""

        def remove_objects() -> None:
            self._files.invalidate_cache()
            # `rm` would take * ? [ in a path for a pattern, and remove what is of other runs.
            paths = self._files.find(self._path(path))
            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(self._files.rm_file, paths))

        self._found(remove_objects)

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _found(self, action: Callable[[], T]) -> T | None:
        """Returns the result of an action, None if there is no such object."""
        try:
            return self._retried(action)
        except FileNotFoundError:
            return None

    def _retried(self, action: Callable[[], T]) -> T:
        """Returns the result of an action, which is repeated after the errors of a store."""
        begin = time.monotonic()
        for seconds in retries.PAUSES_SECONDS:
            try:
                return action()
            except (FileNotFoundError, WeftError):
                raise
            # Stores have errors of their own, which have no common base.
            except Exception as error:
                if time.monotonic() - begin > _RETRY_SECONDS:
                    raise
                logger.info(
                    "%s: %s. Trying again in %g s.",
                    self.url,
                    describe_error(error),
                    seconds,
                )
            time.sleep(seconds)
        return action()


def _copy_bytes(source: BinaryIO, target: BinaryIO, size: int) -> None:
    """Copies at most so many bytes."""
    remaining = size
    while remaining:
        block = source.read(min(remaining, _BLOCK_BYTES))
        if not block:
            return
        target.write(block)
        remaining -= len(block)
