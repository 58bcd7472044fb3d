"""Axis metadata: boxes around values with information about each axis.

A box is a pytree node that contains the value, so mapping over a tree (an optimizer, a loss scale,
`jax.eval_shape`) keeps the metadata. Transformations that remove or add an axis call the hooks of
the box. Invariant: `add_axis` and `remove_axis` with the same arguments are inverses, and metadata
has one entry for each axis of the value.

Boxes can be nested; each level is a separate kind of metadata, whose hook is called once. A hook
may forward the call to the inner box; otherwise, the functions here call the inner hooks.
"""

import abc
import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any, Generic, Self, TypeVar

import jax
import numpy as np

from weft import struct
from weft.core.spmd import AnyMesh, constrain
from weft.core.spmd import get_global_mesh as get_global_mesh
from weft.core.spmd import global_mesh_defined as global_mesh_defined
from weft.errors import (
    AxisMetadataError,
    PartitioningUnspecifiedError,
    PartitionNameError,
)
from weft.lifting.kind import SelectedLeaves, Structure
from weft.typing import MeshAxes, PyTree

A = TypeVar("A")
B = TypeVar("B", bound="Partitioned")
BoxT = TypeVar("BoxT")
T = TypeVar("T")

AxisNames = Any  # the mesh axes of one axis: a name, a tuple of names, or None

PARTITION_NAME = "partition_name"
"""The key of `metadata_params` for the name of the new axis of a `Partitioned`."""


class AxisMetadata(abc.ABC, Generic[A]):
    """Base class of boxes: a value of type `A` with information about each of its axes.

    A subclass should be a pytree node with the value as its only child, such as a
    `weft.struct.PyTreeNode` whose other fields have `pytree_node=False`.
    """

    @abc.abstractmethod
    def unbox(self) -> A:
        """Returns the value in this box, which may be another box."""

    @abc.abstractmethod
    def add_axis(self, index: int, params: Mapping[Any, Any]) -> Self:
        """Returns this box for a value that has gained an axis.

        Args:
            index: position of the new axis in the new value; -1 is the last axis.
            params: `metadata_params` of the transformation.
        """

    @abc.abstractmethod
    def remove_axis(self, index: int, params: Mapping[Any, Any]) -> Self:
        """Returns this box for a value that has lost the axis `index`; inverse of `add_axis`."""

    def replace_boxed(self, val: PyTree) -> Self:
        """Returns the same metadata around another value.

        Classes that are not a pytree node with one child must override this.
        """
        children, structure = _open(self)
        if len(children) != 1 or children[0] is self:
            raise AxisMetadataError(
                f"{type(self).__name__} is not a pytree node with the value as its only child; "
                "define replace_boxed(val) in the class."
            )
        return jax.tree.unflatten(structure, [val])


def is_axis_metadata(val: PyTree) -> bool:
    """Returns whether a value is a box."""
    return isinstance(val, AxisMetadata)


def _open(box: AxisMetadata[PyTree]) -> tuple[list[PyTree], Structure]:
    """Returns the children of a box and its structure; without a pytree node, the box itself."""
    return jax.tree.flatten(box, is_leaf=lambda x: x is not box)


def _content(box: AxisMetadata[PyTree]) -> PyTree:
    """Returns the content of a box, without effects of unboxing such as a sharding constraint."""
    children, _ = _open(box)
    if len(children) == 1 and children[0] is not box:
        return children[0]
    return box.unbox()


def map_axis_meta(
    fn: Callable[[AxisMetadata[PyTree]], PyTree], tree: PyTree
) -> PyTree:
    """Replaces each outermost box of a tree by a function's result; other leaves are unchanged.

    >>> map_axis_meta(lambda box: box.names, {"w": Partitioned(1.0, ("data",)), "b": 0.0})
    {'b': 0.0, 'w': ('data',)}
    """

    def map_leaf(leaf: PyTree) -> PyTree:
        return fn(leaf) if is_axis_metadata(leaf) else leaf

    return jax.tree.map(map_leaf, tree, is_leaf=is_axis_metadata)


def unbox(tree: PyTree) -> PyTree:
    """Returns the values of a tree without any boxes.

    >>> unbox({"w": Partitioned(1.0, ()), "b": 0.0})
    {'b': 0.0, 'w': 1.0}
    """
    if jax.tree_util.all_leaves((tree,)) and not is_axis_metadata(tree):
        return tree  # most often it is an array
    return map_axis_meta(lambda box: unbox(box.unbox()), tree)


def replace_boxed(tree: PyTree, updates: PyTree) -> PyTree:
    """Replaces the values in the boxes of a tree.

    Args:
        updates: the same structure without boxes; at a leaf or box of the tree, any pytree.

    >>> replace_boxed({"w": Partitioned(1.0, ())}, {"w": 2.0})
    {'w': Partitioned(value=2.0, names=(), mesh=None)}
    """

    def replace(leaf: PyTree, value: PyTree) -> PyTree:
        if not is_axis_metadata(leaf):
            return value
        children, structure = _open(leaf)
        if len(children) != 1 or not is_axis_metadata(children[0]):
            return leaf.replace_boxed(value)
        if children[0] is leaf:  # not a pytree node
            inner = leaf.unbox()
            if is_axis_metadata(inner):
                value = replace(inner, value)
            return leaf.replace_boxed(value)
        # The innermost box holds the value; outer boxes keep their metadata, whether or not their
        # own replace_boxed would forward the value.
        return jax.tree.unflatten(structure, [replace(children[0], value)])

    return jax.tree.map(replace, tree, updates, is_leaf=is_axis_metadata)


def add_axis(tree: PyTree, index: int, params: Mapping[Any, Any]) -> PyTree:
    """Notifies every box of a tree, including nested ones, that its value has gained an axis.

    Args:
        index: position of the new axis in the new values; -1 is the last axis.
        params: parameters of the metadata, as `{PARTITION_NAME: "layers"}`. An axis called None is
            not split.

    Raises:
        PartitioningUnspecifiedError: for a `Partitioned`, if `params` has no name.
        AxisMetadataError: if metadata cannot have an axis there; `path` is that of the value.

    >>> add_axis(Partitioned(1.0, ("data",)), 0, {PARTITION_NAME: "layers"}).names
    ('layers', 'data')
    """
    return _call_hooks(lambda box: box.add_axis(index, params), tree)


def remove_axis(tree: PyTree, index: int, params: Mapping[Any, Any]) -> PyTree:
    """Notifies every box of a tree, including nested ones, that its value has lost an axis.

    Args:
        index: position of the axis in the old values; -1 is the last axis.

    Raises:
        PartitionNameError: if the axis has another name than in `params`.
        AxisMetadataError: if metadata has no such axis; `path` is that of the value.

    >>> box = Partitioned(1.0, ("layers", "data"))
    >>> remove_axis(box, 0, {PARTITION_NAME: "layers"}).names
    ('data',)
    """
    return _call_hooks(lambda box: box.remove_axis(index, params), tree)


def _inner_boxes(box: AxisMetadata[PyTree]) -> SelectedLeaves:
    """Returns a box's leaves, with the boxes among them selected."""

    def is_inner(leaf: PyTree) -> bool:
        return is_axis_metadata(leaf) and leaf is not box

    return SelectedLeaves.of(box, is_inner, is_inner)


def _is_unchanged(tree: PyTree, new_tree: PyTree) -> bool:
    leaves, structure = jax.tree.flatten(tree)
    new_leaves, new_structure = jax.tree.flatten(new_tree)
    return structure == new_structure and all(
        map(operator.is_, leaves, new_leaves)
    )


def _call_hooks(
    hook: Callable[[AxisMetadata[PyTree]], AxisMetadata[PyTree]], tree: PyTree
) -> PyTree:
    """Calls a hook once for each box of a tree."""

    def call(box: AxisMetadata[PyTree]) -> AxisMetadata[PyTree]:
        return call_inner(box, hook(box))

    def call_inner(
        box: AxisMetadata[PyTree], new_box: AxisMetadata[PyTree]
    ) -> AxisMetadata[PyTree]:
        """Calls the hooks of inner boxes, unless the hook of the outer box did."""
        inner_boxes = _inner_boxes(box).selected
        new_leaves = _inner_boxes(new_box)
        new_inner_boxes = new_leaves.selected
        if not inner_boxes or len(inner_boxes) != len(new_inner_boxes):
            return new_box
        called: list[AxisMetadata[PyTree]] = []
        for inner_box, new_inner_box in zip(
            inner_boxes, new_inner_boxes, strict=True
        ):
            if _is_unchanged(inner_box, new_inner_box):
                called.append(call(new_inner_box))
            else:
                called.append(call_inner(inner_box, new_inner_box))
        return new_leaves.replace(called)

    def call_at(path: jax.tree_util.KeyPath, leaf: PyTree) -> PyTree:
        if not is_axis_metadata(leaf):
            return leaf
        with about(jax.tree_util.keystr(path, simple=True, separator="/")):
            return call(leaf)

    return jax.tree_util.tree_map_with_path(
        call_at, tree, is_leaf=is_axis_metadata
    )


@contextlib.contextmanager
def about(path: str) -> Iterator[None]:
    """Prepends a path to that of an `AxisMetadataError`; other errors get a note."""
    try:
        yield
    except AxisMetadataError as error:
        error.path = "/".join(filter(None, (path, error.path)))
        raise
    except Exception as error:
        if path:
            error.add_note(f"This is about the axis metadata of {path!r}.")
        raise


def checked_names(names: Iterable[AxisNames]) -> tuple[AxisNames, ...]:
    """Returns names of axes as a tuple; raises AxisMetadataError for sets and single names."""
    is_unordered = isinstance(names, Mapping | Set)
    if isinstance(names, str) or is_unordered or not hasattr(names, "__iter__"):
        advice = "" if is_unordered else f" For one axis write ({names!r},)."
        raise AxisMetadataError(
            f"names is {names!r}; expected a sequence with one entry for each axis of the value: "
            f"a name, a tuple of names, or None.{advice}"
        )
    return tuple(
        tuple(name) if isinstance(name, list) else name for name in names
    )


class Partitioned(struct.PyTreeNode, AxisMetadata[A]):
    """Value with the mesh axes that split each of its axes.

    `unbox` lays the value out over `mesh`, by default that of `jax.set_mesh`, if any.

    Attributes:
        value: an array, or a tree of arrays with the same axes.
        names: for each axis a mesh axis, a tuple of them, or None, as a tuple or `PartitionSpec`.
            Further axes are not split.

    Raises AxisMetadataError if `names` is not a sequence of names.

    >>> box = Partitioned(jax.numpy.ones((4, 8)), (None, "data"))
    >>> box.get_partition_spec()
    P(None, 'data')
    """

    value: A
    names: tuple[AxisNames, ...] = struct.field(pytree_node=False)
    mesh: AnyMesh | None = struct.field(pytree_node=False, default=None)

    AXIS_NAME = PARTITION_NAME

    def __post_init__(self):
        names = checked_names(self.names)
        if not isinstance(self.names, jax.sharding.PartitionSpec):
            object.__setattr__(self, "names", names)

    def unbox(self, apply_constraint: bool = True) -> A:
        """Returns the value, laid out by the names unless `apply_constraint` is False."""
        if not apply_constraint:
            return self.value
        return constrain(self.value, self.get_partition_spec(), self.mesh)

    def replace_boxed(self, val: PyTree) -> Self:
        return self.replace(value=val)

    def add_axis(self, index: int, params: Mapping[Any, Any]) -> Self:
        if PARTITION_NAME not in params:
            raise PartitioningUnspecifiedError(
                f"the value with names={self.names!r} gains axis {index}, which has no name; give "
                f"the transformation its mesh axis, {{{PARTITION_NAME!r}: 'layers'}} as "
                "metadata_params, or None in place of the axis to split it over none."
            )
        position = self._position(index, len(self.names) + 1)
        names = self._padded(position)
        return self.replace(
            names=(*names[:position], params[PARTITION_NAME], *names[position:])
        )

    def remove_axis(self, index: int, params: Mapping[Any, Any]) -> Self:
        position = self._position(index, len(self.names))
        axis_name = self.names[position] if position < len(self.names) else None
        if PARTITION_NAME not in params:
            text = self._removal_error(index, axis_name, "without a name")
            raise PartitioningUnspecifiedError(text)
        (name,) = checked_names((params[PARTITION_NAME],))
        if name != axis_name:
            raise PartitionNameError(
                self._removal_error(index, axis_name, f"as {name!r}")
            )
        return self.replace(
            names=(*self.names[:position], *self.names[position + 1 :])
        )

    def _removal_error(
        self, index: int, axis_name: AxisNames, removed_as: str
    ) -> str:
        return (
            f"axis {index} of names={self.names!r} is called {axis_name!r}, and is to be removed "
            f"{removed_as}; give the transformation the name, {{{PARTITION_NAME!r}: "
            f"{axis_name!r}}} as metadata_params (in NNX transform_metadata), or the axis that "
            "was meant."
        )

    def _position(self, index: int, rank: int) -> int:
        """Returns the index of an axis counted from the front.

        `rank` is that of the value to which `index` refers, as far as the names determine it.
        """
        ndims = [
            getattr(leaf, "ndim", 0) for leaf in jax.tree.leaves(self.value)
        ]
        ndim = max(ndims, default=0)
        # Names may omit the last axes, and the value may or may not have the axis already, so the
        # rank is known only if there are as many names as axes.
        limit = rank if len(self.names) >= ndim else ndim + 1
        if 0 <= index < limit:
            return index
        if -rank <= index < 0 and rank >= ndim:
            return rank + index
        if rank < ndim:
            advice = f"name all {ndim} axes of the value, None for one that is not split"
        else:
            advice = f"expected an axis from {-rank} to {rank - 1}"
        raise AxisMetadataError(
            f"there is no axis {index} for names={self.names!r}; {advice}."
        )

    def _padded(self, length: int) -> tuple[AxisNames, ...]:
        return (*self.names, *[None] * (length - len(self.names)))

    def get_partition_spec(self) -> jax.sharding.PartitionSpec:
        """Returns the names as a `PartitionSpec`."""
        return jax.sharding.PartitionSpec(*self.names)

    def get_sharding(
        self, mesh: jax.sharding.Mesh
    ) -> jax.sharding.NamedSharding:
        """Returns the layout of the value over a mesh."""
        return jax.sharding.NamedSharding(mesh, self.get_partition_spec())

    def to_nnx_metadata(self) -> dict[str, Any]:
        """Returns the fields as metadata of a variable, with `names` as `out_sharding`."""
        return {
            "value": self.value,
            "out_sharding": self.names,
            "mesh": self.mesh,
        }

    @classmethod
    def from_nnx_metadata(cls: type[B], metadata: Mapping[str, Any]) -> B:
        """Inverts `to_nnx_metadata`."""
        return cls(
            metadata["value"], metadata["out_sharding"], metadata.get("mesh")
        )


def with_partitioning(
    fn: Callable[..., Any],
    names: MeshAxes,
    mesh: jax.sharding.Mesh | None = None,
) -> Callable[..., Partitioned[PyTree]]:
    """Wraps an initializer to return a `Partitioned`.

    Args:
        fn: the initializer, any function that returns a value, or a factory of initializers without
            required arguments, such as `jax.nn.initializers.he_normal`.

    >>> init = with_partitioning(jax.nn.initializers.ones, (None, "data"))
    >>> init(jax.random.key(0), (4, 8)).names
    (None, 'data')
    """
    return boxed(fn, Partitioned, names, mesh)


def boxed(
    fn: Callable[..., Any], box: Callable[..., BoxT], *metadata: Any
) -> Callable[..., BoxT]:
    """Wraps an initializer, or a factory of initializers, to return `box(value, *metadata)`."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> BoxT:
        value = fn(*args, **kwargs)
        if callable(value):
            value = fn()(*args, **kwargs)
        return box(value, *metadata)

    return wrapper


def _map_layouts(
    layout_of_box: Callable[[Any], T], default_layout: T, tree: PyTree
) -> PyTree:
    """Returns the layout of each value: that of its outermost box with one, else the default."""

    def layout(leaf: PyTree) -> PyTree:
        if isinstance(leaf, AxisMetadata):
            if hasattr(leaf, "get_partition_spec"):
                return layout_of_box(leaf)
            return _map_layouts(layout_of_box, default_layout, _content(leaf))
        is_array = isinstance(
            leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic
        )
        return default_layout if is_array else None

    return jax.tree.map(layout, tree, is_leaf=is_axis_metadata)


def get_partition_spec(tree: PyTree) -> PyTree:
    """Returns the layout of each value of a tree, in place of its outermost box.

    An array has the spec of a `Partitioned` among its boxes, or an empty one; other leaves None.

    >>> get_partition_spec({"w": Partitioned(jax.numpy.ones(2), ("data",)), "b": 3})
    {'b': None, 'w': P('data',)}
    """
    unsplit = jax.sharding.PartitionSpec()
    return _map_layouts(lambda box: box.get_partition_spec(), unsplit, tree)


def get_sharding(tree: PyTree, mesh: jax.sharding.Mesh) -> PyTree:
    """Returns the layouts of `get_partition_spec` as `NamedSharding`s over a mesh.

    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> get_sharding(Partitioned(jax.numpy.ones(2), ("data",)), mesh).spec
    P('data',)
    """
    unsplit = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return _map_layouts(lambda box: box.get_sharding(mesh), unsplit, tree)
