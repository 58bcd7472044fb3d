"""Corpora: sorted lists of files with a hash and a deterministic split.

A hash of a file's name assigns it to the training or the held-out part, so changes of one file
never move another. The default corpus is the source code of Python's standard library, which
differs between Python versions; `Corpus.record()` includes the hash for a run's record.

`ngram_baselines` are the cross-entropies of unigram, bigram and trigram models. Each order falls
back on the next lower one with the smoothing of Witten and Bell (1991, "The zero-frequency
problem"), which has no hyperparameters. With N(h) the occurrences of a context h and T(h) the
number of distinct tokens after it,

    p(c | h) = (N(h c) + T(h) p(c | shorter h)) / (N(h) + T(h))

The unigram falls back on the uniform distribution.
"""

import dataclasses
import fnmatch
import functools
import hashlib
import math
import os
import sysconfig
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from weft.errors import CorpusReadError, EmptyCorpusError
from weft.input import packing, tokenizers
from weft.input.formats import format_of, read_whole, without_mark
from weft.serialization.untrusted import check_local_path, invalid_text_reason

Split = Literal["train", "held_out"]
"""Parts of a corpus."""

# Tests, platform-dependent files and files that some distributions package separately: without
# them, the text of a Python version is nearly the same everywhere.
STDLIB_EXCLUDED = (
    *("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"),
    *("config-*", "_sysconfigdata*"),
    *("distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo"),
)


@dataclasses.dataclass(frozen=True)
class TextFile:
    """File of a corpus: its relative name, with `/`, and its bytes."""

    name: str
    text: bytes

    def __repr__(self) -> str:
        return f"TextFile({self.name!r}, {len(self.text)} bytes)"


def _cut(file: TextFile, held_out_fraction: float) -> tuple[TextFile, TextFile]:
    """Returns a file without its end, cut before a line where there are several, and its end."""
    text, end = file.text, max(1, int((1 - held_out_fraction) * len(file.text)))
    end = text.rfind(b"\n", 0, end) + 1 or end
    while end < len(text) and text[end] & 0xC0 == 0x80:  # within a character of UTF-8
        end += 1
    return TextFile(file.name, text[:end]), TextFile(file.name, text[end:])


def _name_bytes(name: str) -> bytes:
    # Python keeps bytes of a file's name that are not in UTF-8 as halves of surrogate pairs.
    return name.encode(errors="surrogateescape")


def is_held_out(name: str, fraction: float) -> bool:
    """Returns whether the file of this name belongs to the held-out part.

    Args:
        fraction: Fraction of names to hold out, 0 to 1.

    >>> is_held_out("json/decoder.py", 0.0), is_held_out("json/decoder.py", 1.0)
    (False, True)
    """
    digest = hashlib.blake2b(_name_bytes(name)).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Files sorted by name, with a training and a held-out part.

    Names decide which files are held out; if a part has none, the end of each file is held out.

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
            name = _name_bytes(file.name)
            total.update(f"{len(name)} {len(file.text)} ".encode() + name)
            total.update(file.text)
        return total.hexdigest()

    @functools.cached_property
    def _splits(self) -> dict[Split, tuple[TextFile, ...]]:
        held_out = [is_held_out(file.name, self.held_out_fraction) for file in self.files]
        train = tuple(f for f, out in zip(self.files, held_out, strict=True) if not out)
        others = tuple(f for f, out in zip(self.files, held_out, strict=True) if out)
        if self.files and not (train and others) and 0 < self.held_out_fraction < 1:
            parts = [_cut(file, self.held_out_fraction) for file in self.files]
            train, others = (tuple(f for f in part if f.text) for part in zip(*parts, strict=True))
        return {"train": train, "held_out": others}

    def split(self, split: Split) -> tuple[TextFile, ...]:
        """Returns the files of one part, in order.

        Raises EmptyCorpusError if the part has no files.
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
    return _stdlib_corpus(Path(sysconfig.get_paths()["stdlib"]), pattern, held_out_fraction)


@functools.lru_cache(2)  # of training and evaluation
def _stdlib_corpus(root: Path, pattern: str, held_out_fraction: float) -> Corpus:
    found = _list_files(root, pattern, STDLIB_EXCLUDED)
    files = [TextFile(name, _read_text(path)) for name, path in found]
    name = f"stdlib-{sysconfig.get_python_version()}"
    return _checked(Corpus(name, tuple(files), held_out_fraction), [root], pattern)


def folder_corpus(
    paths: str | Sequence[str],
    *,
    pattern: str = "**/*",
    exclude: Sequence[str] = (),
    held_out_fraction: float = 0.1,
    text_key: str = "text",
) -> Corpus:
    """Returns a corpus of files and folders.

    Each record of a file of JSON (`.jsonl`, `.ndjson`, `.jsonlines`, `.json`) or of Parquet
    (`.parquet`) is a file of its own, named `name#0000000` and so on. `.gz` may follow. Files with
    a suffix of other formats, such as `.csv`, are refused. Texts keep their line ends, CRLF too.

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
    named = [paths] if isinstance(paths, str) else paths
    for path in named:
        check_local_path(path, "paths")
    roots = [Path(path) for path in named]
    files: list[TextFile] = []
    for root in roots:
        if root.is_file():
            files.extend(_documents(root.name, root, text_key))
            continue
        prefix = f"{root.name}/" if len(roots) > 1 else ""
        for name, path in _list_files(root, pattern, exclude):
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
    name = roots[0].name if roots else ""
    return _checked(Corpus(name, tuple(files), held_out_fraction), roots, pattern)


def _checked(corpus: Corpus, roots: Sequence[Path], pattern: str) -> Corpus:
    if not any(file.text for file in corpus.files):
        where = ", ".join(str(root) for root in roots) or "no path"
        missing = [str(root) for root in roots if not root.exists()]
        why = f"; {', '.join(missing)} does not exist" if missing else ""
        raise EmptyCorpusError(
            f"no text: {len(corpus.files)} files match {pattern!r} in {where}, with 0 "
            f"bytes{why}; pass a folder that contains text, or another pattern"
        )
    return corpus


def _list_files(root: Path, pattern: str, exclude: Sequence[str]) -> list[tuple[str, Path]]:
    def matches(name: str, globs: Sequence[str]) -> bool:
        # A name may itself have brackets.
        return any(name == glob or fnmatch.fnmatchcase(name, glob) for glob in globs)

    found = []
    for folder, subfolders, names in os.walk(root):
        # Pruned during the walk: a standard library can include a site-packages of 10,000 files.
        subfolders[:] = sorted(name for name in subfolders if not matches(name, exclude))
        # Sorted, so that the file that an error names does not depend on the file system.
        for path in (Path(folder, name) for name in sorted(names) if not matches(name, exclude)):
            name = path.relative_to(root).as_posix()
            if matches(name, (pattern, pattern.removeprefix("**/"))) and path.is_file():
                found.append((name, path))
    return found


def _documents(name: str, path: Path, text_key: str) -> list[TextFile]:
    kind = format_of(str(path))
    if kind == "text":
        return [TextFile(name, _read_text(path))]
    # Local import, so that a corpus of text does not need Grain.
    from weft.input.datasets import json_lines_dataset, parquet_dataset
    from weft.input.file_cache import document_text

    def text(record: object) -> bytes:
        found = document_text(record, text_key)
        return found.encode() if isinstance(found, str) else found

    read = parquet_dataset if kind == "parquet" else json_lines_dataset
    texts: Any = read(str(path)).map(text)
    return [TextFile(f"{name}#{i:07}", texts[i]) for i in range(len(texts))]


def _read_text(path: Path) -> bytes:
    try:
        data = read_whole(str(path))
    except (OSError, EOFError, zlib.error) as error:
        raise CorpusReadError(
            f"cannot read {path} ({getattr(error, 'strerror', None) or error}); make it readable, "
            "or exclude it from the corpus"
        ) from error
    data = without_mark(data)
    fault = invalid_text_reason(data)
    if fault is not None:
        raise CorpusReadError(f"{path} {fault} (`exclude` of the corpus)")
    return data


ORDER_NAMES = {1: "unigram", 2: "bigram", 3: "trigram"}


@dataclasses.dataclass(frozen=True)
class Baseline:
    """Held-out losses of one n-gram order.

    Attributes:
        order: 1, 2 or 3.
        nats_per_token: Mean cross-entropy of targets, also ends of files; comparable to a loss.
        bits_per_byte: The total, per byte of text.
    """

    order: int
    nats_per_token: float
    bits_per_byte: float

    @property
    def name(self) -> str:
        return ORDER_NAMES[self.order]


def ngram_baselines(corpus: Corpus, *, max_train_bytes: int = 32_000_000) -> Mapping[str, Baseline]:
    """Computes the baselines "unigram", "bigram" and "trigram" on the held-out part of a corpus.

    Args:
        corpus: Tokens are bytes; files are separated by an end token, as in packed sequences.
        max_train_bytes: Maximum of training bytes to count, enough for trigrams of bytes.

    Raises EmptyCorpusError if a part of the corpus has no file.

    >>> from weft.input.corpus import stdlib_corpus
    >>> result = ngram_baselines(stdlib_corpus(pattern="asyncio/*.py"))
    >>> [name for name, b in result.items() if b.bits_per_byte < 8]
    ['unigram', 'bigram', 'trigram']
    """
    train = _corpus_tokens(corpus, "train")[: max_train_bytes + 1]
    held_out = _corpus_tokens(corpus, "held_out")
    num_tokens, num_bytes = len(held_out) - 1, corpus.num_bytes("held_out")
    nats = ngram_nats(train, held_out, vocab_size=tokenizers.ByteTokenizer.eos_id + 1)
    return {
        ORDER_NAMES[order]: Baseline(
            order=order,
            nats_per_token=total / num_tokens,
            bits_per_byte=total / num_bytes / math.log(2),
        )
        for order, total in nats.items()
    }


def ngram_nats(train: np.ndarray, held_out: np.ndarray, *, vocab_size: int) -> dict[int, float]:
    """Computes the total cross-entropy, in nats, of all held-out tokens but the first, by order.

    Args:
        train: `Int[np.ndarray, "train"]`, ids below `vocab_size`.
        held_out: `Int[np.ndarray, "held_out"]`.
        vocab_size: Size of the alphabet. Memory is `8 * vocab_size**3` bytes.
    """
    # A duplicate of the first token gives every target two tokens of context.
    seen = np.concatenate([train[:1], train]).astype(np.int32)
    asked = np.concatenate([held_out[:1], held_out]).astype(np.int32)
    keys, key_counts = np.unique(_encode_ngrams(asked, 3, vocab_size), return_counts=True)
    probability = np.full(len(keys), 1 / vocab_size)
    nats = {}
    for order in ORDER_NAMES:
        contexts = vocab_size ** (order - 1)
        counts = np.bincount(
            _encode_ngrams(seen, order, vocab_size), minlength=contexts * vocab_size
        )
        by_context = counts.reshape(contexts, vocab_size)
        totals = by_context.sum(axis=1)
        kinds = np.bincount(np.flatnonzero(counts) // vocab_size, minlength=contexts)
        key = keys % vocab_size**order
        context = key // vocab_size
        n, t = totals[context], kinds[context]
        smoothed = (counts[key] + t * probability) / np.maximum(n + t, 1)
        # For an unseen context, use the shorter one.
        probability = np.where(n > 0, smoothed, probability)
        nats[order] = float(-np.sum(key_counts * np.log(probability)))
    return nats


def _corpus_tokens(corpus: Corpus, split: Split) -> np.ndarray:
    tokenizer = tokenizers.ByteTokenizer()
    documents = (tokenizer.encode(file.text) for file in corpus.split(split))
    return packing.token_stream(documents, eos_id=tokenizer.eos_id)


def _encode_ngrams(tokens: np.ndarray, order: int, vocab_size: int) -> np.ndarray:
    """Encodes each n-gram as one number, the last token least significant."""
    key = tokens[: len(tokens) - order + 1]
    for offset in range(1, order):
        key = key * vocab_size + tokens[offset : len(tokens) - order + 1 + offset]
    return key
