"""Files of text and of records: read, or refused by file and place."""

import gzip
import tempfile
from pathlib import Path

import hypothesis.strategies as st

from tests.fuzz.readers import DEEP, damaged, read, source_of, untouched
from weft.errors import CorpusReadError, EmptyCorpusError, InputReadError
from weft.input.corpus import folder_corpus
from weft.input.datasets import json_lines_dataset, text_dataset

_TEXT = 'one line\n\ntwo, "né"\r\nthree'.encode()
_LINES = b'{"text": "one"}\n\n{"text": "tw\\u00e9", "n": [1, 2.5, null]}\n'
VALID = {
    "a.txt": _TEXT,
    "a.txt.gz": gzip.compress(_TEXT, mtime=0),
    "a.jsonl": _LINES,
    "a.jsonl.gz": gzip.compress(_LINES, mtime=0),
}
_CRAFTED = [b"", b"\n", DEEP.encode(), b'{"text": ' + b"9" * 5_000 + b"}", b"7\n[]\nnull", b"\0"]
_CRAFTED += [
    b'{"text": 7}',
    b'{"text": "\\ud800"}',
    b"\x1f\x8b",
    b"\xef\xbb\xbf{}",
    b'{"text": ' * 2_000,
]
_CRAFTED += [gzip.compress(data, mtime=0) for data in _CRAFTED]
CASES = st.sampled_from(sorted(VALID)).flatmap(
    lambda name: st.tuples(
        st.just(name), st.one_of(st.sampled_from(_CRAFTED), damaged([VALID[name]]))
    )
)
SHORT = 100
_ERRORS = (InputReadError, CorpusReadError, EmptyCorpusError)


def check(case: tuple[str, bytes]) -> None:
    name, data = case
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(data)
        with untouched(Path(folder)):
            made = [text_dataset, lambda p: text_dataset(p, document="line"), json_lines_dataset]
            for make in made:
                returned, dataset = read(lambda make=make: make(str(path)), _ERRORS)
                for i in range(len(dataset) if returned else 0):
                    known, error = read(lambda i=i, dataset=dataset: dataset[i], _ERRORS)
                    assert known or name in str(error), error
            returned, corpus = read(lambda: folder_corpus(folder), _ERRORS)
            if returned:
                assert all(file.text.decode() is not None for file in corpus.files)


def source(case: tuple[str, bytes]) -> str:
    return source_of("fuzz_records", case)
