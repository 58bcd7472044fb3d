import gzip
import json
import pickle
import sys

import grain
import pytest

from weft.errors import InputReadError, MissingExtraError
from weft.input.datasets import (
    hugging_face_dataset,
    json_lines_dataset,
    parquet_dataset,
    text_dataset,
    tfds_dataset,
)
from weft.input.grain import prefetch_dataset


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("first\n\nsecond", encoding="utf-8")
    (tmp_path / "b.txt").write_text("third\n", encoding="utf-8")
    lines = "\n".join(json.dumps({"text": f"text {i}"}) for i in range(6))
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "zipped"}'))
    return tmp_path


def test_document_is_a_file_or_a_line(folder):
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
    with pytest.raises(
        InputReadError, match=r"^cannot read a\.txt\.gz: EOFError: Compressed file ended"
    ):
        _ = text_dataset("a.txt.gz")[0]


def test_json_lines_of_plain_and_zipped_files(folder):
    texts = [d["text"] for d in json_lines_dataset(["*.jsonl", "*.gz"])]
    assert texts == [*(f"text {i}" for i in range(6)), "zipped"]


def test_map_errors_name_the_record(folder):
    documents = json_lines_dataset("a.jsonl").map(lambda d: d["words"])
    with pytest.raises(InputReadError, match=r"^line 4 of a\.jsonl: KeyError: 'words'$"):
        _ = documents[3]
    upper = text_dataset("?.txt").map(lambda d: d["text"] + "!")
    with pytest.raises(InputReadError, match=r"^b\.txt: TypeError: can't concat str to bytes$"):
        _ = upper[1]


def text_length(document):
    return len(document["text"])


@pytest.mark.long
def test_worker_processes_name_failing_records(folder):
    (folder / "c.jsonl").write_text('{"text": "ok"}\n{"tex": 1}\n', encoding="utf-8")
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


@pytest.fixture
def saved_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    datasets = pytest.importorskip("datasets", reason="needs the extra hf")
    rows = datasets.Dataset.from_dict({"text": [f"row {i}" for i in range(5)]})
    rows.save_to_disk(tmp_path / "one")
    splits = {"train": rows, "test": rows.select([4])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "splits")
    return tmp_path


def test_split(saved_folder):
    test = hugging_face_dataset(str(saved_folder / "splits"), split="test")
    assert list(test) == [{"text": "row 4"}]
    train = hugging_face_dataset(str(saved_folder / "splits"), split="train")
    assert train.fingerprint not in (None, test.fingerprint)
    for split in (None, "val"):
        with pytest.raises(InputReadError, match=rf"\['test', 'train'\], not {split!r}; set spl"):
            hugging_face_dataset(str(saved_folder / "splits"), split=split)
    with pytest.raises(InputReadError, match=r"without splits, so it has no 'train'; omit"):
        hugging_face_dataset(str(saved_folder / "one"), split="train")


def test_files_by_the_name_of_their_folder(saved_folder):
    (saved_folder / "lines").mkdir()
    (saved_folder / "lines" / "train.jsonl").write_text(
        '{"text": "a"}\n{"text": "b"}\n', encoding="utf-8"
    )
    assert [r["text"] for r in hugging_face_dataset(str(saved_folder / "lines"))] == ["a", "b"]
    part = hugging_face_dataset(str(saved_folder / "lines"), split="train[1:]")
    assert list(part) == [{"text": "b"}]


def test_missing_dataset(saved_folder):
    with pytest.raises(InputReadError, match=r"cannot load the dataset '\S+/gone', split None: "):
        hugging_face_dataset(str(saved_folder / "gone"))


def test_hugging_face_without_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"the package datasets.*weft-jax\[hf\]"):
        hugging_face_dataset("any")


@pytest.fixture(scope="module")
def tfds_folder(tmp_path_factory):
    tfds = pytest.importorskip("tensorflow_datasets", reason="needs the extra tfds")

    class WeftNotes(tfds.core.GeneratorBasedBuilder):
        # Not that of a package, whose resources it would look for.
        __module__ = "weft_notes"
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(5)}

        def _generate_examples(self, n):
            yield from ((i, {"text": f"note {i}"}) for i in range(n))

    builder = WeftNotes(data_dir=tmp_path_factory.mktemp("tfds"), file_format="array_record")
    builder.download_and_prepare()
    return str(builder.data_dir)


def test_examples_by_index_without_tensorflow(tfds_folder):
    ds = tfds_dataset(tfds_folder, split="train")
    assert sorted(row["text"] for row in ds) == [f"note {i}".encode() for i in range(5)]
    assert pickle.loads(pickle.dumps(ds))[3] == ds[3]
    assert (ds.num_bytes > 0, ds.fingerprint[0]) == (True, "tfds")
    assert str(ds) == "RecordDataset(5 examples of train of weft_notes/1.0.0)"
    assert len(tfds_dataset(tfds_folder, split="train[:2]")) == 2
    assert "tensorflow" not in sys.modules
    with pytest.raises(InputReadError, match=r"example 2 of train of weft_notes/1\.0\.0: KeyErr"):
        _ = ds.map(lambda row: row["words"])[2]


def test_missing_data(tfds_folder):
    with pytest.raises(InputReadError, match=r"cannot load split 'val' of .*: ValueError: Unkno"):
        tfds_dataset(tfds_folder, split="val")
    with pytest.raises(InputReadError, match=r"of the dataset 'weft_gone': DatasetNotFoundError"):
        tfds_dataset("weft_gone", split="train")


def test_tfds_without_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(MissingExtraError, match=r"package tensorflow-datasets.*weft-jax\[tfds\]"):
        tfds_dataset("any", split="train")
