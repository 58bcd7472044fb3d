import pickle
import sys

import pytest

from weft.errors import InputReadError, MissingExtraError
from weft.input.hugging_face import hugging_face_dataset


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    datasets = pytest.importorskip("datasets", reason="needs the extra hf")
    rows = datasets.Dataset.from_dict({"text": [f"row {i}" for i in range(5)]})
    rows.save_to_disk(tmp_path / "one")
    splits = {"train": rows, "test": rows.select([4])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "splits")
    return tmp_path


def test_rows_by_index(folder):
    ds = hugging_face_dataset(str(folder / "one"))
    assert [row["text"] for row in ds] == [f"row {i}" for i in range(5)]
    assert pickle.loads(pickle.dumps(ds))[3] == {"text": "row 3"}
    assert ds.num_bytes > 0
    assert str(ds) == f"RecordDataset(5 rows of {folder}/one)"
    with pytest.raises(InputReadError, match=rf"row 2 of {folder}/one: KeyError: 'words'"):
        _ = ds.map(lambda row: row["words"])[2]


def test_a_split(folder):
    test = hugging_face_dataset(str(folder / "splits"), split="test")
    assert list(test) == [{"text": "row 4"}]
    train = hugging_face_dataset(str(folder / "splits"), split="train")
    assert train.fingerprint not in (None, test.fingerprint)
    for split in (None, "val"):
        with pytest.raises(InputReadError, match=rf"\['test', 'train'\], not {split!r}; set spl"):
            hugging_face_dataset(str(folder / "splits"), split=split)
    with pytest.raises(InputReadError, match=r"without splits, so it has no 'train'; omit"):
        hugging_face_dataset(str(folder / "one"), split="train")


def test_files_by_the_name_of_their_folder(folder):
    (folder / "lines").mkdir()
    (folder / "lines" / "train.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    assert [r["text"] for r in hugging_face_dataset(str(folder / "lines"))] == ["a", "b"]
    part = hugging_face_dataset(str(folder / "lines"), split="train[1:]")
    assert list(part) == [{"text": "b"}]


def test_a_dataset_that_is_not_there(folder):
    with pytest.raises(InputReadError, match=r"cannot load the dataset '\S+/gone', split None: "):
        hugging_face_dataset(str(folder / "gone"))


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"the package datasets.*weft\[hf\]"):
        hugging_face_dataset("any")
