"""Errors of a file system that may pass, such as a server of files that restarts.

They say nothing about what is in a file: a checkpoint that cannot be read now may be undamaged. An
operation is therefore tried again, with growing pauses, before its error counts.
"""

import errno
import logging
import re
import time
from collections.abc import Callable

from weft.errors import CheckpointReadError
from weft.typing import T

logger = logging.getLogger(__name__)

PAUSES_SECONDS = (0.1, 0.4, 1.6)
"""Times before each further attempt."""

_NUMBERS = {
    *(
        errno.EIO,
        errno.ESTALE,
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.EBUSY,
    ),
    *(
        errno.EAGAIN,
        errno.EINTR,
        errno.ETIMEDOUT,
        errno.EREMOTEIO,
        errno.ENXIO,
        errno.ENODEV,
    ),
    *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
    *(
        errno.ECONNABORTED,
        errno.ECONNRESET,
        errno.ENOTCONN,
        errno.EMFILE,
        errno.ENFILE,
    ),
}
# In messages of array storage in place of Python's errno.
_TEXT = re.compile(
    "os_error_code|EIO|ESTALE|EACCES|EROFS|Input/output error|Stale file handle"
)

_NUMBER_TEXT = re.compile(r"os_error_code='(\d+)'|OS error (\d+):")
_ADVICE = {
    (errno.ENOSPC, errno.EDQUOT, errno.EFBIG): "Free disk space",
    (errno.EACCES, errno.EPERM, errno.EROFS): "Make the directory writable",
    (
        errno.EMFILE,
        errno.ENFILE,
    ): "Allow more open files, as `ulimit -n 4096` does",
    (errno.ENAMETOOLONG,): "Choose a shorter path for the directory",
}
_ADVICE_FOR_OTHERS = "Look into the state of the disk or of the file server"


def may_pass(error: BaseException) -> bool:
    """Returns whether an error is one of the file system that need not come again."""
    return isinstance(error, OSError) and error.errno in _NUMBERS


def is_of_file_system(error: BaseException | None) -> bool:
    """Returns whether an error, or one of its causes, is one of the file system."""
    while error is not None:
        has_number = isinstance(error, OSError) and error.errno is not None
        if has_number or _TEXT.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def error_number(error: BaseException | None) -> int | None:
    """Returns the number of the system's error that an error, or one of its causes, reports."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        match = _NUMBER_TEXT.search(str(error))
        if match is not None:
            return int(match[1] or match[2])
        error = error.__cause__ or error.__context__
    return None


def advice(error: BaseException) -> str:
    """Returns what helps after an error in writing, without a period; "" if that is unknown.

    >>> advice(OSError(errno.EROFS, "x"))
    'Make the directory writable'
    """
    number = error_number(error)
    for numbers, text in _ADVICE.items():
        if number in numbers:
            return text
    if number is None:
        return ""
    return _ADVICE_FOR_OTHERS


def retried(action: Callable[[], T]) -> T:
    """Returns the result of an action, which is repeated after errors that may pass.

    The action must do the same if it is repeated. Raises the error of the last attempt.
    """
    for seconds in PAUSES_SECONDS:
        try:
            return action()
        except OSError as error:
            if not may_pass(error):
                raise
            logger.warning("%s. Trying again in %g s.", error, seconds)
        time.sleep(seconds)
    return action()


def read(path: str, action: Callable[[], T]) -> T:
    """Returns the result of an action that reads a part of a checkpoint.

    Raises CheckpointReadError if all attempts end in an error that may pass; other errors as they
    are.
    """
    try:
        return retried(action)
    except OSError as error:
        if not may_pass(error):
            raise
        raise CheckpointReadError(
            f"{path!r} cannot be read: {error}. It may be undamaged, and "
            f"{len(PAUSES_SECONDS)} more attempts had the same result; no older checkpoint is used "
            "instead. Start again when the file can be read, or move its checkpoint away to "
            "continue from the one before."
        ) from error
