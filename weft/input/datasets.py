"""Random-access datasets of records in files.

    documents = json_lines_dataset("data/*.jsonl.gz")
    documents[7]["text"]

They are Grain `MapDataset`s whose errors name the file and the record, see `weft.input.records`.
The state of an iterator is one number, also after shuffles. Files are listed when the dataset is
created, and must not change while it is used. For ArrayRecord files see
`weft.input.grain.array_record_dataset`.

Datasets of Hugging Face's `datasets` need the extra `hf`, those of TensorFlow Datasets the extra
`tfds`, without TensorFlow; they must be stored as ArrayRecord files:
`tfds.builder(name, file_format="array_record")`.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Literal

from weft._lazy import import_extra
from weft.errors import EmptyCorpusError, InputReadError
from weft.input.formats import (
    Format,
    check_format,
    format_of,
    read_whole,
    without_mark,
)
from weft.input.record_dataset import RecordDataset
from weft.input.record_files import (
    JsonLinesFile,
    LineFile,
    LineFiles,
    ParquetFile,
    file_fingerprint,
)
from weft.input.records import (
    FileRecordSource,
    LibraryRecordSource,
    matching_files,
    read_errors,
)
from weft.serialization.untrusted import invalid_text_reason


def text_dataset(
    paths: str | Sequence[str], *, document: Literal["file", "line"] = "file"
) -> RecordDataset:
    """Returns documents of plain text, as `{"text": bytes}`.

    Args:
        paths: Files and glob patterns; `.gz` files are decompressed. Files whose suffix is that of
            another format, such as `.jsonl` or `.csv`, are refused.
        document: Whether a document is a whole file, or a line that is not blank. A whole file
            keeps its line ends, CRLF too; a line loses them.

    Raises:
        InputReadError: If a path or pattern matches no file, or a file or document cannot be read.

    >>> import json
    >>> documents = text_dataset(json.__path__[0] + "/*.py")
    >>> documents.describe(0).endswith("json/__init__.py"), len(documents[0]["text"]) > 1000
    (True, True)
    """
    files = _files(paths, "text")
    if document == "line":
        return _dataset_of_lines(files, _TextLines)
    return RecordDataset(FileRecordSource(files, _WholeFile))


def _dataset_of_lines(
    files: Sequence[str], open_file: Callable[[str], LineFile]
) -> RecordDataset:
    return RecordDataset(FileRecordSource(files, LineFiles(files, open_file)))


def _files(paths: str | Sequence[str], expected: Format) -> list[str]:
    files = matching_files(paths)
    for file in files:
        check_format(file, expected)
    return files


def json_lines_dataset(paths: str | Sequence[str]) -> RecordDataset:
    """Returns the values of files with one JSON value per line.

    A file that is one JSON array has its values, one that is a single object in several lines only
    this one.

    Args:
        paths: Files and glob patterns; `.gz` files are decompressed.

    Raises InputReadError if a path or pattern matches no file, or a file cannot be read; on access,
    with file, line and column, if a line is not JSON.
    """
    return _dataset_of_lines(_files(paths, "json"), JsonLinesFile)


def parquet_dataset(
    paths: str | Sequence[str], *, columns: Sequence[str] | None = None
) -> RecordDataset:
    """Returns the rows of Parquet files, as dicts of Python values. Needs the extra `parquet`.

    Raises:
        InputReadError: If a path matches no file, or a file is not Parquet or lacks a column.
        MissingExtraError: If pyarrow is not installed.
    """
    files = _files(paths, "parquet")
    open_file = functools.partial(
        ParquetFile, columns=columns, num_files=len(files)
    )
    return RecordDataset(FileRecordSource(files, open_file))


def read_rows(paths: str | Sequence[str]) -> RecordDataset:
    """Returns the rows of files of JSON lines or of Parquet, by the name of the first.

    Raises:
        InputReadError: If a path matches no file, or a file cannot be read.
        EmptyCorpusError: If there is no row.
    """
    first_path = paths if isinstance(paths, str) else paths[0]
    if format_of(first_path) == "parquet":
        rows = parquet_dataset(paths)
    else:
        rows = json_lines_dataset(paths)
    if len(rows) == 0:
        name = paths if isinstance(paths, str) else ", ".join(paths)
        raise EmptyCorpusError(
            f"{name} has no rows; expected a JSON object in each line, or rows of Parquet"
        )
    return rows


class _WholeFile:
    def __init__(self, path: str):
        self.fingerprint = file_fingerprint(path)
        self._path, self.num_bytes = path, self.fingerprint[1]

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, bytes]:
        return _text_record(without_mark(read_whole(self._path)), self, index)

    def describe(self, index: int) -> str:
        return self._path


class _TextLines(LineFile):
    def __getitem__(self, index: int) -> dict[str, bytes]:
        return _text_record(self.line(index), self, index)


def _text_record(
    data: bytes, source: _WholeFile | _TextLines, index: int
) -> dict[str, bytes]:
    """Returns a text as a record with the key `text`, like JSON and Parquet records."""
    fault = invalid_text_reason(data)
    if fault is not None:
        raise InputReadError(f"{source.describe(index)} {fault}")
    return {"text": data}


def hugging_face_dataset(
    path: str, *, name: str | None = None, split: str | None = None
) -> RecordDataset:
    """Returns the rows of a dataset, as dicts of Python values.

    Args:
        path: A folder of `save_to_disk`, or a name that `datasets.load_dataset` may download.
        name: Configuration of a dataset that is not a folder.
        split: Split, such as `"train"`. None: the only one.

    Raises:
        InputReadError: If it cannot be loaded, or lacks the split.
        MissingExtraError: If `datasets` is not installed.
    """
    datasets = import_extra("datasets", "hf", needed_by="hugging_face_dataset")
    is_saved = False
    if os.path.isdir(path):
        is_saved = not {"state.json", "dataset_dict.json"}.isdisjoint(
            os.listdir(path)
        )
    with read_errors(f"cannot load the dataset {path!r}, split {split!r}"):
        if is_saved:
            dataset = datasets.load_from_disk(path)
        else:
            dataset = datasets.load_dataset(path, name, split=split)
    title = path if split is None else f"{split} of {path}"
    if isinstance(dataset, dict):
        if split is None and len(dataset) == 1:
            split = next(iter(dataset))
        if split not in dataset:
            raise InputReadError(
                f"the dataset {path!r} has the splits {sorted(dataset)}, not {split!r}; set split "
                "to one of them"
            )
        dataset = dataset[split]
    elif is_saved and split is not None:
        raise InputReadError(
            f"the dataset {path!r} was saved without splits, so it has no {split!r}; omit split"
        )
    files = [file["filename"] for file in dataset.cache_files]
    fingerprint = (title, *map(file_fingerprint, files)) if files else None
    num_bytes = sum(map(os.path.getsize, files))
    return RecordDataset(
        LibraryRecordSource(
            dataset,
            unit="row",
            title=title,
            fingerprint=fingerprint,
            num_bytes=num_bytes,
        )
    )


def tfds_dataset(
    name: str,
    *,
    split: str,
    data_dir: str | None = None,
    download: bool = False,
) -> RecordDataset:
    """Returns the examples of a split, as dicts of NumPy arrays and bytes.

    Args:
        name: Name of a dataset, such as `"mnist"` or `"mnist:3.*.*"`; or the folder of a prepared
            one, with `dataset_info.json`.

    Raises:
        InputReadError: If it cannot be loaded.
        MissingExtraError: If `tensorflow-datasets` is not installed.
    """
    package = "tensorflow-datasets"
    tfds = import_extra(
        "tensorflow_datasets", "tfds", needed_by="tfds_dataset", package=package
    )
    try:
        if os.path.exists(os.path.join(name, "dataset_info.json")):
            builder = tfds.builder_from_directory(name)
        else:
            builder = tfds.builder(
                name, data_dir=data_dir, file_format="array_record"
            )
            if download:
                builder.download_and_prepare()
        rows = builder.as_data_source(split)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise InputReadError(
            f"cannot load split {split!r} of the dataset {name!r}: {type(error).__name__}: {reason}"
        ) from error
    name = builder.info.full_name
    return RecordDataset(
        LibraryRecordSource(
            rows,
            unit="example",
            title=f"{split} of {name}",
            fingerprint=("tfds", str(builder.data_dir), name, split),
            num_bytes=int(builder.info.splits[split].num_bytes),
        )
    )
