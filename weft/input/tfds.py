"""Random-access datasets of TensorFlow Datasets, without TensorFlow. Needs the extra `tfds`.

They must be stored as ArrayRecord files: `tfds.builder(name, file_format="array_record")`.
"""

import os
from typing import Any

from weft.errors import InputReadError, MissingExtraError
from weft.input.records import RecordDataset, TitledSource


def tfds_dataset(
    name: str, *, split: str, data_dir: str | None = None, download: bool = False
) -> RecordDataset:
    """Returns the examples of a split, as dicts of NumPy arrays and bytes.

    Args:
        name: Name of a dataset, such as `"mnist"` or `"mnist:3.*.*"`; or the folder of a prepared
            one, with `dataset_info.json`.

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
    name = builder.info.full_name
    return RecordDataset(
        TitledSource(
            rows,
            unit="example",
            title=f"{split} of {name}",
            fingerprint=("tfds", str(builder.data_dir), name, split),
            num_bytes=int(builder.info.splits[split].num_bytes),
        )
    )
