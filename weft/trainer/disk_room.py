"""Whether a write failed for lack of room: the one failure that someone can mend meanwhile."""

import errno

_NUMBERS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# What array storage says where Python would give a number.
_WORDS = ("ENOSPC", "EDQUOT", "EFBIG", "No space left", "quota exceeded", "File too large")


def lacks_room(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, says that a disk or a quota is full.

    Args:
        error: what was raised.

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
