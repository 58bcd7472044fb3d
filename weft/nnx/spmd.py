"""Layouts of variables over a mesh, also when an axis is added or removed.

A variable's metadata `out_sharding` has one entry per axis of its value. It is converted to layouts
for `jax.jit`, `jax.device_put` and checkpoints. Transformations that add or remove an axis update
it by `add_axis` and `remove_axis`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from weft import errors
from weft.core.meta import PARTITION_NAME as PARTITION_NAME
from weft.core.meta import Partitioned
from weft.core.spmd import AnyMesh, axes_of, get_global_mesh, without_format
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

A = TypeVar("A")


_REMOVED_AXES = {"out_sharding": "axes_that_left", "optimizer_sharding": "optimizer_axes_that_left"}
"""Metadata entries by layout, in which `remove_axis` stores what `add_axis` restores."""


def with_partitioning(
    initializer: Callable[..., Any],
    sharding: tuple[Any, ...],
    mesh: Mesh | None = None,
    **metadata: object,
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
    return with_metadata(initializer, out_sharding=sharding, mesh=mesh, **metadata)


def _map_shardings(make: Callable[[PartitionSpec, Any], Any], tree: Any) -> Any:
    def at(path: jax.tree_util.KeyPath, x: Any) -> Any:
        def plain(value: object) -> Any:
            is_kept = is_array(value) or isinstance(value, jax.Ref)
            return make(PartitionSpec(), path) if is_kept else None

        if not is_variable(x):
            return plain(x)
        spec = _pspec_at(path, x)
        return x.copy(jax.tree.map(plain, x._value) if spec is None else make(spec, path))

    return jax.tree_util.tree_map_with_path(at, tree, is_leaf=is_variable)


def _pspec_at(path: jax.tree_util.KeyPath, variable: Variable[Any]) -> PartitionSpec | None:
    try:
        return pspec_of(variable._metadata)
    except errors.LogicalAxisError as error:
        raise errors.LogicalAxisError(f"the layout of {_path_text(path)!r}: {error}") from None


def _path_text(path: jax.tree_util.KeyPath) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _sharding(mesh: AnyMesh, spec: PartitionSpec, path: jax.tree_util.KeyPath) -> NamedSharding:
    unknown = {name for entry in spec for name in axes_of(entry)}.difference(mesh.axis_names)
    if unknown:
        raise errors.MeshError(
            f"{_path_text(path)!r} has the layout {spec}, and the mesh has the axes "
            f"{', '.join(map(repr, mesh.axis_names))}; use one of those, or None, or enter "
            "logical_axis_rules that map logical names to mesh axes."
        )
    return NamedSharding(mesh, spec)


def get_partition_spec(tree: object) -> Any:
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


def get_named_sharding(tree: object, mesh: AnyMesh) -> Any:
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

    def at(path: jax.tree_util.KeyPath, x: Any) -> Any:
        spec = _pspec_at(path, x) if is_variable(x) else None
        if spec is None:
            return x
        mesh = mesh_of(x._metadata)
        if mesh is None:
            raise errors.NoMeshError(
                f"{_path_text(path)!r} has the layout {spec}, and there is no mesh; enter "
                "jax.set_mesh(mesh), or give the variable mesh=mesh."
            )
        return _with_sharding(x, mesh, spec, path, keep=True)

    return jax.tree_util.tree_map_with_path(at, tree, is_leaf=is_variable)


def _with_sharding(
    x: Any, mesh: AnyMesh, spec: PartitionSpec, path: jax.tree_util.KeyPath, keep: bool = False
) -> Any:
    """Adds a layout to an abstract value or variable; with `keep`, only if it has none."""

    def laid(value: object) -> Any:
        if not isinstance(value, jax.ShapeDtypeStruct) or (keep and value.sharding is not None):
            return value
        try:
            return eager_sharding.abstract_value(value, spec, mesh)
        except errors.MeshError as error:
            raise errors.MeshError(f"the layout of {_path_text(path)!r}: {error}") from None

    return map_value(laid, x)


def shard_shapes(tree: object) -> None:
    """Adds layouts to shapes in variables, in place, where a mesh is known."""
    is_mesh_set = get_global_mesh() is not None
    for x in flatten_graph(tree).objects:
        if (
            isinstance(x, Variable)
            and (is_mesh_set or x._metadata)  # else there is no mesh
            and eager_sharding.is_eagerly_sharded(x._metadata)
        ):
            value = eager_sharding.with_abstract_shardings(x._value, x._metadata)
            x.set_raw_value(value, _unsafe_bypass_check=True)


def get_abstract_model(
    init_fn: Callable[[], Any], mesh: Mesh, *, graph: bool | None = None
) -> tuple[GraphDef, State]:
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

    def at(path: jax.tree_util.KeyPath, x: Any) -> Any:
        spec = _pspec_at(path, x) if is_variable(x) else None
        return _with_sharding(x, mesh, spec or PartitionSpec(), path)

    return graphdef, jax.tree_util.tree_map_with_path(at, state, is_leaf=is_variable)


def add_axis(tree: A, index: int, transform_metadata: Mapping[Any, Any]) -> A:
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


def remove_axis(tree: A, index: int, transform_metadata: Mapping[Any, Any]) -> A:
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
    layouts = [layout for layout in _REMOVED_AXES if metadata.get(layout) is not None]
    _change(
        variable, {_REMOVED_AXES[x]: (*metadata.get(_REMOVED_AXES[x], ()), name) for x in layouts}
    )


def has_axis_metadata(variable: Variable[Any]) -> bool:
    """Returns whether a variable has metadata or a method that a new axis may affect."""
    cls = type(variable)
    is_plain = cls.add_axis is Variable.add_axis and cls.remove_axis is Variable.remove_axis
    return bool(variable._metadata) or not is_plain


def _update_axes(change: str, tree: Any, index: int, params: Mapping[Any, Any]) -> Any:
    if is_variable(tree):
        return _update_axis(change, tree, index, params)

    def at(path: jax.tree_util.KeyPath, x: Any) -> Any:
        try:
            return _update_axis(change, x, index, params) if is_variable(x) else x
        except errors.AxisMetadataError as error:
            error.path = "/".join(part for part in (_path_text(path), error.path) if part)
            raise

    return jax.tree_util.tree_map_with_path(at, tree, is_leaf=is_variable)


def _update_axis(
    change: str, variable: Variable[Any], index: int, params: Mapping[Any, Any]
) -> Variable[Any]:
    changed: dict[str, Any] = {}
    for entry, axis in _entries(variable, params):
        if entry in _REMOVED_AXES and axis is None and PARTITION_NAME not in params:
            left = variable._metadata.get(_REMOVED_AXES[entry], ())
            if change == "remove_axis":
                names = tuple(_spec(variable._metadata[entry]))
                axis = names[index] if -len(names) <= index < len(names) else None
                changed[_REMOVED_AXES[entry]] = (*left, axis)
            elif left:
                axis, changed[_REMOVED_AXES[entry]] = left[-1], left[:-1]
        changed[entry] = _renamed(variable, entry, change, index, axis)
    _change(variable, changed)
    getattr(variable, change)(index, params.get(PARTITION_NAME))
    return variable


def _entries(variable: Variable[Any], params: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    """Returns the metadata with an entry per axis, and each one's entry of the axis in question."""
    metadata = variable._metadata
    found = [(k, v) for k, v in params.items() if isinstance(metadata.get(k), tuple)]
    for layout in _REMOVED_AXES:
        if metadata.get(layout) is not None and layout not in params:
            found.append((layout, params.get(PARTITION_NAME)))
    return found


def _spec(layout: object) -> Any:
    layout = without_format(layout)
    return layout.spec if isinstance(layout, NamedSharding) else layout


def _renamed(variable: Variable[Any], entry: str, change: str, index: int, axis: object) -> Any:
    layout = without_format(variable._metadata[entry])  # the memory order refers to other axes
    box = Partitioned(variable._value, tuple(_spec(layout)))
    names = getattr(box, change)(index, {PARTITION_NAME: axis}).names
    if isinstance(layout, NamedSharding):
        return NamedSharding(layout.mesh, PartitionSpec(*names))
    return names


def _change(variable: Variable[Any], changed: dict[str, Any]) -> None:
    if changed:
        metadata = {**variable._metadata, **changed}
        done = [left for left in _REMOVED_AXES.values() if metadata.get(left) == ()]
        variable.set_metadata({k: v for k, v in metadata.items() if k not in done})
