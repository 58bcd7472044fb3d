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


def _cut(file: TextFile, held_out_fraction: float) -> tuple[TextFile, TextFile]:
    """Returns a file without its end, cut before a line where there are several, and its end."""
    text = file.text
    end = max(1, int((1 - held_out_fraction) * len(text)))
    end = text.rfind(b"\n", 0, end) + 1 or end
    while (
        end < len(text) and text[end] & 0xC0 == 0x80
    ):  # within a character of UTF-8
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
        parts = []
        for split, files in self._splits.items():
            parts.append(
                f"{split} {len(files)} files, {self.num_bytes(split)} bytes"
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
        train: list[TextFile] = []
        held_out: list[TextFile] = []
        for file in self.files:
            part = (
                held_out
                if is_held_out(file.name, self.held_out_fraction)
                else train
            )
            part.append(file)
        if not (train and held_out) and 0 < self.held_out_fraction < 1:
            parts = [_cut(file, self.held_out_fraction) for file in self.files]
            train = [start for start, _ in parts if start.text]
            held_out = [end for _, end in parts if end.text]
        return {"train": tuple(train), "held_out": tuple(held_out)}

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


def stdlib_corpus(
    *, pattern: str = "**/*.py", held_out_fraction: float = 0.1
) -> Corpus:
    """Returns the running Python's standard library: 500 files, 10 MB of code and prose.

    Args:
        pattern: Glob for whole relative names; `*` also matches `/`.

    Raises:
        EmptyCorpusError: If there are no files, for example if the library is an archive.
        CorpusReadError: If a file cannot be read.

    >>> stdlib_corpus(pattern="json/*.py").files[0]  # doctest: +ELLIPSIS
    TextFile('json/__init__.py', ... bytes)
    """
    return _stdlib_corpus(
        Path(sysconfig.get_paths()["stdlib"]), pattern, held_out_fraction
    )


@functools.lru_cache(2)  # of training and evaluation
def _stdlib_corpus(
    root: Path, pattern: str, held_out_fraction: float
) -> Corpus:
    files = []
    for file_name, path in _list_files(root, pattern, STDLIB_EXCLUDED):
        files.append(TextFile(file_name, _read_text(path)))
    name = f"stdlib-{sysconfig.get_python_version()}"
    return _checked(
        Corpus(name, tuple(files), held_out_fraction), [root], pattern
    )


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
    if isinstance(paths, str):
        paths = [paths]
    for path in paths:
        check_local_path(path, "paths")
    roots = [Path(path) for path in paths]
    files: list[TextFile] = []
    for root in roots:
        if root.is_file():
            files.extend(_documents(root.name, root, text_key))
            continue
        prefix = f"{root.name}/" if len(roots) > 1 else ""
        for name, path in _list_files(root, pattern, exclude):
            files.extend(_documents(prefix + name, path, text_key))
    names: set[str] = set()
    for file in files:
        if file.name in names:
            raise CorpusReadError(
                f"two files of {[str(r) for r in roots]} are named {file.name!r} in the "
                "corpus; names determine the split and must differ: rename one of the folders "
                "or pass their common parent"
            )
        names.add(file.name)
    name = roots[0].name if roots else ""
    return _checked(
        Corpus(name, tuple(files), held_out_fraction), roots, pattern
    )


def _checked(corpus: Corpus, roots: Sequence[Path], pattern: str) -> Corpus:
    """Returns the corpus; raises if it has no text."""
    if any(file.text for file in corpus.files):
        return corpus
    folders = ", ".join(map(str, roots)) or "no path"
    missing = [str(root) for root in roots if not root.exists()]
    reason = f"; {', '.join(missing)} does not exist" if missing else ""
    raise EmptyCorpusError(
        f"no text: {len(corpus.files)} files match {pattern!r} in {folders}, with 0 "
        f"bytes{reason}; pass a folder that contains text, or another pattern"
    )


def _matches(name: str, globs: Sequence[str]) -> bool:
    # A name may itself have brackets.
    return any(
        name == glob or fnmatch.fnmatchcase(name, glob) for glob in globs
    )


def _list_files(
    root: Path, pattern: str, exclude: Sequence[str]
) -> list[tuple[str, Path]]:
    """Returns the files below a folder whose relative names match, with these names."""
    globs = (pattern, pattern.removeprefix("**/"))
    named_paths = []
    for folder, subfolders, file_names in os.walk(root):
        # Pruned during the walk: a standard library can include a site-packages of 10,000 files.
        subfolders[:] = sorted(
            name for name in subfolders if not _matches(name, exclude)
        )
        # Sorted, so that the file that an error names does not depend on the file system.
        for file_name in sorted(file_names):
            if _matches(file_name, exclude):
                continue
            path = Path(folder, file_name)
            relative_name = path.relative_to(root).as_posix()
            if _matches(relative_name, globs) and path.is_file():
                named_paths.append((relative_name, path))
    return named_paths


def _documents(name: str, path: Path, text_key: str) -> list[TextFile]:
    """Returns a text as one file, or each record of a file of records as one."""
    file_format = format_of(str(path))
    if file_format == "text":
        return [TextFile(name, _read_text(path))]
    # Local import, so that a corpus of text does not need Grain.
    from weft.input.datasets import json_lines_dataset, parquet_dataset
    from weft.input.file_cache import document_text

    def text_of(record: object) -> bytes:
        text = document_text(record, text_key)
        if isinstance(text, str):
            return text.encode()
        return text

    read = parquet_dataset if file_format == "parquet" else json_lines_dataset
    texts: Any = read(str(path)).map(text_of)
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


def ngram_baselines(
    corpus: Corpus, *, max_train_bytes: int = 32_000_000
) -> Mapping[str, Baseline]:
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
    num_targets = len(held_out) - 1
    num_bytes = corpus.num_bytes("held_out")
    nats_by_order = ngram_nats(
        train, held_out, vocab_size=tokenizers.ByteTokenizer.eos_id + 1
    )
    baselines = {}
    for order, nats in nats_by_order.items():
        baselines[ORDER_NAMES[order]] = Baseline(
            order=order,
            nats_per_token=nats / num_targets,
            bits_per_byte=nats / num_bytes / math.log(2),
        )
    return baselines


def ngram_nats(
    train: np.ndarray, held_out: np.ndarray, *, vocab_size: int
) -> dict[int, float]:
    """Computes the total cross-entropy, in nats, of all held-out tokens but the first, by order.

    Args:
        train: `Int[np.ndarray, "train"]`, ids below `vocab_size`.
        held_out: `Int[np.ndarray, "held_out"]`.
        vocab_size: Size of the alphabet. Memory is `8 * vocab_size**3` bytes.
    """
    # A duplicate of the first token gives every target two tokens of context.
    train = np.concatenate([train[:1], train]).astype(np.int32)
    held_out = np.concatenate([held_out[:1], held_out]).astype(np.int32)
    held_out_trigrams = _encode_ngrams(held_out, 3, vocab_size)
    trigrams, trigram_counts = np.unique(held_out_trigrams, return_counts=True)
    # p(c | h) of the last token of each trigram, for contexts h of one token more each time.
    probability = np.full(len(trigrams), 1 / vocab_size)
    nats = {}
    for order in ORDER_NAMES:
        num_contexts = vocab_size ** (order - 1)
        train_ngrams = _encode_ngrams(train, order, vocab_size)
        counts = np.bincount(
            train_ngrams, minlength=num_contexts * vocab_size
        )  # N(h c)
        context_counts = counts.reshape(num_contexts, vocab_size).sum(
            axis=1
        )  # N(h)
        observed_ngrams = np.flatnonzero(counts)
        types = np.bincount(
            observed_ngrams // vocab_size, minlength=num_contexts
        )  # T(h)
        ngrams = trigrams % vocab_size**order
        contexts = ngrams // vocab_size
        n, t = context_counts[contexts], types[contexts]
        smoothed = (counts[ngrams] + t * probability) / np.maximum(n + t, 1)
        # For an unseen context, use the shorter one.
        probability = np.where(n > 0, smoothed, probability)
        nats[order] = float(-np.sum(trigram_counts * np.log(probability)))
    return nats


def _corpus_tokens(corpus: Corpus, split: Split) -> np.ndarray:
    tokenizer = tokenizers.ByteTokenizer()
    documents = (tokenizer.encode(file.text) for file in corpus.split(split))
    return packing.token_stream(documents, eos_id=tokenizer.eos_id)


def _encode_ngrams(
    tokens: np.ndarray, order: int, vocab_size: int
) -> np.ndarray:
    """Encodes each n-gram as one number, the last token least significant."""
    num_ngrams = len(tokens) - order + 1
    codes = tokens[:num_ngrams]
    for offset in range(1, order):
        codes = codes * vocab_size + tokens[offset : num_ngrams + offset]
    return codes
