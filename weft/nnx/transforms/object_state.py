"""The static half of a call's objects, and their state inside the call.

Each value in the objects of a call has a number, its position in the order of traversal. A group
of an object's state maps numbers to leaves: a variable, or the array in an attribute.

A leaf that a custom rule has returned unchanged is marked as a `PassedValue`. It has the gradient
of the rule, so it is written like a changed one, except where only real changes are refused: in
objects that all iterations of a loop share, and in captured ones.

A loop keeps the structure of the objects that it carries or shares; `check_loop_graph` refuses
changes. A new variable in the place of a carried one counts as the same.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from weft.lifting import CARRY, static_keys
from weft.lifting.roles import Role
from weft.nnx import graph
from weft.nnx.filters import Everything, OfType, Path, Predicate, to_predicate
from weft.nnx.pytree import Pytree
from weft.nnx.transforms import calls, graph_diff
from weft.nnx.transforms.graph_diff import Difference, NumberedGraph
from weft.nnx.variables import Variable
from weft.nnx.versions import StaticSnapshot, StaticValue, mutable_parts
from weft.typing import PyTree

Object = Pytree | Variable[Any]
Leaf = Any  # a variable, or an array (or other data) in an attribute
LeafKey = tuple[int, Hashable]
Group = dict[int, Leaf]
Groups = tuple[Group, ...]
FilterRoles = tuple[tuple[Any, Any], ...]
Filters = Sequence[FilterRoles]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PassedValue:
    """Mark of a leaf that custom rules have returned unchanged."""

    value: Leaf


def without_mark(leaf: Leaf) -> Leaf:
    """Returns a leaf of a group, also if it is marked as a `PassedValue`."""
    return leaf.value if isinstance(leaf, PassedValue) else leaf


def value_of_leaf(leaf: Leaf) -> PyTree:
    """Returns the value of a variable, or another leaf itself."""
    if isinstance(leaf, Variable):
        return leaf._value
    return value_of_leaf(leaf.value) if isinstance(leaf, PassedValue) else leaf


def with_value(leaf: Leaf, value: PyTree) -> Leaf:
    """Returns a leaf like another one, with its mark, and with another value."""
    if isinstance(leaf, PassedValue):
        return PassedValue(with_value(leaf.value, value))
    if isinstance(leaf, Variable):
        return leaf.copy(value, _copy_ref=False)
    return value


def empty_groups(filters: Iterable[Sequence[Any]]) -> list[Groups]:
    """Returns an empty group for each filter of each object."""
    groups: list[Groups] = []
    for object_filters in filters:
        groups.append(tuple([{} for _ in object_filters]))
    return groups


def merged_groups(groups: Iterable[Iterable[Group]]) -> Group:
    """Returns the entries of all groups of all objects, which have different numbers."""
    merged: Group = {}
    for object_groups in groups:
        for group in object_groups:
            merged.update(group)
    return merged


class ValuePlace(NamedTuple):
    """Place of a value: among the arguments (0) or the results (1), in an object and a group.

    It is unpacked to `part, i, g` where it is used.
    """

    part: int
    object: int
    group: int


class StaticObjects(NamedTuple):
    """The static half of a call's objects.

    Attributes:
        graphdef: describes the pair of the objects and no results, without metadata.
        places: the place of each value.
        owners: for each value that is not a variable, the index of its object and its attribute.
        is_tracked: whether all values are variables, and no static value is mutable.
        changing: mutable static values, compared by identity as well, since a program would
            otherwise serve another object of equal value with the changes of the first one.
    """

    graphdef: graph.GraphDef
    places: tuple[ValuePlace, ...]
    owners: tuple[tuple[int, Hashable] | None, ...]
    is_tracked: bool
    changing: tuple[static_keys.IdentityKey, ...]

    def path_of(self, number: int) -> Path | None:
        """Returns the path of an input value."""
        paths = self.graphdef.paths
        return paths[number] if 0 <= number < len(paths) else None

    def described(self) -> NumberedGraph:
        """Returns the graph with the index of each object as its number."""
        num_objects = len(graph.first_paths(self.graphdef))
        return NumberedGraph(self.graphdef, range(num_objects))


class ChangedObjects(NamedTuple):
    """The graph after a call, of the input objects and of the results.

    Attributes:
        origins: for each object the index of the input one, None for a new one.
        keys: for each value the number of the input one, or a number after those.
        copies: copies of new `unhashable_values`, for each caller; None if nothing is mutable.
        replaced: numbers of input values whose variable or object was replaced by a new one.
    """

    graphdef: graph.GraphDef
    origins: tuple[int | None, ...]
    keys: tuple[int, ...]
    copies: StaticSnapshot | None
    replaced: frozenset[int] = frozenset()

    def described(self) -> NumberedGraph:
        return NumberedGraph(self.graphdef, self.origins)


class InnerObjects(NamedTuple):
    """The objects inside a call, with their variables and arrays, and the initial values of these.

    `snapshots` are the initial parts of each object, if they show all changes.
    """

    static: StaticObjects
    objects: list[Object]
    leaves: list[Leaf]
    values: list[PyTree]
    metadata: list[dict[str, Any] | None]
    snapshots: list[tuple[Pytree, list[Any]]] | None

    def has_same_structure(self) -> bool:
        """Returns whether only values and metadata of variables can have changed."""
        if self.snapshots is None:
            return False
        return all(
            are_identical(x._snapshot(), snapshot)
            for x, snapshot in self.snapshots
        )

    def has_same_graph(self, flat: graph.FlatGraph) -> bool:
        """Returns whether references and static values are those of the arguments."""
        initial_graphdef = self.static.graphdef
        if (
            not are_identical(flat.objects, self.objects)
            or flat.graphdef != initial_graphdef
        ):
            return False
        if not self.static.changing:
            return True
        return _keeps_mutable_values(initial_graphdef, flat.graphdef)

    def numbers(self) -> dict[LeafKey, int]:
        """Returns the numbers of the values, by `leaf_key`."""
        number_of: dict[LeafKey, int] = {}
        for n, (leaf, owner) in enumerate(
            zip(self.leaves, self.static.owners, strict=True)
        ):
            if owner is not None:
                object_index, attribute = owner
                owner = self.objects[object_index], attribute
            number_of[leaf_key(leaf, owner)] = n
        return number_of

    def is_changed(self, leaf: Leaf, n: int) -> bool:
        """Returns whether a value, or a variable's metadata, differs from its initial one."""
        value = leaf
        if isinstance(leaf, Variable):
            value = leaf._value
            if leaf._metadata is not self.metadata[n]:
                return True
        initial_value = self.values[n]
        if value is initial_value:
            return False
        # The value may be a tree that was built again from the same arrays.
        return not _is_same_value(initial_value, value)

    def is_passed(self, leaf: Leaf, owner: graph.Owner, n: int) -> bool:
        """Returns whether custom rules alone have replaced the initial value."""
        rule_value = _rule_value(leaf, owner)
        if rule_value is None:
            return False
        if owner is None and leaf._metadata is not self.metadata[n]:
            return False
        is_initial = _is_same_value(rule_value.initial, self.values[n])
        return is_initial and _is_same_value(
            rule_value.returned, value_of_leaf(leaf)
        )


def leaf_key(leaf: Leaf, owner: graph.Owner) -> LeafKey:
    """Returns what identifies a value: its variable, or its owner and the attribute there."""
    if owner is None:
        return id(leaf), None
    x, attribute = owner
    return id(x), attribute


class _GroupRole(NamedTuple):
    """Filter of the entries that are in a group of an object, and the group's role."""

    matches: Predicate
    role: Role


class Grouping:
    """The groups of values, and the roles of these groups."""

    def __init__(self, arg_filters: Filters, result_filters: Filters):
        # By the beginnings of paths: 0 for arguments or 1 for results, and an object's index.
        self._groups: dict[Path, list[_GroupRole]] = {}
        for part, objects in enumerate((arg_filters, result_filters)):
            for i, filter_roles in enumerate(objects):
                groups: list[_GroupRole] = []
                for where, role in filter_roles:
                    groups.append(_GroupRole(to_predicate(where), role))
                self._groups[part, i] = groups

    def place(self, path: Path, leaf: Leaf) -> ValuePlace:
        """Returns the place of a value in the first group whose filter matches it.

        Raises StateFilterError if no filter matches.
        """
        groups = self._groups[path[:2]]
        for g, (matches, _) in enumerate(groups):
            # Most filters are of this class, whose call costs more than the comparison.
            if type(matches) is Everything or matches(path[2:], leaf):
                return ValuePlace(path[0], path[1], g)  # pyright: ignore[reportArgumentType]
        filters = [group.matches for group in groups]
        raise calls.unmatched_error(leaf, path, filters)

    @property
    def depends_only_on_structure(self) -> bool:
        """True if equal graph descriptions always have the same groups."""
        for groups in self._groups.values():
            for group in groups:
                if not isinstance(group.matches, Everything | OfType):
                    return False
        return True

    def role(self, path: Path, leaf: Leaf) -> Role:
        """Returns the role of a value."""
        g = self.place(path, leaf).group
        return self._groups[path[:2]][g].role

    def roles(self, path: Path) -> list[Role]:
        """Returns the roles of all groups of the object at the beginning of a path."""
        return [group.role for group in self._groups[path[:2]]]

    def is_mapped(self, flat: graph.FlatGraph, path: Path) -> bool:
        """Returns whether all values of a graph below a path have an axis."""
        roles: list[Role] = []
        for leaf_path, leaf in flat.items():
            if leaf_path[: len(path)] == path:
                roles.append(self.role(leaf_path, leaf))
        # Without values, all groups count that could have some.
        return all(isinstance(role, int) for role in roles or self.roles(path))

    def is_carried(self, path: Path) -> bool:
        """Returns whether a loop carries a part of the argument at the beginning of a path."""
        return any(role is CARRY for role in self.roles(path))

    def is_same(self, path: Path, other_path: Path) -> bool:
        """Returns whether the objects at two paths have the same single group."""
        groups = self._groups[path[:2]]
        other_groups = self._groups[other_path[:2]]
        if len(groups) != 1 or len(other_groups) != 1:
            return False
        group, other = groups[0], other_groups[0]
        return (group.matches, group.role) == (other.matches, other.role)


def are_identical(xs: Sequence[Any], ys: Sequence[Any]) -> bool:
    """Returns whether two lists hold the same objects."""
    return len(xs) == len(ys) and all(map(operator.is_, xs, ys))


def _is_same_value(x: PyTree, y: PyTree) -> bool:
    """Returns whether two trees have the same structure, and the same leaves by identity."""
    x_leaves, x_tree = jax.tree.flatten(x)
    y_leaves, y_tree = jax.tree.flatten(y)
    return are_identical(x_leaves, y_leaves) and x_tree == y_tree


def is_differentiable(leaf: Leaf) -> bool:
    """Returns whether a value, or a variable's one, has arrays of floats and no `jax.Ref`."""
    has_floats = False
    for x in jax.tree.leaves(value_of_leaf(leaf)):
        if isinstance(x, jax.Ref):
            return False
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact):
            has_floats = True
    return has_floats


class _RuleValue(NamedTuple):
    """Pair of the initial value, and the equal one that custom rules have returned for it."""

    initial: PyTree
    returned: PyTree


def note_passed(leaf: Leaf, owner: graph.Owner, value: Leaf) -> None:
    """Notes, before `value` is written, that it is the present value out of a custom rule.

    A variable keeps both values in `_passed`, an object those of its arrays in `_info.passed`.
    """
    initial = value_of_leaf(leaf)
    earlier = _rule_value(leaf, owner)
    if earlier is not None and _is_same_value(earlier.returned, initial):
        # The initial value of a rule inside another one is that of the outer one.
        initial = earlier.initial
    rule_value = _RuleValue(initial, value_of_leaf(value))
    if owner is None:
        object.__setattr__(leaf, "_passed", rule_value)
        return
    x, attribute = owner
    passed = dict(getattr(x._info, "passed", {}))
    passed[attribute] = rule_value
    x._info.passed = passed


def _rule_value(leaf: Leaf, owner: graph.Owner) -> _RuleValue | None:
    """Returns what `note_passed` has noted last for a value."""
    if owner is None:
        return getattr(leaf, "_passed", None)
    x, attribute = owner
    return getattr(x._info, "passed", {}).get(attribute)


def _keeps_mutable_values(
    input_graphdef: graph.GraphDef, output_graphdef: graph.GraphDef
) -> bool:
    """Returns whether no mutable static value replaces a different, possibly equal, input one."""
    input_values = _mutable_values(input_graphdef)
    output_values = _mutable_values(output_graphdef)
    # The values are equal, since the descriptions are. The caller's objects have to be told if
    # another one of them is now in a place; a new value counts as the equal old one.
    distinct_inputs = set(input_values)
    for output_value, input_value in zip(
        output_values, input_values, strict=True
    ):
        if output_value != input_value and output_value in distinct_inputs:
            return False
    return True


def _mutable_values(
    graphdef: graph.GraphDef, is_unchanged: bool = False
) -> list[static_keys.IdentityKey]:
    """Returns the parts of static values that can change; see `unhashable_static_values`."""
    values = graph.unhashable_static_values(graphdef, is_unchanged)
    return list(mutable_parts(tuple(values)))


def static_snapshot(
    flat: graph.FlatGraph, input_graphdef: graph.GraphDef
) -> StaticSnapshot | None:
    """Returns a snapshot of the mutable static values of a graph, None if it cannot have any."""
    if flat.is_tracked:
        return None
    unchanged = _mutable_values(input_graphdef, is_unchanged=True)
    values = graph.unhashable_static_values(flat.graphdef)
    return StaticSnapshot(values, [key.value for key in unchanged])


def changed_loop_arrays(
    inner: InnerObjects, flat: graph.FlatGraph, filters: Filters
) -> Group:
    """Returns the arrays in attributes of the carry that a loop's body changed, by number.

    Without graph updates, these and values of variables are all that a loop can carry. Other
    changes of the carry are refused; those of objects that are not carried are dropped.

    Args:
        flat: the arguments after the body.
    """
    static = inner.static
    # Variables have an identity, other objects and arrays only a path.
    input_paths = static.graphdef.paths
    numbers_by_path = dict(
        zip(input_paths, range(len(input_paths)), strict=True)
    )
    changed: Group = {}
    for (path, leaf), owner in zip(flat.items(), flat.owners, strict=True):
        n = numbers_by_path.get(path)
        if n is None or owner is None or not inner.is_changed(leaf, n):
            continue
        _, i, g = static.places[n]
        _, role = filters[i][g]
        if role is CARRY:
            changed[n] = leaf
        elif not inner.is_passed(leaf, owner, n):
            calls.warn_of_dropped_structure(path, "replaces the array")

    index_of_variable: dict[int, int] = {}
    for i, x in enumerate(inner.objects):
        if isinstance(x, Variable):
            index_of_variable[id(x)] = i
    index_of_path: dict[Path, int] = {}
    for i, path in graph.first_paths(static.graphdef).items():
        index_of_path[path] = i
    paths = graph.first_paths(flat.graphdef)
    origins: list[int | None] = []
    for i, x in enumerate(flat.objects):
        if isinstance(x, Variable):
            origins.append(index_of_variable.get(id(x)))
        else:
            origins.append(index_of_path.get(paths[i]))
    grouping = Grouping(filters, ())
    for difference in _changes_of_arguments(static, flat, origins):
        path, change = difference.path, _change_text(difference)
        if grouping.is_carried(path):
            raise calls.loop_change_error(path, change)
        calls.warn_of_dropped_structure(path, change)
    return changed


def check_loop_graph(
    static: StaticObjects,
    flat: graph.FlatGraph,
    origins: Sequence[int | None],
    grouping: Grouping,
) -> None:
    """Raises LoopStructureError for changes that a loop with graph updates cannot have.

    Each iteration has its own part of a mapped object. Static values of a shared one are the same
    at the beginning of each iteration, and so at its end.

    Args:
        flat: the arguments and results after the body.
        origins: for each object there the index of the input one, also if it replaces that.
    """
    for difference in _changes_of_arguments(static, flat, origins):
        path = difference.path
        is_static = all(
            part is None or isinstance(part, StaticValue)
            for part in difference.parts
        )
        is_shared_static = is_static and not grouping.is_carried(path)
        if not is_shared_static and not grouping.is_mapped(flat, path):
            raise calls.loop_change_error(path, _change_text(difference))


def _changes_of_arguments(
    static: StaticObjects, flat: graph.FlatGraph, origins: Sequence[int | None]
) -> Iterator[Difference]:
    """Yields the changes of the arguments' graph; marks, order and class may change."""
    initial_graph = static.described()
    input_part = dict(initial_graph.graphdef.root.attributes)[0]
    output_part = dict(flat.graphdef.root.attributes)[0]
    for difference in graph_diff.differences(
        (input_part, output_part), (initial_graph.origins, origins), (0,)
    ):
        initial, final = difference.parts
        index = graph_diff.index_of(final)
        is_same_object = (
            index is not None and graph_diff.index_of(initial) == origins[index]
        )
        if not is_same_object or type(initial) is not type(final):
            yield difference


def _change_text(difference: Difference) -> str:
    """Says what a body did to a part."""
    initial, final = difference.parts
    if initial is None:
        return "makes an attribute"
    if final is None:
        return "removes the attribute"
    if isinstance(initial, graph.VariableDef):
        return "replaces the variable"
    return "changes a reference or static value"
