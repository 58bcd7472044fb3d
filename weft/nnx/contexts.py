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
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import jax

from weft import errors
from weft.core.tracing import ThreadStack
from weft.lifting.kind import Structure
from weft.nnx.filters import Filter, Path
from weft.nnx.graph import GraphDef, flatten_graph
from weft.nnx.pytree import is_object, key_of
from weft.nnx.split_merge import RefMap, flatten, unflatten
from weft.nnx.state import (
    FlatState,
    merge_state,
    path_text,
    split_flat_state,
)
from weft.nnx.transforms.state_roles import StateAxes
from weft.nnx.variables import is_variable
from weft.typing import MISSING, PyTree

T = TypeVar("T")


@dataclasses.dataclass
class SplitContext:
    """Context that splits objects; objects split before in the context become references.

    Attributes:
        is_inner: whether it is inside the transformation; None without an update context.
    """

    ctxtag: Hashable | None
    ref_index: RefMap
    is_inner: bool | None

    def split(self, node: PyTree, *filters: Filter) -> tuple[Any, ...]:
        """Splits like `nnx.split`; states leave out objects seen before."""
        graphdef, *flat_states = self.flatten(node, *filters)
        states = [flat_state.to_nested_state() for flat_state in flat_states]
        return graphdef, *states

    def flatten(
        self, node: PyTree, *filters: Filter, with_paths: bool = True
    ) -> tuple[Any, ...]:
        """Flattens like `nnx.flatten`, with one flat state per filter.

        Raises GraphStructureError if there are filters, and `with_paths` is False.
        """
        if not with_paths and filters:
            raise errors.GraphStructureError(
                "flatten was given filters and with_paths=False, but filters need the paths; omit "
                "one of them."
            )
        outer_indices = None
        static_cache = None
        if self.ctxtag is not None:
            update = current_update_context(self.ctxtag)
            outer_indices = update.inner_ref_outer_index
            static_cache = update.static_cache
        graphdef, flat_state = flatten(
            node,
            with_paths=with_paths,
            ref_index=self.ref_index,
            ref_outer_index=outer_indices,
        )
        if static_cache is not None:
            graphdef = static_cache.setdefault(graphdef, graphdef)
        if not filters:
            return graphdef, flat_state
        return graphdef, *split_flat_state(flat_state, filters)


@dataclasses.dataclass
class MergeContext:
    """Context that merges objects; references resolve to objects merged before in the context.

    Attributes:
        is_inner: whether it is inside the transformation; None without an update context.
    """

    ctxtag: Hashable | None
    index_ref: dict[int, Any]
    is_inner: bool | None

    def merge(
        self, graphdef: GraphDef[T], state: PyTree, /, *states: PyTree
    ) -> T:
        """Merges like `nnx.merge` with copied variables; outside, updates the original objects."""
        if states:
            state = merge_state(state, *states)
        return self._unflatten(graphdef, state, copy_variables=True)

    def unflatten(
        self, graphdef: GraphDef[T], flat_state: PyTree, /, *flat_states: PyTree
    ) -> T:
        """Unflattens like `nnx.unflatten`; accepts several flat states."""
        if flat_states:
            flat_state = FlatState.merge(flat_state, *flat_states)
        return self._unflatten(graphdef, flat_state, copy_variables=False)

    def _unflatten(
        self, graphdef: GraphDef[T], state: PyTree, copy_variables: bool
    ) -> T:
        outer_objects = None
        if self.is_inner is False:
            update = current_update_context(self.ctxtag)
            outer_objects = update.outer_index_outer_ref
        return unflatten(
            graphdef,
            state,
            index_ref=self.index_ref,
            outer_index_outer_ref=outer_objects,
            copy_variables=copy_variables,
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
    static_cache: dict[Any, Any] | None = dataclasses.field(
        default_factory=dict
    )

    def flatten_end(self, ref_index: RefMap) -> None:
        """Records the objects of a split context; inside, drops the inner objects."""
        if self.inner_ref_outer_index is None:
            self.outer_ref_outer_index = ref_index
            self.outer_index_outer_ref = {i: x for x, i in ref_index.items()}
        else:
            self.outer_index_inner_ref = None
            self.inner_ref_outer_index = None

    def unflatten_end(
        self, index_ref: dict[int, Any], inner_merge: bool
    ) -> None:
        """Records the objects of a merge context."""
        if not inner_merge:
            return
        self.outer_index_inner_ref = index_ref
        self.inner_ref_outer_index = RefMap()
        for index, x in index_ref.items():
            self.inner_ref_outer_index[x] = index


# What an update context carries from one context to the next, for a function that is transformed:
#
#   split outside   original objects -> indices              flatten_end
#   merge inside    indices -> copies                        unflatten_end(inner_merge=True)
#   split inside    copies -> indices of the originals, or new ones
#   merge outside   indices -> original objects, which are updated; new ones are made
_OPEN_CONTEXTS = ThreadStack[UpdateContext]()


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
    with _OPEN_CONTEXTS.push(UpdateContext(tag)) as context:
        yield context


def current_update_context(tag: Hashable) -> UpdateContext:
    """Returns the innermost open update context with a tag.

    Raises GraphStructureError if there is none.
    """
    contexts = _OPEN_CONTEXTS.items
    for context in reversed(contexts):
        if context.tag == tag:
            return context
    tags = ", ".join(repr(context.tag) for context in contexts) or "none"
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
    if ctxtag is None:
        yield SplitContext(None, RefMap(), is_inner=None)
        return
    update = current_update_context(ctxtag)
    is_inner = update.inner_ref_outer_index is not None
    context = SplitContext(ctxtag, RefMap(), is_inner)
    yield context
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
    if ctxtag is None:
        yield MergeContext(None, {}, is_inner=None)
        return
    update = current_update_context(ctxtag)
    if inner is None:
        raise errors.GraphStructureError(
            f"merge_context({ctxtag!r}) needs inner; give inner=True inside the transformed "
            "function, and inner=False after it."
        )
    context = MergeContext(ctxtag, {}, inner)
    yield context
    update.unflatten_end(context.index_ref, inner)


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
    def state(self) -> PyTree:
        """The only state; raises GraphStructureError if there are several."""
        if len(self.states) != 1:
            raise errors.GraphStructureError(
                f"these NodeStates have {len(self.states)} states; look at .states."
            )
        return self.states[0]

    @classmethod
    def from_split(
        cls,
        graphdef: GraphDef | None,
        state: PyTree,
        /,
        *states: PyTree,
        metadata: Any = None,
    ) -> Self:
        """Builds node states from the results of `nnx.split`."""
        return cls(graphdef, (state, *states), metadata)

    @classmethod
    def from_states(cls, state: PyTree, /, *states: PyTree) -> Self:
        """Builds node states without a description."""
        return cls(None, (state, *states))

    @classmethod
    def from_prefixes(
        cls, prefixes: Sequence[PyTree], /, *, metadata: Any = None
    ) -> Self:
        """Builds node states from prefixes of each state, such as axes."""
        return cls(None, tuple(prefixes), metadata)

    def replace(self, **updates: object) -> Self:
        """Returns a copy with other attributes."""
        return dataclasses.replace(self, **updates)


jax.tree_util.register_dataclass(
    NodeStates, ["states"], ["_graphdef", "metadata"]
)


def _is_node_states(x: PyTree) -> bool:
    return isinstance(x, NodeStates)


def _default_split(
    ctx: SplitContext, path: jax.tree_util.KeyPath, prefix: PyTree, x: PyTree
) -> NodeStates:
    return NodeStates.from_split(*ctx.split(x))


def _default_merge(
    ctx: MergeContext,
    path: jax.tree_util.KeyPath,
    prefix: PyTree,
    x: NodeStates,
) -> PyTree:
    return ctx.merge(x.graphdef, *x.states)


def to_tree(
    tree: PyTree,
    /,
    *,
    prefix: PyTree = MISSING,
    split_fn: Callable[[SplitContext, Any, Any, Any], PyTree] = _default_split,
    map_non_graph_nodes: bool = False,
    ctxtag: Hashable | None = None,
    check_aliasing: bool = True,
) -> PyTree:
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
    items, structure = _flatten_with_prefix(prefix, tree, is_object)
    if check_aliasing and prefix is not MISSING:
        _check_aliases(items)
    leaves: list[PyTree] = []
    with split_context(ctxtag) as ctx:
        for path, prefix_leaf, leaf in items:
            if map_non_graph_nodes or is_object(leaf):
                leaf = split_fn(ctx, path, prefix_leaf, leaf)
            leaves.append(leaf)
    return structure.unflatten(leaves)


def from_tree(
    tree: PyTree,
    /,
    *,
    prefix: PyTree = MISSING,
    merge_fn: Callable[[MergeContext, Any, Any, Any], PyTree] = _default_merge,
    is_node_leaf: Callable[[Any], bool] = _is_node_states,
    is_leaf: Callable[[Any], bool] = _is_node_states,
    map_non_graph_nodes: bool = False,
    is_inner: bool | None = None,
    ctxtag: Hashable | None = None,
) -> PyTree:
    """Replaces the states in a tree by objects; the inverse of `to_tree`.

    Args:
        merge_fn: maps a merge context, a path, a prefix leaf and `NodeStates` to an object.
        map_non_graph_nodes: whether to call `merge_fn` for other leaves as well.

    Raises GraphStructureError if values are missing, or `is_inner` is missing with a tag.
    """
    items, structure = _flatten_with_prefix(prefix, tree, is_leaf)
    leaves: list[PyTree] = []
    with merge_context(ctxtag, is_inner) as ctx:
        for path, prefix_leaf, leaf in items:
            if map_non_graph_nodes or is_node_leaf(leaf):
                leaf = merge_fn(ctx, path, prefix_leaf, leaf)
            leaves.append(leaf)
    return structure.unflatten(leaves)


class _PrefixedLeaf(NamedTuple):
    """Leaf of a tree, with the leaf of a prefix that applies to it."""

    path: jax.tree_util.KeyPath
    prefix_leaf: PyTree
    leaf: PyTree


def _flatten_with_prefix(
    prefix: PyTree, tree: PyTree, is_leaf: Callable[[Any], bool]
) -> tuple[list[_PrefixedLeaf], Structure]:
    """Flattens a tree; without a prefix, its leaves are all 0."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=is_leaf
    )
    prefix_leaves: list[PyTree] = []
    if prefix is MISSING:
        prefix_leaves = [0] * len(leaves)
    else:

        def add_leaves(prefix_leaf: PyTree, subtree: PyTree) -> None:
            n_leaves = len(jax.tree.leaves(subtree, is_leaf=is_leaf))
            prefix_leaves.extend([prefix_leaf] * n_leaves)

        def is_prefix_leaf(x: PyTree) -> bool:
            return x is None or is_leaf(x)

        jax.tree.map(add_leaves, prefix, tree, is_leaf=is_prefix_leaf)
    items: list[_PrefixedLeaf] = []
    for (path, leaf), prefix_leaf in zip(leaves, prefix_leaves, strict=True):
        items.append(_PrefixedLeaf(path, prefix_leaf, leaf))
    return items, structure


def _check_aliases(items: Sequence[_PrefixedLeaf]) -> None:
    """Rejects a variable or array that has different prefixes at different places."""
    first_places: dict[int, tuple[str, PyTree]] = {}
    for root_path, prefix_leaf, x in items:
        if not is_object(x):
            continue
        map_prefix = getattr(prefix_leaf, "map_prefix", None)
        for path, leaf in flatten_graph(x).items():
            leaf_prefix = prefix_leaf
            if map_prefix is not None:
                leaf_prefix = map_prefix(path, leaf)
            place = path_text((*map(key_of, root_path), *path))
            first_place, first_prefix = first_places.setdefault(
                id(leaf), (place, leaf_prefix)
            )
            if first_prefix != leaf_prefix:
                raise errors.InconsistentAliasError(
                    f"one {type(leaf).__name__} is at {first_place!r}, with {first_prefix!r}, and "
                    f"at {place!r}, with {leaf_prefix!r}; give both the same, or nnx.clone(...) "
                    "at one place."
                )


class PrefixMap(Protocol):
    """Mapping with an entry for each variable, such as `nnx.StateAxes`."""

    def map_prefix(self, path: Path, variable: Any, /) -> PyTree:
        """Returns the entry of a variable."""
        ...


FilterMap = Mapping[Any, PyTree] | PrefixMap | Callable[[Path, Any], PyTree]


def prefix(
    node: PyTree, filter_map: FilterMap, /, *, graph: bool | None = None
) -> PyTree:
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

    def map_leaf(path: jax.tree_util.KeyPath, leaf: PyTree) -> PyTree:
        return value_at(tuple(map(key_of, path)), leaf)

    return jax.tree_util.tree_map_with_path(map_leaf, node, is_leaf=is_variable)


def _as_function(filter_map: FilterMap) -> Callable[[Path, Any], PyTree]:
    if isinstance(filter_map, Mapping):
        return StateAxes(filter_map).map_prefix
    map_prefix = getattr(filter_map, "map_prefix", None)
    if callable(map_prefix):
        return map_prefix
    if callable(filter_map):
        return filter_map
    raise errors.ObjectArgumentError(
        f"prefix was given {filter_map!r}; give a dict from filters to entries, such as "
        "{nnx.Param: 0, ...: None}, or a function of a path and a value."
    )
