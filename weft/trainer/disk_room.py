"""Detection of write errors caused by a full disk, which can be fixed while the run continues."""

import errno

_NUMBERS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# Texts of array storage in place of Python's errno.
_WORDS = ("ENOSPC", "EDQUOT", "EFBIG", "No space left", "quota exceeded", "File too large")


def lacks_room(error: BaseException | None) -> bool:
    """Returns whether an error, or one of its causes, reports a full disk or quota.

    >>> lacks_room(OSError(errno.ENOSPC, "No space left on device"))
    True
    >>> lacks_room(PermissionError("not yours"))
    False
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NUMBERS:
            return True
        if any(word in str(error) for word in _WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False
