"""Contents of a Hugging Face folder: its tensors and the parameters that they become.

Only the headers of the files are read.
"""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from weft.interop.huggingface.checkpoint import (
    huggingface_model_config,
    parameter_shapes,
    reading_plan,
)
from weft.interop.huggingface.tensors import TensorLocation
from weft.serialization.safetensors import StoredTensor, TensorFiles
from weft.typing import PyTree


class TensorsOfParameter(NamedTuple):
    """The tensors of a parameter.

    Attributes:
        path: of the parameter, its names joined by dots.
        parameter: its shape, dtype and sharding.
        names: of the tensors in the files, in the order of the layers and experts.
        pattern: all names as one, such as "model.layers.0…31.mlp.up_proj.weight".
        rows: the first and one after the last row that the parameter is of each tensor; None for
            the whole tensor.
        dtypes: of the tensors in the files, in the format's names, such as "BF16".
    """

    path: str
    parameter: Any
    names: list[str]
    pattern: str
    rows: tuple[int, int] | None
    dtypes: list[str]


class FolderContents(NamedTuple):
    """Tensors of a folder and parameters of its model.

    Attributes:
        model_type: the family.
        parameters: in the order of the model.
        tensors: all in the files, by name.
        unused: names of tensors that are not read. Loading refuses them, unless they are known to
            have no effect.
        refused: those of them that loading refuses.
        missing: tensors that the files lack, by name.
        misshaped: tensors of another shape than the model's, by name.
    """

    model_type: str
    parameters: list[TensorsOfParameter]
    tensors: dict[str, StoredTensor]
    unused: list[str]
    refused: list[str]
    missing: dict[str, jax.ShapeDtypeStruct]
    misshaped: dict[str, jax.ShapeDtypeStruct]


def folder_contents(
    folder: str | os.PathLike[str], target: PyTree = None
) -> FolderContents:
    """Returns where each tensor of a checkpoint goes, without reading values.

    Args:
        target: The model's parameters, or their shapes, as for `load_huggingface_params`; those of
            `huggingface_model_config(folder)` if None.

    Raises:
        WeightsReadError: if a file is missing or damaged.
        WeightsMismatchError: if the target is that of another family.
        HuggingFaceConfigError: if the model is not supported.
        MeshError: if a sharding does not divide its parameter.
    """
    if target is None:
        target = parameter_shapes(huggingface_model_config(folder))
    with TensorFiles(folder) as files:
        plan = reading_plan(files, target)
        tensors = files.tensors
    unused = [name for name in tensors if name not in plan.expected]
    missing: dict[str, jax.ShapeDtypeStruct] = {}
    misshaped: dict[str, jax.ShapeDtypeStruct] = {}
    for name, expected in plan.expected.items():
        if name not in tensors:
            missing[name] = expected
        elif tensors[name].shape != tuple(expected.shape):
            misshaped[name] = expected
    return FolderContents(
        model_type=plan.family.model_type,
        parameters=[
            _tensors_of(location, plan.prefix, tensors)
            for location in plan.locations
        ],
        tensors=tensors,
        unused=unused,
        refused=[name for name in unused if not plan.is_extra_allowed(name)],
        missing=missing,
        misshaped=misshaped,
    )


def _tensors_of(
    location: TensorLocation, prefix: str, tensors: dict[str, StoredTensor]
) -> TensorsOfParameter:
    names = [name for name, _ in location.pieces(prefix)]
    dtypes = {tensors[name].dtype for name in names if name in tensors}
    entry = location.entry
    pattern = entry.hf_name if entry.is_output_layer else prefix + entry.hf_name
    experts = ""
    if entry.has_experts:
        num_experts = location.parameter.shape[int(location.is_stacked)]
        experts = _numbers_text(range(num_experts))
    layers = _numbers_text(location.layers or ())
    return TensorsOfParameter(
        path=location.path,
        parameter=location.parameter,
        names=names,
        pattern=pattern.format(layers, expert=experts),
        rows=entry.rows,
        dtypes=sorted(dtypes),
    )


def _numbers_text(numbers: Sequence[int]) -> str:
    """Formats numbers at equal distances.

    >>> _numbers_text(range(32)), _numbers_text([1, 3, 5, 7]), _numbers_text([0, 1])
    ('0…31', '1,3,…,7', '0,1')
    """
    if len(numbers) <= 2:
        return ",".join(map(str, numbers))
    first, second, last = numbers[0], numbers[1], numbers[-1]
    if second - first == 1:
        return f"{first}…{last}"
    return f"{first},{second},…,{last}"
