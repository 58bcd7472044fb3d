"""Graphs of objects, converted to a description and values, and back.

The description, a `GraphDef`, has each object's class, static attributes, and positions of other
attributes: objects, variables, plain values, or references to earlier objects, which preserve
sharing. It is compared by value. The values are variables and arrays in traversal order.

A graph is built from both. All changes of existing objects are planned and checked before the first
is made, so that an error leaves every object unchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import jax

from weft.errors import GraphStructureError
from weft.lifting.static_keys import IdentityKey
from weft.nnx import settings, versions
from weft.nnx.filters import Filter, Path, to_predicate
from weft.nnx.pytree import (
    Pytree,
    TreePlaces,
    children,
    container_items,
    is_array,
    is_data,
    with_children,
)
from weft.nnx.state import (
    FlatState,
    State,
    from_flat_state,
    merge_state,
    path_text,
    to_flat_state,
)
from weft.nnx.variables import NO_METADATA, Variable, metadata_key
from weft.nnx.versions import (
    OTHER_STATIC_TYPES,
    PLAIN_TYPES,
    StaticPart,
    StaticValue,
    plain_static_value,
)
from weft.typing import PyTree

_NOTHING: Mapping[Any, Any] = MappingProxyType({})
Node = TypeVar("Node")
Part = Any
"""Part of a description: a `NodeDef`, `VariableDef`, `NodeRef`, `LeafDef` or `StaticValue`."""


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
    attributes: tuple[tuple[Hashable, Part], ...]
    marks: Any
    order: tuple[Hashable, ...] | None = None


_OBJECT_DEFS = (NodeDef, VariableDef)


class GraphDef(Generic[Node]):
    """Description of a graph; hashable, and equal for graphs that differ only in values.

    Attributes:
        outer: index pairs (here, before) of objects that `nnx.unflatten` updates.
    """

    def __init__(
        self,
        root: Part,
        paths: Sequence[Path],
        outer: Mapping[int, int] = _NOTHING,
    ):
        self.root = root
        self.paths = tuple(paths)
        self.outer = tuple(sorted(outer.items()))
        self._hash = hash(root)

    @property
    def num_leaves(self) -> int:
        """Number of values of the graph."""
        return len(self.paths)

    def apply(
        self, state: PyTree, *states: PyTree, graph: bool | None = None
    ) -> MethodCaller:
        """Calls a method purely; see `nnx.call`. Further states are merged."""
        return call((self, state, *states))

    @property
    def nodes(self) -> list[NodeDef | VariableDef]:
        """Objects and variables, in their order."""
        nodes: list[NodeDef | VariableDef] = []
        for part, _, _ in _parts(self.root):
            if isinstance(part, _OBJECT_DEFS):
                nodes.append(part)
        return nodes

    @property
    def attributes(self) -> list[tuple[Hashable, Part]]:
        """Attributes of all objects."""
        attributes: list[tuple[Hashable, Part]] = []
        for node in self.nodes:
            if isinstance(node, NodeDef):
                attributes.extend(node.attributes)
        return attributes

    def with_outer_index(self, outer: Mapping[int, int]) -> GraphDef[Node]:
        """Returns the description with the earlier indices of its objects."""
        return GraphDef(self.root, self.paths, outer)

    def with_no_outer_index(self) -> GraphDef[Node]:
        """Returns the description without earlier indices."""
        return self.with_outer_index(_NOTHING)

    def with_same_outer_index(self) -> GraphDef[Node]:
        """Returns the description whose objects keep their own indices."""
        return self.with_outer_index(
            {index: index for index in self._indices()}
        )

    def with_matching_outer_index(self, other: GraphDef[Any]) -> GraphDef[Node]:
        """Returns the description with the earlier indices that another one's `outer` has."""
        outer = dict(other.outer)
        # Of the other one's objects, those that this one has as well.
        own_indices = self._indices()
        return self.with_outer_index(
            {i: j for i, j in outer.items() if i in own_indices}
        )

    def _indices(self) -> set[int]:
        """Returns the indices of the objects, without containers, which have none."""
        return {node.index for node in self.nodes if node.index is not None}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GraphDef) or self._hash != other._hash:
            return False
        return self.root == other.root and self.outer == other.outer

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        root_type = getattr(self.root, "type", type(self.root))
        return f"GraphDef({root_type.__name__}, {len(self.nodes)} nodes, {self.num_leaves} leaves)"


jax.tree_util.register_static(GraphDef)


class _PlacedPart(NamedTuple):
    """Part of a description, its path, and for a plain value its object's index and name there."""

    part: Part
    path: Path
    owner: Owner


def _parts(
    part: Part, path: Path = (), owner: Owner = None
) -> Iterator[_PlacedPart]:
    """Yields the parts of a description, outer ones first."""
    yield _PlacedPart(part, path, owner)
    if not isinstance(part, NodeDef):
        return
    for name, attribute in part.attributes:
        if part.index is None:
            attribute_owner = _container_key(owner, name)
        else:
            attribute_owner = (part.index, name)
        yield from _parts(attribute, (*path, name), attribute_owner)


def first_paths(graphdef: GraphDef) -> dict[int, Path]:
    """Returns the first path of each object."""
    paths: dict[int, Path] = {}
    for part, path, _ in _parts(graphdef.root):
        if isinstance(part, _OBJECT_DEFS) and part.index is not None:
            paths[part.index] = path
    return paths


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
    leaves: list[PyTree]
    owners: list[Owner]
    objects: list[Any]
    repeated: list[tuple[int, Path]]
    is_tracked: bool

    def items(self) -> Iterator[tuple[Path, PyTree]]:
        """Returns the values with their paths."""
        return zip(self.graphdef.paths, self.leaves, strict=True)


# A model with the layer `a` at two places, and the number 3, is described as
#
#   NodeDef(Model, 0, (("a", NodeDef(Layer, 1, (("w", VariableDef(Param, 2)),))),
#                      ("b", NodeRef(1)),
#                      ("n", StaticValue(3))))
#
# with the leaves [a.w] at the paths [("a", "w")]. The indices count objects and variables in the
# order in which the walk enters them, so that equal graphs get equal descriptions.


class _Flattener:
    """Walk of a graph that describes its parts and collects its values, in one pass."""

    def __init__(
        self,
        with_metadata: bool,
        indices: Mapping[Any, int],
        places: TreePlaces | None,
    ) -> None:
        self.with_metadata = with_metadata
        self.places = places
        self.index_of_id = {id(x): index for x, index in indices.items()}
        self.next_index = 1 + max(self.index_of_id.values(), default=-1)
        self.objects: list[Any] = []
        self.repeated: list[tuple[int, Path]] = []
        self.leaves: list[PyTree] = []
        self.owners: list[Owner] = []
        self.paths: list[Path] = []
        self.is_tracked = True

    def describe(
        self, x: PyTree, path: Path, owner: Owner = None, is_data: bool = False
    ) -> Part:
        """Returns the description of a part; `is_data` if its attribute is marked as data."""
        if isinstance(x, Variable):
            return self._describe_variable(x, path)
        if isinstance(x, Pytree):
            return self._describe_object(x, path)
        if is_array(x):
            return self._describe_leaf(x, path, owner)
        contents = container_items(x)
        if contents is not None:
            # Lists and dicts can change unnoticed.
            self.is_tracked &= isinstance(x, tuple)
            items, structure = contents
            attributes: list[tuple[Hashable, Part]] = []
            for key, value in items:
                item_owner = _container_key(owner, key)
                part = self.describe(value, (*path, key), item_owner)
                attributes.append((key, part))
            return NodeDef(type(x), None, tuple(attributes), structure)
        if isinstance(x, _CONTAINERS):
            _check_no_objects(x, path)
        if is_data and x is not None:
            return self._describe_leaf(x, path, owner)
        return self._describe_static(x)

    def _describe_variable(
        self, x: Variable[Any], path: Path
    ) -> VariableDef | NodeRef:
        index = self._enter(x, path)
        if isinstance(index, NodeRef):
            return index
        self._describe_leaf(x, path, None)
        metadata = NO_METADATA
        if x._metadata:
            if not all(map(versions.is_immutable, x._metadata.values())):
                self.is_tracked = False
            if self.with_metadata:
                metadata = metadata_key(x)
        return VariableDef(type(x), index, metadata)

    def _describe_object(self, x: Pytree, path: Path) -> NodeDef | NodeRef:
        index = self._enter(x, path)
        if isinstance(index, NodeRef):
            return index
        marks = x._info.marks
        attributes: list[tuple[Hashable, Part]] = []
        for name, value in x._items():
            value_type = type(value)
            # Most attributes are static, so these come without a call of `describe`.
            if name in marks:
                part = self._describe_marked(x, name, value, (*path, name))
            elif value_type in PLAIN_TYPES:
                part = plain_static_value(value)
            elif value_type in OTHER_STATIC_TYPES:
                part = versions.static_value(value)
            else:
                part = self.describe(value, (*path, name), (x, name))
            attributes.append((name, part))
        if self.places is not None:
            self.places.leave(x)
        return NodeDef(
            type(x), index, tuple(attributes), x._marks(), x._order()
        )

    def _describe_marked(
        self, x: Pytree, name: Hashable, value: PyTree, path: Path
    ) -> Part:
        """Returns the description of an attribute that was marked as data or as static."""
        if x._info.marks[name] or _holds_containers(value):
            return self.describe(value, path, (x, name), is_data=True)
        return self._describe_static(value)

    def _describe_static(self, x: StaticPart) -> StaticValue:
        self.is_tracked = self.is_tracked and versions.is_immutable(x)
        return versions.static_value(x)

    def _enter(self, x: Pytree | Variable[Any], path: Path) -> int | NodeRef:
        """Returns a new index for an object, or a reference to it if it was met before."""
        if self.places is not None:
            self.places.enter(x, path)
            self.index_of_id.pop(id(x), None)  # a tree has no references
        new_index = self.next_index
        index = self.index_of_id.setdefault(id(x), new_index)
        if index != new_index:
            self.repeated.append((index, path))
            return NodeRef(index)
        self.next_index += 1
        self.objects.append(x)
        return index

    def _describe_leaf(self, x: PyTree, path: Path, owner: Owner) -> LeafDef:
        self.leaves.append(x)
        self.owners.append(owner)
        self.paths.append(path)
        return _LEAF_DEF


def _holds_containers(x: PyTree) -> bool:
    """Returns whether a static value is a `List` or `Dict`, or a tuple of them, without data."""
    if type(x) is tuple:
        return any(map(_holds_containers, x))
    return isinstance(x, Pytree)


def _container_key(owner: Owner, key: Hashable) -> Owner:
    """Returns the owner of a value with a key in a container, given that of the container."""
    if owner is None:
        return None
    x, place = owner
    if isinstance(place, ContainerKey):
        return x, ContainerKey(place.name, (*place.keys, key))
    return x, ContainerKey(place, (key,))


_CONTAINERS = (list, tuple, dict)


def _check_no_objects(
    x: list[Any] | tuple[Any, ...] | dict[Any, Any], path: Path
) -> None:
    """Rejects objects in a container unknown to JAX, where they would be constants."""
    items = x.values() if isinstance(x, dict) else x
    for item in items:
        if isinstance(item, Variable | Pytree):
            location = ".".join(map(str, path)) or "the top"
            raise GraphStructureError(
                f"the {type(x).__name__} at {location} holds a "
                f"{type(item).__name__}, but is not a pytree to JAX; use nnx.List or nnx.Dict, or "
                "register the class with jax.tree_util."
            )


def flatten_graph(
    x: PyTree,
    with_metadata: bool = True,
    indices: Mapping[Any, int] = _NOTHING,
    places: TreePlaces | None = None,
) -> FlatGraph:
    """Splits a graph into a description, by default with variables' metadata, and values.

    `indices` are those of objects of another description that this one refers to. With `places`
    it is a tree, and an object is another one at each of its places.
    """
    flattener = _Flattener(with_metadata, indices, places)
    root = flattener.describe(x, ())
    return FlatGraph(
        GraphDef(root, flattener.paths),
        flattener.leaves,
        flattener.owners,
        flattener.objects,
        flattener.repeated,
        flattener.is_tracked,
    )


def flat_graph_of_variables(
    graphdef: GraphDef, objects: list[Any]
) -> FlatGraph:
    """Returns a graph whose values are all variables, and in which nothing can change unnoticed."""
    leaves = [x for x in objects if isinstance(x, Variable)]
    return FlatGraph(
        graphdef,
        leaves,
        owners=[None] * len(leaves),
        objects=objects,
        repeated=[],
        is_tracked=True,
    )


def matching_objects(
    items: Sequence[tuple[Hashable, Any]],
    descriptions: Sequence[tuple[Hashable, Part]],
) -> list[Any] | None:
    """Returns the objects and variables of a graph that equals a description, found quickly.

    None if something differs from its description, or may change unnoticed.

    Args:
        items: names or indices, with the values to compare.
        descriptions: the same with descriptions of objects without repeated objects, whose values
            are all variables, and in which nothing can change unnoticed.
    """
    objects: list[Any] = []
    if not _matches(items, descriptions, objects):
        return None
    has_repeated = len({*map(id, objects)}) < len(objects)
    return None if has_repeated else objects


def _matches(
    items: Sequence[tuple[Hashable, Any]],
    descriptions: Sequence[tuple[Hashable, Part]],
    objects: list[Any],
) -> bool:
    """Returns whether items match their descriptions; adds their objects to `objects`."""
    if len(items) != len(descriptions):
        return False
    for (name, x), (described_name, part) in zip(
        items, descriptions, strict=True
    ):
        if name != described_name:
            return False
        part_type = type(part)
        if part_type is StaticValue:
            # The same function may close over other values now, so compare by value.
            is_same = type(x) in PLAIN_TYPES and x is part.value
            is_alike = is_same or versions.static_value(x) == part
        elif type(x) is not part.type:
            is_alike = False
        elif part_type is VariableDef:
            objects.append(x)
            is_alike = not x._metadata or all(
                map(versions.is_immutable, x._metadata.values())
            )
        elif part.index is None:  # a container: only a tuple can't change
            is_alike = type(x) is tuple and _matches(
                [*enumerate(x)], part.attributes, objects
            )
        else:
            objects.append(x)
            is_alike = x._marks() == part.marks and x._order() == part.order
            is_alike = is_alike and _matches(
                x._items(), part.attributes, objects
            )
        if not is_alike:
            return False
    return True


def leaf_defs(
    graphdef: GraphDef,
) -> Iterator[tuple[VariableDef | LeafDef, tuple[int, Hashable] | None]]:
    """Yields the definition of each value, the index of its object and its place there.

    Variables have None in place of the last two.
    """
    for part, _, owner in _parts(graphdef.root):
        if isinstance(part, VariableDef):
            yield part, None
        elif isinstance(part, LeafDef):
            yield part, owner


def mutable_static_values(flat: FlatGraph) -> tuple[IdentityKey, ...]:
    """Returns the static values of a graph that can change, each equal to itself alone."""
    values: list[StaticPart] = []
    for part, _, _ in _parts(flat.graphdef.root):
        if isinstance(part, StaticValue):
            values.append(part.value)
    for leaf in flat.leaves:
        if isinstance(leaf, Variable):
            values.extend(leaf._metadata.values())
    return tuple(versions.mutable_parts(tuple(values)))


def unhashable_static_values(
    graphdef: GraphDef, is_unchanged: bool = False
) -> list[StaticPart]:
    """Returns the unhashable static values; with `is_unchanged`, without changed ones."""
    values: list[StaticPart] = []
    for part, _, _ in _parts(graphdef.root):
        if not isinstance(part, StaticValue):
            continue
        if versions.is_hashable(part.value):
            continue
        if not is_unchanged or StaticValue(part.value) == part:
            values.append(part.value)
    return values


def with_static_values(
    graphdef: GraphDef, values: Iterable[StaticPart]
) -> GraphDef:
    """Returns an equal description with other, pairwise equal `unhashable_static_values`."""
    remaining_values = iter(values)

    def with_values(part: Part) -> Part:
        if isinstance(part, StaticValue):
            if versions.is_hashable(part.value):
                return part
            return part.with_value(next(remaining_values))
        if isinstance(part, NodeDef):
            attributes: list[tuple[Hashable, Part]] = []
            for name, attribute in part.attributes:
                attributes.append((name, with_values(attribute)))
            return part._replace(attributes=tuple(attributes))
        return part

    root = with_values(graphdef.root)
    return GraphDef(root, graphdef.paths, dict(graphdef.outer))


def with_plain_values(
    graphdef: GraphDef, leaves: Sequence[PyTree]
) -> tuple[GraphDef, list[PyTree]]:
    """Returns a description in which values in place of variables are attributes, and its values.

    They are at each place of a shared variable.
    """
    remaining_leaves = iter(leaves)
    value_of_variable: dict[int, PyTree] = {}
    values: list[PyTree] = []
    paths: list[Path] = []

    def with_values(part: Part, path: Path) -> Part:
        if isinstance(part, NodeDef):
            attributes: list[tuple[Hashable, Part]] = []
            for name, attribute in part.attributes:
                attribute = with_values(attribute, (*path, name))
                attributes.append((name, attribute))
            return part._replace(attributes=tuple(attributes))
        if isinstance(part, LeafDef):
            value = next(remaining_leaves)
        elif isinstance(part, VariableDef):
            value = next(remaining_leaves)
            value_of_variable[part.index] = value
        elif isinstance(part, NodeRef) and part.index in value_of_variable:
            value = value_of_variable[part.index]
            if isinstance(value, Variable):
                return part  # still shared
        else:
            return part
        values.append(value)
        paths.append(path)
        if isinstance(part, VariableDef) and isinstance(value, Variable):
            return part
        return _LEAF_DEF

    return GraphDef(with_values(graphdef.root, ()), paths), values


def leaves_of(graphdef: GraphDef, state: PyTree) -> list[PyTree]:
    """Returns the values of a state in the order of a description, which a list already has.

    Raises GraphStructureError if a value is missing or unexpected.
    """
    if isinstance(state, list) and not isinstance(state, FlatState):
        return state
    paths = graphdef.paths
    # A dict by path, or else a nested state.
    is_by_path = isinstance(state, Mapping) and all(p in state for p in paths)
    value_of_path = dict(state if is_by_path else to_flat_state(state))
    missing = [path for path in paths if path not in value_of_path]
    if missing:
        raise GraphStructureError(
            f"the state has no value for {_first_paths_text(missing)}, which the description has; "
            "give all states that split returned."
        )
    unexpected = value_of_path.keys() - set(paths)
    if unexpected:
        raise GraphStructureError(
            f"the state has values for {_first_paths_text(unexpected)}, which the description has "
            "not; remove it."
        )
    return [value_of_path[path] for path in paths]


def _first_paths_text(paths: Collection[Path]) -> str:
    first_paths = sorted(map(path_text, paths))[:5]
    suffix = " ..." if len(paths) > len(first_paths) else ""
    return ", ".join(first_paths) + suffix


def copies(leaves: Iterable[PyTree]) -> list[PyTree]:
    """Returns values with copies of the variables among them."""
    return [x.copy() if isinstance(x, Variable) else x for x in leaves]


class _Item(NamedTuple):
    """Item on the path to a method; an attribute is its name alone."""

    key: Hashable


def call(graphdef_state: tuple[Any, ...], /) -> MethodCaller:
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
    graphdef, state, *further_states = graphdef_state
    if further_states:
        state = merge_state(state, *further_states)
    return MethodCaller(graphdef, state, ())


class MethodCaller:
    """Method, attribute or item of a split object, which `path` leads to."""

    def __init__(
        self, graphdef: GraphDef, state: PyTree, path: tuple[str | _Item, ...]
    ):
        self._graphdef = graphdef
        self._state = state
        self._path = path

    def __getattr__(self, name: str) -> MethodCaller:
        return MethodCaller(self._graphdef, self._state, (*self._path, name))

    def __getitem__(self, key: Hashable) -> MethodCaller:
        path = (*self._path, _Item(key))
        return MethodCaller(self._graphdef, self._state, path)

    def __call__(
        self, *args: PyTree, **kwargs: PyTree
    ) -> tuple[Any, tuple[GraphDef, State]]:
        leaves = copies(leaves_of(self._graphdef, self._state))
        root, _ = build_graph(self._graphdef, leaves, share=True)
        method = root
        for part in self._path:
            if isinstance(part, _Item):
                method = method[part.key]
            else:
                method = getattr(method, part)
        result = method(*args, **kwargs)
        flat = flatten_graph(root)
        return result, (flat.graphdef, from_flat_state(flat.items()))


def find_duplicates(node: PyTree, /, *, only: Filter = ...) -> list[list[Path]]:
    """Returns the paths of objects and variables that occur more than once in a graph.

    Contents of a repeated object count below its first path only; `only` filters the objects.

    >>> shared = nnx.Param(1.0)
    >>> find_duplicates({"a": shared, "b": shared})
    [[('a',), ('b',)]]
    """
    matches = to_predicate(only)
    paths_of_id: dict[int, list[Path]] = {}
    visited_ids: set[int] = set()

    def walk(x: PyTree, path: Path) -> None:
        if isinstance(x, Variable | Pytree):
            if matches(path, x):
                paths_of_id.setdefault(id(x), []).append(path)
            if id(x) in visited_ids:
                return
            visited_ids.add(id(x))
        for key, value in children(x):
            walk(value, (*path, key))

    walk(node, ())
    return [paths for paths in paths_of_id.values() if len(paths) > 1]


def recursive_map(
    f: Callable[[Path, Any], PyTree],
    node: PyTree,
    /,
    *,
    graph: bool | None = None,
) -> PyTree:
    """Returns a copy of a graph with `f(path, x)` in place of each object and value, inner first.

    Objects and variables passed to `f` are copies. For `graph` see `nnx.iter_graph`.

    >>> recursive_map(lambda path, x: x * 2 if isinstance(x, int) else x, (1, {"a": 2}))
    (2, {'a': 4})
    """
    copy_of_id: dict[int, PyTree] = {}
    is_graph, _ = settings.resolve_graph_options(graph)
    if not is_graph:
        flatten_graph(node, places=TreePlaces())  # which checks it

    def walk(x: PyTree, path: Path) -> PyTree:
        if isinstance(x, Variable | Pytree):
            if not is_graph or id(x) not in copy_of_id:
                copy_of_id[id(x)] = f(path, copied(x, path))
            return copy_of_id[id(x)]
        items = mapped_items(children(x), path)
        if items:
            x = with_children(x, [value for _, value in items])
        return f(path, x)

    def copied(x: Variable[Any] | Pytree, path: Path) -> PyTree:
        if isinstance(x, Variable):
            return x.copy()
        copy = type(x)._from_items((), x._info.marks)
        # Registered before its contents are mapped, so that cycles lead back to it.
        copy_of_id[id(x)] = copy
        copy._fill(mapped_items(x._items(), path))
        return copy

    def mapped_items(
        items: list[tuple[Hashable, PyTree]], path: Path
    ) -> list[tuple[Hashable, PyTree]]:
        return [(name, walk(value, (*path, name))) for name, value in items]

    return walk(node, ())


class Change(NamedTuple):
    """Planned change of an object: its new description and attributes."""

    object: Any
    part: NodeDef
    items: list[tuple[Hashable, PyTree]]
    marks: dict[Any, bool]


def check_changes(changes: Sequence[Change]) -> None:
    """Raises `TraceContextError` if an object may not be changed in this trace."""
    for change in changes:
        change.object._info.check(change.object)


def apply_changes(changes: Sequence[Change]) -> None:
    """Applies planned changes."""
    for x, part, items, marks in changes:
        if type(x) is not part.type:
            x.__class__ = part.type
        x._set_items(items, marks, part.order)


def plan_graph(
    graphdef: GraphDef,
    leaves: Iterable[PyTree],
    share: bool = False,
    existing: Mapping[int, Any] = _NOTHING,
    known_objects: Mapping[int, Any] = _NOTHING,
) -> tuple[Any, list[Any], list[Change]]:
    """Returns the results of `build_graph`, and the changes that are still to be made."""
    leaves = list(leaves)
    if len(leaves) != graphdef.num_leaves:
        raise GraphStructureError(
            f"the description has {graphdef.num_leaves} values, and {len(leaves)} were given; give "
            "those that nnx.flatten returned."
        )
    builder = _Builder(leaves, share, existing, known_objects)
    root = builder.build(graphdef.root)
    objects = [builder.objects[i] for i in sorted(builder.objects)]
    return root, objects, builder.changes


class _Builder:
    """Walk of a description that makes its objects, and plans changes of existing ones.

    Attributes:
        objects: by index; those of other descriptions at first.
    """

    def __init__(
        self,
        leaves: Iterable[PyTree],
        share: bool,
        existing: Mapping[int, Any],
        known_objects: Mapping[int, Any],
    ):
        self._leaves = iter(leaves)
        self._share = share
        self._existing = existing
        self.objects: dict[int, Any] = dict(known_objects)
        self.changes: list[Change] = []
        # Whether numbers are in place of arrays: their attributes stay data.
        self._has_numbers = False
        # Shared, as all objects are made at the same place.
        self._info = versions.ObjectInfo()

    def build(self, part: Part) -> PyTree:
        """Returns what a part describes."""
        part_type = type(part)
        if part_type is VariableDef:
            return self._variable(part)
        if part_type is StaticValue:
            return part.value
        if part_type is LeafDef:
            value = next(self._leaves)
            if not is_data(value):
                self._has_numbers = True
            return value
        if part_type is NodeRef:
            if part.index not in self.objects:
                raise GraphStructureError(
                    f"the description refers to object {part.index} of another one, with which it "
                    "was split; merge both in one nnx.merge_context(), that one first."
                )
            return self.objects[part.index]
        if part.index is None:
            contents = [self.build(value) for _, value in part.attributes]
            return jax.tree.unflatten(part.marks, contents)
        return self._object(part)

    def _variable(self, part: VariableDef) -> Variable[Any]:
        value = next(self._leaves)
        if part.index in self._existing:
            variable = self._existing[part.index]
        elif not isinstance(value, Variable):
            variable = part.type.from_metadata(value, dict(part.metadata.value))
        elif self._share:
            variable = value
        else:
            variable = value.copy(_copy_ref=False)
        self.objects[part.index] = variable
        return variable

    def _object(self, part: NodeDef) -> Pytree:
        assert part.index is not None
        is_new = part.index not in self._existing
        if is_new:
            x = part.type._new_like(self._info)
        else:
            x = self._existing[part.index]
        # Before its attributes, which may refer to it.
        self.objects[part.index] = x
        items: list[tuple[Hashable, PyTree]] = []
        for name, attribute in part.attributes:
            # Most attributes are static, so these come without a call of `build`.
            if type(attribute) is StaticValue:
                value = attribute.value
            else:
                value = self.build(attribute)
            items.append((name, value))
        marks = dict(part.marks)
        if self._has_numbers:
            for name, attribute in part.attributes:
                if type(attribute) is LeafDef:
                    marks[name] = True
        change = Change(x, part, items, marks)
        if is_new:
            apply_changes([change])
            return x
        is_same_class = type(x) is part.type
        if not is_same_class or not x._has_items(items, marks, part.order):
            self.changes.append(change)
        return x


def build_graph(
    graphdef: GraphDef,
    leaves: Iterable[PyTree],
    share: bool = False,
    existing: Mapping[int, Any] = _NOTHING,
    known_objects: Mapping[int, Any] = _NOTHING,
) -> tuple[Any, list[Any]]:
    """Builds the graph of a description and values; returns the outermost object, and all by index.

    Args:
        leaves: for each value a variable, copied with its `jax.Ref`, or a variable's value.
        share: whether to use the given variables themselves.
        existing: objects to update by index; variables keep their values.
        known_objects: objects of other descriptions that this one refers to, by index.

    Raises GraphStructureError if the number of values is wrong, or a referenced object is unknown.
    """
    root, objects, changes = plan_graph(
        graphdef, leaves, share, existing, known_objects
    )
    check_changes(changes)
    apply_changes(changes)
    return root, objects
