"""Shared code of the fuzzers of readers: damaged valid data, and allowed outcomes."""

import contextlib
import copy
import json
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st

SECONDS = 10
MEGABYTES = 512

DEEP = "[" * 1_500
# Replacements of JSON values.
ODD = [None, True, 0, -1, 1, 2, 3, 2**31, 2**62, 2**63, 2**70, -(2**63), 0.0, 1.5, -2.5, 1e308]
ODD += [
    float("nan"),
    float("inf"),
    "",
    "x",
    "0",
    "..",
    "../x",
    "/dev/zero",
    "a\0b",
    "\ud800",
    "\x1b[2J",
]
ODD += [[], {}, [0], [0, 2**62], [2**62, 2**62], [[]], ["x"], [None], {"x": 1}, {"": {}}]


@st.composite
def damaged(draw: st.DrawFn, valid: Sequence[bytes]) -> bytes:
    """Returns valid bytes with a few random changes."""
    data = bytearray(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        change = draw(st.sampled_from(["set", "cut", "insert", "end", "repeat"]))
        if change == "set" and at < len(data):
            data[at] = draw(st.integers(0, 255))
        elif change == "cut":
            del data[at : at + draw(st.integers(1, 16))]
        elif change == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=8))
        elif change == "end":
            del data[at:]
        elif change == "repeat":
            data[at:at] = data[at : at + draw(st.integers(1, 64))]
    return bytes(data)


@st.composite
def damaged_json(draw: st.DrawFn, valid: Sequence[Any]) -> bytes:
    """Returns valid JSON in which some values, keys or whole branches are others."""
    value = json.loads(json.dumps(draw(st.sampled_from(valid))))
    for _ in range(draw(st.integers(1, 3))):
        value = _changed(draw, value)
    text = json.dumps(value)
    if draw(st.integers(0, 20)) == 0:
        text = text.replace("null", DEEP, 1)
    return text.encode()


def _changed(draw: st.DrawFn, value: Any) -> Any:
    keys = (
        list(value)
        if isinstance(value, dict)
        else range(len(value))
        if isinstance(value, list)
        else []
    )
    if not keys or draw(st.integers(0, 5)) == 0:
        return copy.deepcopy(draw(st.sampled_from(ODD)))
    key = draw(st.sampled_from(keys))
    change = draw(st.sampled_from(["below", "below", "below", "drop", "copy"]))
    if change == "drop":
        del value[key]
    elif change == "copy" and isinstance(value, dict):
        value[draw(st.sampled_from(["x", "", "../x", *keys]))] = value[key]
    elif change == "copy":
        value.insert(key, value[key])
    else:
        value[key] = _changed(draw, value[key])
    return value


def any_of(valid: Sequence[bytes], crafted: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Returns crafted bytes, those that are valid, and those damaged."""
    return st.one_of(st.sampled_from([*crafted, *valid]), damaged(valid))


def read(
    reader: Callable[[], Any], errors: type[Exception] | tuple[type[Exception], ...]
) -> tuple[bool, Any]:
    """Calls a reader, which may return or raise one of its errors, soon and with little memory.

    Returns:
        Whether it returned, and what.
    """
    begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        result = True, reader()
    except errors as error:
        assert str(error).strip(), f"{type(error).__name__} without a message"
        result = False, error
    except Exception:
        raise
    except BaseException as error:  # as of a library in Rust that panics
        raise AssertionError(f"raised {type(error).__name__}: {error}") from error
    seconds = time.monotonic() - begin
    assert seconds < SECONDS, f"took {seconds:.1f} s"
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert more < MEGABYTES, f"took {more:.0f} MB"
    return result


@contextlib.contextmanager
def untouched(folder: Path) -> Iterator[None]:
    """Fails if what is done changes, adds or removes a file of a folder."""
    before = _state(folder)
    yield
    assert _state(folder) == before, "files were changed"


def _state(folder: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for root, _, names in os.walk(folder):
        for name in names:
            status = os.lstat(os.path.join(root, name))
            found[os.path.join(root, name)] = status.st_size, status.st_mtime_ns
    return found


def source_of(module: str, case: object) -> str:
    """Returns source that checks a case again."""
    return f"from tests.fuzz.{module} import check\n\ncheck({case!r})\n"
