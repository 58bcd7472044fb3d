"""Text as data: a corpus is a sorted list of files, a hash of all of it, and a split by name.

A file belongs to the training or to the held-out part by a hash of its name alone, so adding,
removing or editing one file never moves another. The default corpus is the text every Python
installation carries: the sources of its standard library. It differs between Python versions, which
is why `Corpus.record()`, with the hash, belongs in a run's record.
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

# Tests, platform-dependent files and what some distributions package apart: without these the text
# of one Python version is nearly the same on every machine.
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
    """One file of a corpus: its name relative to the corpus, with `/`, and its bytes."""

    name: str
    text: bytes

    def __repr__(self) -> str:
        return f"TextFile({self.name!r}, {len(self.text)} bytes)"


def is_held_out(name: str, fraction: float) -> bool:
    """Whether the file of this name belongs to the held-out part.

    Args:
        name: The file's relative name, with `/`.
        fraction: Which part of all names is held out, 0 to 1.

    >>> is_held_out("json/decoder.py", 0.0), is_held_out("json/decoder.py", 1.0)
    (False, True)
    """
    digest = hashlib.blake2b(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


@dataclasses.dataclass(frozen=True, repr=False)
class Corpus:
    """Files in the order of their names, split into a training and a held-out part.

    Args:
        name: What the corpus is called in messages and records.
        files: The files, in any order.
        held_out_fraction: Which part of the names is held out.

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
        """The hash of every name and every byte, in order."""
        total = hashlib.sha256()
        for file in self.files:
            # The lengths keep ("ab", "c") and ("a", "bc") apart.
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
        """The files of one part, in order.

        Raises:
            EmptyCorpusError: If no file fell into that part.
        """
        files = self._splits[split]
        if not files:
            raise EmptyCorpusError(
                f"corpus {self.name!r}: none of its {len(self.files)} files is in the {split!r} "
                f"part at held_out_fraction={self.held_out_fraction}; give it more files or "
                "another fraction"
            )
        return files

    def num_bytes(self, split: Split) -> int:
        """How many bytes of text one part has."""
        return sum(len(file.text) for file in self._splits[split])

    def record(self) -> dict[str, str | int | float]:
        """What a run should remember of its data; plain JSON values."""
        return {
            "name": self.name,
            "sha256": self.sha256,
            "files": len(self.files),
            "held_out_fraction": self.held_out_fraction,
            "train_bytes": self.num_bytes("train"),
            "held_out_bytes": self.num_bytes("held_out"),
        }


def stdlib_corpus(*, pattern: str = "**/*.py", held_out_fraction: float = 0.1) -> Corpus:
    """The sources of the running Python's standard library: 500 files, 10 MB of code and prose.

    Args:
        pattern: Which files: a glob that the whole relative name must fit; `*` also stands for `/`.
        held_out_fraction: Which part of the names is held out.

    Raises:
        EmptyCorpusError: If there are none, as where the library is kept in an archive.
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
    """The files below some folders, or these files.

    The records of JSON lines (`.jsonl`, `.jsonl.gz`) and of Parquet files (`.parquet`) are
    documents, each a file of its own, `name#0000000` and so on.

    Args:
        paths: Folders and files. With more than one, names start with the last part of their path.
        pattern: Which files of a folder: a glob that the whole relative name must fit; `*` also
            stands for `/`.
        exclude: Globs; a file is left out if any part of its relative name fits one.
        held_out_fraction: Which part of the names is held out.
        text_key: The key of the text in a record.

    Raises:
        EmptyCorpusError: If no file fits.
        CorpusReadError: If a file cannot be read, is compressed, binary or not in UTF-8, or two
            files would have the same name.
        InputReadError: If a record cannot be read or has no text; it names the record.
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
                f"two files of {[str(r) for r in roots]} are named {file.name!r} in the corpus; "
                "names decide the split and must differ: rename one of the folders or give their "
                "common parent"
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
            f"no text: {len(corpus.files)} files fit {pattern!r} in {where}, with 0 bytes{why}; "
            "give a folder that holds text, or another pattern"
        )
    return corpus


def _files_below(root: Path, pattern: str, exclude: Sequence[str]) -> list[tuple[str, Path]]:
    """Relative names and paths."""

    def kept(part: str) -> bool:
        return not any(fnmatch.fnmatchcase(part, glob) for glob in exclude)

    found = []
    for folder, subfolders, names in os.walk(root):
        # Pruned, not filtered: a standard library can hold a site-packages of 10,000 files.
        subfolders[:] = sorted(filter(kept, subfolders))
        for path in (Path(folder, name) for name in names if kept(name)):
            name = path.relative_to(root).as_posix()
            if _fits(name, pattern) and path.is_file():
                found.append((name, path))
    return found


def _documents(name: str, path: Path, text_key: str) -> list[TextFile]:
    """A file of text as it is; of a file of records, each."""
    if not name.endswith((".jsonl", ".jsonl.gz", ".parquet")):
        return [TextFile(name, _read(path))]
    # Not imported before, so that a corpus of text needs no Grain.
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


# How files begin that hold text in another form, and what unpacks them.
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
    r"""What is wrong with data that should be text in UTF-8, and how to fix it; None for text.

    A model would learn compressed or binary data as if they were text.

    Args:
        data: the whole content.

    >>> text_fault("né".encode()), text_fault(b"a\0b")
    (None, 'is not text: byte 1 is 0, as in binary files; leave the file out')
    """
    for start, (kind, program) in _PACKED.items():
        if data.startswith(start) and (kind != "bzip2" or data[4:10] == b"1AY&SY"):
            fix = f"unpack it first, as by `{program}`" if program else "take the text out of it"
            return f"is not text: at byte 0 begins {kind} data; {fix}, or leave the file out"
    if (at := data.find(b"\0")) >= 0:
        return f"is not text: byte {at:,} is 0, as in binary files; leave the file out"
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return (
            f"is not text in UTF-8: byte {error.start:,} is 0x{data[error.start]:02x} "
            f"({error.reason}); convert it, as by `iconv -f ISO-8859-1 -t UTF-8`, or leave the "
            "file out"
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
