"""The output layer of a checkpoint: a tensor of its own, or the table of token embeddings ("tied").

`tie_word_embeddings` of `config.json` says which, and files may contradict it. What readers do then
differs: transformers 5 takes an output layer that differs from the table, transformers 4 ignores
it, and both initialize a missing one at random. So a contradiction is refused; a copy of the table
under the name of the output layer is none.
"""

from collections.abc import Collection, Mapping

import numpy as np

from weft import errors
from weft.interop.huggingface.settings import Settings
from weft.serialization import safetensors

_ROWS_AT_ONCE = 4096


def check_output_layer(
    files: safetensors.TensorFiles,
    expected_names: Collection[str],
    settings: Settings,
    *,
    output_layer: str,
    prefix: str,
    table_name: str,
) -> None:
    """Raises WeightsMismatchError if files have another output layer than the settings say.

    Args:
        expected_names: tensors that the model of the settings has.
        output_layer: name of the tensor if the output layer has one.
        prefix: of the names of other tensors than the output layer.
        table_name: of the token embeddings.
    """
    is_tied = output_layer not in expected_names
    setting = (
        f"{settings.source} says tie_word_embeddings={is_tied}"
        if "tie_word_embeddings" in settings.values
        else f"tie_word_embeddings, which {settings.source} lacks, is {is_tied} by default"
    )
    if not is_tied and output_layer not in files.tensors:
        raise errors.WeightsMismatchError(
            f"{str(files.path)!r} has no {output_layer!r}, but {setting}: the output layer is a "
            f"tensor of its own. Set tie_word_embeddings to true if it is {table_name!r}; or copy "
            "all files of a model with an output layer."
        )
    output_name = table_name if is_tied else output_layer
    for name in (output_layer, prefix + output_layer):
        if name == output_name or name not in files.tensors:
            continue
        if output_name not in files.tensors:
            continue  # `check_tensors` names all that is missing
        if _are_equal(files, name, output_name):
            continue
        fix = f"Leave {name!r} out of the files."
        if is_tied:
            fix = (
                "Set tie_word_embeddings to false if the output layer is a tensor of its own, as "
                f"transformers 5 takes it; or leave {name!r} out of the files, as transformers 4 "
                "did."
            )
        raise errors.WeightsMismatchError(
            f"{name!r} and {output_name!r} in {str(files.path)!r} are not equal, but {setting}: "
            f"the output layer is {output_name!r}. {fix}"
        )


def check_copies(
    files: safetensors.TensorFiles, copies: Mapping[str, str]
) -> None:
    """Raises WeightsMismatchError if a copy of a tensor is not equal to it.

    Args:
        copies: names of tensors by the names of their copies, which files may lack.
    """
    for copy_name, name in copies.items():
        if copy_name not in files.tensors or name not in files.tensors:
            continue
        if not _are_equal(files, copy_name, name):
            raise errors.WeightsMismatchError(
                f"{copy_name!r} and {name!r} in {str(files.path)!r} are not equal, but the model "
                f"has one tensor for both. Leave {copy_name!r} out of the files."
            )


def _are_equal(
    files: safetensors.TensorFiles, name: str, other_name: str
) -> bool:
    """Compares two tensors in parts, as they are large."""
    shape = files.tensors[name].shape
    if shape != files.tensors[other_name].shape or not shape:
        return False
    for start in range(0, shape[0], _ROWS_AT_ONCE):
        rows = (slice(start, min(start + _ROWS_AT_ONCE, shape[0])),)
        part, other_part = (
            files.read(tensor_name, rows).astype(np.float32)
            for tensor_name in (name, other_name)
        )
        if not np.array_equal(part, other_part, equal_nan=True):
            return False
    return True
