import errno

import pytest

from weft.trainer.disk_room import lacks_room


def caused(cause):
    error = RuntimeError("the save failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "x"), True),
        (OSError(errno.EDQUOT, "x"), True),
        (OSError(errno.EFBIG, "x"), True),
        (ValueError("RESOURCE_EXHAUSTED: [OS error 28: ENOSPC No space left on device]"), True),
        (caused(OSError(errno.ENOSPC, "x")), True),
        (OSError(errno.EIO, "x"), False),
        (caused(PermissionError("not yours")), False),
        (None, False),
    ],
    ids=["ENOSPC", "EDQUOT", "EFBIG", "tensorstore", "cause", "EIO", "permission", "none"],
)
def test_whether_it_is_for_lack_of_room(error, expected):
    assert lacks_room(error) is expected
