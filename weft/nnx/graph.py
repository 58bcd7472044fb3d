"""Graphs of objects, converted to a description and values, and back.

The description, a `GraphDef`, has each object's class, static attributes, and positions of other
attributes: objects, variables, plain values, or references to earlier objects, which preserve
sharing. It is compared by value. The values are variables and arrays in traversal order.
"""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from weft.errors import GraphStructureError
from weft.lifting.functions import Same
from weft.nnx.filters import Path, to_predicate
from weft.nnx.pytree import Pytree
from weft.nnx.structure import (
    IMMUTABLE,
    PLAIN,
    UNCHANGING,
    Fixed,
    cannot_change,
    changing_parts,
    fixed,
    is_hashable,
    of_plain,
)
from weft.nnx.variables import NO_METADATA, Variable, metadata_key

_NOTHING: Mapping[Any, Any] = MappingProxyType({})


class Ref(NamedTuple):
    """Reference to an earlier object."""

    index: int


class Leaf(NamedTuple):
    """Value that is not a variable."""


_LEAF = Leaf()


class Within(NamedTuple):
    """Position of a value inside a container in an attribute."""

    name: Hashable
    keys: tuple[Hashable, ...]


class VariableDef(NamedTuple):
    """Variable without its value."""

    type: type[Variable[Any]]
    index: int
    metadata: Fixed


class NodeDef(NamedTuple):
    """Object or JAX container without its values.

    Attributes:
        index: index of the object in the graph; None for a container, which has no identity.
        attributes: definitions by name or key.
        marks: data and static marks of an object's attributes, or the structure of a container.
        order: order of the attributes, if not the default.
    """

    type: type
    index: int | None
    attributes: tuple[tuple[Hashable, Any], ...]
    marks: Any
    order: tuple[Hashable, ...] | None = None


class GraphDef:
    """Description of a graph; hashable, and equal for graphs that differ only in values.

    Attributes:
        root: definition of the outermost object.
        paths: paths of the values.
        outer: index pairs (here, before) of objects that `nnx.unflatten` updates.
    """

    def __init__(self, root: Any, paths: Sequence[Path], outer: Mapping[int, int] = _NOTHING):
        self.root = root
        self.paths = tuple(paths)
        self.outer = tuple(sorted(outer.items()))
        self._hash = hash(root)

    @property
    def num_leaves(self) -> int:
        """Number of values of the graph."""
        return len(self.paths)

    def apply(self, state: Any, *states: Any, graph: bool | None = None) -> Any:
        """Calls a method purely; see `nnx.call`. Further states are merged."""
        from weft.nnx.splitting import call
        from weft.nnx.state import merge_state

        return call((self, merge_state(state, *states) if states else state))

    @property
    def nodes(self) -> list[Any]:
        """Objects and variables, in their order."""
        return [part for part in _parts(self.root) if isinstance(part, NodeDef | VariableDef)]

    @property
    def attributes(self) -> list[tuple[Hashable, Any]]:
        """Attributes of all objects."""
        found = (part for part in _parts(self.root) if isinstance(part, NodeDef))
        return [item for node in found for item in node.attributes]

    def with_outer_index(self, outer: Mapping[int, int]) -> "GraphDef":
        """Returns the description with the earlier indices of its objects."""
        return GraphDef(self.root, self.paths, outer)

    def with_no_outer_index(self) -> "GraphDef":
        """Returns the description without earlier indices."""
        return self.with_outer_index(_NOTHING)

    def with_same_outer_index(self) -> "GraphDef":
        """Returns the description whose objects keep their own indices."""
        return self.with_outer_index({part.index: part.index for part in self._objects()})

    def with_matching_outer_index(self, other: "GraphDef") -> "GraphDef":
        """Returns the description with the earlier indices that another one's `outer` has."""
        own, outer = {part.index for part in self._objects()}, dict(other.outer)
        return self.with_outer_index({i: outer[i] for i in own & set(outer)})

    def _objects(self) -> Iterator[Any]:
        return (part for part in self.nodes if part.index is not None)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GraphDef) or self._hash != other._hash:
            return False
        return self.root == other.root and self.outer == other.outer

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"GraphDef({getattr(self.root, 'type', type(self.root)).__name__}, " + (
            f"{len(self.nodes)} nodes, {self.num_leaves} leaves)"
        )


jax.tree_util.register_static(GraphDef)


def _parts(part: Any) -> Iterator[Any]:
    yield part
    if isinstance(part, NodeDef):
        for _, below in part.attributes:
            yield from _parts(below)


@dataclasses.dataclass
class Flat:
    """Graph split into description and values.

    Attributes:
        leaves: variables, and values that are not variables.
        owners: for a value that is not a variable, its object and attribute name, or a `Within`.
        objects: objects and variables by index, without those already known.
        again: paths of repeated objects, and their indices.
        is_sure: whether no static value or container can change unnoticed.
    """

    graphdef: GraphDef
    leaves: list[Any]
    owners: list[tuple[Any, Hashable] | None]
    objects: list[Any]
    again: list[tuple[int, Path]]
    is_sure: bool


class _Walk:
    def __init__(self, with_metadata: bool, known: Mapping[Any, int]) -> None:
        self.with_metadata = with_metadata
        self.index = {id(x): i for x, i in known.items()}
        self.next = 1 + max(self.index.values(), default=-1)
        self.objects: list[Any] = []
        self.again: list[tuple[int, Path]] = []
        self.leaves: list[Any] = []
        self.owners: list[tuple[Any, Hashable] | None] = []
        self.paths: list[Path] = []
        self.is_sure = True

    def describe(self, x: Any, path: Path, owner: Any = None, is_data: bool = False) -> Any:
        if isinstance(x, Variable):
            index = self._index(x, path)
            if type(index) is Ref:
                return index
            self._leaf(x, path, None)
            metadata = NO_METADATA
            if x._metadata:
                self.is_sure &= all(map(cannot_change, x._metadata.values()))
                metadata = metadata_key(x) if self.with_metadata else NO_METADATA
            return VariableDef(type(x), index, metadata)
        if isinstance(x, Pytree):
            index, marks = self._index(x, path), x._watch.marks
            if type(index) is Ref:
                return index
            attributes = tuple(
                [
                    (name, self._marked(x, name, value, (*path, name)))
                    if name in marks
                    else (name, of_plain(value))
                    if (kind := type(value)) in PLAIN
                    else (name, fixed(value))
                    if kind in UNCHANGING
                    else (name, self.describe(value, (*path, name), (x, name)))
                    for name, value in x._items()
                ]
            )
            return NodeDef(type(x), index, attributes, x._marks(), x._order())
        if is_array(x):
            self._leaf(x, path, owner)
            return _LEAF
        below = _children(x)
        if below is None:
            if isinstance(x, _CONTAINERS):
                _check_no_objects(x, path)
            if is_data and x is not None:
                self._leaf(x, path, owner)
                return _LEAF
            self.is_sure = self.is_sure and cannot_change(x)
            return fixed(x)
        self.is_sure &= isinstance(x, tuple)
        children, tree = below
        attributes = tuple(
            (key, self.describe(v, (*path, key), _within(owner, key))) for key, v in children
        )
        return NodeDef(type(x), None, attributes, tree)

    def _marked(self, x: Pytree, name: Any, value: Any, path: Path) -> Any:
        if not x._watch.marks[name] and not _holds_containers(value):
            self.is_sure &= cannot_change(value)
            return fixed(value)
        return self.describe(value, path, (x, name), is_data=True)

    def _index(self, x: Any, path: Path) -> Any:
        new = self.next
        index = self.index.setdefault(id(x), new)
        if index != new:
            self.again.append((index, path))
            return Ref(index)
        self.next += 1
        self.objects.append(x)
        return index

    def _leaf(self, x: Any, path: Path, owner: Any) -> None:
        self.leaves.append(x)
        self.owners.append(owner)
        self.paths.append(path)


def _holds_containers(x: Any) -> bool:
    """Returns whether a static value is a `List` or `Dict`, or a tuple of them, without data."""
    return isinstance(x, Pytree) or (type(x) is tuple and any(map(_holds_containers, x)))


def _within(owner: Any, key: Hashable) -> Any:
    if owner is None:
        return None
    x, place = owner
    name, keys = place if isinstance(place, Within) else (place, ())
    return x, Within(name, (*keys, key))


def is_array(x: Any) -> bool:
    """Returns whether a value is an array or abstract array."""
    return isinstance(x, _ARRAYS)


_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
_CONTAINERS = (list, tuple, dict)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)


def _check_no_objects(x: Any, path: Path) -> None:
    """Rejects objects in a container unknown to JAX, where they would be constants."""
    for item in x.values() if isinstance(x, dict) else x:
        if isinstance(item, Variable | Pytree):
            raise GraphStructureError(
                f"the {type(x).__name__} at {'.'.join(map(str, path)) or 'the top'} holds a "
                f"{type(item).__name__}, but is not a pytree to JAX; use nnx.List or nnx.Dict, or "
                "register the class with jax.tree_util."
            )


def children(x: Any) -> list[tuple[Hashable, Any]]:
    """Returns the attributes of an object, or the items of a container, by name or key."""
    if isinstance(x, Pytree):
        return x._items()
    if isinstance(x, Variable) or is_array(x):
        return []
    return (_children(x) or ([], None))[0]


def data_children(x: Any) -> list[tuple[Hashable, Any]]:
    """Returns the attributes or items that are data, which are an object's pytree children."""
    items = children(x)
    return [(k, v) for k, v in items if x._is_data(k, v)] if isinstance(x, Pytree) else items


def with_children(x: Any, items: Iterable[Any]) -> Any:
    """Returns a copy of a container with other items."""
    return jax.tree.unflatten(jax.tree.structure(x, is_leaf=lambda y: y is not x), items)


def with_item(x: Any, keys: Sequence[Hashable], value: Any) -> Any:
    """Returns a copy of a container with another value at a path of keys."""
    if not keys:
        return value
    first, *rest = keys
    items = children(x)
    return with_children(x, [with_item(v, rest, value) if k == first else v for k, v in items])


def _children(x: Any) -> tuple[list[tuple[Hashable, Any]], Any] | None:
    """Returns a JAX container's items by key and its structure; None for a value."""
    if x is None or isinstance(x, IMMUTABLE) or type(x) in _FUNCTIONS:
        return None
    items, tree = jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda y: y is not x)
    if jax.tree_util.treedef_is_leaf(tree) and (not items or items[0][1] is x):
        return None
    return [(key_of(path[0]), value) for path, value in items], tree


def key_of(key: Any) -> Hashable:
    """Returns the name, key or index of an element of a JAX path."""
    for name in ("key", "idx", "name"):
        if hasattr(key, name):
            return getattr(key, name)
    return key


def take_apart(x: Any, with_metadata: bool = True, known: Mapping[Any, int] = _NOTHING) -> Flat:
    """Splits a graph into a description, by default with variables' metadata, and values.

    `known` has indices of objects of another description that this one refers to.
    """
    walk = _Walk(with_metadata, known)
    root = walk.describe(x, ())
    graphdef = GraphDef(root, walk.paths)
    return Flat(graphdef, walk.leaves, walk.owners, walk.objects, walk.again, walk.is_sure)


def flat_of_variables(graphdef: GraphDef, objects: list[Any]) -> Flat:
    """Returns a graph whose values are all variables, and in which nothing can change unnoticed."""
    leaves = [x for x in objects if isinstance(x, Variable)]
    return Flat(graphdef, leaves, [None] * len(leaves), objects, [], True)


def objects_alike(
    items: Sequence[tuple[Hashable, Any]], known: Sequence[tuple[Hashable, Any]]
) -> list[Any] | None:
    """Returns the objects and variables of a graph that equals a description, found quickly.

    Args:
        items: names or indices, with the values to compare.
        known: the same with descriptions of objects without repeated objects, whose values are all
            variables, and in which nothing can change unnoticed.

    Returns:
        None if something differs from its description, or may change unnoticed.
    """
    found: list[Any] = []
    is_alike = _are_alike(items, known, found) and len({*map(id, found)}) == len(found)
    return found if is_alike else None


def _are_alike(
    items: Sequence[tuple[Hashable, Any]], known: Sequence[tuple[Hashable, Any]], found: list[Any]
) -> bool:
    if len(items) != len(known):
        return False
    for (name, x), (known_name, part) in zip(items, known, strict=True):
        kind = type(part)
        if kind is Fixed:
            # The same function may close over other values now, so compare by value.
            is_alike = (type(x) in PLAIN and x is part.value) or fixed(x) == part
        elif type(x) is not part.type:
            is_alike = False
        elif kind is VariableDef:
            found.append(x)
            is_alike = not x._metadata or all(map(cannot_change, x._metadata.values()))
        elif part.index is None:
            is_alike = type(x) is tuple and _are_alike([*enumerate(x)], part.attributes, found)
        else:
            found.append(x)
            is_alike = x._marks() == part.marks and x._order() == part.order
            is_alike = is_alike and _are_alike(x._items(), part.attributes, found)
        if name != known_name or not is_alike:
            return False
    return True


def leaf_parts(graphdef: GraphDef) -> list[Any]:
    """Returns the definitions of the values of a description."""
    return [part for part in _parts(graphdef.root) if isinstance(part, VariableDef | Leaf)]


def changing_values(flat: Flat) -> tuple[Same, ...]:
    """Returns the static values of a graph that can change, each equal to itself alone."""
    metadata = (x._metadata.values() for x in flat.leaves if isinstance(x, Variable))
    static = (part.value for part in _parts(flat.graphdef.root) if isinstance(part, Fixed))
    return tuple(changing_parts((*static, *itertools.chain(*metadata))))


def unhashable_values(graphdef: GraphDef, is_unchanged: bool = False) -> list[Any]:
    """Returns the unhashable static values; with `is_unchanged`, without changed ones."""
    parts = (part for part in _parts(graphdef.root) if isinstance(part, Fixed))
    of = [part for part in parts if not is_hashable(part.value)]
    return [part.value for part in of if not is_unchanged or Fixed(part.value) == part]


def with_static_values(graphdef: GraphDef, values: Iterable[Any]) -> GraphDef:
    """Returns an equal description with other, pairwise equal `unhashable_values`."""
    rest = iter(values)

    def replaced(part: Any) -> Any:
        if isinstance(part, Fixed):
            return part if is_hashable(part.value) else part.having(next(rest))
        if isinstance(part, NodeDef):
            attributes = tuple([(name, replaced(below)) for name, below in part.attributes])
            return part._replace(attributes=attributes)
        return part

    return GraphDef(replaced(graphdef.root), graphdef.paths, dict(graphdef.outer))


# Traversals without splitting.


def iter_graph(node: Any, /, *, graph: bool | None = None) -> Iterator[tuple[Path, Any]]:
    """Yields each object and value of a graph once with its path, inner ones first.

    Example:
        >>> from weft import nnx
        >>> [path for path, _ in iter_graph({"a": nnx.List([1, nnx.Param(2)])})]
        [('a', 0), ('a', 1), ('a',), ()]
    """
    seen: set[int] = set()

    def walk(x: Any, path: Path) -> Iterator[tuple[Path, Any]]:
        if isinstance(x, Variable | Pytree):
            if id(x) in seen:
                return
            seen.add(id(x))
        for name, value in children(x):
            yield from walk(value, (*path, name))
        yield path, x

    return walk(node, ())


def iter_children(node: Any, /, *, graph: bool | None = None) -> Iterator[tuple[Hashable, Any]]:
    """Yields the objects and variables in an object's attributes; `graph` is ignored."""
    return ((k, v) for k, v in children(node) if isinstance(v, Variable | Pytree))


def iter_module_children(
    node: Any, /, *, graph: bool | None = None
) -> Iterator[tuple[Hashable, Any]]:
    """Yields the objects, without variables, in an object's attributes; `graph` is ignored."""
    return ((k, v) for k, v in children(node) if isinstance(v, Pytree))


def find_duplicates(node: Any, /, *, only: Any = ...) -> list[list[Path]]:
    """Returns the paths of objects and variables that occur more than once in a graph.

    Contents of a repeated object count below its first path only; `only` filters the objects.

    Example:
        >>> from weft import nnx
        >>> shared = nnx.Param(1.0)
        >>> find_duplicates({"a": shared, "b": shared})
        [[('a',), ('b',)]]
    """
    matches = to_predicate(only)
    paths: dict[int, list[Path]] = {}
    seen: set[int] = set()

    def walk(x: Any, path: Path) -> None:
        if isinstance(x, Variable | Pytree):
            if matches(path, x):
                paths.setdefault(id(x), []).append(path)
            if id(x) in seen:
                return
            seen.add(id(x))
        for key, value in children(x):
            walk(value, (*path, key))

    walk(node, ())
    return [found for found in paths.values() if len(found) > 1]


def recursive_map(f: Callable[[Path, Any], Any], node: Any, /, *, graph: bool | None = None) -> Any:
    """Returns a copy of a graph with `f(path, x)` in place of each object and value, inner first.

    Objects and variables passed to `f` are copies.

    Example:
        >>> from weft import nnx
        >>> recursive_map(lambda path, x: x * 2 if isinstance(x, int) else x, (1, {"a": 2}))
        (2, {'a': 4})
    """
    made: dict[int, Any] = {}

    def walk(x: Any, path: Path) -> Any:
        if isinstance(x, Variable | Pytree):
            if id(x) not in made:
                # Registered before its contents are mapped, so that cycles lead back to it.
                made[id(x)] = new = _empty_copy(x)
                if isinstance(x, Pytree):
                    new._fill([(name, walk(v, (*path, name))) for name, v in x._items()])
                made[id(x)] = f(path, new)
            return made[id(x)]
        items = children(x)
        new = with_children(x, [walk(v, (*path, key)) for key, v in items]) if items else x
        return f(path, new)

    return walk(node, ())


def _empty_copy(x: Any) -> Any:
    return x.copy() if isinstance(x, Variable) else type(x)._made_of((), x._watch.marks)
