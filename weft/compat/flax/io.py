"""Files and directories by the names of Flax: local ones, or those that TensorFlow reaches."""

import contextlib
import enum
import glob as _glob
import importlib
import os
import shutil
from collections.abc import Iterator
from typing import IO, Any

from weft.errors import AlreadyExistsError, MissingExtraError


class BackendMode(enum.Enum):
    """Backend of the functions: local files, or `tensorflow.io.gfile`, which knows gs:// paths."""

    DEFAULT = 0
    TF = 1


io_mode = BackendMode.DEFAULT


def set_mode(override: BackendMode) -> None:
    """Sets the backend of this process."""
    global io_mode
    io_mode = override


@contextlib.contextmanager
def override_mode(override: BackendMode) -> Iterator[None]:
    """Enters a context with another backend.

    >>> with override_mode(BackendMode.DEFAULT):
    ...     isdir("/")
    True
    """
    outer_mode = io_mode
    set_mode(override)
    try:
        yield
    finally:
        set_mode(outer_mode)


class _LocalFiles:
    """Functions of `tensorflow.io.gfile`, for local files."""

    exists = os.path.exists
    isdir = os.path.isdir
    listdir = os.listdir
    glob = _glob.glob
    remove = os.remove
    rmtree = shutil.rmtree
    stat = os.stat

    @staticmethod
    def GFile(name: str, mode: str) -> IO[Any]:
        return open(name, mode, encoding=None if "b" in mode else "utf-8")

    @staticmethod
    def makedirs(path: str) -> None:
        os.makedirs(path, exist_ok=True)

    @staticmethod
    def copy(src: str, dst: str, overwrite: bool) -> None:
        if os.path.exists(dst) and not overwrite:
            raise AlreadyExistsError(dst)
        shutil.copy(src, dst)

    @staticmethod
    def rename(src: str, dst: str, overwrite: bool) -> None:
        if os.path.exists(dst) and not overwrite:
            raise AlreadyExistsError(dst)
        os.replace(src, dst)


def _files() -> Any:
    """Returns the functions of the backend."""
    if io_mode is BackendMode.DEFAULT:
        return _LocalFiles
    try:
        return importlib.import_module("tensorflow").io.gfile
    except ImportError as error:
        raise MissingExtraError(
            f"BackendMode.TF needs the package tensorflow, which cannot be imported ({error}); "
            "install it, or use BackendMode.DEFAULT."
        ) from error


def GFile(name: str, mode: str) -> Any:
    """Opens a file; text is in UTF-8."""
    return _files().GFile(name, mode)


def exists(path: str) -> bool:
    """Returns whether there is a file or directory."""
    return _files().exists(path)


def isdir(path: str) -> bool:
    """Returns whether a path is a directory."""
    return _files().isdir(path)


def getsize(path: str) -> int:
    """Returns the number of bytes of a file."""
    status = _files().stat(path)
    return (
        status.st_size if isinstance(status, os.stat_result) else status.length
    )


def listdir(path: str) -> list[str]:
    """Returns the names in a directory."""
    return _files().listdir(path)


def glob(pattern: str) -> list[str]:
    """Returns the paths that match a pattern."""
    return _files().glob(pattern)


def makedirs(path: str) -> None:
    """Creates a directory, and those above it, unless it exists."""
    _files().makedirs(path)


def copy(src: str, dst: str, overwrite: bool = False) -> None:
    """Copies a file.

    Raises AlreadyExistsError if `dst` exists, and `overwrite` is False.
    """
    _files().copy(src, dst, overwrite=overwrite)


def rename(src: str, dst: str, overwrite: bool = False) -> None:
    """Renames a file or directory; see `copy`."""
    _files().rename(src, dst, overwrite=overwrite)


def remove(path: str) -> None:
    """Removes a file."""
    _files().remove(path)


def rmtree(path: str) -> None:
    """Removes a directory and what is in it."""
    _files().rmtree(path)
