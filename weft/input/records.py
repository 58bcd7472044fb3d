"""Random access to records of many files, with the file and record in errors.

Nothing here imports Grain, which takes half a second: commands that train nothing read files too.
"""

import bisect
import contextlib
import dataclasses
import glob
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from weft.errors import InputReadError, describe_error
from weft.serialization.untrusted import check_local_path


class Records(Protocol):
    """Protocol of sequences of records; some also have `describe` and `fingerprint`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


def describe_record(records: Records, index: int) -> str:
    """Returns the name of a record for messages."""
    describe = getattr(records, "describe", None)
    if describe is None:
        return f"record {index} of {records}"
    return describe(index)


@contextlib.contextmanager
def read_errors(fault: str) -> Iterator[None]:
    """Converts errors of other libraries to InputReadError, with what cannot be done."""
    try:
        yield
    except InputReadError:
        raise
    except Exception as error:
        raise InputReadError(f"{fault}: {describe_error(error)}") from error


class FileRecordSource:
    """Random-access source of files, whose errors name the file and the record.

    Args:
        open_file: Opens a path as a source with a length and items. Optionally it has
            `describe(index)`, the name of a record; `fingerprint`, the identity of its data; and
            `num_bytes`, its approximate size.
    """

    def __init__(self, paths: Sequence[str], open_file: Callable[[str], Any]):
        self._paths = list(paths)
        self._sources = []
        sizes = []
        for path in self._paths:
            with read_errors(f"cannot open {path}"):
                source = open_file(path)
                sizes.append(len(source))
            self._sources.append(source)
        # Of file i, the records from `_starts[i]` to before `_starts[i + 1]`.
        self._starts = list(itertools.accumulate(sizes, initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def __repr__(self) -> str:
        return (
            f"FileRecordSource({len(self)} records in {len(self._paths)} files)"
        )

    def __getitem__(self, index: int) -> Any:
        file, record = self._locate(index)
        try:
            return self._sources[file][record]
        except InputReadError:
            raise
        except Exception as error:
            raise InputReadError(
                f"cannot read {self.describe(index)}: {describe_error(error)}"
            ) from error

    def describe(self, index: int) -> str:
        """Returns the name of a record for messages."""
        file, record = self._locate(index)
        describe = getattr(self._sources[file], "describe", None)
        if describe is None:
            return f"record {record} of {self._paths[file]}"
        return describe(record)

    @property
    def fingerprint(self) -> tuple | None:
        """Identity of the data; None if unknown for a file."""
        fingerprints = []
        for source in self._sources:
            fingerprint = getattr(source, "fingerprint", None)
            if fingerprint is None:
                return None
            fingerprints.append((type(source).__name__, fingerprint))
        return tuple(fingerprints)

    @property
    def num_bytes(self) -> int | None:
        """Approximate size of all files in bytes; None if unknown for one."""
        total = 0
        for source in self._sources:
            num_bytes = getattr(source, "num_bytes", None)
            if num_bytes is None:
                return None
            total += num_bytes
        return total

    def _locate(self, index: int) -> tuple[int, int]:
        """Returns the index of a record's file, and that of the record in it."""
        file = bisect.bisect_right(self._starts, index, lo=1) - 1
        return file, index - self._starts[file]


class ConcatenatedRecords:
    """Records of several datasets, one after the other."""

    def __init__(self, parts: Iterable[Records]):
        self._parts = list(parts)
        self._starts = list(
            itertools.accumulate(map(len, self._parts), initial=0)
        )

    def __len__(self) -> int:
        return self._starts[-1]

    def __repr__(self) -> str:
        return " and ".join(map(str, self._parts))

    def __getitem__(self, index: int) -> Any:
        part, record = self._locate(index)
        return self._parts[part][record]

    def describe(self, index: int) -> str:
        """Returns the name of a record for messages."""
        part, record = self._locate(index)
        return describe_record(self._parts[part], record)

    @property
    def fingerprint(self) -> tuple | None:
        """Identity of the data; None if unknown for a part."""
        return _all_known(self._parts, "fingerprint")

    @property
    def num_bytes(self) -> int | None:
        """Approximate size in bytes; None if unknown for a part."""
        sizes = _all_known(self._parts, "num_bytes")
        return None if sizes is None else sum(sizes)

    def _locate(self, index: int) -> tuple[int, int]:
        part = bisect.bisect_right(self._starts, index, lo=1) - 1
        return part, index - self._starts[part]


def _all_known(parts: Sequence[Records], name: str) -> tuple | None:
    """Returns an attribute of each part; None if one does not have it."""
    values = tuple(getattr(part, name, None) for part in parts)
    return None if None in values else values


@dataclasses.dataclass(eq=False, repr=False)
class LibraryRecordSource:
    """Rows of another library's dataset, with names for errors."""

    rows: Records
    _: dataclasses.KW_ONLY
    unit: str
    title: str
    fingerprint: tuple | None
    num_bytes: int | None

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"{len(self)} {self.unit}s of {self.title}"

    def __getitem__(self, index: int) -> Any:
        with read_errors(f"cannot read {self.describe(index)}"):
            return self.rows[index]

    def describe(self, index: int) -> str:
        return f"{self.unit} {index} of {self.title}"


def matching_files(paths: str | Sequence[str]) -> list[str]:
    """Returns the files that match paths and patterns, each once.

    Args:
        paths: Files and glob patterns (`**` for any folders). The matches of a pattern are sorted.
            Folders and files that exist by the very name are meant before those that match it, such
            as a folder `data [2024]`.

    Raises InputReadError if one of them matches no file, PathNotLocalError for a URL.
    """
    patterns = (
        [paths] if isinstance(paths, str) else [str(path) for path in paths]
    )
    if not patterns:
        raise InputReadError(
            "no paths were given, so there is nothing to read; pass at least one"
        )
    files: list[str] = []
    for pattern in patterns:
        check_local_path(pattern, "paths")
        if os.path.isfile(pattern):
            files.append(pattern)
            continue
        matches = _matches(pattern)
        if not matches:
            raise InputReadError(_no_match(pattern))
        files += matches
    return list(dict.fromkeys(files))


def _matches(pattern: str) -> list[str]:
    """Returns the files that match a pattern, below the longest folder that it names."""
    parts = pattern.split("/")
    num_folders = len(parts) - 1
    while num_folders and not os.path.isdir(
        "/".join(parts[:num_folders]) or "/"
    ):
        num_folders -= 1
    folder = "".join(f"{part}/" for part in parts[:num_folders])
    relative_pattern = "/".join(parts[num_folders:])
    # Brackets may also be part of a file's name, next to a star.
    with_literal_brackets = relative_pattern.replace("[", "[[]")
    for glob_pattern in (relative_pattern, with_literal_brackets):
        paths = glob.glob(glob.escape(folder) + glob_pattern, recursive=True)
        files = sorted(filter(os.path.isfile, paths))
        if files:
            return files
    return []


def _no_match(pattern: str) -> str:
    path = Path(pattern)
    if path.is_dir():
        return f"{pattern} is a folder; name the files in it, such as '{path / '*'}'"
    folder = next(p for p in path.parents if p.is_dir() or p == p.parent)
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    content = ", ".join(map(repr, names[:5])) or "nothing"
    if len(names) > 5:
        content += f" and {len(names) - 5} more"
    return (
        f"no file matches {pattern!r}; the folder {str(folder)!r} holds {content}: "
        "correct the path"
    )
