"""Datasets of TensorFlow Datasets by index, without TensorFlow. Needs the extra `tfds`.

They must be kept as ArrayRecord files, as by `tfds.builder(name, file_format="array_record")`.
"""

import os
from typing import Any

from weft.errors import InputReadError, MissingExtraError
from weft.input.records import RecordDataset


def tfds_dataset(
    name: str, *, split: str, data_dir: str | None = None, download: bool = False
) -> RecordDataset:
    """The examples of a split, as dicts of NumPy arrays and bytes.

    Args:
        name: The name of a dataset, such as `"mnist"` or `"mnist:3.*.*"`; or the folder of one that
            is prepared, the one with `dataset_info.json`.
        split: Which part, such as `"train"` or `"train[:10%]"`.
        data_dir: Where datasets are kept, for one given by its name.
        download: Whether one that is not there may be downloaded and prepared.

    Raises:
        InputReadError: If it cannot be loaded.
        MissingExtraError: If `tensorflow-datasets` is not installed.
    """
    try:
        import tensorflow_datasets as tfds  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtraError(
            "tfds_dataset needs the package tensorflow-datasets, which cannot be imported "
            f"({error}); install it with `pip install 'weft[tfds]'`"
        ) from error
    try:
        if os.path.exists(os.path.join(name, "dataset_info.json")):
            builder: Any = tfds.builder_from_directory(name)
        else:
            builder = tfds.builder(name, data_dir=data_dir, file_format="array_record")
            if download:
                builder.download_and_prepare()
        rows = builder.as_data_source(split)
    except Exception as error:
        raise InputReadError(
            f"cannot load split {split!r} of the dataset {name!r}: {type(error).__name__}: "
            f"{str(error).splitlines()[0]}"
        ) from error
    return RecordDataset(_Examples(rows, builder, split))


class _Examples:
    """A data source of TensorFlow Datasets that names itself."""

    def __init__(self, rows: Any, builder: Any, split: str):
        self._rows = rows
        self._title = f"{split} of {builder.info.full_name}"
        self.fingerprint = ("tfds", str(builder.data_dir), builder.info.full_name, split)
        self.num_bytes = int(builder.info.splits[split].num_bytes)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"{len(self)} examples of {self._title}"

    def __getitem__(self, index: int) -> Any:
        try:
            return self._rows[index]
        except Exception as error:
            raise InputReadError(
                f"cannot read {self.describe(index)}: {type(error).__name__}: {error}"
            ) from error

    def describe(self, index: int) -> str:
        return f"example {index} of {self._title}"
