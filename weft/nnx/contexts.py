"""Splitting and merging several objects that share parts, across a JAX transformation and back.

A `split_context` replaces objects that it has already split by references, which a `merge_context`
resolves. An `update_context` connects four of them around a transformation: split outside, merge
inside, split inside, and merge outside, which then updates the original objects instead of creating
new ones; see its example.
`to_tree` replaces each object of a tree by a pytree node with its states, for JAX functions;
`from_tree` is the inverse. Parts that several objects share are in the first of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Self

import jax

from weft import errors
from weft.core.tracing import ThreadStack
from weft.nnx.filters import Filter, Path
from weft.nnx.graph import GraphDef, flatten_graph
from weft.nnx.pytree import is_object, key_of
from weft.nnx.split_merge import RefMap, flatten, unflatten
from weft.nnx.state import FlatState, merge_state, path_text
from weft.nnx.transforms.state_roles import StateAxes
from weft.nnx.variables import is_variable


@dataclasses.dataclass
class SplitContext:
    """Context that splits objects; objects split before in the context become references.

    Attributes:
        is_inner: whether it is inside the transformation; None without an update context.
    """

    ctxtag: Hashable | None
    ref_index: RefMap
    is_inner: bool | None

    def split(self, node: object, *filters: Filter) -> tuple[Any, ...]:
        """Splits like `nnx.split`; states leave out objects seen before."""
        graphdef, *flat_states = self.flatten(node, *filters)
        return graphdef, *(flat.to_nested_state() for flat in flat_states)

    def flatten(self, node: object, *filters: Filter, with_paths: bool = True) -> tuple[Any, ...]:
        """Flattens like `nnx.flatten`, with one flat state per filter.

        Raises GraphStructureError if there are filters, and `with_paths` is False.
        """
        if not with_paths and filters:
            raise errors.GraphStructureError(
                "flatten was given filters and with_paths=False, but filters need the paths; omit "
                "one of them."
            )
        update = current_update_context(self.ctxtag) if self.ctxtag is not None else None
        outer = update.inner_ref_outer_index if update is not None else None
        graphdef, flat = flatten(
            node, with_paths=with_paths, ref_index=self.ref_index, ref_outer_index=outer
        )
        if update is not None and update.static_cache is not None:
            graphdef = update.static_cache.setdefault(graphdef, graphdef)
        if not filters:
            return graphdef, flat
        groups = flat.split(*filters)
        return graphdef, *(groups if len(filters) > 1 else (groups,))


@dataclasses.dataclass
class MergeContext:
    """Context that merges objects; references resolve to objects merged before in the context.

    Attributes:
        is_inner: whether it is inside the transformation; None without an update context.
    """

    ctxtag: Hashable | None
    index_ref: dict[int, Any]
    is_inner: bool | None

    def merge(self, graphdef: GraphDef, state: object, /, *states: object) -> Any:
        """Merges like `nnx.merge` with copied variables; outside, updates the original objects."""
        return self._made(graphdef, merge_state(state, *states) if states else state, copy=True)

    def unflatten(self, graphdef: GraphDef, flat_state: object, /, *flat_states: object) -> Any:
        """Unflattens like `nnx.unflatten`; accepts several flat states."""
        if flat_states:
            flat_state = FlatState.merge(flat_state, *flat_states)
        return self._made(graphdef, flat_state, copy=False)

    def _made(self, graphdef: GraphDef, state: object, copy: bool) -> Any:
        outer = None
        if self.is_inner is False:
            outer = current_update_context(self.ctxtag).outer_index_outer_ref
        return unflatten(
            graphdef,
            state,
            index_ref=self.index_ref,
            outer_index_outer_ref=outer,
            copy_variables=copy,
        )


@dataclasses.dataclass
class UpdateContext:
    """Context that maps objects to their copies inside a transformation, and back.

    Attributes:
        outer_ref_outer_index: indices of the original objects.
        outer_index_inner_ref: their copies inside, by index.
        outer_index_outer_ref: the original objects, by index.
        inner_ref_outer_index: indices of the copies inside.
        static_cache: interned descriptions; JAX compares identical objects faster.
    """

    tag: Hashable
    outer_ref_outer_index: RefMap | None = None
    outer_index_inner_ref: dict[int, Any] | None = None
    outer_index_outer_ref: dict[int, Any] | None = None
    inner_ref_outer_index: RefMap | None = None
    static_cache: dict[Any, Any] | None = dataclasses.field(default_factory=dict)

    def flatten_end(self, ref_index: RefMap) -> None:
        """Records the objects of a split context; inside, drops the inner objects."""
        if self.inner_ref_outer_index is None:
            self.outer_ref_outer_index = ref_index
            self.outer_index_outer_ref = {i: x for x, i in ref_index.items()}
        else:
            self.outer_index_inner_ref = self.inner_ref_outer_index = None

    def unflatten_end(self, index_ref: dict[int, Any], inner_merge: bool) -> None:
        """Records the objects of a merge context."""
        if inner_merge:
            self.outer_index_inner_ref = index_ref
            self.inner_ref_outer_index = RefMap((x, i) for i, x in index_ref.items())


_OPEN = ThreadStack[UpdateContext]()


@contextlib.contextmanager
def update_context(tag: Hashable) -> Iterator[UpdateContext]:
    """Connects split and merge contexts, so that a transformation's results update its inputs.

    A nested context hides an outer one with the same tag.

    >>> model = nnx.Dict(w=nnx.Param(jnp.array(1.0)))
    >>> with update_context("f"):
    ...     with split_context("f") as ctx:
    ...         graphdef, state = ctx.split(model)
    ...     @jax.jit
    ...     def f(state):
    ...         with merge_context("f", inner=True) as ctx:
    ...             inner = ctx.merge(graphdef, state)
    ...         inner.new = nnx.Param(inner.w * 2)
    ...         with split_context("f") as ctx:
    ...             return ctx.split(inner)
    ...     with merge_context("f", inner=False) as ctx:
    ...         same = ctx.merge(*f(state))
    >>> same is model, float(model.new)
    (True, 2.0)
    """
    with _OPEN.push(UpdateContext(tag)) as context:
        yield context


def current_update_context(tag: Hashable) -> UpdateContext:
    """Returns the innermost open update context with a tag.

    Raises GraphStructureError if there is none.
    """
    for context in reversed(_OPEN.items):
        if context.tag == tag:
            return context
    tags = ", ".join(repr(context.tag) for context in _OPEN.items) or "none"
    raise errors.GraphStructureError(
        f"there is no update context {tag!r} here; open in this thread: {tags}. Enter "
        f"nnx.update_context({tag!r}) around it."
    )


@contextlib.contextmanager
def split_context(ctxtag: Hashable | None = None) -> Iterator[SplitContext]:
    """Splits several objects, each shared part once.

    Raises GraphStructureError if there is no update context with the tag `ctxtag`.

    >>> w = nnx.Param(1.0)
    >>> with split_context() as ctx:
    ...     first, second = ctx.split({"a": w}), ctx.split({"b": w})
    >>> len(first[1]), len(second[1])
    (1, 0)
    """
    update = current_update_context(ctxtag) if ctxtag is not None else None
    is_inner = update.inner_ref_outer_index is not None if update is not None else None
    context = SplitContext(ctxtag, RefMap(), is_inner)
    yield context
    if update is not None:
        update.flatten_end(context.ref_index)


@contextlib.contextmanager
def merge_context(
    ctxtag: Hashable | None = None, inner: bool | None = None
) -> Iterator[MergeContext]:
    """Merges what a split context has split.

    Args:
        ctxtag: tag of an update context to connect to.
        inner: whether it is inside the transformation; required with a tag.

    Raises GraphStructureError if there is no update context with the tag, or `inner` is missing.
    """
    update = current_update_context(ctxtag) if ctxtag is not None else None
    if update is not None and inner is None:
        raise errors.GraphStructureError(
            f"merge_context({ctxtag!r}) needs inner; give inner=True inside the transformed "
            "function, and inner=False after it."
        )
    context = MergeContext(ctxtag, {}, inner if update is not None else None)
    yield context
    if update is not None:
        update.unflatten_end(context.index_ref, bool(inner))


_MISSING: Any = object()


@dataclasses.dataclass(frozen=True)
class NodeStates:
    """States of an object, as one node of a tree.

    >>> states = NodeStates.from_states(nnx.State({"w": jnp.ones((3, 2))}))
    >>> axes = NodeStates.from_prefixes([1])
    >>> jax.vmap(lambda s: s.state.w.sum(), in_axes=(axes,))(states)
    Array([3., 3.], dtype=float32)
    """

    _graphdef: GraphDef | None
    states: tuple[Any, ...]
    metadata: Any = None

    @property
    def graphdef(self) -> GraphDef:
        """Description of the object; raises GraphStructureError if there is none."""
        if self._graphdef is None:
            raise errors.GraphStructureError(
                "these NodeStates have no description; make them by NodeStates.from_split."
            )
        return self._graphdef

    @property
    def state(self) -> Any:
        """The only state; raises GraphStructureError if there are several."""
        if len(self.states) != 1:
            raise errors.GraphStructureError(
                f"these NodeStates have {len(self.states)} states; look at .states."
            )
        return self.states[0]

    @classmethod
    def from_split(
        cls, graphdef: GraphDef | None, state: object, /, *states: object, metadata: object = None
    ) -> Self:
        """Builds node states from the results of `nnx.split`."""
        return cls(graphdef, (state, *states), metadata)

    @classmethod
    def from_states(cls, state: object, /, *states: object) -> Self:
        """Builds node states without a description."""
        return cls(None, (state, *states))

    @classmethod
    def from_prefixes(cls, prefixes: Any, /, *, metadata: Any = None) -> Self:
        """Builds node states from prefixes of each state, such as axes."""
        return cls(None, tuple(prefixes), metadata)

    def replace(self, **updates: object) -> Self:
        """Returns a copy with other attributes."""
        return dataclasses.replace(self, **updates)


jax.tree_util.register_dataclass(NodeStates, ["states"], ["_graphdef", "metadata"])


def _is_node_states(x: object) -> bool:
    return isinstance(x, NodeStates)


def _default_split(
    ctx: SplitContext, path: jax.tree_util.KeyPath, prefix: object, x: object
) -> NodeStates:
    return NodeStates.from_split(*ctx.split(x))


def _default_merge(
    ctx: MergeContext, path: jax.tree_util.KeyPath, prefix: object, x: NodeStates
) -> Any:
    return ctx.merge(x.graphdef, *x.states)


def to_tree(
    tree: object,
    /,
    *,
    prefix: object = _MISSING,
    split_fn: Callable[[SplitContext, Any, Any, Any], Any] = _default_split,
    map_non_graph_nodes: bool = False,
    ctxtag: Hashable | None = None,
    check_aliasing: bool = True,
) -> Any:
    """Replaces the objects of a tree by their states.

    Args:
        split_fn: maps a split context, a path, a prefix leaf and an object to the replacement; by
            default `NodeStates` with one state.
        map_non_graph_nodes: whether to call it for leaves that are not objects as well.
        check_aliasing: whether to check that all occurrences of a variable have the same prefix.

    Raises:
        InconsistentAliasError: if they differ.
        ValueError: from JAX, if `prefix` is not a prefix of the tree.

    >>> layer = nnx.Dict(w=nnx.Param(1.0))
    >>> tree = to_tree((layer, {"again": layer, "x": 2}))
    >>> len(tree[0].state), len(tree[1]["again"].state), tree[1]["x"]
    (1, 0, 2)
    """
    items, structure = _with_prefixes(prefix, tree, is_object)
    if check_aliasing and prefix is not _MISSING:
        _check_aliases(items)
    with split_context(ctxtag) as ctx:
        return structure.unflatten(
            split_fn(ctx, *item) if map_non_graph_nodes or is_object(item[2]) else item[2]
            for item in items
        )


def from_tree(
    tree: object,
    /,
    *,
    prefix: object = _MISSING,
    merge_fn: Callable[[MergeContext, Any, Any, Any], Any] = _default_merge,
    is_node_leaf: Callable[[Any], bool] = _is_node_states,
    is_leaf: Callable[[Any], bool] = _is_node_states,
    map_non_graph_nodes: bool = False,
    is_inner: bool | None = None,
    ctxtag: Hashable | None = None,
) -> Any:
    """Replaces the states in a tree by objects; the inverse of `to_tree`.

    Args:
        merge_fn: maps a merge context, a path, a prefix leaf and `NodeStates` to an object.
        map_non_graph_nodes: whether to call `merge_fn` for other leaves as well.

    Raises GraphStructureError if values are missing, or `is_inner` is missing with a tag.
    """
    items, structure = _with_prefixes(prefix, tree, is_leaf)
    with merge_context(ctxtag, is_inner) as ctx:
        return structure.unflatten(
            merge_fn(ctx, *item) if map_non_graph_nodes or is_node_leaf(item[2]) else item[2]
            for item in items
        )


def _with_prefixes(
    prefix: object, tree: object, is_leaf: Callable[[Any], bool]
) -> tuple[list[tuple[Any, Any, Any]], Any]:
    """Returns the path, the entry of the prefix and the value of each leaf, and the structure."""
    items, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    values: list[Any] = [0] * len(items) if prefix is _MISSING else []

    def extend(value: object, part: object) -> None:
        values.extend([value] * len(jax.tree.leaves(part, is_leaf=is_leaf)))

    if prefix is not _MISSING:
        jax.tree.map(extend, prefix, tree, is_leaf=lambda x: x is None or is_leaf(x))
    return [(path, s, x) for (path, x), s in zip(items, values, strict=True)], structure


def _check_aliases(items: list[tuple[Any, Any, Any]]) -> None:
    seen: dict[int, tuple[str, Any]] = {}
    for root, value, x in items:
        if not is_object(x):
            continue
        flat = flatten_graph(x)
        for path, leaf in flat.items():
            of_leaf = getattr(value, "map_prefix", None)
            here = of_leaf(path, leaf) if of_leaf is not None else value
            where = path_text((*map(key_of, root), *path))
            there, before = seen.setdefault(id(leaf), (where, here))
            if before != here:
                raise errors.InconsistentAliasError(
                    f"one {type(leaf).__name__} is at {there!r}, with {before!r}, and at "
                    f"{where!r}, with {here!r}; give both the same, or nnx.clone(...) at one place."
                )


def prefix(node: Any, filter_map: Any, /, *, graph: bool | None = None) -> Any:
    """Returns a prefix of a tree with an entry for each variable and array, chosen by filters.

    It is usable as `in_axes`, `in_shardings` and `in_specs`. `filter_map` maps filters to entries,
    or is an `nnx.StateAxes` or a function of a path and a variable or value.

    Raises:
        StateFilterError: if no filter matches a value.
        ObjectArgumentError: if `filter_map` has another type.

    >>> model = nnx.Dict(w=nnx.Param(jnp.ones((3, 2))), n=nnx.BatchStat(jnp.ones(())))
    >>> axes = prefix(model, {nnx.Param: 0, ...: None})
    >>> jax.vmap(lambda m: m.w.sum() + m.n, in_axes=(axes,))(model)
    Array([3., 3., 3.], dtype=float32)
    """
    value_at = _as_function(filter_map)

    def at(path: jax.tree_util.KeyPath, x: Any) -> Any:
        return value_at(tuple(map(key_of, path)), x)

    return jax.tree_util.tree_map_with_path(at, node, is_leaf=is_variable)


def _as_function(filter_map: Any) -> Callable[[Path, Any], Any]:
    if isinstance(filter_map, Mapping):
        return StateAxes(filter_map).map_prefix
    if callable(getattr(filter_map, "map_prefix", None)):
        return filter_map.map_prefix
    if callable(filter_map):
        return filter_map
    raise errors.ObjectArgumentError(
        f"prefix was given {filter_map!r}; give a dict from filters to entries, such as "
        "{nnx.Param: 0, ...: None}, or a function of a path and a value."
    )
