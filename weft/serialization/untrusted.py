"""Untrusted input: files, JSON and text that this program did not write.

These functions raise only `OSError` and `ValueError`, which readers turn into their documented
error: a FIFO or device is refused instead of waited for, JSON nested too deeply is a `ValueError`,
and printed text loses terminal control characters.
"""

import codecs
import datetime
import json
import math
import os
import re
import stat
import sys
from collections.abc import Sequence
from typing import Any, cast

from weft.errors import PathNotLocalError

MAX_AXES = 32
"""How many axes an array may have, in JAX and in NumPy before 2.0."""

MAX_JSON_BYTES = 2**28
"""How large a file of JSON may be; the index of the largest published models has a few MB."""


MAX_JSON_VALUES = 2**25
"""How many values a JSON text may have, at most: an empty list of one byte takes 64 in memory."""


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def refuse_url(path: str | os.PathLike[str], what: str) -> None:
    """Raises PathNotLocalError for a URL; `what` is the field or option that names the path.

    >>> refuse_url("s3://bucket/run", "dir")
    Traceback (most recent call last):
    weft.errors._training.PathNotLocalError: dir='s3://bucket/run' is a URL, but only paths of ...
    """
    if _URL.match(os.fspath(path)):
        choice = ""
        if what == "dir":
            choice = (
                " Or set checkpointer.copy_to to the URL, for copies of the checkpoints there, "
                "and dir to a folder of this machine."
            )
        raise PathNotLocalError(
            f"{what}={os.fspath(path)!r} is a URL, but only paths of this machine are read and "
            "written. Mount the storage, for example with gcsfuse or mount-s3, and name the folder "
            f"where it is mounted.{choice}"
        )


def check_local_path(path: str | os.PathLike[str], what: str) -> None:
    """Refuses a URL, and a path in `~` or of Windows, which would become a folder of that name.

    Raises PathNotLocalError, as `refuse_url`.
    """
    refuse_url(path, what)
    if os.fspath(path).partition("/")[0] == "~":
        raise PathNotLocalError(
            f"{what}={os.fspath(path)!r} begins with '~', which a shell replaces by the home "
            "directory, but did not do here. Write the whole path."
        )
    if is_windows_path(os.fspath(path)):
        raise PathNotLocalError(f"{what}={os.fspath(path)!r} {WINDOWS_PATH}")


WINDOWS_PATH = (
    "is a path as Windows has them. On this system a path has no drive letter, and / between its "
    "parts: runs/lm."
)


def is_windows_path(path: str) -> bool:
    """Returns whether a path has a drive letter or is written with backslashes, on other systems.

    >>> is_windows_path("runs/lm")
    False
    """
    is_windows = re.match(r"[A-Za-z]:[\\/]|\\\\", path) is not None
    has_backslashes = "\\" in path and "/" not in path
    is_like_windows = is_windows or has_backslashes
    return os.name == "posix" and is_like_windows and not os.path.exists(path)


def utf8_fault(path: str | os.PathLike[str]) -> str | None:
    """Returns why array storage cannot use a path, which it takes as UTF-8; None if it can.

    It would end in an error of its own, or write to a directory of another name.
    """
    path = os.path.abspath(path)
    if os.fsencode(path) == path.encode(errors="replace"):
        return None
    return (
        f"{path!a} is not in UTF-8 (this process has the encoding {sys.getfilesystemencoding()}). "
        "Choose a path of ASCII characters, or set PYTHONUTF8=1 and name it in UTF-8"
    )


def open_file(path: str | os.PathLike[str], *, buffering: int = -1) -> Any:
    """Opens a regular file for reading; never waits for a writer.

    Raises OSError if the file is missing, or is a directory, a FIFO, a socket or a device.
    """
    # Without O_NONBLOCK, to open a FIFO waits until another process writes to it.
    flags = (
        os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    )
    try:
        fd = os.open(path, flags)
    except (
        ValueError
    ) as error:  # a NUL in the path, or half of a surrogate pair
        raise OSError(f"{os.fspath(path)!r} is not a path: {error}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{os.fspath(path)!r} is not a regular file")
    return open(fd, "rb", buffering)


def read_json_file(path: str | os.PathLike[str]) -> Any:
    """Returns the JSON value of a file.

    Raises:
        OSError: see `open_file`.
        ValueError: if it has more than `MAX_JSON_BYTES`, or is not JSON.
    """
    return parse_json(_read_file(path, MAX_JSON_BYTES))


def read_text_file(path: str | os.PathLike[str], *, at_most: int) -> str:
    """Returns the text, in UTF-8, of a file that the user named; it may be a link.

    Raises:
        OSError: see `open_file`.
        ValueError: if it has more than `at_most` bytes, or is not in UTF-8.
    """
    return _read_file(path, at_most).decode("utf-8-sig")


def _read_file(path: str | os.PathLike[str], at_most: int) -> bytes:
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > at_most:
            raise ValueError(
                f"it has {size:,} bytes; at most {at_most:,} are read"
            )
        return file.read(size)


def parse_json(data: str | bytes | bytearray) -> Any:
    """Returns the JSON value of a text or of UTF-8 bytes.

    Raises ValueError if it is not JSON, is nested too deeply, or has more than `MAX_JSON_VALUES`.

    >>> parse_json(b'{"a": [1]}')
    {'a': [1]}
    """
    # Some programs put a mark before UTF-8 (BOM).
    if isinstance(data, str):
        text = data
    else:
        text = data.decode("utf-8-sig")
    if _may_have_too_many_values(text):
        raise ValueError(f"it has more than {MAX_JSON_VALUES:,} values")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _may_have_too_many_values(text: str) -> bool:
    if len(text) <= MAX_JSON_VALUES:
        return False
    return sum(map(text.count, ",[{")) > MAX_JSON_VALUES


def check_json_size(text: str) -> None:
    """Raises a ValueError if a JSON text in ASCII is too large to be read from a file again.

    >>> check_json_size('{"a": [1]}')
    """
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(
            f"it would have {len(text):,} bytes, and at most {MAX_JSON_BYTES:,} are read"
        )
    if _may_have_too_many_values(text):
        raise ValueError(
            f"it would have more than {MAX_JSON_VALUES:,} values, which are not read"
        )


def memory_bytes() -> int:
    """Returns the size of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


MAX_COUNT = 2**53
"""How large a count may be: a float holds it exactly."""


def check_json(value: object, form: Any, where: str = "") -> None:
    """Raises a ValueError that names the place, unless a JSON value has a form.

    Args:
        form: `int` is a count up to `MAX_COUNT`, `float` a number, `datetime.datetime` a time in
            ISO 8601, `str`, `bool`, `list`, `dict` or None itself; `(a, b)` one of several forms;
            `[form]` a list of them; `{str: form}` an object with any names, `{"a": form, "b?":
            form}` one with these, and maybe others.
        where: place of the value, for the message.

    >>> check_json({"end": {"step": "x"}}, {"end?": {"step": int}})
    Traceback (most recent call last):
    ValueError: end.step is 'x'; expected a count
    """
    if not _has_kind(value, form):
        raise ValueError(
            f"{where or 'it'} is {_shortened(value)}; expected {_form_text(form)}"
        )
    if isinstance(form, tuple):
        form = next(option for option in form if _has_kind(value, option))
    if isinstance(form, list):
        for i, item in enumerate(cast(list[object], value)):
            check_json(item, form[0], f"{where}[{i}]")
    if not isinstance(form, dict):
        return
    values = cast(dict[str, object], value)
    if str in form:
        form = dict.fromkeys(values, form[str])
    for name, inner in form.items():
        key = name.removesuffix("?")
        if key in values:
            check_json(values[key], inner, f"{where}.{key}" if where else key)
        elif key == name:
            raise ValueError(f"{where or 'it'} has no {key!r}")


_NAMES = {
    int: "a count",
    float: "a number",
    str: "a text",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    datetime.datetime: "a time",
    None: "null",
}


def _form_text(form: Any) -> str:
    if isinstance(form, tuple):
        return " or ".join(map(_form_text, form))
    if isinstance(form, list | dict):
        form = type(form)
    return _NAMES[form]


def _shortened(value: object) -> str:
    text = repr(value)
    if len(text) <= 60:
        return text
    return f"{text[:60]}…"


def _has_kind(value: object, form: Any) -> bool:
    """Returns whether a value is of the kind that a form begins with."""
    if isinstance(form, tuple):
        return any(_has_kind(value, option) for option in form)
    if form is datetime.datetime:
        return isinstance(value, str) and _is_time(value)
    if form is int:
        return type(value) is int and 0 <= value <= MAX_COUNT
    if form is float:
        return type(value) is float or (
            type(value) is int and abs(value) < 2**1000
        )
    if form is None:
        return value is None
    if isinstance(form, list | dict):
        form = type(form)
    return type(value) is form


def _is_time(text: str) -> bool:
    try:
        datetime.datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return False
    return True


def is_possible_shape(shape: Sequence[int], itemsize: int) -> bool:
    """Returns whether NumPy can make an array of this shape; it refuses large sizes even if empty.

    >>> is_possible_shape([0, 3], 4), is_possible_shape([0, 2**62], 4)
    (True, False)
    """
    largest = math.prod(size for size in shape if size) * itemsize
    return (
        len(shape) <= MAX_AXES
        and min(shape, default=0) >= 0
        and largest < 2**63
    )


# What a terminal obeys instead of showing it: the control characters C0 and C1 except tabs and line
# ends, what turns the direction of the text around it, and halves of pairs, which have no bytes.
_COMMANDS = re.compile(
    r"\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]"
    r"|[\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""Returns the text with all characters escaped that a terminal obeys instead of showing them.

    Texts that others wrote (names of files, models, logs, messages) go through it before they are
    printed. Letters of all scripts, tabs and line ends stay.

    >>> printable("é: \x1b[2J\nnext")
    'é: \\x1b[2J\nnext'
    """
    return _COMMANDS.sub(
        lambda match: match[0].encode("unicode_escape").decode(), text
    )


# First bytes of non-text formats, and commands that unpack them, whatever the file is called.
_PACKED = {
    b"\x1f\x8b": ("gzip", "gunzip <old >new"),
    b"PK\x03\x04": ("zip", "unzip"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd <old >new"),
    b"\xfd7zXZ\x00": ("xz", "unxz <old >new"),
    b"BZh": ("bzip2", "bunzip2 <old >new"),
    b"\x04\x22\x4d\x18": ("lz4", "unlz4 <old >new"),
    b"\x89PNG": ("PNG", None),
    b"%PDF-": ("PDF", None),
}


def invalid_text_reason(data: bytes) -> str | None:
    r"""Returns why data is not text in UTF-8, and how to fix it; None for text.

    Models would learn compressed or binary data like text.

    >>> invalid_text_reason("né".encode()), invalid_text_reason(b"a\0b")
    (None, 'is not text: byte 1 is 0, as in binary files; leave the file out')
    """
    for start, (kind, program) in _PACKED.items():
        if data.startswith(start) and (
            kind != "bzip2" or data[4:10] == b"1AY&SY"
        ):
            fix = "extract its text"
            if program is not None:
                fix = f"unpack it first, for example with `{program}`"
            return f"is not text: {kind} data begins at byte 0; {fix}, or leave the file out"
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        fix = (
            "convert it, for example with `iconv -f UTF-16 -t UTF-8 <old >new`"
        )
        return (
            f"is not text in UTF-8, but in UTF-16; {fix}, or leave the file out"
        )
    zero_position = data.find(b"\0")
    if zero_position >= 0:
        return f"is not text: byte {zero_position:,} is 0, as in binary files; leave the file out"
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return (
            f"is not text in UTF-8: byte {error.start:,} is 0x{data[error.start]:02x} "
            f"({error.reason}); convert it, for example with "
            "`iconv -f ISO-8859-1 -t UTF-8 <old >new`, or leave the file out"
        )
    return None
