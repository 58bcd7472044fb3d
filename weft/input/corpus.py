"""Corpora: sorted lists of files with a hash and a deterministic split.

A hash of a file's name assigns it to the training or the held-out part, so changes of one file
never move another. The default corpus is the source code of Python's standard library, which
differs between Python versions; `Corpus.record()` includes the hash for a run's record.
"""

import dataclasses
import fnmatch
import functools
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from weft.errors import CorpusReadError, EmptyCorpusError
from weft.serialization.foreign import open_file

Split = Literal["train", "held_out"]

# Tests, platform-dependent files and files that some distributions package separately: without
# them, the text of a Python version is nearly the same everywhere.
STDLIB_EXCLUDED = (
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "config-*",
    "_sysconfigdata*",
    "distutils",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "tkinter",
    "turtledemo",
)


@dataclasses.dataclass(frozen=True)
class TextFile:
    """File of a corpus: its relative name, with `/`, and its bytes."""

    name: str
    text: bytes

    def __repr__(self) -> str:
        return f"TextFile({self.name!r}, {len(self.text)} bytes)"


def is_held_out(name: str, fraction: float) -> bool:
    """Returns whether the file of this name belongs to the held-out part.

    Args:
        fraction: Fraction of names to hold out, 0 to 1.

    >>> is_held_out("json/decoder.py", 0.0), is_held_out("json/decoder.py", 1.0)
    (False, True)
    """
    digest = hashlib.blake2b(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


@dataclasses.dataclass(frozen=True, repr=False)
class Corpus:
    """Files sorted by name, with a training and a held-out part.

    >>> corpus = Corpus("two", (TextFile("b", b"xy"), TextFile("a", b"z")), held_out_fraction=0.0)
    >>> corpus
    Corpus('two': train 2 files, 3 bytes; held_out 0 files, 0 bytes)
    >>> [file.name for file in corpus.split("train")]
    ['a', 'b']
    """

    name: str
    files: tuple[TextFile, ...]
    held_out_fraction: float = 0.1

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.files, key=lambda file: file.name))
        object.__setattr__(self, "files", ordered)

    def __repr__(self) -> str:
        parts = (
            f"{split} {len(files)} files, {sum(len(f.text) for f in files)} bytes"
            for split, files in self._splits.items()
        )
        return f"Corpus({self.name!r}: {'; '.join(parts)})"

    @functools.cached_property
    def sha256(self) -> str:
        """Hash of all names and contents, in order."""
        total = hashlib.sha256()
        for file in self.files:
            # The lengths distinguish ("ab", "c") from ("a", "bc").
            total.update(f"{len(file.name.encode())} {len(file.text)} {file.name}".encode())
            total.update(file.text)
        return total.hexdigest()

    @functools.cached_property
    def _splits(self) -> dict[Split, tuple[TextFile, ...]]:
        held_out = [is_held_out(file.name, self.held_out_fraction) for file in self.files]
        return {
            "train": tuple(f for f, out in zip(self.files, held_out, strict=True) if not out),
            "held_out": tuple(f for f, out in zip(self.files, held_out, strict=True) if out),
        }

    def split(self, split: Split) -> tuple[TextFile, ...]:
        """Returns the files of one part, in order.

        Raises:
            EmptyCorpusError: If the part has no files.
        """
        files = self._splits[split]
        if not files:
            raise EmptyCorpusError(
                f"corpus {self.name!r}: none of its {len(self.files)} files is in the "
                f"{split!r} part at held_out_fraction={self.held_out_fraction}; add files or "
                "change the fraction"
            )
        return files

    def num_bytes(self, split: Split) -> int:
        """Returns the number of bytes of text in one part."""
        return sum(len(file.text) for file in self._splits[split])

    def record(self) -> dict[str, str | int | float]:
        """Returns a description for a run's record, as JSON values."""
        return {
            "name": self.name,
            "sha256": self.sha256,
            "files": len(self.files),
            "held_out_fraction": self.held_out_fraction,
            "train_bytes": self.num_bytes("train"),
            "held_out_bytes": self.num_bytes("held_out"),
        }


def stdlib_corpus(*, pattern: str = "**/*.py", held_out_fraction: float = 0.1) -> Corpus:
    """Returns the running Python's standard library: 500 files, 10 MB of code and prose.

    Args:
        pattern: Glob for whole relative names; `*` also matches `/`.

    Raises:
        EmptyCorpusError: If there are no files, for example if the library is an archive.
        CorpusReadError: If a file cannot be read.

    >>> stdlib_corpus(pattern="json/*.py").files[0]  # doctest: +ELLIPSIS
    TextFile('json/__init__.py', ... bytes)
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = _files_below(root, pattern, STDLIB_EXCLUDED)
    files = [TextFile(name, _read(path)) for name, path in found]
    name = f"stdlib-{sysconfig.get_python_version()}"
    return _checked(name, files, held_out_fraction, [root], pattern)


def folder_corpus(
    paths: str | Sequence[str],
    *,
    pattern: str = "**/*",
    exclude: Sequence[str] = (),
    held_out_fraction: float = 0.1,
    text_key: str = "text",
) -> Corpus:
    """Returns a corpus of files and folders.

    Each record of a JSON lines (`.jsonl`, `.jsonl.gz`) or Parquet file (`.parquet`) is a file of
    its own, named `name#0000000` and so on.

    Args:
        paths: Folders and files. With several, names begin with the last part of their path.
        pattern: Glob for whole relative names in folders; `*` also matches `/`.
        exclude: Globs; omits files with any part of their relative name matching one.

    Raises:
        EmptyCorpusError: If no file matches.
        CorpusReadError: If a file cannot be read, is compressed, binary or not in UTF-8, or two
            files have the same name.
        InputReadError: If a record cannot be read or has no text; names the record.
    """
    roots = [Path(p) for p in ([paths] if isinstance(paths, str) else paths)]
    files: list[TextFile] = []
    for root in roots:
        if root.is_file():
            files.extend(_documents(root.name, root, text_key))
            continue
        prefix = f"{root.name}/" if len(roots) > 1 else ""
        for name, path in _files_below(root, pattern, exclude):
            files.extend(_documents(prefix + name, path, text_key))
    seen: set[str] = set()
    for file in files:
        if file.name in seen:
            raise CorpusReadError(
                f"two files of {[str(r) for r in roots]} are named {file.name!r} in the "
                "corpus; names determine the split and must differ: rename one of the folders "
                "or pass their common parent"
            )
        seen.add(file.name)
    return _checked(roots[0].name if roots else "", files, held_out_fraction, roots, pattern)


def _checked(
    name: str,
    files: Iterable[TextFile],
    held_out_fraction: float,
    roots: Sequence[Path],
    pattern: str,
) -> Corpus:
    corpus = Corpus(name, tuple(files), held_out_fraction)
    if not any(file.text for file in corpus.files):
        where = ", ".join(str(root) for root in roots) or "no path"
        missing = [str(root) for root in roots if not root.exists()]
        why = f"; {', '.join(missing)} does not exist" if missing else ""
        raise EmptyCorpusError(
            f"no text: {len(corpus.files)} files match {pattern!r} in {where}, with 0 "
            f"bytes{why}; pass a folder that contains text, or another pattern"
        )
    return corpus


def _files_below(root: Path, pattern: str, exclude: Sequence[str]) -> list[tuple[str, Path]]:
    """Returns relative names and paths."""

    def kept(part: str) -> bool:
        return not any(fnmatch.fnmatchcase(part, glob) for glob in exclude)

    found = []
    for folder, subfolders, names in os.walk(root):
        # Pruned during the walk: a standard library can include a site-packages of 10,000 files.
        subfolders[:] = sorted(filter(kept, subfolders))
        for path in (Path(folder, name) for name in names if kept(name)):
            name = path.relative_to(root).as_posix()
            if _fits(name, pattern) and path.is_file():
                found.append((name, path))
    return found


def _documents(name: str, path: Path, text_key: str) -> list[TextFile]:
    """Reads a text file, or each record of a file of records."""
    if not name.endswith((".jsonl", ".jsonl.gz", ".parquet")):
        return [TextFile(name, _read(path))]
    # Local import, so that a corpus of text does not need Grain.
    from weft.input.files import json_lines_dataset, parquet_dataset
    from weft.input.token_files import document_text

    def text(record: Any) -> bytes:
        found = document_text(record, text_key)
        return found.encode() if isinstance(found, str) else found

    read = parquet_dataset if name.endswith(".parquet") else json_lines_dataset
    texts: Any = read(str(path)).map(text)
    return [TextFile(f"{name}#{i:07}", texts[i]) for i in range(len(texts))]


def _fits(name: str, pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for glob in (pattern, pattern.removeprefix("**/")))


# First bytes of non-text formats, and programs that unpack them.
_PACKED = {
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"PK\x03\x04": ("zip", "unzip"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
    b"\xfd7zXZ\x00": ("xz", "unxz"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\x04\x22\x4d\x18": ("lz4", "unlz4"),
    b"\x89PNG": ("PNG", None),
    b"%PDF-": ("PDF", None),
}


def text_fault(data: bytes) -> str | None:
    r"""Returns why data is not text in UTF-8, and how to fix it; None for text.

    Models would learn compressed or binary data like text.

    >>> text_fault("né".encode()), text_fault(b"a\0b")
    (None, 'is not text: byte 1 is 0, as in binary files; leave the file out')
    """
    for start, (kind, program) in _PACKED.items():
        if data.startswith(start) and (kind != "bzip2" or data[4:10] == b"1AY&SY"):
            fix = (
                f"unpack it first, for example with `{program}`" if program else "extract its text"
            )
            return f"is not text: {kind} data begins at byte 0; {fix}, or leave the file out"
    if (at := data.find(b"\0")) >= 0:
        return f"is not text: byte {at:,} is 0, as in binary files; leave the file out"
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return (
            f"is not text in UTF-8: byte {error.start:,} is 0x{data[error.start]:02x} "
            f"({error.reason}); convert it, for example with `iconv -f ISO-8859-1 -t UTF-8`, "
            "or leave the file out"
        )
    return None


def _read(path: Path) -> bytes:
    try:
        with open_file(path) as file:
            data = file.read()
    except OSError as error:
        raise CorpusReadError(
            f"cannot read {path} ({error.strerror or error}); make it readable or exclude it from "
            "the corpus"
        ) from error
    fault = text_fault(data)
    if fault is not None:
        raise CorpusReadError(f"{path} {fault} (`exclude` of the corpus)")
    return data
