"""Records by index from many files, whose errors name the file and the record.

`RecordDataset` is a Grain `MapDataset`. What is mapped over it record by record, before it is
shuffled, mixed or batched, is mapped where the name of the record is still known:

    ds = json_lines_dataset("data/*.jsonl").map(to_example)    # an error names file and line
    ds = ds.seed(0).shuffle().repeat(None)                     # from here on, only the batch
"""

import bisect
import glob
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grain

from weft.errors import InputDatasetError, InputReadError


class NamedSource:
    """Files as one random-access source, whose errors name the file and the record.

    Args:
        paths: One path per file.
        open_file: From a path to a source: something with a length and items. It may have
            `describe(index)`, what to call a record; `fingerprint`, what tells one state of its
            data from another; and `num_bytes`, about its size.
    """

    def __init__(self, paths: Sequence[str], open_file: Callable[[str], Any]):
        self._paths = list(paths)
        self._sources = []
        sizes = []
        for path in self._paths:
            try:
                self._sources.append(open_file(path))
                sizes.append(len(self._sources[-1]))
            except InputReadError:
                raise
            except Exception as error:
                raise InputReadError(
                    f"cannot open {path}: {type(error).__name__}: {error}"
                ) from error
        self._ends = list(itertools.accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __repr__(self) -> str:
        return f"NamedSource({len(self)} records in {len(self._paths)} files)"

    def __getitem__(self, index: int) -> Any:
        file, record = self._place(index)
        try:
            return self._sources[file][record]
        except InputReadError:
            raise
        except Exception as error:
            raise InputReadError(
                f"cannot read {self.describe(index)}: {type(error).__name__}: {error}"
            ) from error

    def describe(self, index: int) -> str:
        """What to call a record in a message."""
        file, record = self._place(index)
        describe = getattr(self._sources[file], "describe", None)
        return describe(record) if describe else f"record {record} of {self._paths[file]}"

    @property
    def fingerprint(self) -> tuple | None:
        """What tells this data from any other; None if a file does not say."""
        parts = [getattr(source, "fingerprint", None) for source in self._sources]
        kinds = [type(source).__name__ for source in self._sources]
        return None if None in parts else tuple(zip(kinds, parts, strict=True))

    @property
    def num_bytes(self) -> int | None:
        """About how many bytes all files have; None if one does not say."""
        sizes = [getattr(source, "num_bytes", None) for source in self._sources]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None

    def _place(self, index: int) -> tuple[int, int]:
        file = bisect.bisect_right(self._ends, index)
        return file, index - (self._ends[file - 1] if file else 0)


class TitledSource:
    """The rows of a dataset that another library has opened, with names for errors.

    Args:
        rows: Something with a length and items.
        unit: What an item is called, such as `"row"`.
        title: What the dataset is called.
        fingerprint: What tells this data from any other. None: not known.
        num_bytes: About how many bytes the rows have. None: not known.
    """

    def __init__(
        self, rows: Any, *, unit: str, title: str, fingerprint: tuple | None, num_bytes: int | None
    ):
        self._rows, self._unit, self._title = rows, unit, title
        self.fingerprint, self.num_bytes = fingerprint, num_bytes

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"{len(self)} {self._unit}s of {self._title}"

    def __getitem__(self, index: int) -> Any:
        try:
            return self._rows[index]
        except Exception as error:
            raise InputReadError(
                f"cannot read {self.describe(index)}: {type(error).__name__}: {error}"
            ) from error

    def describe(self, index: int) -> str:
        """What to call a row in a message."""
        return f"{self._unit} {index} of {self._title}"


class RecordDataset(grain.MapDataset):
    """Records by index, and functions of single records, which fail with the record's name.

    Args:
        source: The records.
        functions: Called on each, one after the other.
    """

    def __init__(self, source: Any, functions: Sequence[Callable[[Any], Any]] = ()):
        super().__init__()
        self._source, self._functions = source, tuple(functions)

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        if not len(self):
            raise InputDatasetError(f"{self} has no records; give it files that hold some")
        index = index % len(self)
        value = self._source[index]
        for function in self._functions:
            try:
                value = function(value)
            except Exception as error:
                # Said already, and better, if it names what is wrong in Weft's words.
                what = str(error) if isinstance(error, InputDatasetError) else _shown(error)
                raise InputReadError(f"{self.describe(index)}: {what}") from error
        return value

    def map(self, transform):
        function = transform.map if isinstance(transform, grain.transforms.Map) else transform
        return RecordDataset(self._source, (*self._functions, function))

    def __str__(self) -> str:
        return f"RecordDataset({self._source!r})"

    def describe(self, index: int) -> str:
        """What to call a record in a message."""
        describe = getattr(self._source, "describe", None)
        return describe(index) if describe else f"record {index} of {self._source!r}"

    @property
    def fingerprint(self) -> tuple | None:
        """What tells this data from any other; None if that is not known.

        It is not, if functions are called on the records: they say nothing of what they do.
        """
        return None if self._functions else getattr(self._source, "fingerprint", None)

    @property
    def num_bytes(self) -> int | None:
        """About how many bytes the records have; None if that is not known."""
        return getattr(self._source, "num_bytes", None)


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def matching_files(paths: str | Sequence[str]) -> list[str]:
    """The files that paths and patterns name, each once.

    Args:
        paths: Files and glob patterns (`**` for any folders). The files of one pattern come in the
            order of their names.

    Raises:
        InputReadError: If one of them names no file.
    """
    patterns = [paths] if isinstance(paths, str) else [str(path) for path in paths]
    if not patterns:
        raise InputReadError("no paths were given, so there is nothing to read; give at least one")
    found: list[str] = []
    for pattern in patterns:
        if os.path.isfile(pattern):
            found.append(pattern)
            continue
        matches = sorted(p for p in glob.glob(pattern, recursive=True) if os.path.isfile(p))
        if not matches:
            raise InputReadError(_no_match(pattern))
        found += matches
    return list(dict.fromkeys(found))


def _no_match(pattern: str) -> str:
    path = Path(pattern)
    if path.is_dir():
        return f"{pattern} is a folder; name the files in it, as '{path / '*'}'"
    folder = next(p for p in path.parents if p.is_dir() or p == p.parent)
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    holds = ", ".join(repr(name) for name in names[:5]) or "nothing"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (
        f"no file matches {pattern!r}; the folder {str(folder)!r} holds {holds}{more}: correct the "
        "path"
    )
