import gzip
import json
import os

import grain
import pytest

from weft.errors import InputReadError
from weft.input.files import json_lines_dataset, parquet_dataset, text_dataset
from weft.input.grain import prefetch_dataset


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("first\n\nsecond")
    (tmp_path / "b.txt").write_text("third\n")
    lines = "\n".join(json.dumps({"text": f"text {i}"}) for i in range(6))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "zipped"}'))
    return tmp_path


def test_a_document_is_a_file_or_a_line(folder):
    assert [d["text"] for d in text_dataset("?.txt")] == [b"first\n\nsecond", b"third\n"]
    lines = text_dataset(["b.txt", "a.txt"], document="line")
    assert [d["text"] for d in lines] == [b"third", b"first", b"second"]
    assert lines.describe(2) == "line 3 of a.txt"
    assert text_dataset("?.txt").describe(1) == "b.txt"


def test_zipped_documents(folder):
    (folder / "a.txt.gz").write_bytes(gzip.compress(b"one\ntwo"))
    assert text_dataset("*.txt.gz")[0] == {"text": b"one\ntwo"}
    assert text_dataset("*.txt.gz", document="line")[1] == {"text": b"two"}
    (folder / "a.txt.gz").write_bytes(gzip.compress(b"one\ntwo")[:-9])
    with pytest.raises(InputReadError, match=r"^cannot read a\.txt\.gz \(Compressed file ended"):
        _ = text_dataset("a.txt.gz")[0]


def test_json_lines_of_plain_and_zipped_files(folder):
    texts = [d["text"] for d in json_lines_dataset(["*.jsonl", "*.gz"])]
    assert texts == [*(f"text {i}" for i in range(6)), "zipped"]


def test_what_is_mapped_fails_with_the_name_of_the_record(folder):
    documents = json_lines_dataset("a.jsonl").map(lambda d: d["words"])
    with pytest.raises(InputReadError, match=r"^line 4 of a\.jsonl: KeyError: 'words'$"):
        _ = documents[3]
    upper = text_dataset("?.txt").map(lambda d: d["text"] + "!")
    with pytest.raises(InputReadError, match=r"^b\.txt: TypeError: can't concat str to bytes$"):
        _ = upper[1]


def test_a_file_that_was_removed(folder):
    documents = text_dataset("?.txt")
    os.remove("b.txt")
    with pytest.raises(InputReadError, match=r"^cannot read b\.txt \(No such file .*leave it out"):
        _ = documents[1]


def test_what_tells_one_state_of_the_files_from_another(folder):
    before = [text_dataset("?.txt"), text_dataset("?.txt", document="line")]
    assert before[0].fingerprint != before[1].fingerprint
    assert [d.num_bytes for d in before] == [19, 19]
    (folder / "b.txt").write_text("other\n\n")
    after = [text_dataset("?.txt"), text_dataset("?.txt", document="line")]
    assert all(b.fingerprint != a.fingerprint for b, a in zip(before, after, strict=True))


def text_length(document):
    return len(document["text"])


@pytest.mark.long
def test_worker_processes_read_them_and_name_what_fails(folder):
    (folder / "c.jsonl").write_text('{"text": "ok"}\n{"tex": 1}\n')
    ds = json_lines_dataset(["a.jsonl", "b.jsonl.gz", "c.jsonl"]).map(text_length)
    options = grain.MultiprocessingOptions(num_workers=1)
    it = iter(prefetch_dataset(ds, multiprocessing_options=options))
    assert [next(it) for _ in range(8)] == [6] * 7 + [2]
    assert it.get_state() == {"next_index": 8}
    with pytest.raises(Exception, match=r"line 2 of c\.jsonl: KeyError: 'text'"):
        next(it)
    it.close()


def test_parquet_rows(folder):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")
    import pyarrow as pa

    parquet.write_table(pa.table({"text": ["x", "y"], "n": [1, 2]}), "a.parquet")
    assert list(parquet_dataset("*.parquet")) == [{"text": "x", "n": 1}, {"text": "y", "n": 2}]
    assert parquet_dataset("*.parquet", columns=["n"])[1] == {"n": 2}
