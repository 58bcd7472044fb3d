"""Trees in which objects stand as states, and back.

`to_tree` puts a pytree node with the states of an object in the place of each object of a tree, so
that functions of JAX take it; `from_tree` makes the objects again. What several objects of the tree
share is in the first of them.
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
    """The states of an object, as one node of a tree.

    Attributes:
        states: the states, or prefixes of them.
        metadata: what else is to go with them; static.

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
        """The description of the object.

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
        """Of what `nnx.split` gives."""
        return cls(graphdef, (state, *states), metadata)

    @classmethod
    def from_states(cls, state: Any, /, *states: Any) -> Self:
        """Of states alone."""
        return cls(None, (state, *states))

    @classmethod
    def from_prefixes(cls, prefixes: Any, /, *, metadata: Any = None) -> Self:
        """Of what is said of each state, such as axes."""
        return cls(None, tuple(prefixes), metadata)

    def replace(self, **updates: Any) -> Self:
        """The same with other attributes."""
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
    """A tree with the states of its objects in their place.

    Args:
        tree: a pytree with objects.
        prefix: a prefix of the tree with what is said of its parts, such as axes.
        split_fn: from a split context, the path, what is said of it, and an object to what stands
            in its place; by default `NodeStates` with one state.
        map_non_graph_nodes: whether it is called for the leaves that are no objects as well.
        ctxtag: the tag of an update context.
        check_aliasing: whether it is an error if different things are said of two places of one
            variable.

    Raises:
        InconsistentAliasError: then, with both places.
        ValueError: of JAX, if `prefix` is no prefix of the tree.

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
    """A tree with objects in the place of their states; the inverse of `to_tree`.

    Args:
        tree: what `to_tree` gave, with other values perhaps.
        prefix: a prefix of the tree with what is said of its parts.
        merge_fn: from a merge context, the path, what is said of it, and `NodeStates` to an
            object.
        is_node_leaf: which leaves stand for objects.
        is_leaf: where the tree is not looked into.
        map_non_graph_nodes: whether `merge_fn` is called for the other leaves as well.
        is_inner: whether it is inside of the transformation, see `merge_context`.
        ctxtag: the tag of an update context.

    Raises:
        GraphStructureError: if values are missing, or `is_inner` is with a tag.
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
    """For each leaf of a tree what the prefix says of it."""
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
                    f"one {type(leaf).__name__} is at {there!r}, of which {before!r} is said, and "
                    f"at {where!r}, of which {here!r} is said; say the same of both, or give "
                    "nnx.clone(...) at one place."
                )
