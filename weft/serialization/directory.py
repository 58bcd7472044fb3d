"""Directories from elsewhere, such as that of a stranger's run: nothing in them leads out of them.

The user names a directory, which may be a link. What is in it may have been made by others: a link
to a private file, a pipe that nobody writes to, a file as large as the disk. So a `Directory` opens
each part of a path relative to the handle of the part before it, and never through a link:

    runs/lm  →  summaries  →  train_train  →  summaries.jsonl
    a handle    a handle      a handle        a regular file, of at most so many bytes

Only regular files are read. A file is replaced by a new one, under a random name that did not
exist. A file that others know by another name (a hard link) is copied before it is changed in
place. Texts are in UTF-8, whatever the locale.
"""

import contextlib
import dataclasses
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, cast

from weft.errors import FileRefusedError
from weft.serialization.untrusted import MAX_JSON_BYTES, parse_json

MAX_TEXT_BYTES = 2**26
"""How large a text may be that is read as a whole."""

MAX_ENTRIES = 2**20
"""How many files and folders a directory may hold."""

MAX_DEPTH = 64
"""How many folders deep a file may be: each way to one is walked from the directory."""

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
    stat.S_IFREG: "a file",
}
_FIXES = {
    stat.S_IFLNK: "; replace it by a copy of what it points to, if you trust that",
    stat.S_IFDIR: "; move it away",
}
_TO_FOLDER = os.O_RDONLY | os.O_DIRECTORY
# A FIFO would be waited for.
_TO_FILE = os.O_NOFOLLOW | os.O_NONBLOCK


@dataclasses.dataclass(frozen=True)
class Entry:
    """File, folder, link or other entry of a directory, seen without following it.

    Attributes:
        name: its path below the directory, with "/".
        status: of the entry itself.
    """

    name: str
    status: os.stat_result

    @property
    def is_folder(self) -> bool:
        """True for a directory, and not for a link to one."""
        return stat.S_ISDIR(self.status.st_mode)

    @property
    def is_file(self) -> bool:
        """True for a regular file."""
        return stat.S_ISREG(self.status.st_mode)


@dataclasses.dataclass(frozen=True)
class Directory:
    r"""Directory that the user named, with what may have come from elsewhere in it.

    Names are paths below it, with "/". All methods raise a FileRefusedError, which is an OSError,
    if an entry on the way is a link, or the entry itself is of the wrong kind; and an OSError that
    names the path, such as FileNotFoundError, if the system refuses.

    >>> import tempfile
    >>> run = Directory(tempfile.mkdtemp())
    >>> run.write("summaries/steps.txt", "1 2\n")
    >>> run.read_text("summaries/steps.txt"), run.names("summaries")
    ('1 2\n', ['steps.txt'])
    """

    path: str

    # Reading.

    def open(
        self, name: str, *, at_most: int | None = None, buffering: int = -1
    ) -> BinaryIO:
        """Opens a regular file for reading, if it has `at_most` so many bytes."""
        fd = self.descriptor(name, os.O_RDONLY)
        size = os.fstat(fd).st_size
        if at_most is not None and size > at_most:
            os.close(fd)
            raise self.refusal(
                name, f"has {size:,} bytes; at most {at_most:,} are read"
            )
        return cast(BinaryIO, open(fd, "rb", buffering))

    def read_bytes(self, name: str, *, at_most: int) -> bytes:
        """Returns the contents of a file of `at_most` so many bytes."""
        with self.open(name, at_most=at_most) as file:
            # What is appended meanwhile is not read.
            return file.read(os.fstat(file.fileno()).st_size)

    def read_text(self, name: str, *, at_most: int = MAX_TEXT_BYTES) -> str:
        """Returns the text of a file in UTF-8."""
        try:
            return self.read_bytes(name, at_most=at_most).decode("utf-8")
        except UnicodeDecodeError as error:
            why = f"is not text in UTF-8: byte {error.start:,} is 0x{error.object[error.start]:02x}"
            raise self.refusal(name, why) from error

    def read_json(self, name: str, *, at_most: int = MAX_JSON_BYTES) -> Any:
        """Returns the JSON value of a file; raises a ValueError if it is none."""
        return parse_json(self.read_bytes(name, at_most=at_most))

    def descriptor(self, name: str, flags: int) -> int:
        """Returns the descriptor of a regular file, opened with the flags of `os.open`."""
        with self._folder_of(name) as (folder, last):
            try:
                with self._naming(name):
                    fd = os.open(last, flags | _TO_FILE, 0o666, dir_fd=folder)
            except OSError:
                self._refuse_other_than(stat.S_IFREG, name, last, folder)
                raise
            status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise self._kind_refusal(name, status, "a regular file")
        return fd

    def status(self, name: str) -> os.stat_result | None:
        """Returns the status of an entry itself, None if there is none."""
        try:
            with self._folder_of(name) as (folder, last):
                return os.stat(last, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def has_file(self, name: str) -> bool:
        """Returns whether there is a regular file; refuses anything else of that name."""
        return self._has(name, stat.S_IFREG)

    def has_folder(self, name: str) -> bool:
        """Returns whether there is a folder; refuses anything else of that name."""
        return self._has(name, stat.S_IFDIR)

    def names(self, folder: str = "") -> list[str]:
        """Returns the sorted names in a folder, by default in the directory itself."""
        return sorted(
            os.path.basename(entry.name) for entry in self.entries(folder)
        )

    def entries(self, folder: str = "") -> list[Entry]:
        """Returns what is in a folder, by default in the directory itself, sorted by name."""
        prefix = f"{folder}/" if folder else ""
        entries = []
        with (
            self._folder_of(f"{prefix}_") as (fd, _),
            os.scandir(fd) as scanned,
        ):
            for entry in scanned:
                if len(entries) > MAX_ENTRIES:
                    break  # `walk` refuses it
                with contextlib.suppress(
                    FileNotFoundError
                ):  # removed in the meantime
                    entries.append(
                        Entry(
                            prefix + entry.name,
                            entry.stat(follow_symlinks=False),
                        )
                    )
        return sorted(entries, key=lambda entry: entry.name)

    def walk(self, folder: str = "") -> Iterator[Entry]:
        """Yields what is in a folder and below it, links included, which are not followed."""
        pending_folders = [self.entries(folder)]
        count = 0
        while pending_folders:
            entries = pending_folders.pop()
            count += len(entries)
            if count > MAX_ENTRIES:
                raise self.refusal(
                    folder, f"holds more than {MAX_ENTRIES:,} files"
                )
            for entry in entries:
                yield entry
                if entry.is_folder:
                    with contextlib.suppress(
                        FileNotFoundError
                    ):  # removed in the meantime
                        pending_folders.append(self.entries(entry.name))

    def check(self, entries: Iterable[Entry]) -> None:
        """Refuses entries that are neither folders nor regular files."""
        for entry in entries:
            if not (entry.is_folder or entry.is_file):
                raise self._kind_refusal(
                    entry.name, entry.status, "a file or folder"
                )

    # Writing.

    def write(
        self,
        name: str,
        data: str | bytes,
        *,
        mode: int = 0o666,
        sync: bool = True,
    ) -> None:
        """Replaces a file atomically: readers see the new or the previous contents.

        Args:
            mode: of the new file, less the bits of the umask.
            sync: whether to wait until it is on the disk.
        """
        with self.replacing(name, mode=mode, sync=sync) as file:
            file.write(data.encode("utf-8") if isinstance(data, str) else data)

    @contextlib.contextmanager
    def replacing(
        self, name: str, *, mode: int = 0o666, sync: bool = True
    ) -> Iterator[BinaryIO]:
        """Yields a new file that replaces that of the name at the end, unless the block raises."""
        with self._folder_of(name, make=True) as (folder, last):
            temporary = f".{last}.{secrets.token_hex(8)}"
            with self._naming(name):
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
                fd = os.open(temporary, flags, mode, dir_fd=folder)
            try:
                with open(fd, "w+b") as file:
                    yield file
                    file.flush()
                    if sync:
                        os.fsync(fd)
                with self._naming(name):
                    os.replace(
                        temporary, last, src_dir_fd=folder, dst_dir_fd=folder
                    )
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise
            if sync:
                os.fsync(folder)

    def open_to_append(self, name: str) -> BinaryIO:
        """Opens a regular file for reading, and for writing at its end; creates it if needed."""
        fd = self.open_to_change(name, os.O_APPEND)
        return cast(BinaryIO, open(fd, "a+b"))

    def open_to_change(self, name: str, flags: int = 0) -> int:
        """Returns the descriptor of a regular file, created if needed, to read and write in place.

        A file with other names (hard links) is replaced by a copy before.
        """
        flags |= os.O_RDWR | os.O_CREAT
        fd = self.descriptor(name, flags)
        if os.fstat(fd).st_nlink > 1:
            os.close(fd)
            with self.open(name) as shared_file, self.replacing(name) as copy:
                shutil.copyfileobj(shared_file, copy)
            fd = self.descriptor(name, flags)
        return fd

    def make_folder(self, name: str) -> None:
        """Creates a folder, and those above it below the directory, unless it exists."""
        with self._folder_of(f"{name}/_", make=True):
            pass

    @contextlib.contextmanager
    def steady_path(self, name: str) -> Iterator[str]:
        """Yields a path to a folder, which it creates if needed, for libraries that take paths.

        On Linux, the path leads to this folder while the context is open, whatever gets its name in
        the meantime. Elsewhere it is the usual path.
        """
        self.make_folder(name)
        with self._folder_of(f"{name}/_") as (folder, _):
            steady = f"/proc/self/fd/{folder}"
            yield steady if os.path.isdir(steady) else self.full_path(name)

    def rename(self, name: str, new_name: str) -> None:
        """Renames an entry, as `os.replace`."""
        old_folder, new_folder = (
            self._folder_of(name),
            self._folder_of(new_name),
        )
        with (
            old_folder as (old, old_last),
            new_folder as (new, new_last),
            self._naming(name),
        ):
            os.replace(old_last, new_last, src_dir_fd=old, dst_dir_fd=new)

    def remove(self, name: str) -> None:
        """Removes a file or link, or a folder with all that is in it; links are not followed."""
        with self._folder_of(name) as (folder, last), self._naming(name):
            if stat.S_ISDIR(
                os.stat(last, dir_fd=folder, follow_symlinks=False).st_mode
            ):
                shutil.rmtree(last, dir_fd=folder)
            else:
                os.unlink(last, dir_fd=folder)

    # Messages.

    def full_path(self, name: str) -> str:
        """Returns the path of an entry for messages."""
        return os.path.join(self.path, name) if name else self.path

    def refusal(self, name: str, why: str) -> FileRefusedError:
        """Returns the error about an entry."""
        return FileRefusedError(f"{self.full_path(name)!r} {why}.")

    # The way to an entry.

    def _has(self, name: str, kind: int) -> bool:
        status = self.status(name)
        if status is not None and stat.S_IFMT(status.st_mode) != kind:
            raise self._kind_refusal(name, status, _KINDS[kind])
        return status is not None

    @contextlib.contextmanager
    def _folder_of(
        self, name: str, *, make: bool = False
    ) -> Iterator[tuple[int, str]]:
        """Yields the handle of the folder that a name is in, and the last part of the name."""
        *folders, last = name.split("/")
        if {"", ".", ".."} & {*folders, last}:
            raise self.refusal(name, "is not a path below the directory")
        if len(folders) > MAX_DEPTH:
            raise self.refusal(
                folders[0],
                f"has something more than {MAX_DEPTH} folders deep in it",
            )
        with self._naming(""):
            fd = os.open(self.path, _TO_FOLDER)
        try:
            for i, folder in enumerate(folders):
                relative_name = "/".join(folders[: i + 1])
                folder_fd = self._open_folder(
                    relative_name, folder, fd, make=make
                )
                os.close(fd)
                fd = folder_fd
            yield fd, last
        finally:
            os.close(fd)

    def _open_folder(
        self, name: str, last: str, parent_fd: int, *, make: bool
    ) -> int:
        """Opens a folder by the last part of its name, in its parent; never through a link."""
        if make:
            with self._naming(name), contextlib.suppress(FileExistsError):
                os.mkdir(last, dir_fd=parent_fd)
        try:
            with self._naming(name):
                return os.open(
                    last, _TO_FOLDER | os.O_NOFOLLOW, dir_fd=parent_fd
                )
        except OSError:
            self._refuse_other_than(stat.S_IFDIR, name, last, parent_fd)
            raise

    def _refuse_other_than(
        self, kind: int, name: str, last: str, folder: int
    ) -> None:
        """Explains why an entry could not be opened, if it is of another kind."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            status = os.stat(last, dir_fd=folder, follow_symlinks=False)
            if stat.S_IFMT(status.st_mode) != kind:
                raise self._kind_refusal(name, status, _KINDS[kind])

    def _kind_refusal(
        self, name: str, status: os.stat_result, expected: str
    ) -> FileRefusedError:
        kind = stat.S_IFMT(status.st_mode)
        kind_text = _KINDS.get(kind, "of an unknown kind")
        fix = _FIXES.get(kind, "")
        return self.refusal(
            name, f"is {kind_text}, where {expected} was expected{fix}"
        )

    @contextlib.contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Lets errors of the system name the whole path."""
        try:
            yield
        except FileRefusedError:
            raise
        except OSError as error:
            number = error.errno or errno.EIO
            raise OSError(
                number, error.strerror or str(error), self.full_path(name)
            ) from error
        except (
            ValueError
        ) as error:  # a NUL in the name, or half of a surrogate pair
            raise self.refusal(name, f"is not a path: {error}") from error
