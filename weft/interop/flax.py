"""Layers of Flax Linen and Flax NNX in models of Weft.

They are called like Weft's. Boxes of axis metadata are converted to those of Weft and back.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import jax

from weft.core.filters import DenyList
from weft.core.logical import LogicallyPartitioned
from weft.core.meta import AxisMetadata, Partitioned, map_axis_meta
from weft.interop.linen import LinenModel
from weft.interop.models import Layer, import_library
from weft.interop.nnx import NNXModel
from weft.interop.variables import NNXMeta
from weft.nnx.variables import variable_type_from_name
from weft.nnx.versions import StaticValue
from weft.serialization import (
    from_state_dict,
    register_serialization_state,
    to_state_dict,
)
from weft.typing import Leaf, PyTree

_Box = Any  # an `AxisMetadata` of Flax, which need not be installed


class FlaxBox(AxisMetadata):
    """A boxed Flax value without an equivalent class in Weft."""

    def __init__(self, box: _Box):
        self.box = box

    def unbox(self) -> Leaf:
        return self.box.unbox()

    def replace_boxed(self, val: Leaf) -> "FlaxBox":
        return FlaxBox(self.box.replace_boxed(val))

    def add_axis(self, index: int, params: Mapping[Any, Any]) -> "FlaxBox":
        return FlaxBox(self.box.add_axis(index, params))

    def remove_axis(self, index: int, params: Mapping[Any, Any]) -> "FlaxBox":
        return FlaxBox(self.box.remove_axis(index, params))


def _flatten(x: FlaxBox) -> tuple[list[Any], StaticValue]:
    leaves, structure = jax.tree.flatten(x.box)
    return leaves, StaticValue(structure)


jax.tree_util.register_pytree_node(
    FlaxBox,
    _flatten,
    lambda fixed, leaves: FlaxBox(jax.tree.unflatten(fixed.value, leaves)),
)
register_serialization_state(
    FlaxBox,
    lambda x: {"value": to_state_dict(x.unbox())},
    lambda x, state: x.replace_boxed(
        from_state_dict(x.unbox(), state["value"], name="value")
    ),
)


def _to_weft(box: _Box) -> AxisMetadata:
    class_name = type(box).__name__
    if class_name == "Partitioned":
        return Partitioned(box.value, box.names, box.mesh)
    if class_name == "LogicallyPartitioned":
        return LogicallyPartitioned(box.value, box.names, box.mesh, box.rules)
    return FlaxBox(box)


def _to_flax(box: AxisMetadata) -> _Box:
    """Returns the Flax box for a box of Weft; the bare value if Flax has none."""
    if isinstance(box, FlaxBox):
        return box.box
    linen = import_library("flax.linen", "flax")
    if isinstance(box, LogicallyPartitioned):
        return linen.LogicallyPartitioned(
            box.value, box.names, box.mesh, box.rules
        )
    if isinstance(box, Partitioned):
        return linen.Partitioned(box.value, box.names, box.mesh)
    return box.unbox()


class FlaxLinenModel(LinenModel):
    """A module of Flax Linen; see `LinenModel`."""

    quantizes = False

    @staticmethod
    def _without_parent() -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @staticmethod
    def _base_class() -> type:
        return import_library("flax.linen", "flax").Module

    def _library_filter(self, mutable):
        if not isinstance(mutable, DenyList):
            return mutable
        denied = self._library_filter(mutable.deny)
        return import_library("flax.core", "flax").DenyList(denied)

    def _to_library(self, variables):
        return map_axis_meta(_to_flax, dict(variables))

    def _from_library(self, variables):
        meta = import_library("flax.core.meta", "flax")
        return meta.map_axis_meta(_to_weft, dict(variables))


class FlaxNNXModel(NNXModel):
    """A module of Flax NNX; see `NNXModel`."""

    quantizes = False

    def __init__(self, module: Layer, *args: PyTree, **kwargs: PyTree):
        super().__init__(module, *args, **kwargs)
        self.metadata_fn = _box_variable

    @property
    def nnx(self) -> Any:
        return import_library("flax.nnx", "flax")

    def _collection(self, leaf: Leaf) -> str:
        if not isinstance(leaf, self.nnx.Variable):
            return "arrays"
        return _collection_name(type(leaf))

    def _new(self, col: str, value: object) -> Leaf:
        leaf = super()._new(col, value)
        if col == "arrays":
            return leaf
        variable_type = self.nnx.variable_type_from_name(
            col, allow_register=True
        )
        metadata = {"eager_sharding": False, **leaf._metadata}
        return variable_type(leaf.get_raw_value(), **metadata)


_FLAX_METADATA = ("eager_sharding", "hijax", "ref")
"""What Flax keeps in the metadata of each variable."""


def _collection_name(kind: type) -> str:
    nnx = import_library("flax.nnx", "flax")
    return nnx.variable_name_from_type(kind, allow_register=True)


def _box_variable(variable: Leaf) -> Leaf | NNXMeta:
    """Returns the entry of a collection for a variable of Flax."""
    value = variable.get_raw_value()
    metadata = dict(variable.get_metadata())
    for name in _FLAX_METADATA:
        metadata.pop(name, None)
    if not metadata:
        return value
    collection = _collection_name(type(variable))
    return NNXMeta(
        variable_type_from_name(collection, allow_register=True),
        value,
        metadata,
    )
