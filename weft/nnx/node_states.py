"""Trees with states in place of objects, and back.

`to_tree` replaces each object of a tree by a pytree node with its states, for JAX functions;
`from_tree` is the inverse. Parts that several objects share are in the first of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, Self

import jax

from weft.errors import GraphStructureError, InconsistentAliasError
from weft.nnx.contexts import MergeContext, SplitContext, merge_context, split_context
from weft.nnx.graph import GraphDef, key_of, take_apart
from weft.nnx.pytree import Pytree
from weft.nnx.state import shown_path
from weft.nnx.variables import Variable

_MISSING: Any = object()


@dataclasses.dataclass(frozen=True)
class NodeStates:
    """States of an object, as one node of a tree.

    Attributes:
        states: states, or prefixes of them.
        metadata: static data to pass along.

    Example:
        >>> import jax.numpy as jnp
        >>> from weft import nnx
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
        """Description of the object.

        Raises:
            GraphStructureError: if there is none.
        """
        if self._graphdef is None:
            raise GraphStructureError(
                "these NodeStates have no description; make them by NodeStates.from_split."
            )
        return self._graphdef

    @property
    def state(self) -> Any:
        """The only state.

        Raises:
            GraphStructureError: if there are several.
        """
        if len(self.states) != 1:
            raise GraphStructureError(
                f"these NodeStates have {len(self.states)} states; look at .states."
            )
        return self.states[0]

    @classmethod
    def from_split(
        cls, graphdef: GraphDef | None, state: Any, /, *states: Any, metadata: Any = None
    ) -> Self:
        """Builds node states from the results of `nnx.split`."""
        return cls(graphdef, (state, *states), metadata)

    @classmethod
    def from_states(cls, state: Any, /, *states: Any) -> Self:
        """Builds node states without a description."""
        return cls(None, (state, *states))

    @classmethod
    def from_prefixes(cls, prefixes: Any, /, *, metadata: Any = None) -> Self:
        """Builds node states from prefixes of each state, such as axes."""
        return cls(None, tuple(prefixes), metadata)

    def replace(self, **updates: Any) -> Self:
        """Returns a copy with other attributes."""
        return dataclasses.replace(self, **updates)


jax.tree_util.register_pytree_with_keys(
    NodeStates,
    lambda x: ([(jax.tree_util.GetAttrKey("states"), x.states)], (x._graphdef, x.metadata)),
    lambda fixed, children: NodeStates(fixed[0], next(iter(children)), fixed[1]),
)


def _is_object(x: Any) -> bool:
    return isinstance(x, Pytree | Variable)


def _is_node_states(x: Any) -> bool:
    return isinstance(x, NodeStates)


def _default_split(ctx: SplitContext, path: Any, prefix: Any, x: Any) -> NodeStates:
    return NodeStates.from_split(*ctx.split(x))


def _default_merge(ctx: MergeContext, path: Any, prefix: Any, x: NodeStates) -> Any:
    return ctx.merge(x.graphdef, *x.states)


def to_tree(
    tree: Any,
    /,
    *,
    prefix: Any = _MISSING,
    split_fn: Callable[[SplitContext, Any, Any, Any], Any] = _default_split,
    map_non_graph_nodes: bool = False,
    ctxtag: Hashable | None = None,
    check_aliasing: bool = True,
) -> Any:
    """Replaces the objects of a tree by their states.

    Args:
        prefix: prefix of the tree, such as axes.
        split_fn: maps a split context, a path, a prefix leaf and an object to the replacement; by
            default `NodeStates` with one state.
        map_non_graph_nodes: whether to call it for leaves that are not objects as well.
        ctxtag: tag of the update context.
        check_aliasing: whether to check that all occurrences of a variable have the same prefix.

    Raises:
        InconsistentAliasError: if they differ.
        ValueError: from JAX, if `prefix` is not a prefix of the tree.

    Example:
        >>> from weft import nnx
        >>> layer = nnx.Dict(w=nnx.Param(1.0))
        >>> tree = to_tree((layer, {"again": layer, "x": 2}))
        >>> len(tree[0].state), len(tree[1]["again"].state), tree[1]["x"]
        (1, 0, 2)
        >>> first, rest = from_tree(tree)
        >>> first is rest["again"]
        True
    """
    items, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_object)
    said = _broadcast(prefix, tree, _is_object, len(items))
    if check_aliasing and prefix is not _MISSING:
        _check_aliases([(path, s, x) for (path, x), s in zip(items, said, strict=True)])
    with split_context(ctxtag) as ctx:
        leaves = [
            split_fn(ctx, path, s, x) if map_non_graph_nodes or _is_object(x) else x
            for (path, x), s in zip(items, said, strict=True)
        ]
    return structure.unflatten(leaves)


def from_tree(
    tree: Any,
    /,
    *,
    prefix: Any = _MISSING,
    merge_fn: Callable[[MergeContext, Any, Any, Any], Any] = _default_merge,
    is_node_leaf: Callable[[Any], bool] = _is_node_states,
    is_leaf: Callable[[Any], bool] = _is_node_states,
    map_non_graph_nodes: bool = False,
    is_inner: bool | None = None,
    ctxtag: Hashable | None = None,
) -> Any:
    """Replaces the states in a tree by objects; the inverse of `to_tree`.

    Args:
        tree: a result of `to_tree`, possibly with other values.
        prefix: prefix of the tree, such as axes.
        merge_fn: maps a merge context, a path, a prefix leaf and `NodeStates` to an object.
        is_node_leaf: predicate of leaves that represent objects.
        is_leaf: predicate that stops the traversal.
        map_non_graph_nodes: whether to call `merge_fn` for other leaves as well.
        is_inner: whether this is inside the transformation, see `merge_context`.
        ctxtag: tag of the update context.

    Raises:
        GraphStructureError: if values are missing, or `is_inner` is missing with a tag.
    """
    items, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    said = _broadcast(prefix, tree, is_leaf, len(items))
    with merge_context(ctxtag, is_inner) as ctx:
        leaves = [
            merge_fn(ctx, path, s, x) if map_non_graph_nodes or is_node_leaf(x) else x
            for (path, x), s in zip(items, said, strict=True)
        ]
    return structure.unflatten(leaves)


def _broadcast(
    prefix: Any, tree: Any, is_leaf: Callable[[Any], bool], number_of_leaves: int
) -> list[Any]:
    if prefix is _MISSING:
        return [0] * number_of_leaves
    is_said = lambda x: x is None or is_leaf(x)  # noqa: E731
    said: list[Any] = []

    def extend(one: Any, part: Any) -> None:
        said.extend([one] * len(jax.tree.leaves(part, is_leaf=is_leaf)))

    jax.tree.map(extend, prefix, tree, is_leaf=is_said)
    return said


def _check_aliases(items: list[tuple[Any, Any, Any]]) -> None:
    seen: dict[int, tuple[str, Any]] = {}
    for root, said, x in items:
        if not _is_object(x):
            continue
        flat = take_apart(x)
        for path, leaf in zip(flat.graphdef.paths, flat.leaves, strict=True):
            of_leaf = getattr(said, "map_prefix", None)
            here = of_leaf(path, leaf) if of_leaf is not None else said
            where = shown_path((*map(key_of, root), *path))
            there, before = seen.setdefault(id(leaf), (where, here))
            if before != here:
                raise InconsistentAliasError(
                    f"one {type(leaf).__name__} is at {there!r}, with {before!r}, and at "
                    f"{where!r}, with {here!r}; give both the same, or nnx.clone(...) at one "
                    "place."
                )
