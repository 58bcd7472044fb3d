import functools
import gzip
import json
import os
import pickle
import shutil
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import InputReadError, MissingExtraError
from weft.input import file_cache, record_files
from weft.input.datasets import json_lines_dataset, parquet_dataset
from weft.input.record_files import JsonLinesFile, LineFile, ParquetFile, file_fingerprint


def write(path, content):
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.sampled_from([b"", b"a", b"bc", b"\r", b" ", b"\n", b"d\r\n"]), max_size=12))
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_lines_match_python(tmp_path_factory, chunk, parts):
    content = b"".join(parts)
    path = write(tmp_path_factory.mktemp("lines") / "file.txt", content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_files, "_CHUNK", chunk)
        lines = LineFile(path)
        found = [lines[i] for i in range(len(lines))]
        numbers = [lines.line_number(i) for i in range(len(lines))]
    pieces = content.split(b"\n")
    # A `\r` belongs to the end of a line only before a `\n`.
    want = [p.removesuffix(b"\r") for p in pieces[:-1]] + pieces[-1:]
    assert list(zip(numbers, found, strict=True)) == [
        (i + 1, w) for i, w in enumerate(want) if w.strip()
    ]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("is_small", [True, False])
def test_json_values_by_index_after_pickling(tmp_path, monkeypatch, name, is_small):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if not is_small:
        monkeypatch.setattr(file_cache, "MAX_BYTES_IN_MEMORY", 0)
    values = [{"text": f"é{i}"} for i in range(100)]
    path = write(tmp_path / name, "\n".join(map(json.dumps, values)).encode())
    first = JsonLinesFile(path)
    assert [first[i] for i in (99, 0, 50)] == [values[i] for i in (99, 0, 50)]
    assert len(first) == 100
    # A pickle holds no data, so that workers are started quickly.
    data = pickle.dumps(first)
    assert len(data) < 300
    assert pickle.loads(data)[7] == values[7]
    assert (tmp_path / "cache").exists() is not is_small


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_files_that_are_large_together_have_one_index(tmp_path, monkeypatch, suffix):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(file_cache, "MAX_BYTES_IN_MEMORY", 1000)
    want = []
    for number in range(20):
        values = [{"text": f"é{number} {i}"} for i in range(number)]
        write(tmp_path / f"{number:02}.jsonl{suffix}", "\n".join(map(json.dumps, values)).encode())
        want += values
    documents = json_lines_dataset(str(tmp_path / "*.jsonl*"))
    assert list(documents) == want
    assert documents.describe(50).startswith("line 6 of ")
    open_before = len(os.listdir("/proc/self/fd"))
    again = json_lines_dataset(str(tmp_path / "*.jsonl*"))
    assert [again[i] for i in (0, 189, 100)] == [want[i] for i in (0, 189, 100)]
    # Each mapped file keeps one open, of 1,024 that a process may have.
    assert len(os.listdir("/proc/self/fd")) <= open_before + 1
    (index,) = (tmp_path / "cache" / "weft" / "line_indexes").glob("*[!k]")
    copies = pickle.loads(pickle.dumps(again))
    index.unlink()  # a worker process makes it again
    assert copies[120] == want[120]
    # Of changed files, the index is made again.
    write(tmp_path / f"19.jsonl{suffix}", b'{"text": 1}')
    assert len(json_lines_dataset(str(tmp_path / "*.jsonl*"))) == len(want) - 19 + 1


def test_files_with_an_index_are_asked_for_twice_and_not_opened(tmp_path, monkeypatch):
    """Each start of each process opened each file twice, and asked for it twelve times."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(file_cache, "MAX_BYTES_IN_MEMORY", 100)
    folder = tmp_path / "documents"
    folder.mkdir()
    for number in range(20):
        write(folder / f"{number:02}.jsonl", b'{"text": 1}\n{"text": 2}\n')
    array = write(folder / "20.jsonl", b'[{"text": 1},\n{"text": 2}]')
    pattern = str(folder / "*.jsonl")
    json_lines_dataset(pattern)
    accesses = []

    def noting(name, do, path, *args, **kwargs):
        if str(folder) in str(path) and path != array:
            accesses.append((name, os.path.basename(path)))
        return do(path, *args, **kwargs)

    for name in ("stat", "lstat", "open"):
        monkeypatch.setattr(os, name, functools.partial(noting, name, getattr(os, name)))
    documents = json_lines_dataset(pattern)
    assert len(documents) == 42
    assert {path for _, path in accesses} >= {f"{number:02}.jsonl" for number in range(20)}
    assert all(name != "open" for name, _ in accesses)
    assert len(accesses) <= 2 * 20 + 5
    assert documents[41] == {"text": 2}


def test_fingerprint_has_the_real_path(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "a").mkdir()
    path = write(tmp_path / "real" / "file", b"x")
    (tmp_path / "a" / "folder").symlink_to(tmp_path / "real")
    (tmp_path / "link").symlink_to(path)
    want = file_fingerprint(path)
    monkeypatch.chdir(tmp_path / "a")
    names = ["folder/file", "../link", "folder/../real/file", str(tmp_path / "a/folder/file")]
    assert {file_fingerprint(name) for name in names} == {want}
    monkeypatch.chdir(tmp_path)
    assert file_fingerprint("real/file") == want
    # By its folder's name alone, it would be that of another folder.
    write(tmp_path / "file", b"y")
    assert file_fingerprint("file")[0] == str((tmp_path / "file").resolve())


def test_the_index_of_many_documents_is_not_in_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(file_cache, "MAX_BYTES_IN_MEMORY", 2**20)
    num_lines = 10**6
    for number in range(4):
        write(tmp_path / f"{number}.jsonl", b"12\n" * (num_lines // 4))
    tracemalloc.start()
    documents = json_lines_dataset(str(tmp_path / "*.jsonl"))
    shuffled = documents.seed(0).shuffle().repeat(None)
    assert {shuffled[i] for i in range(100)} == {12}
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(documents) == num_lines
    # Two bytes for each of 10^8 documents would be 200 MB.
    assert used < 0.5 * num_lines


def test_index_of_changed_file_is_rebuilt(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(file_cache, "MAX_BYTES_IN_MEMORY", 0)
    path = write(tmp_path / "a.txt", b"one\ntwo\n")
    assert len(LineFile(path)) == 2
    write(tmp_path / "a.txt", b"one\ntwo\nthree\n")
    assert len(LineFile(path)) == 3
    # Also if only the time has changed.
    os.utime(path, ns=(1, 1))
    write(tmp_path / "a.txt", b"a\nbcde\nfghij\n")
    assert LineFile(path)[1] == b"bcde"


@pytest.mark.parametrize(
    ("line", "column", "why"),
    [
        (b'{"a": tru}', 7, r"Expecting value, in '{\"a\": tru}'"),
        (b'{"a": 1', 8, "Expecting ',' delimiter"),
        (b'{"a": "\xff"}', 8, "invalid start byte"),
        (b"x" * 50, 1, "Expecting value, in 'xxxxxxxxxxxxxxxxxxxx'"),
    ],
    ids=["value", "end", "utf-8", "text"],
)
def test_bad_json_is_named_by_file_line_and_column(tmp_path, line, column, why):
    path = write(tmp_path / "a.jsonl", b'{"a": 1}\n\n' + line + b"\n2\n")
    values = JsonLinesFile(path)
    assert (values[0], values[2]) == ({"a": 1}, 2)
    with pytest.raises(InputReadError, match=rf"{path}, line 3, column {column}: {why}"):
        values[1]


def test_missing_file():
    with pytest.raises(InputReadError, match=r"cannot open gone\.txt \(No such file"):
        LineFile("gone.txt")
    with pytest.raises(InputReadError, match=r"pass the path of an existing file"):
        file_fingerprint("gone.txt")


def test_file_truncated_after_open(tmp_path):
    path = write(tmp_path / "a.txt", b"one\ntwo\n")
    lines = LineFile(path)
    assert lines[1] == b"two"
    write(tmp_path / "a.txt", b"one\nt")
    with pytest.raises(InputReadError, match=rf"{path} ends before byte 7: it was changed"):
        lines[1]


def test_file_removed_after_open(tmp_path):
    path = write(tmp_path / "a.txt", b"one\ntwo\n")
    lines = LineFile(path)
    assert len(lines) == 2
    os.remove(path)
    with pytest.raises(InputReadError, match=rf"cannot read {path} \(No such .*it existed when"):
        lines[1]


def test_truncated_gzip_file(tmp_path):
    path = write(tmp_path / "a.txt.gz", b"one\ntwo\n" * 1000)
    (tmp_path / "a.txt.gz").write_bytes((tmp_path / "a.txt.gz").read_bytes()[:-12])
    with pytest.raises(
        InputReadError, match=rf"{path} cannot be decompressed: EOFError: Compressed file ended"
    ):
        len(LineFile(path))


@pytest.fixture
def path(tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")
    import pyarrow as pa

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    table = pa.table({"text": [f"row {i}" for i in range(3000)], "n": list(range(3000))})
    # Groups that do not fit the batches that they are unpacked to.
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=700)
    return str(tmp_path / "a.parquet")


@pytest.mark.parametrize("is_small", [True, False])
def test_rows_by_index_after_pickling(path, monkeypatch, tmp_path, is_small):
    if not is_small:
        monkeypatch.setattr(file_cache, "MAX_BYTES_IN_MEMORY", 0)
    rows = ParquetFile(path)
    assert len(rows) == 3000
    assert [rows[i]["n"] for i in range(3000)] == list(range(3000))
    data = pickle.dumps(rows)
    assert len(data) < 400
    assert pickle.loads(data)[1500] == {"text": "row 1500", "n": 1500}
    assert (tmp_path / "cache").exists() is not is_small
    assert rows.describe(3) == f"row 3 of {path}"


def test_only_some_columns(path):
    rows = ParquetFile(path, ["n"])
    assert rows[2999] == {"n": 2999}
    assert rows.fingerprint != ParquetFile(path).fingerprint
    with pytest.raises(InputReadError, match=r"has no column 'm'; it has \['text', 'n'\]: change"):
        ParquetFile(path, ["n", "m"])


def test_parquet_files_that_are_large_together_are_not_in_memory(path, tmp_path, monkeypatch):
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(120):
        shutil.copy(path, folder / f"{number:03}.parquet")
    monkeypatch.setattr(file_cache, "MAX_BYTES_IN_MEMORY", ParquetFile(path).num_bytes)
    open_before = len(os.listdir("/proc/self/fd"))
    rows = parquet_dataset(str(folder / "*.parquet"))
    assert [rows[i * 3000 + i]["n"] for i in range(120)] == list(range(120))
    assert len(list((tmp_path / "cache" / "weft" / "parquet").glob("*.lock"))) == 120
    # Of about 1,000 that a process may have open.
    assert len(os.listdir("/proc/self/fd")) <= open_before + 100


def test_parquet_file_is_unpacked_by_batches(tmp_path, monkeypatch):
    """A row group was read as a whole, and a file is one if its writer does not divide it."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")
    import pyarrow as pa

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(record_files, "_BATCH_BYTES", 2**20)
    texts = np.random.default_rng(0).bytes(10_000_000).hex()
    rows = []
    for start in range(0, len(texts), 10_000):
        # The file holds the second value once.
        rows.append({"text": texts[start : start + 10_000], "same": "x" * 9000})
    table = pa.Table.from_pylist(rows)
    table = table.set_column(1, "same", table["same"].dictionary_encode())
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2000, write_batch_size=50)
    monkeypatch.setattr(file_cache, "MAX_BYTES_IN_MEMORY", 21_000_000)
    unpacked = ParquetFile(str(tmp_path / "a.parquet"), ["same", "text"])
    assert unpacked.num_bytes < 21_000_000
    default_pool = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(default_pool)
    pa.set_memory_pool(pool)
    try:
        assert unpacked[1999] == rows[1999]
    finally:
        pa.set_memory_pool(default_pool)
    assert pool.max_memory() < 10_000_000
    assert (tmp_path / "cache").exists(), "38 MB are not in memory"
    assert [unpacked[i] for i in (0, 104, 105, 1000)] == [rows[i] for i in (0, 104, 105, 1000)]


def test_damaged_parquet_files(path, tmp_path):
    (tmp_path / "text").write_text("no table", encoding="utf-8")
    with pytest.raises(InputReadError, match=r"text is not a Parquet file: ArrowInvalid: Parquet"):
        ParquetFile(str(tmp_path / "text"))
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[4:2000] = bytes(1996)
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(InputReadError, match=r"row group 0 of \S+ cannot be read: \w+"):
        ParquetFile(path)[0]


def test_without_pyarrow(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtraError, match=r"needs the package pyarrow.*weft-jax\[parquet\]"):
        ParquetFile(str(tmp_path / "a.parquet"))


def test_bomb_in_a_gzipped_file_is_not_unpacked(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(5):
            file.write(b"\n" * 2**24)
    why = r"a\.jsonl\.gz cannot be decompressed: BadGzipFile: it becomes larger than 7"
    with pytest.raises(InputReadError, match=why):
        len(JsonLinesFile(str(path)))


def test_record_of_180_megabytes_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    with open(path, "wb") as file:
        file.write(b'{"text": "first"}\n')
        file.seek(180 * 10**6, os.SEEK_CUR)
        file.write(b'1\n{"text": "last"}\n')
    records = JsonLinesFile(str(path))
    assert records[0] == {"text": "first"} and records[2] == {"text": "last"}
    with pytest.raises(InputReadError, match=r"line 2 of .* has 180,000,001 bytes, and a record"):
        _ = records[1]
