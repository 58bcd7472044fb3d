"""Files and directories by the names of Flax: local ones, or those that TensorFlow reaches."""

import contextlib
import enum
import glob as _glob
import importlib
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

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
    before = io_mode
    set_mode(override)
    try:
        yield
    finally:
        set_mode(before)


def _gfile() -> Any:
    """Returns TensorFlow's functions if they are used, else None."""
    if io_mode is BackendMode.DEFAULT:
        return None
    try:
        return importlib.import_module("tensorflow").io.gfile
    except ImportError as error:
        raise MissingExtraError(
            f"BackendMode.TF needs the package tensorflow, which cannot be imported ({error}); "
            "install it, or use BackendMode.DEFAULT."
        ) from error


def GFile(name: str, mode: str) -> Any:
    """Opens a file."""
    if gfile := _gfile():
        return gfile.GFile(name, mode)  # text is in UTF-8 there
    return open(name, mode, encoding=None if "b" in mode else "utf-8")


def exists(path: str) -> bool:
    """Returns whether there is a file or directory."""
    return gfile.exists(path) if (gfile := _gfile()) else os.path.exists(path)


def isdir(path: str) -> bool:
    """Returns whether a path is a directory."""
    return gfile.isdir(path) if (gfile := _gfile()) else os.path.isdir(path)


def getsize(path: str) -> int:
    """Returns the number of bytes of a file."""
    return gfile.stat(path).length if (gfile := _gfile()) else os.path.getsize(path)


def listdir(path: str) -> list[str]:
    """Returns the names in a directory."""
    return gfile.listdir(path) if (gfile := _gfile()) else os.listdir(path)


def glob(pattern: str) -> list[str]:
    """Returns the paths that match a pattern."""
    return gfile.glob(pattern) if (gfile := _gfile()) else _glob.glob(pattern)


def makedirs(path: str) -> None:
    """Creates a directory, and those above it, unless it exists."""
    gfile.makedirs(path) if (gfile := _gfile()) else os.makedirs(path, exist_ok=True)


def copy(src: str, dst: str, overwrite: bool = False) -> None:
    """Copies a file.

    Raises AlreadyExistsError if `dst` exists, and `overwrite` is False.
    """
    _run_unless_exists("copy", shutil.copy, src, dst, overwrite)


def rename(src: str, dst: str, overwrite: bool = False) -> None:
    """Renames a file or directory; see `copy`."""
    _run_unless_exists("rename", os.replace, src, dst, overwrite)


def _run_unless_exists(
    name: str, run: Callable[[str, str], object], src: str, dst: str, overwrite: bool
) -> None:
    if gfile := _gfile():
        getattr(gfile, name)(src, dst, overwrite=overwrite)
    elif os.path.exists(dst) and not overwrite:
        raise AlreadyExistsError(dst)
    else:
        run(src, dst)


def remove(path: str) -> None:
    """Removes a file."""
    gfile.remove(path) if (gfile := _gfile()) else os.remove(path)


def rmtree(path: str) -> None:
    """Removes a directory and what is in it."""
    gfile.rmtree(path) if (gfile := _gfile()) else shutil.rmtree(path)
