import pickle
import sys

import pytest

from weft.errors import InputReadError, MissingExtraError
from weft.input.tfds import tfds_dataset


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
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


def test_examples_by_index_without_tensorflow(folder):
    ds = tfds_dataset(folder, split="train")
    assert sorted(row["text"] for row in ds) == [f"note {i}".encode() for i in range(5)]
    assert pickle.loads(pickle.dumps(ds))[3] == ds[3]
    assert (ds.num_bytes > 0, ds.fingerprint[0]) == (True, "tfds")
    assert str(ds) == "RecordDataset(5 examples of train of weft_notes/1.0.0)"
    assert len(tfds_dataset(folder, split="train[:2]")) == 2
    assert "tensorflow" not in sys.modules
    with pytest.raises(InputReadError, match=r"example 2 of train of weft_notes/1\.0\.0: KeyErr"):
        _ = ds.map(lambda row: row["words"])[2]


def test_what_is_not_there(folder):
    with pytest.raises(InputReadError, match=r"cannot load split 'val' of .*: ValueError: Unkno"):
        tfds_dataset(folder, split="val")
    with pytest.raises(InputReadError, match=r"of the dataset 'weft_gone': DatasetNotFoundError"):
        tfds_dataset("weft_gone", split="train")


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(MissingExtraError, match=r"package tensorflow-datasets.*weft\[tfds\]"):
        tfds_dataset("any", split="train")
