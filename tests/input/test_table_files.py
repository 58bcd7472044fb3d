import pickle
import sys

import pytest

from weft.errors import InputReadError, MissingExtraError
from weft.input import file_cache
from weft.input.table_files import ParquetFile


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
def test_rows_by_index_also_in_another_process(path, monkeypatch, tmp_path, is_small):
    if not is_small:
        monkeypatch.setattr(file_cache, "SMALL", 0)
    rows = ParquetFile(path)
    assert len(rows) == 3000
    assert [rows[i]["n"] for i in range(3000)] == list(range(3000))
    data = pickle.dumps(rows)
    assert len(data) < 300
    assert pickle.loads(data)[1500] == {"text": "row 1500", "n": 1500}
    assert (tmp_path / "cache").exists() is not is_small
    assert rows.describe(3) == f"row 3 of {path}"


def test_only_some_columns(path):
    rows = ParquetFile(path, ["n"])
    assert rows[2999] == {"n": 2999}
    assert rows.fingerprint != ParquetFile(path).fingerprint
    with pytest.raises(InputReadError, match=r"has no column 'm'; it has \['text', 'n'\]: change"):
        ParquetFile(path, ["n", "m"])


def test_what_is_no_parquet_file_or_a_damaged_one(path, tmp_path):
    (tmp_path / "text").write_text("no table")
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
    with pytest.raises(MissingExtraError, match=r"needs the package pyarrow.*weft\[parquet\]"):
        ParquetFile(str(tmp_path / "a.parquet"))
