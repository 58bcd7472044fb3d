"""Graphs of objects, converted to a description and values, and back.

The description, a `GraphDef`, has each object's class, static attributes, and positions of other
attributes: objects, variables, plain values, or references to earlier objects, which preserve
sharing. It is compared by value. The values are variables and arrays in traversal order.

A graph is built from both. All changes of existing objects are planned and checked before the first
is made, so that an error leaves every object unchanged.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import jax

from weft.errors import GraphStructureError
from weft.lifting.static_keys import IdentityKey
from weft.nnx import settings, versions
from weft.nnx.filters import Path, to_predicate
from weft.nnx.pytree import (
    Pytree,
    TreePlaces,
    children,
    container_items,
    is_array,
    is_data,
    with_children,
)
from weft.nnx.state import FlatState, State, from_flat_state, merge_state, path_text, to_flat_state
from weft.nnx.variables import NO_METADATA, Variable, metadata_key
from weft.nnx.versions import OTHER_STATIC_TYPES, PLAIN_TYPES, StaticValue, plain_static_value

_NOTHING: Mapping[Any, Any] = MappingProxyType({})
Node = TypeVar("Node")


class NodeRef(NamedTuple):
    """Reference to an earlier object."""

    index: int


class LeafDef(NamedTuple):
    """Value that is not a variable."""


_LEAF_DEF = LeafDef()


class ContainerKey(NamedTuple):
    """Position of a value inside a container in an attribute."""

    name: Hashable
    keys: tuple[Hashable, ...]


class VariableDef(NamedTuple):
    """Variable without its value."""

    type: type[Variable[Any]]
    index: int
    metadata: StaticValue


class NodeDef(NamedTuple):
    """Object or JAX container without its values.

    Attributes:
        index: index of the object in the graph; None for a container, which has no identity.
        marks: data and static marks of an object's attributes, or the structure of a container.
        order: order of the attributes, if not the default.
    """

    type: type
    index: int | None
    attributes: tuple[tuple[Hashable, Any], ...]
    marks: Any
    order: tuple[Hashable, ...] | None = None


_OBJECT_DEFS = (NodeDef, VariableDef)


class GraphDef(Generic[Node]):
    """Description of a graph; hashable, and equal for graphs that differ only in values.

    Attributes:
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

    def apply(self, state: object, *states: object, graph: bool | None = None) -> Any:
        """Calls a method purely; see `nnx.call`. Further states are merged."""
        return call((self, state, *states))

    @property
    def nodes(self) -> list[Any]:
        """Objects and variables, in their order."""
        return [part for part, *_ in _parts(self.root) if isinstance(part, _OBJECT_DEFS)]

    @property
    def attributes(self) -> list[tuple[Hashable, Any]]:
        """Attributes of all objects."""
        found = (node for node in self.nodes if isinstance(node, NodeDef))
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


def _parts(part: object, path: Path = (), owner: Any = None) -> Iterator[tuple[Any, Path, Any]]:
    """Yields the parts of a description, each with its path, its object's index and place there."""
    yield part, path, owner
    if isinstance(part, NodeDef):
        for name, below in part.attributes:
            place = _container_key(owner, name) if part.index is None else (part.index, name)
            yield from _parts(below, (*path, name), place)


def first_paths(graphdef: GraphDef) -> dict[int, Path]:
    """Returns the first path of each object."""
    found = ((x, path) for x, path, _ in _parts(graphdef.root) if isinstance(x, _OBJECT_DEFS))
    return {x.index: path for x, path in found if x.index is not None}


Owner = tuple[Any, Hashable] | None
"""Object and attribute name of a value that is not a variable."""


@dataclasses.dataclass
class FlatGraph:
    """Graph split into description and values.

    Attributes:
        leaves: variables, and values that are not variables.
        owners: for a value that is not a variable, its object and attribute name, or a
        `ContainerKey`.
        objects: objects and variables by index, without those already known.
        repeated: paths of repeated objects, and their indices.
        is_tracked: whether no static value or container can change unnoticed.
    """

    graphdef: GraphDef
    leaves: list[Any]
    owners: list[Owner]
    objects: list[Any]
    repeated: list[tuple[int, Path]]
    is_tracked: bool

    def items(self) -> Iterator[tuple[Path, Any]]:
        """Returns the values with their paths."""
        return zip(self.graphdef.paths, self.leaves, strict=True)


class _Flattener:
    def __init__(
        self, with_metadata: bool, known: Mapping[Any, int], places: TreePlaces | None
    ) -> None:
        self.with_metadata = with_metadata
        self.places = places
        self.index = {id(x): i for x, i in known.items()}
        self.next = 1 + max(self.index.values(), default=-1)
        self.objects: list[Any] = []
        self.repeated: list[tuple[int, Path]] = []
        self.leaves: list[Any] = []
        self.owners: list[Owner] = []
        self.paths: list[Path] = []
        self.is_tracked = True

    def describe(self, x: object, path: Path, owner: object = None, is_data: bool = False) -> Any:
        if isinstance(x, Variable):
            index = self._index(x, path)
            if type(index) is NodeRef:
                return index
            self._leaf(x, path, None)
            metadata = NO_METADATA
            if x._metadata:
                self.is_tracked &= all(map(versions.is_immutable, x._metadata.values()))
                metadata = metadata_key(x) if self.with_metadata else NO_METADATA
            return VariableDef(type(x), index, metadata)
        if isinstance(x, Pytree):
            index, marks = self._index(x, path), x._info.marks
            if type(index) is NodeRef:
                return index
            attributes = tuple(
                [
                    (name, self._marked(x, name, value, (*path, name)))
                    if name in marks
                    else (name, plain_static_value(value))
                    if (kind := type(value)) in PLAIN_TYPES
                    else (name, versions.static_value(value))
                    if kind in OTHER_STATIC_TYPES
                    else (name, self.describe(value, (*path, name), (x, name)))
                    for name, value in x._items()
                ]
            )
            if self.places is not None:
                self.places.leave(x)
            return NodeDef(type(x), index, attributes, x._marks(), x._order())
        if is_array(x):
            self._leaf(x, path, owner)
            return _LEAF_DEF
        below = container_items(x)
        if below is None:
            if isinstance(x, _CONTAINERS):
                _check_no_objects(x, path)
            if is_data and x is not None:
                self._leaf(x, path, owner)
                return _LEAF_DEF
            self.is_tracked = self.is_tracked and versions.is_immutable(x)
            return versions.static_value(x)
        self.is_tracked &= isinstance(x, tuple)
        items, tree = below
        attributes = tuple(
            (key, self.describe(v, (*path, key), _container_key(owner, key))) for key, v in items
        )
        return NodeDef(type(x), None, attributes, tree)

    def _marked(self, x: Pytree, name: Any, value: Any, path: Path) -> Any:
        if not x._info.marks[name] and not _holds_containers(value):
            self.is_tracked &= versions.is_immutable(value)
            return versions.static_value(value)
        return self.describe(value, path, (x, name), is_data=True)

    def _index(self, x: Pytree | Variable[Any], path: Path) -> Any:
        if self.places is not None:
            self.places.enter(x, path)
            self.index.pop(id(x), None)  # a tree has no references
        new = self.next
        index = self.index.setdefault(id(x), new)
        if index != new:
            self.repeated.append((index, path))
            return NodeRef(index)
        self.next += 1
        self.objects.append(x)
        return index

    def _leaf(self, x: Any, path: Path, owner: Any) -> None:
        self.leaves.append(x)
        self.owners.append(owner)
        self.paths.append(path)


def _holds_containers(x: object) -> bool:
    """Returns whether a static value is a `List` or `Dict`, or a tuple of them, without data."""
    return isinstance(x, Pytree) or (type(x) is tuple and any(map(_holds_containers, x)))


def _container_key(owner: Any, key: Hashable) -> Any:
    if owner is None:
        return None
    x, place = owner
    name, keys = place if isinstance(place, ContainerKey) else (place, ())
    return x, ContainerKey(name, (*keys, key))


_CONTAINERS = (list, tuple, dict)


def _check_no_objects(x: list[Any] | tuple[Any, ...] | dict[Any, Any], path: Path) -> None:
    """Rejects objects in a container unknown to JAX, where they would be constants."""
    for item in x.values() if isinstance(x, dict) else x:
        if isinstance(item, Variable | Pytree):
            raise GraphStructureError(
                f"the {type(x).__name__} at {'.'.join(map(str, path)) or 'the top'} holds a "
                f"{type(item).__name__}, but is not a pytree to JAX; use nnx.List or nnx.Dict, or "
                "register the class with jax.tree_util."
            )


def flatten_graph(
    x: object,
    with_metadata: bool = True,
    known: Mapping[Any, int] = _NOTHING,
    places: TreePlaces | None = None,
) -> FlatGraph:
    """Splits a graph into a description, by default with variables' metadata, and values.

    `known` has indices of objects of another description that this one refers to. With `places`
    it is a tree, and an object is another one at each of its places.
    """
    walk = _Flattener(with_metadata, known, places)
    root = walk.describe(x, ())
    graphdef = GraphDef(root, walk.paths)
    return FlatGraph(
        graphdef, walk.leaves, walk.owners, walk.objects, walk.repeated, walk.is_tracked
    )


def flat_graph_of_variables(graphdef: GraphDef, objects: list[Any]) -> FlatGraph:
    """Returns a graph whose values are all variables, and in which nothing can change unnoticed."""
    leaves = [x for x in objects if isinstance(x, Variable)]
    return FlatGraph(graphdef, leaves, [None] * len(leaves), objects, [], True)


def matching_objects(
    items: Sequence[tuple[Hashable, Any]], known: Sequence[tuple[Hashable, Any]]
) -> list[Any] | None:
    """Returns the objects and variables of a graph that equals a description, found quickly.

    None if something differs from its description, or may change unnoticed.

    Args:
        items: names or indices, with the values to compare.
        known: the same with descriptions of objects without repeated objects, whose values are all
            variables, and in which nothing can change unnoticed.
    """
    found: list[Any] = []
    is_alike = _matches(items, known, found) and len({*map(id, found)}) == len(found)
    return found if is_alike else None


def _matches(
    items: Sequence[tuple[Hashable, Any]], known: Sequence[tuple[Hashable, Any]], found: list[Any]
) -> bool:
    if len(items) != len(known):
        return False
    for (name, x), (known_name, part) in zip(items, known, strict=True):
        kind = type(part)
        if kind is StaticValue:
            # The same function may close over other values now, so compare by value.
            is_same = type(x) in PLAIN_TYPES and x is part.value
            is_alike = is_same or versions.static_value(x) == part
        elif type(x) is not part.type:
            is_alike = False
        elif kind is VariableDef:
            found.append(x)
            is_alike = not x._metadata or all(map(versions.is_immutable, x._metadata.values()))
        elif part.index is None:
            is_alike = type(x) is tuple and _matches([*enumerate(x)], part.attributes, found)
        else:
            found.append(x)
            is_alike = x._marks() == part.marks and x._order() == part.order
            is_alike = is_alike and _matches(x._items(), part.attributes, found)
        if name != known_name or not is_alike:
            return False
    return True


def leaf_defs(graphdef: GraphDef) -> Iterator[tuple[Any, tuple[int, Hashable] | None]]:
    """Yields the definition of each value, the index of its object and its place there.

    Variables have None in place of the last two.
    """
    for part, _, owner in _parts(graphdef.root):
        if isinstance(part, VariableDef | LeafDef):
            yield part, owner if isinstance(part, LeafDef) else None


def mutable_static_values(flat: FlatGraph) -> tuple[IdentityKey, ...]:
    """Returns the static values of a graph that can change, each equal to itself alone."""
    metadata = (x._metadata.values() for x in flat.leaves if isinstance(x, Variable))
    static = (x.value for x, *_ in _parts(flat.graphdef.root) if isinstance(x, StaticValue))
    return tuple(versions.mutable_parts((*static, *itertools.chain(*metadata))))


def unhashable_static_values(graphdef: GraphDef, is_unchanged: bool = False) -> list[Any]:
    """Returns the unhashable static values; with `is_unchanged`, without changed ones."""
    parts = (part for part, *_ in _parts(graphdef.root) if isinstance(part, StaticValue))
    of = [part for part in parts if not versions.is_hashable(part.value)]
    return [part.value for part in of if not is_unchanged or StaticValue(part.value) == part]


def with_static_values(graphdef: GraphDef, values: Iterable[Any]) -> GraphDef:
    """Returns an equal description with other, pairwise equal `unhashable_static_values`."""
    rest = iter(values)

    def replaced(part: object) -> Any:
        if isinstance(part, StaticValue):
            return part if versions.is_hashable(part.value) else part.with_value(next(rest))
        if isinstance(part, NodeDef):
            attributes = tuple([(name, replaced(below)) for name, below in part.attributes])
            return part._replace(attributes=attributes)
        return part

    return GraphDef(replaced(graphdef.root), graphdef.paths, dict(graphdef.outer))


def with_plain_values(graphdef: GraphDef, leaves: Sequence[Any]) -> tuple[GraphDef, list[Any]]:
    """Returns a description in which values in place of variables are attributes, and its values.

    They are at each place of a shared variable.
    """
    rest, known, held, paths = iter(leaves), {}, [], []

    def replaced(part: Any, path: Path) -> Any:
        if isinstance(part, NodeDef):
            below = tuple([(name, replaced(x, (*path, name))) for name, x in part.attributes])
            return part._replace(attributes=below)
        is_variable = isinstance(part, VariableDef)
        if is_variable:
            known[part.index] = next(rest)
        elif not isinstance(part, LeafDef | NodeRef):
            return part
        index = None if isinstance(part, LeafDef) else part.index
        value = next(rest) if index is None else known.get(index)
        if isinstance(part, NodeRef) and (index not in known or isinstance(value, Variable)):
            return part
        held.append(value)
        paths.append(path)
        return part if is_variable and isinstance(value, Variable) else _LEAF_DEF

    return GraphDef(replaced(graphdef.root, ()), paths), held


def leaves_of(graphdef: GraphDef, state: object) -> list[Any]:
    """Returns the values of a state in the order of a description, which a list already has.

    Raises GraphStructureError if a value is missing or unexpected.
    """
    if isinstance(state, list) and not isinstance(state, FlatState):
        return state
    is_flat = isinstance(state, Mapping) and all(path in state for path in graphdef.paths)
    flat: Any = state if is_flat else to_flat_state(state)
    found = dict(flat)
    missing = [path for path in graphdef.paths if path not in found]
    extra = set(found) - set(graphdef.paths)
    if missing or extra:
        what, paths = ("has no value for", missing) if missing else ("has values for", extra)
        shown = ", ".join(sorted(path_text(path) for path in paths)[:5]) + (
            " ..." if len(paths) > 5 else ""
        )
        raise GraphStructureError(
            f"the state {what} {shown}, which the description has"
            + ("; give all states that split returned." if missing else " not; remove it.")
        )
    return [found[path] for path in graphdef.paths]


def copies(leaves: Iterable[Any]) -> list[Any]:
    """Returns values with copies of the variables among them."""
    return [x.copy() if isinstance(x, Variable) else x for x in leaves]


def call(graphdef_state: tuple[Any, ...], /) -> Any:
    """Calls a method of a split object, given as its description and states, purely.

    Returns a proxy of the object; a call of it or its methods returns the result and the new pair.

    >>> class Counter(nnx.Module):
    ...     def __init__(self):
    ...         self.n = nnx.Variable(0)
    ...     def count(self, by):
    ...         self.n.set_value(self.n.get_value() + by)
    ...         return self.n.get_value()
    >>> n, (graphdef, state) = nnx.call(nnx.split(Counter())).count(3)
    >>> n, state.n.get_value()
    (3, 3)
    """
    graphdef, state, *states = graphdef_state
    return _MethodCaller((graphdef, merge_state(state, *states) if states else state), ())


class _MethodCaller:
    def __init__(self, graphdef_state: tuple[GraphDef, Any], path: tuple[Any, ...]):
        self._graphdef_state = graphdef_state
        self._path = path

    def __getattr__(self, name: str) -> "_MethodCaller":
        return _MethodCaller(self._graphdef_state, (*self._path, name))

    def __getitem__(self, key: object) -> "_MethodCaller":
        return _MethodCaller(self._graphdef_state, (*self._path, [key]))

    def __call__(self, *args: object, **kwargs: object) -> tuple[Any, tuple[GraphDef, State]]:
        graphdef, state = self._graphdef_state
        root = build_graph(graphdef, copies(leaves_of(graphdef, state)), share=True)[0]
        at = root
        for part in self._path:
            at = at[part[0]] if isinstance(part, list) else getattr(at, part)
        result = at(*args, **kwargs)
        flat = flatten_graph(root)
        return result, (flat.graphdef, from_flat_state(flat.items()))


def find_duplicates(node: Any, /, *, only: Any = ...) -> list[list[Path]]:
    """Returns the paths of objects and variables that occur more than once in a graph.

    Contents of a repeated object count below its first path only; `only` filters the objects.

    >>> shared = nnx.Param(1.0)
    >>> find_duplicates({"a": shared, "b": shared})
    [[('a',), ('b',)]]
    """
    matches = to_predicate(only)
    paths: dict[int, list[Path]] = {}
    seen: set[int] = set()

    def walk(x: object, path: Path) -> None:
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


def recursive_map(
    f: Callable[[Path, Any], Any], node: object, /, *, graph: bool | None = None
) -> Any:
    """Returns a copy of a graph with `f(path, x)` in place of each object and value, inner first.

    Objects and variables passed to `f` are copies. For `graph` see `nnx.iter_graph`.

    >>> recursive_map(lambda path, x: x * 2 if isinstance(x, int) else x, (1, {"a": 2}))
    (2, {'a': 4})
    """
    made: dict[int, Any] = {}
    is_tree = not settings.resolve_graph_options(graph)[0]
    if is_tree:
        flatten_graph(node, places=TreePlaces())

    def walk(x: object, path: Path) -> Any:
        if isinstance(x, Variable | Pytree):
            if is_tree or id(x) not in made:
                is_variable = isinstance(x, Variable)
                new: Any = x.copy() if is_variable else type(x)._from_items((), x._info.marks)
                # Registered before its contents are mapped, so that cycles lead back to it.
                made[id(x)] = new
                if not is_variable:
                    new._fill([(name, walk(v, (*path, name))) for name, v in x._items()])
                made[id(x)] = f(path, new)
            return made[id(x)]
        items = children(x)
        new = with_children(x, [walk(v, (*path, key)) for key, v in items]) if items else x
        return f(path, new)

    return walk(node, ())


class Change(NamedTuple):
    """Planned change of an object: its new description and attributes."""

    object: Any
    part: NodeDef
    items: list[tuple[Any, Any]]
    marks: dict[str, bool]


def check_changes(changes: Sequence[Change]) -> None:
    """Raises `TraceContextError` if an object may not be changed in this trace."""
    for made, *_ in changes:
        made._info.check(made)


def apply_changes(changes: Sequence[Change]) -> None:
    """Applies planned changes."""
    for made, part, items, marks in changes:
        if type(made) is not part.type:
            made.__class__ = part.type
        made._set_items(items, marks, part.order)


def plan_graph(
    graphdef: GraphDef,
    leaves: Iterable[Any],
    share: bool = False,
    existing: Mapping[int, Any] = _NOTHING,
    known: Mapping[int, Any] = _NOTHING,
) -> tuple[Any, list[Any], list[Change]]:
    """Returns the results of `build_graph`, and the changes that are still to be made."""
    leaves = list(leaves)
    if len(leaves) != graphdef.num_leaves:
        raise GraphStructureError(
            f"the description has {graphdef.num_leaves} values, and {len(leaves)} were given; give "
            "those that nnx.flatten returned."
        )
    rest = iter(leaves)
    objects: dict[int, Any] = dict(known)
    changes: list[Change] = []
    numbers: list[Any] = []  # values in place of arrays: their attributes stay data
    watch = versions.ObjectInfo()  # shared: all objects are made at the same place

    def build(part: Any) -> Any:
        kind = type(part)
        if kind is VariableDef:
            value = next(rest)
            if part.index in existing:
                made = existing[part.index]
            elif isinstance(value, Variable):
                made = value if share else value.copy(_copy_ref=False)
            else:
                made = part.type.from_metadata(value, dict(part.metadata.value))
            objects[part.index] = made
            return made
        if kind is StaticValue:
            return part.value
        if kind is LeafDef:
            value = next(rest)
            if not is_data(value):
                numbers.append(value)
            return value
        if kind is NodeRef:
            if part.index not in objects:
                raise GraphStructureError(
                    f"the description refers to object {part.index} of another one, with which it "
                    "was split; merge both in one nnx.merge_context(), that one first."
                )
            return objects[part.index]
        if part.index is None:
            return jax.tree.unflatten(part.marks, [build(below) for _, below in part.attributes])
        is_new = part.index not in existing
        made = part.type._new_like(watch) if is_new else existing[part.index]
        objects[part.index] = made
        # Fast path: most attributes are static.
        items = [
            (name, below.value if type(below) is StaticValue else build(below))
            for name, below in part.attributes
        ]
        marks = dict(part.marks)
        if numbers:
            marks |= {name: True for name, below in part.attributes if type(below) is LeafDef}
        change = Change(made, part, items, marks)
        if is_new:
            apply_changes([change])
            return made
        is_same = type(made) is part.type
        if not is_same or not made._has_items(items, marks, part.order):
            changes.append(change)
        return made

    root = build(graphdef.root)
    return root, [objects[i] for i in sorted(objects)], changes


def build_graph(
    graphdef: GraphDef,
    leaves: Iterable[Any],
    share: bool = False,
    existing: Mapping[int, Any] = _NOTHING,
    known: Mapping[int, Any] = _NOTHING,
) -> tuple[Any, list[Any]]:
    """Builds the graph of a description and values; returns the outermost object, and all by index.

    Args:
        leaves: for each value a variable, copied with its `jax.Ref`, or a variable's value.
        share: whether to use the given variables themselves.
        existing: objects to update by index; variables keep their values.
        known: objects of other descriptions that this one refers to, by index.

    Raises GraphStructureError if the number of values is wrong, or a referenced object is unknown.
    """
    root, objects, changes = plan_graph(graphdef, leaves, share, existing, known)
    check_changes(changes)
    apply_changes(changes)
    return root, objects
