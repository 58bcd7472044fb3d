import pickle

import pytest

from weft.errors import InputDatasetError, InputReadError
from weft.input.record_dataset import RecordDataset
from weft.input.records import FileRecordSource, LibraryRecordSource, matching_files


class Letters(list):
    """File whose name is its content."""

    def __init__(self, path):
        if path == "torn":
            raise ValueError("no magic bytes")
        super().__init__(path)

    def __getitem__(self, i):
        if super().__getitem__(i) == "!":
            raise OSError("checksum")
        return super().__getitem__(i)


class Titled(Letters):
    fingerprint = "f"
    num_bytes = 2

    def describe(self, index):
        return f"letter {index + 1}"


def dataset(*paths, kind=Letters):
    return RecordDataset(FileRecordSource(paths, kind))


def parse(letter):
    return {"n": int(letter)}


def test_records_of_files_in_order():
    ds = dataset("12", "", "3")
    assert list(ds) == ["1", "2", "3"]
    assert (len(ds), ds[4], list(ds[1:])) == (3, "2", ["2", "3"])
    assert sorted(ds.seed(0).shuffle()) == ["1", "2", "3"]
    assert list(ds.map(parse).map(lambda x: x["n"] + 1)) == [2, 3, 4]
    assert str(ds) == "RecordDataset(FileRecordSource(3 records in 3 files))"


def test_failing_records_are_named():
    ds = dataset("12", "3x!")
    with pytest.raises(
        InputReadError, match=r"^cannot read record 2 of 3x!: OSError: checksum$"
    ) as read:
        _ = ds[4]
    assert isinstance(read.value.__cause__, OSError)
    mapped = ds.map(parse)
    with pytest.raises(
        InputReadError, match=r"^record 1 of 3x!: ValueError: invalid literal"
    ) as call:
        _ = mapped[3]
    assert isinstance(call.value.__cause__, ValueError)
    # Through shuffles, and where an epoch has passed.
    endless = mapped.map(lambda x: x).shuffle(seed=1).repeat(None)
    with pytest.raises(InputReadError, match=r"record 1 of 3x!: ValueError|record 2 of 3x!: OSE"):
        [endless[i] for i in range(5, 10)]
    with pytest.raises(InputReadError, match=r"^letter 1: ValueError"):
        _ = dataset("x", kind=Titled).map(parse)[0]


def test_unreadable_file():
    with pytest.raises(InputReadError, match=r"^cannot open torn: ValueError: no magic bytes$"):
        dataset("ab", "torn")


def test_fingerprint_identifies_data():
    known = dataset("a", "b", kind=Titled)
    assert (known.fingerprint, known.num_bytes) == ((("Titled", "f"), ("Titled", "f")), 4)
    # Functions have no fingerprint.
    assert known.map(parse).fingerprint is None
    assert dataset("a").fingerprint is None
    assert dataset("a").num_bytes is None
    assert RecordDataset("abc").describe(1) == "record 1 of abc"


def test_library_rows():
    rows = LibraryRecordSource(
        Letters("ab!"), unit="row", title="t", fingerprint=("f",), num_bytes=3
    )
    ds = RecordDataset(rows)
    assert (ds[1], ds.describe(1), ds.fingerprint, ds.num_bytes) == ("b", "row 1 of t", ("f",), 3)
    assert str(ds) == "RecordDataset(3 rows of t)"
    with pytest.raises(InputReadError, match=r"^cannot read row 2 of t: OSError: checksum$"):
        _ = ds[2]


def test_datasets_can_be_pickled_for_workers():
    ds = pickle.loads(pickle.dumps(dataset("12", "3").map(parse)))
    assert list(ds) == [{"n": 1}, {"n": 2}, {"n": 3}]


class TestMatchingFiles:
    @pytest.fixture(autouse=True)
    def files(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        for name in ("b.txt", "a.txt", "a.json", "sub/c.txt", "odd[1].txt"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()

    def test_ordered_by_pattern_and_unique(self):
        assert matching_files("?.txt") == ["a.txt", "b.txt"]
        assert matching_files(["b.txt", "*.json", "?.txt"]) == ["b.txt", "a.json", "a.txt"]
        assert matching_files("**/c.txt") == ["sub/c.txt"]
        assert matching_files("odd[1].txt") == ["odd[1].txt"]

    def test_unknown_names(self):
        with pytest.raises(InputReadError, match=r"no file matches '\*\.csv'; the folder '\.' ho"):
            matching_files(["a.txt", "*.csv"])
        with pytest.raises(InputReadError, match=r"the folder 'sub' holds 'c\.txt': correct"):
            matching_files("sub/d*")
        with pytest.raises(InputReadError, match=r"'a\.json', 'a\.txt', .* and 1 more|correct"):
            matching_files("gone/d/e.txt")
        with pytest.raises(InputReadError, match=r"sub is a folder; name the files.*'sub/\*'"):
            matching_files("sub")
        with pytest.raises(InputReadError, match=r"no paths were given"):
            matching_files([])


def test_empty_files():
    assert list(dataset("", "")) == []
    with pytest.raises(InputDatasetError, match=r"0 records in 2 files\)\) has no records; pass"):
        _ = dataset("", "")[0]
