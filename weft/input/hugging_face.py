"""Random-access datasets of Hugging Face's `datasets`. Needs the extra `hf`."""

import os
from typing import Any

from weft.errors import InputReadError, MissingExtraError
from weft.input.line_files import file_fingerprint
from weft.input.records import RecordDataset, TitledSource


def hugging_face_dataset(
    path: str, *, name: str | None = None, split: str | None = None
) -> RecordDataset:
    """Returns the rows of a dataset, as dicts of Python values.

    Args:
        path: A folder written by `save_to_disk`, or a name for `datasets.load_dataset`, which may
            download it.
        name: Configuration of a dataset that is not a folder.
        split: Split, such as `"train"`. None: the only one.

    Raises:
        InputReadError: If it cannot be loaded, or lacks the split.
        MissingExtraError: If `datasets` is not installed.
    """
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtraError(
            f"hugging_face_dataset needs the package datasets, which cannot be imported ({error}); "
            "install it with `pip install 'weft[hf]'`"
        ) from error
    saved = os.path.isdir(path) and {"state.json", "dataset_dict.json"} & set(os.listdir(path))
    try:
        if saved:
            found: Any = datasets.load_from_disk(path)
        else:
            found = datasets.load_dataset(path, name, split=split)
    except Exception as error:
        raise InputReadError(
            f"cannot load the dataset {path!r}, split {split!r}: {type(error).__name__}: {error}"
        ) from error
    title = path if split is None else f"{split} of {path}"
    if isinstance(found, dict):
        if split is None and len(found) == 1:
            split = next(iter(found))
        if split not in found:
            raise InputReadError(
                f"the dataset {path!r} has the splits {sorted(found)}, not {split!r}; set split "
                "to one of them"
            )
        found = found[split]
    elif saved and split is not None:
        raise InputReadError(
            f"the dataset {path!r} was saved without splits, so it has no {split!r}; omit split"
        )
    files = [file["filename"] for file in found.cache_files]
    states = (title, *map(file_fingerprint, files)) if files else None
    num_bytes = sum(os.path.getsize(file) for file in files)
    return RecordDataset(
        TitledSource(found, unit="row", title=title, fingerprint=states, num_bytes=num_bytes)
    )
