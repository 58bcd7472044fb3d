"""Conversion of NNX variables to Linen and back: classes to collections, metadata to boxes.

Linen keeps a variable's axes in a box around its value, NNX in its metadata. A box with
`to_nnx_metadata` becomes metadata that remembers its class; other metadata becomes a box,
`NNXMeta`. Both are updated when an axis is added or removed.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import jax

from weft import errors, nnx, serialization
from weft.core import meta, spmd
from weft.nnx.versions import StaticValue
from weft.typing import Leaf, MeshAxes, PyTree

_BOX = "linen_meta_type"
"""The metadata entry with the class of the box that the other entries came from."""


@dataclasses.dataclass(frozen=True)
class NNXMeta(meta.AxisMetadata):
    """A value in a Linen collection with the metadata of its NNX variable.

    An axis that a transformation adds without a name is not split, as in NNX.

    Attributes:
        metadata: its metadata; `out_sharding` is the layout of its axes.

    >>> box = NNXMeta(nnx.Param, jax.numpy.ones((4, 8)), {"out_sharding": (None, "model")})
    >>> box.add_axis(0, {"partition_name": "layers"}).metadata["out_sharding"]
    ('layers', None, 'model')
    """

    var_type: type[nnx.Variable[Any]]
    value: Any
    metadata: Mapping[str, Any]

    @property
    def _out_sharding(self) -> Any:
        return self.metadata.get("out_sharding")

    def replace(self, **updates: Leaf) -> Self:
        """Returns a copy with other fields."""
        return dataclasses.replace(self, **updates)

    def unbox(self) -> Leaf:
        """Returns the value, sharded over the mesh of the metadata or of `jax.set_mesh`, if any."""
        if not self._out_sharding:
            return self.value
        return spmd.constrain(
            self.value, self.get_partition_spec(), self.metadata.get("mesh")
        )

    def replace_boxed(self, val: Leaf) -> Self:
        return self.replace(value=val)

    def add_axis(self, index: int, params: Mapping[Any, Any]) -> Self:
        named = {meta.PARTITION_NAME: None, **params}
        return self._renamed(lambda names: names.add_axis(index, named))

    def remove_axis(self, index: int, params: Mapping[Any, Any]) -> Self:
        named = {meta.PARTITION_NAME: None, **params}
        return self._renamed(lambda names: names.remove_axis(index, named))

    def _renamed(
        self, change: Callable[[meta.Partitioned], meta.Partitioned]
    ) -> Self:
        if self._out_sharding is None:
            return self
        names = getattr(self._out_sharding, "spec", self._out_sharding)
        renamed = change(meta.Partitioned(self.value, tuple(names)))
        return self.replace(
            metadata={**self.metadata, "out_sharding": renamed.names}
        )

    def get_partition_spec(self) -> jax.sharding.PartitionSpec:
        """Returns the layout of the metadata, by its rules and those of the context."""
        spec = spmd.get_pspec(
            self._out_sharding, self.metadata.get("sharding_rules")
        )
        return jax.sharding.PartitionSpec() if spec is None else spec

    def to_nnx_variable(self) -> nnx.Variable[Any]:
        """Returns the NNX variable."""
        return self.var_type.from_metadata(self.value, self.metadata)


def _register() -> None:
    key = jax.tree_util.GetAttrKey("value")

    def static(box: NNXMeta) -> StaticValue:
        return StaticValue((box.var_type, tuple(sorted(box.metadata.items()))))

    def flatten(box: NNXMeta) -> tuple[list[Any], StaticValue]:
        return [box.value], static(box)

    def flatten_with_keys(box: NNXMeta) -> tuple[list[Any], StaticValue]:
        return [(key, box.value)], static(box)

    def unflatten(
        static_value: StaticValue, children: Iterable[Any]
    ) -> NNXMeta:
        var_type, metadata = static_value.value
        (value,) = children
        return NNXMeta(var_type, value, dict(metadata))

    jax.tree_util.register_pytree_with_keys(
        NNXMeta, flatten_with_keys, unflatten, flatten
    )
    serialization.register_serialization_state(
        NNXMeta,
        lambda box: {"value": serialization.to_state_dict(box.value)},
        lambda box, state: box.replace(
            value=serialization.from_state_dict(
                box.value, state["value"], name="value"
            )
        ),
    )


_register()


def collection_of(kind: type[nnx.Variable[Any]]) -> str:
    """Returns the collection of a kind of variable: its registered name or its class's."""
    with contextlib.suppress(errors.VariableTypeError):
        return nnx.variable_name_from_type(kind)
    # Where another class of this name was there before, the collection is the same.
    with contextlib.suppress(errors.VariableTypeError):
        nnx.register_variable_name(kind.__name__, kind)
    return kind.__name__


def to_linen_var(vs: nnx.Variable[Any]) -> Leaf | meta.AxisMetadata:
    """Returns the Linen collection entry of an NNX variable.

    It is the value; with metadata, in its original box or an `NNXMeta`.
    """
    value = vs._read()
    metadata = dict(vs._metadata)
    if not metadata:
        return value
    box = metadata.pop(_BOX, None)
    if box is None:
        return NNXMeta(type(vs), value, metadata)
    return box.from_nnx_metadata({"value": value, **metadata})


def to_nnx_var(col: str, x: Leaf, *, lay_out: bool = True) -> nnx.Variable[Any]:
    """Returns the NNX variable for an entry of a Linen collection.

    Args:
        col: the collection; an unknown name makes a new kind of variable.
        lay_out: whether the value is new and gets the layout of its metadata.

    Raises LayerVariablesError for a box of another kind, or of a class that cannot be metadata.
    """
    variable_type = nnx.variable_type_from_name(col, allow_register=True)
    if not meta.is_axis_metadata(x):
        return variable_type(x)
    if isinstance(x, NNXMeta):
        if collection_of(x.var_type) != col:
            raise errors.LayerVariablesError(
                f"the collection {col!r} has an NNXMeta of a {x.var_type.__name__}, whose "
                f"collection is {collection_of(x.var_type)!r}; put it there."
            )
        return x.to_nnx_variable()
    if not hasattr(x, "to_nnx_metadata"):
        raise errors.LayerVariablesError(
            f"the collection {col!r} has a {type(x).__name__}, which cannot become the metadata "
            "of a variable; give its class the methods to_nnx_metadata and from_nnx_metadata, as "
            "Partitioned has them."
        )
    metadata = {**x.to_nnx_metadata(), _BOX: type(x)}
    value = metadata.pop("value")
    if lay_out:
        return variable_type(value, **metadata)
    return variable_type.from_metadata(value, metadata)


def with_partitioning(
    fn: Callable[..., Any],
    names: MeshAxes,
    mesh: jax.sharding.Mesh | None = None,
) -> Callable[..., nnx.VariableMetadata]:
    """Returns an initializer for bridge modules whose values have a layout.

    Args:
        names: for each axis of the value a mesh axis, a tuple of them, or None.
        mesh: the mesh; by default that of `jax.set_mesh`.
    """

    @functools.wraps(fn)
    def initialize(*args: PyTree, **kwargs: PyTree) -> nnx.VariableMetadata:
        metadata = {"out_sharding": names, "mesh": mesh, _BOX: meta.Partitioned}
        return nnx.VariableMetadata(fn(*args, **kwargs), metadata=metadata)

    return initialize
