"""Layouts of variables over a mesh, also when an axis is added or removed.

A variable's metadata `out_sharding` has one entry per axis of its value. It is converted to layouts
for `jax.jit`, `jax.device_put` and checkpoints. Transformations that add or remove an axis update
it by `add_axis` and `remove_axis`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from weft import errors
from weft.core.meta import PARTITION_NAME as PARTITION_NAME
from weft.core.meta import Partitioned
from weft.core.spmd import (
    AnyMesh,
    Entry,
    Layout,
    axes_of,
    get_global_mesh,
    without_format,
)
from weft.core.spmd import logical_axis_rules as logical_axis_rules
from weft.nnx import eager_sharding
from weft.nnx.eager_sharding import mesh_of, pspec_of
from weft.nnx.eager_sharding import use_eager_sharding as use_eager_sharding
from weft.nnx.eager_sharding import using_eager_sharding as using_eager_sharding
from weft.nnx.graph import GraphDef, flatten_graph
from weft.nnx.pytree import is_array
from weft.nnx.split_merge import split
from weft.nnx.state import State
from weft.nnx.variables import Variable, is_variable, map_value, with_metadata
from weft.typing import PyTree

A = TypeVar("A")
Metadata = Mapping[Any, Any]
_REMOVED_AXES = {
    "out_sharding": "axes_that_left",
    "optimizer_sharding": "optimizer_axes_that_left",
}
"""Metadata entries by layout, in which `remove_axis` stores what `add_axis` restores."""


def with_partitioning(
    initializer: Callable[..., Any],
    sharding: tuple[Any, ...],
    mesh: Mesh | None = None,
    **metadata: Any,
) -> Callable[..., Any]:
    """Returns an initializer whose values become variables with a layout.

    Args:
        sharding: for each axis a mesh axis or logical name, a tuple of them, or None.
        mesh: the mesh, if not that of `jax.set_mesh`.

    >>> init = with_partitioning(jax.nn.initializers.ones, (None, "model"))
    >>> with use_eager_sharding(False):
    ...     nnx.Param(init(jax.random.key(0), (4, 8))).out_sharding
    (None, 'model')
    """
    return with_metadata(
        initializer, out_sharding=sharding, mesh=mesh, **metadata
    )


def _map_shardings(
    make: Callable[[PartitionSpec, jax.tree_util.KeyPath], PyTree], tree: PyTree
) -> PyTree:
    """Returns a tree with `make(layout, path)` in place of each array; None for other values."""

    def map_leaf(path: jax.tree_util.KeyPath, leaf: PyTree) -> PyTree:
        def without_layout(value: PyTree) -> PyTree:
            if is_array(value) or isinstance(value, jax.Ref):
                return make(PartitionSpec(), path)
            return None

        if not is_variable(leaf):
            return without_layout(leaf)
        spec = _pspec_of_leaf(path, leaf)
        if spec is None:
            return leaf.copy(jax.tree.map(without_layout, leaf._value))
        return leaf.copy(make(spec, path))

    return jax.tree_util.tree_map_with_path(map_leaf, tree, is_leaf=is_variable)


def _pspec_of_leaf(
    path: jax.tree_util.KeyPath, leaf: PyTree
) -> PartitionSpec | None:
    """Returns the layout of a variable in a tree; None for other leaves."""
    if not is_variable(leaf):
        return None
    try:
        return pspec_of(leaf._metadata)
    except errors.LogicalAxisError as error:
        raise errors.LogicalAxisError(
            f"the layout of {_path_text(path)!r}: {error}"
        ) from None


def _path_text(path: jax.tree_util.KeyPath) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _sharding(
    mesh: AnyMesh, spec: PartitionSpec, path: jax.tree_util.KeyPath
) -> NamedSharding:
    names: set[str] = set()
    for entry in spec:
        names.update(axes_of(entry))
    if not names.issubset(mesh.axis_names):
        raise errors.MeshError(
            f"{_path_text(path)!r} has the layout {spec}, and the mesh has the axes "
            f"{', '.join(map(repr, mesh.axis_names))}; use one of those, or None, or enter "
            "logical_axis_rules that map logical names to mesh axes."
        )
    return NamedSharding(mesh, spec)


def get_partition_spec(tree: PyTree) -> PyTree:
    """Returns a tree of variables with a `PartitionSpec` in place of each value.

    It is `out_sharding` after `sharding_rules` and `logical_axis_rules`; empty for an array without
    layout; None for values that are not arrays.

    Raises LogicalAxisError if rules are malformed, or a variable's contradict those of the context.

    >>> w = nnx.Param(jnp.ones(4), out_sharding=("embed",), eager_sharding=False)
    >>> with logical_axis_rules([("embed", "data")]):
    ...     get_partition_spec(nnx.State({"w": w})).w.get_value()
    P('data',)
    """
    return _map_shardings(lambda spec, _: spec, tree)


def get_var_pspec(v: Variable[Any]) -> PartitionSpec | None:
    """Returns the layout of a variable; None if its value is not an array.

    >>> get_var_pspec(nnx.Param(jnp.ones(4)))
    P()
    """
    spec = get_partition_spec(v).get_raw_value()
    return spec if isinstance(spec, PartitionSpec) else None


def get_named_sharding(tree: PyTree, mesh: AnyMesh) -> PyTree:
    """Returns the layouts of a tree of variables as `NamedSharding`s; see `get_partition_spec`.

    Raises:
        VariableArgumentError: if `mesh` is not a mesh.
        MeshError: if it lacks an axis.

    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> get_named_sharding(nnx.Param(jnp.ones(4)), mesh).get_value().spec
    P()
    """
    if not isinstance(mesh, AnyMesh):
        raise errors.VariableArgumentError(
            f"get_named_sharding was given {mesh!r} for the mesh; give a jax.sharding.Mesh."
        )
    return _map_shardings(functools.partial(_sharding, mesh), tree)


def abstract_with_sharding(tree: A, graph: bool | None = None) -> A:
    """Returns a copy of a tree with layouts added to abstract values.

    Affected are variables with `out_sharding` whose value is a `jax.ShapeDtypeStruct` without one.

    Raises:
        NoMeshError: if neither a variable's metadata nor `jax.set_mesh` provides a mesh.
        MeshError: if a layout does not fit the mesh or a shape.

    Warns with ShardingWarning if a mesh axis does not divide the sharded axis.

    >>> value = jax.ShapeDtypeStruct((4,), "float32")
    >>> w = nnx.Param(value, out_sharding=("data",), eager_sharding=False)
    >>> with jax.set_mesh(jax.make_mesh((1,), ("data",))):
    ...     abstract_with_sharding(w).get_value().sharding.spec
    P('data',)
    """

    def with_sharding(path: jax.tree_util.KeyPath, leaf: PyTree) -> PyTree:
        spec = _pspec_of_leaf(path, leaf)
        if spec is None:
            return leaf
        mesh = mesh_of(leaf._metadata)
        if mesh is None:
            raise errors.NoMeshError(
                f"{_path_text(path)!r} has the layout {spec}, and there is no mesh; enter "
                "jax.set_mesh(mesh), or give the variable mesh=mesh."
            )
        return _with_sharding(leaf, mesh, spec, path, replace=False)

    return jax.tree_util.tree_map_with_path(
        with_sharding, tree, is_leaf=is_variable
    )


def _with_sharding(
    x: PyTree,
    mesh: AnyMesh,
    spec: PartitionSpec,
    path: jax.tree_util.KeyPath,
    replace: bool,
) -> PyTree:
    """Gives a layout to an abstract value or variable that has none, or has another to replace."""

    def with_sharding(value: PyTree) -> PyTree:
        if not isinstance(value, jax.ShapeDtypeStruct):
            return value
        if value.sharding is not None and not replace:
            return value
        try:
            return eager_sharding.abstract_value(value, spec, mesh)
        except errors.MeshError as error:
            raise errors.MeshError(
                f"the layout of {_path_text(path)!r}: {error}"
            ) from None

    return map_value(with_sharding, x)


def shard_shapes(tree: PyTree) -> None:
    """Adds layouts to shapes in variables, in place, where a mesh is known."""
    is_mesh_set = get_global_mesh() is not None
    for x in flatten_graph(tree).objects:
        if not isinstance(x, Variable):
            continue
        metadata = x._metadata
        may_have_mesh = is_mesh_set or metadata
        if may_have_mesh and eager_sharding.is_eagerly_sharded(metadata):
            value = eager_sharding.with_abstract_shardings(x._value, metadata)
            x.set_raw_value(value, _unsafe_bypass_check=True)


def get_abstract_model(
    init_fn: Callable[[], A], mesh: Mesh, *, graph: bool | None = None
) -> tuple[GraphDef[A], State]:
    """Traces `init_fn`, and returns the description and abstract state of its model.

    The state of `jax.ShapeDtypeStruct`s with shardings is a target for restoring checkpoints.
    Raises MeshError as `abstract_with_sharding`.

    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> make = lambda: nnx.Dict(w=nnx.Param(jnp.ones(4), out_sharding=("data",)))
    >>> graphdef, state = get_abstract_model(make, mesh)
    >>> state.w.get_value().sharding.spec
    P('data',)
    """
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        graphdef, state = jax.eval_shape(lambda: split(init_fn()))

    def with_sharding(path: jax.tree_util.KeyPath, leaf: PyTree) -> PyTree:
        spec = _pspec_of_leaf(path, leaf) or PartitionSpec()
        return _with_sharding(leaf, mesh, spec, path, replace=True)

    sharded_state = jax.tree_util.tree_map_with_path(
        with_sharding, state, is_leaf=is_variable
    )
    return graphdef, sharded_state


def add_axis(tree: A, index: int, transform_metadata: Metadata) -> A:
    """Updates metadata of variables whose values have gained an axis; returns the tree.

    `out_sharding`, and each other tuple in the metadata for which `transform_metadata` has a value,
    gains an entry for the axis. Then the hook `on_add_axis` is called.

    Args:
        tree: pytree of variables; some may have no layout.
        index: position of the axis in the new value; -1 is its last axis.
        transform_metadata: `{PARTITION_NAME: name}` names the axis. Without a name, it gets the
            entry that the last nameless `remove_axis` stored, or else is not sharded.

    Raises:
        AxisMetadataError: if the metadata cannot have an axis there.
        TraceContextError: if a variable belongs to another trace.

    >>> w = nnx.Param(jnp.ones((4, 8)), out_sharding=(None, "model"), eager_sharding=False)
    >>> add_axis(w, 0, {PARTITION_NAME: "layers"}).out_sharding
    ('layers', None, 'model')
    """
    return _update_axes("add_axis", tree, index, transform_metadata)


def remove_axis(tree: A, index: int, transform_metadata: Metadata) -> A:
    """Updates metadata of variables whose values have lost an axis; the inverse of `add_axis`.

    Args:
        index: position of the axis in the old value; -1 is its last axis.
        transform_metadata: `{PARTITION_NAME: name}` names the axis. Without a name, its entry is
            stored for `add_axis`.

    Raises:
        PartitionNameError: if the axis has another name.
        AxisMetadataError: if the metadata has no such axis.
        TraceContextError: if a variable belongs to another trace.
    """
    return _update_axes("remove_axis", tree, index, transform_metadata)


def name_next_axis(variable: Variable[Any], name: str | None) -> None:
    """Sets the name of the axis that `add_axis` without a name adds next."""
    metadata = variable._metadata
    changes: dict[str, Any] = {}
    for layout_name, removed_name in _REMOVED_AXES.items():
        if metadata.get(layout_name) is not None:
            changes[removed_name] = (*metadata.get(removed_name, ()), name)
    _change_metadata(variable, changes)


def has_axis_metadata(variable: Variable[Any]) -> bool:
    """Returns whether a variable has metadata or a method that a new axis may affect."""
    cls = type(variable)
    is_plain = (
        cls.add_axis is Variable.add_axis
        and cls.remove_axis is Variable.remove_axis
    )
    return bool(variable._metadata) or not is_plain


def _update_axes(
    method: str, tree: A, index: int, transform_metadata: Metadata
) -> A:
    """Calls `_update_axis` with each variable of a tree; errors say its path."""
    if is_variable(tree):
        _update_axis(method, tree, index, transform_metadata)
        return tree

    def update_leaf(path: jax.tree_util.KeyPath, leaf: PyTree) -> PyTree:
        if not is_variable(leaf):
            return leaf
        try:
            _update_axis(method, leaf, index, transform_metadata)
        except errors.AxisMetadataError as error:
            paths = [_path_text(path), error.path]
            error.path = "/".join(filter(None, paths))
            raise
        return leaf

    return jax.tree_util.tree_map_with_path(
        update_leaf, tree, is_leaf=is_variable
    )


def _update_axis(
    method: str,
    variable: Variable[Any],
    index: int,
    transform_metadata: Metadata,
) -> None:
    """Updates metadata of a variable, and calls its hook; `method` is that with the hook's name."""
    metadata = variable._metadata
    changes: dict[str, Any] = {}
    for name, axis in _axis_entries(variable, transform_metadata):
        removed_name = _REMOVED_AXES.get(name)
        is_nameless = axis is None and PARTITION_NAME not in transform_metadata
        if removed_name is not None and is_nameless:
            # A stack: the axis that was removed last is the one that comes back.
            removed_axes = metadata.get(removed_name, ())
            if method == "remove_axis":
                names = _axis_names(metadata[name])
                if -len(names) <= index < len(names):
                    axis = names[index]
                changes[removed_name] = (*removed_axes, axis)
            elif removed_axes:
                axis = removed_axes[-1]
                changes[removed_name] = removed_axes[:-1]
        changes[name] = _changed_layout(variable, name, method, index, axis)
    _change_metadata(variable, changes)
    update_axis = getattr(variable, method)
    update_axis(index, transform_metadata.get(PARTITION_NAME))


class _AxisEntry(NamedTuple):
    """Metadata with an entry per axis, by name, and its entry for the axis in question."""

    name: str
    axis: Entry


def _axis_entries(
    variable: Variable[Any], transform_metadata: Metadata
) -> list[_AxisEntry]:
    metadata = variable._metadata
    entries: list[_AxisEntry] = []
    for name, axis in transform_metadata.items():
        if isinstance(metadata.get(name), tuple):
            entries.append(_AxisEntry(name, axis))
    partition_name = transform_metadata.get(PARTITION_NAME)
    for layout_name in _REMOVED_AXES:
        if (
            metadata.get(layout_name) is not None
            and layout_name not in transform_metadata
        ):
            entries.append(_AxisEntry(layout_name, partition_name))
    return entries


def _axis_names(layout: Layout) -> tuple[Entry, ...]:
    sharding = without_format(layout)
    if isinstance(sharding, NamedSharding):
        return tuple(sharding.spec)
    return tuple(sharding)


def _changed_layout(
    variable: Variable[Any], name: str, method: str, index: int, axis: Entry
) -> NamedSharding | tuple[Entry, ...]:
    """Returns a layout in the metadata with the axis added or removed."""
    # The memory order of a `Format` refers to other axes.
    layout = without_format(variable._metadata[name])
    box = Partitioned(variable._value, _axis_names(layout))
    changed_box = getattr(box, method)(index, {PARTITION_NAME: axis})
    if isinstance(layout, NamedSharding):
        return NamedSharding(layout.mesh, PartitionSpec(*changed_box.names))
    return changed_box.names


def _change_metadata(
    variable: Variable[Any], changes: Mapping[str, Any]
) -> None:
    if not changes:
        return
    metadata = {**variable._metadata, **changes}
    for removed_name in _REMOVED_AXES.values():
        if metadata.get(removed_name) == ():
            del metadata[removed_name]
    variable.set_metadata(metadata)
