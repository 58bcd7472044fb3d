"""Places of parameters in Hugging Face's files.

A parameter of Weft may be many tensors: where layers are repeated, those of all layers, and of a
mixture of experts, those of all experts. A tensor may also be several parameters, one above the
other: a fused projection to queries, keys and values, or to both halves of a gated layer.
"""

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from weft import errors
from weft.interop.huggingface.family import Family, TensorMapping
from weft.interop.huggingface.settings import Settings
from weft.serialization.safetensors import TensorFiles

IN_LAYERS = re.compile(
    r"(?:(?:decoder|encoder)\.)?transformer\.(repeat\.layer\.)?(?:layer(\d+)\.)?(.*)"
)
"""Path of a parameter in a stack of layers: whether it is repeated, the layer, the path there."""


def stack_of_path(path: str) -> str:
    """Returns the start of a path in a stack of layers: which stack it is.

    >>> stack_of_path("encoder.transformer.layer0.feed_forward.norm.scale")
    'encoder.transformer.'
    """
    owner, stack, _ = path.partition("transformer.")
    return owner + stack


def name_of_entry(
    stack: str, name_in_layer: str, entries: Collection[str]
) -> str:
    """Returns the name of the entry of a parameter of a layer.

    If a model has an encoder and a decoder, entries of the encoder's layers have the stack's name.
    """
    if stack + name_in_layer in entries:
        return stack + name_in_layer
    return name_in_layer


@dataclasses.dataclass(frozen=True)
class TensorLocation:
    """A parameter of Weft and its tensors, or parts of tensors, in Hugging Face's files.

    Attributes:
        path: of the parameter, its names joined by dots.
        parameter: the array, or its shape.
        layers: the number of each layer that the parameter belongs to; None outside of layers.
        is_stacked: whether the parameter has a leading axis of layers.
    """

    entry: TensorMapping
    path: str
    parameter: Any
    layers: tuple[int, ...] | None
    is_stacked: bool

    def pieces(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields the name of each tensor, and where in the parameter its values are."""
        hf_name = self.entry.hf_name
        if not self.entry.is_output_layer:
            hf_name = prefix + hf_name
        layer_axes: list[tuple[int | None, tuple[int, ...]]] = [(None, ())]
        if self.layers is not None:
            layer_axes = []
            for i, layer in enumerate(self.layers):
                layer_axes.append((layer, (i,) if self.is_stacked else ()))
        for layer, index in layer_axes:
            if not self.entry.has_experts:
                yield hf_name.format(layer), index
                continue
            for expert in range(self.parameter.shape[len(index)]):
                name = hf_name.format(layer, expert=expert)
                yield name, (*index, expert)

    def read(
        self, files: TensorFiles, name: str, box: tuple[slice, ...]
    ) -> np.ndarray:
        """Returns the values of a tensor, or of this parameter's part of it, in Weft's layout.

        Only what is in `box`, an extent of each axis, is read and returned.
        """
        stored_rows = self.entry.rows
        if _is_whole(box, self._piece_shape()):
            parts = () if stored_rows is None else (slice(*stored_rows),)
            return self.entry.change.to_weft(files.read(name, parts))
        hf_shape = self.hf_shape()
        hf_box = self._hf_box(box, hf_shape)
        file_box = hf_box
        if stored_rows is not None:
            rows = hf_box[0]
            first = stored_rows[0]
            file_box = (
                slice(first + rows.start, first + rows.stop),
                *hf_box[1:],
            )
        part = files.read(name, file_box)
        # Pages of memory that nothing is written to take no space.
        values = np.zeros(hf_shape, part.dtype)
        values[hf_box] = part
        return self.entry.change.to_weft(values)[box]

    def _piece_shape(self) -> tuple[int, ...]:
        """Returns the shape of the parameter without the axes of layers and experts."""
        num_axes = int(self.is_stacked) + int(self.entry.has_experts)
        return self.parameter.shape[num_axes:]

    def _hf_box(
        self, box: tuple[slice, ...], hf_shape: tuple[int, ...]
    ) -> tuple[slice, ...]:
        """Returns an extent of each axis of a tensor that has all that is in a box of Weft's.

        A change of layout moves numbers as they are, so it also moves their positions.
        """
        extents: list[slice] = []
        for axis, size in enumerate(hf_shape):
            positions = np.arange(size, dtype=np.int32)
            positions = np.expand_dims(
                positions, [i for i in range(len(hf_shape)) if i != axis]
            )
            positions = np.broadcast_to(positions, hf_shape)
            needed = self.entry.change.to_weft(positions)[box]
            extents.append(slice(int(needed.min()), int(needed.max()) + 1))
        return tuple(extents)

    def hf_values(self, index: tuple[int, ...]) -> np.ndarray:
        """Returns the values of the tensor at an index of the parameter."""
        return self.entry.change.to_hf(np.asarray(self.parameter[index]))

    def hf_shape(self) -> tuple[int, ...]:
        """Returns the shape of each tensor, or of this parameter's part of it."""
        weft_shape = jax.ShapeDtypeStruct(
            self._piece_shape(), self.parameter.dtype
        )
        return jax.eval_shape(self.entry.change.to_hf, weft_shape).shape


@dataclasses.dataclass(frozen=True)
class FileTensor:
    """A tensor of Hugging Face's files: the parameter that it is, or several as its rows.

    Attributes:
        pieces: each parameter's location, and where in the parameter the values are.
    """

    pieces: Sequence[tuple[TensorLocation, tuple[int, ...]]]

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the parameter."""
        return np.dtype(self.pieces[0][0].parameter.dtype)

    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the whole tensor."""
        shapes = [location.hf_shape() for location, _ in self.pieces]
        if len(shapes) == 1:
            return shapes[0]
        num_rows = sum(shape[0] for shape in shapes)
        return (num_rows, *shapes[0][1:])

    def values(self) -> np.ndarray:
        """Returns the values of the whole tensor."""
        parts = [location.hf_values(index) for location, index in self.pieces]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts)


def file_tensors(
    locations: Iterable[TensorLocation], prefix: str
) -> dict[str, FileTensor]:
    """Returns the tensors of all locations by name."""
    pieces: dict[str, list[tuple[TensorLocation, tuple[int, ...]]]] = {}
    for location in locations:
        for name, index in location.pieces(prefix):
            pieces.setdefault(name, []).append((location, index))
    tensors: dict[str, FileTensor] = {}
    for name, pieces_of_name in pieces.items():
        pieces_of_name.sort(key=lambda piece: piece[0].entry.rows or (0, 0))
        tensors[name] = FileTensor(pieces_of_name)
    return tensors


def tensor_locations(
    family: Family, settings: Settings, parameters: Mapping[str, Any]
) -> list[TensorLocation]:
    """Returns the location of each parameter, in order.

    Raises WeightsMismatchError if the parameters are not those of the family's model.
    """
    entries = {entry.weft_name: entry for entry in family.entries(settings)}
    missing = {name for name, entry in entries.items() if not entry.is_optional}
    unknown: list[str] = []
    locations: list[TensorLocation] = []
    block_sizes = _block_sizes(parameters)
    for name, parameter in parameters.items():
        layers, is_stacked, entry_name = None, False, name
        match = IN_LAYERS.fullmatch(name)
        if match:
            repeat, number, entry_name = match.groups()
            stack = stack_of_path(name)
            entry_name = name_of_entry(stack, entry_name, entries)
            is_stacked = repeat is not None
            first = int(number or 0)
            layers = (first,)
            if is_stacked:
                layers = tuple(
                    range(
                        first,
                        parameter.shape[0] * block_sizes[stack],
                        block_sizes[stack],
                    )
                )
        if entry_name in entries:
            missing.discard(entry_name)
            locations.append(
                TensorLocation(
                    entries[entry_name], name, parameter, layers, is_stacked
                )
            )
        else:
            unknown.append(name)
    if unknown or missing:
        # The family's model lacks what it does not know, and has what the parameters lack.
        raise errors.WeightsMismatchError(
            f"the parameters are not those of the {family.model_type} of {settings.source}: it "
            f"lacks {_first_names(unknown)}, and has {_first_names(missing)} besides. Make the "
            "model from huggingface_model_config, and merge adapters first."
        )
    return locations


def _is_whole(box: tuple[slice, ...], shape: tuple[int, ...]) -> bool:
    return all(
        extent.stop - extent.start == size
        for extent, size in zip(box, shape, strict=True)
    )


def _block_sizes(parameters: Iterable[str]) -> dict[str, int]:
    """Returns the number of layers that are repeated together, in each stack."""
    sizes: dict[str, int] = {}
    for name in parameters:
        match = IN_LAYERS.fullmatch(name)
        if match:
            stack = stack_of_path(name)
            last = int(match[2] or 0)
            sizes[stack] = max(sizes.get(stack, 1), last + 1)
    return sizes


def _first_names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)[:8]) or "none"
