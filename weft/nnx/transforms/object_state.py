"""The static half of a call's objects, and their state inside the call.

A group of an object's state maps the number of a value in the call to the variable or array; at
`~number` is None for a value that a custom rule has returned unchanged. Such a value has the
gradient of the rule, so it is written like a changed one, except where only real changes are
refused: in objects that all iterations of a loop share, and in captured ones.

A loop keeps the structure of the objects that it carries or shares; `check_loop_graph` refuses
changes. A new variable in the place of a carried one counts as the same.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from weft.lifting import CARRY, static_keys
from weft.nnx import graph
from weft.nnx.filters import Everything, OfType, Path, Predicate, to_predicate
from weft.nnx.pytree import Pytree
from weft.nnx.transforms import calls, graph_diff
from weft.nnx.transforms.graph_diff import Difference, NumberedGraph
from weft.nnx.variables import Variable
from weft.nnx.versions import StaticSnapshot, StaticValue, mutable_parts

Group = dict[int, Any]
Groups = tuple[Group, ...]
FilterRoles = tuple[tuple[Any, Any], ...]
Filters = Sequence[FilterRoles]


class StaticObjects(NamedTuple):
    """The static half of a call's objects.

    Attributes:
        graphdef: describes the pair of the objects and no results, without metadata.
        places: the object and its group of each value.
        owners: for each value that is not a variable, the index of its object and its attribute.
        is_tracked: whether all values are variables, and no static value is mutable.
        changing: mutable static values, compared by identity as well, since a program would
            otherwise serve another object of equal value with the changes of the first one.
    """

    graphdef: graph.GraphDef
    places: tuple[tuple[int, int], ...]
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
    objects: list[Any]
    leaves: list[Any]
    values: list[Any]
    metadata: list[Any]
    snapshots: list[tuple[Pytree, list[Any]]] | None

    def has_same_structure(self) -> bool:
        """Returns whether only values and metadata of variables can have changed."""
        if self.snapshots is None:
            return False
        return all(are_identical(x._snapshot(), snapshot) for x, snapshot in self.snapshots)

    def has_same_graph(self, flat: graph.FlatGraph) -> bool:
        """Returns whether references and static values are those of the arguments."""
        initial_graphdef = self.static.graphdef
        if not are_identical(flat.objects, self.objects) or flat.graphdef != initial_graphdef:
            return False
        if not self.static.changing:
            return True
        return _keeps_mutable_values(initial_graphdef, flat.graphdef)

    def numbers(self) -> dict[Any, int]:
        """Returns the numbers of the values, by variable, or by owner and attribute."""
        number_of: dict[Any, int] = {}
        for n, (leaf, owner) in enumerate(zip(self.leaves, self.static.owners, strict=True)):
            if owner is None:
                number_of[id(leaf)] = n
            else:
                object_index, attribute = owner
                number_of[id(self.objects[object_index]), attribute] = n
        return number_of

    def is_changed(self, leaf: object, n: int) -> bool:
        """Returns whether a value, or a variable's metadata, differs from its initial one."""
        value = leaf
        if isinstance(leaf, Variable):
            value = leaf._value
            if leaf._metadata is not self.metadata[n]:
                return True
        initial_value = self.values[n]
        return value is not initial_value and not _is_same_value(initial_value, value)

    def is_passed(self, leaf: Any, owner: graph.Owner, n: int) -> bool:
        """Returns whether custom rules alone have replaced the initial value."""
        passed = _passed_values(leaf, owner)
        if passed is None or (owner is None and leaf._metadata is not self.metadata[n]):
            return False
        value = leaf._value if owner is None else leaf
        return _is_same_value(passed.initial, self.values[n]) and _is_same_value(
            passed.returned, value
        )


class _Group(NamedTuple):
    """A group of an object: which entries are in it, and what becomes of them."""

    matches: Predicate
    role: Any


class Grouping:
    """The groups of values, and the roles of these groups."""

    def __init__(self, arg_filters: Filters, result_filters: Filters):
        # By the beginnings of paths: 0 for arguments or 1 for results, and an object's index.
        self._groups: dict[Path, list[_Group]] = {}
        for part, objects in enumerate((arg_filters, result_filters)):
            for i, filter_roles in enumerate(objects):
                groups = [_Group(to_predicate(where), role) for where, role in filter_roles]
                self._groups[part, i] = groups

    def place(self, path: Path, leaf: object) -> tuple[int, int, int]:
        """Returns 0 for an argument or 1 for a result, and the indices of the object and group.

        Raises StateFilterError if no filter matches.
        """
        groups = self._groups[path[:2]]
        for g, group in enumerate(groups):
            if type(group.matches) is Everything or group.matches(path[2:], leaf):
                return *path[:2], g  # pyright: ignore[reportReturnType]
        raise calls.unmatched_error(leaf, path, [group.matches for group in groups])

    @property
    def depends_only_on_structure(self) -> bool:
        """True if equal graph descriptions always have the same groups."""
        for groups in self._groups.values():
            for group in groups:
                if not isinstance(group.matches, Everything | OfType):
                    return False
        return True

    def role(self, path: Path, leaf: object) -> Any:
        """Returns the role of a value."""
        _, _, g = self.place(path, leaf)
        return self._groups[path[:2]][g].role

    def roles(self, path: Path) -> list[Any]:
        """Returns the roles of all groups of the object at the beginning of a path."""
        return [group.role for group in self._groups[path[:2]]]

    def is_mapped(self, after: graph.FlatGraph, path: Path) -> bool:
        """Returns whether all values below a path have an axis."""
        roles: list[Any] = []
        for leaf_path, leaf in after.items():
            if leaf_path[: len(path)] == path:
                roles.append(self.role(leaf_path, leaf))
        return all(isinstance(role, int) for role in roles or self.roles(path))

    def is_carried(self, path: Path) -> bool:
        """Returns whether a loop carries a part of the argument at the beginning of a path."""
        return any(role is CARRY for role in self.roles(path))

    def is_same(self, path: Path, other_path: Path) -> bool:
        """Returns whether the objects at two paths have the same single group."""
        groups, other_groups = self._groups[path[:2]], self._groups[other_path[:2]]
        if len(groups) != 1 or len(other_groups) != 1:
            return False
        group, other = groups[0], other_groups[0]
        return (group.matches, group.role) == (other.matches, other.role)


def are_identical(xs: list[Any], ys: list[Any]) -> bool:
    """Returns whether two lists hold the same objects."""
    return len(xs) == len(ys) and all(map(operator.is_, xs, ys))


def _is_same_value(x: object, y: object) -> bool:
    """Returns whether two trees have the same structure, and the same leaves by identity."""
    x_leaves, x_tree = jax.tree.flatten(x)
    y_leaves, y_tree = jax.tree.flatten(y)
    return are_identical(x_leaves, y_leaves) and x_tree == y_tree


def is_differentiable(leaf: object) -> bool:
    """Returns whether a value, or a variable's one, has arrays of floats and no `jax.Ref`."""
    if isinstance(leaf, Variable):
        leaf = leaf._value
    has_floats = False
    for x in jax.tree.leaves(leaf):
        if isinstance(x, jax.Ref):
            return False
        has_floats |= isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)
    return has_floats


class _PassedValue(NamedTuple):
    """A value that custom rules have returned unchanged: the initial one, and that of the rule."""

    initial: Any
    returned: Any


def note_passed(leaf: Any, owner: graph.Owner, value: Any) -> None:
    """Notes, before `value` is written, that it is the present value out of a custom rule.

    A variable keeps both values in `_passed`, an object those of its arrays in `_info.passed`.
    """
    initial = leaf
    if owner is None:
        initial, value = leaf._value, value._value
    earlier = _passed_values(leaf, owner)
    if earlier is not None and _is_same_value(earlier.returned, initial):
        # The initial value of a rule inside another one is that of the outer one.
        initial = earlier.initial
    passed = _PassedValue(initial, value)
    if owner is None:
        object.__setattr__(leaf, "_passed", passed)
    else:
        x, attribute = owner
        x._info.passed = {**getattr(x._info, "passed", {}), attribute: passed}


def _passed_values(leaf: Any, owner: graph.Owner) -> _PassedValue | None:
    if owner is None:
        return getattr(leaf, "_passed", None)
    x, attribute = owner
    return getattr(x._info, "passed", {}).get(attribute)


def _keeps_mutable_values(before: graph.GraphDef, after: graph.GraphDef) -> bool:
    """Returns whether no mutable static value replaces a different, possibly equal, input one."""
    input_values = list(mutable_parts(tuple(graph.unhashable_static_values(before))))
    output_values = list(mutable_parts(tuple(graph.unhashable_static_values(after))))
    distinct_inputs = set(input_values)
    for output_value, input_value in zip(output_values, input_values, strict=True):
        if output_value != input_value and output_value in distinct_inputs:
            return False
    return True


def static_snapshot(flat: graph.FlatGraph, before: graph.GraphDef) -> StaticSnapshot | None:
    """Returns a snapshot of the mutable static values of a graph, None if it cannot have any."""
    if flat.is_tracked:
        return None
    unchanged = mutable_parts(tuple(graph.unhashable_static_values(before, is_unchanged=True)))
    values = graph.unhashable_static_values(flat.graphdef)
    return StaticSnapshot(values, [key.value for key in unchanged])


def changed_loop_arrays(
    inner: InnerObjects, flat: graph.FlatGraph, filters: Filters
) -> dict[int, Any]:
    """Returns the arrays in attributes of the carry that a loop's body changed, by number.

    Without graph updates, these and values of variables are all that a loop can carry. Other
    changes of the carry are refused; those of objects that are not carried are dropped.

    Args:
        flat: the arguments after the body.
    """
    static = inner.static
    numbers_by_path = {path: n for n, path in enumerate(static.graphdef.paths)}
    changed: dict[int, Any] = {}
    for (path, after), owner in zip(flat.items(), flat.owners, strict=True):
        n = numbers_by_path.get(path)
        if n is None or owner is None or not inner.is_changed(after, n):
            continue
        i, g = static.places[n]
        if filters[i][g][1] is CARRY:
            changed[n] = after
        elif not inner.is_passed(after, owner, n):
            calls.warn_of_dropped_structure(path, "replaces the array")

    # Variables have an identity, other objects only a place.
    index_of_variable: dict[int, int] = {}
    for i, x in enumerate(inner.objects):
        if isinstance(x, Variable):
            index_of_variable[id(x)] = i
    index_of_path = {path: i for i, path in graph.first_paths(static.graphdef).items()}
    paths = graph.first_paths(flat.graphdef)
    origins: list[int | None] = []
    for i, x in enumerate(flat.objects):
        if isinstance(x, Variable):
            origins.append(index_of_variable.get(id(x)))
        else:
            origins.append(index_of_path.get(paths[i]))
    grouping = Grouping(filters, ())
    for difference in _changes_of_arguments(static, flat, origins):
        path, change = difference.path, _change_text(*difference.parts)
        if grouping.is_carried(path):
            raise calls.loop_change_error(path, change)
        calls.warn_of_dropped_structure(path, change)
    return changed


def check_loop_graph(
    static: StaticObjects,
    after: graph.FlatGraph,
    origins: Sequence[int | None],
    grouping: Grouping,
) -> None:
    """Raises LoopStructureError for changes that a loop with graph updates cannot have.

    Each iteration has its own part of a mapped object. Static values of a shared one are the same
    at the beginning of each iteration, and so at its end.

    `origins` has the index of each object before, also for one that replaces another one.
    """
    for difference in _changes_of_arguments(static, after, origins):
        path, parts = difference.path, difference.parts
        is_static = all(part is None or isinstance(part, StaticValue) for part in parts)
        is_shared_static = is_static and not grouping.is_carried(path)
        if not is_shared_static and not grouping.is_mapped(after, path):
            raise calls.loop_change_error(path, _change_text(*parts))


def _changes_of_arguments(
    static: StaticObjects, after: graph.FlatGraph, origins: Sequence[int | None]
) -> Iterator[Difference]:
    """Yields the changes of the arguments' graph; marks, order and class may change."""
    arguments_before = dict(static.graphdef.root.attributes)[0]
    arguments_after = dict(after.graphdef.root.attributes)[0]
    both_origins = static.described().origins, origins
    both_arguments = arguments_before, arguments_after
    for difference in graph_diff.differences(both_arguments, both_origins, (0,)):
        part_before, part_after = difference.parts
        index = graph_diff.index_of(part_after)
        is_same_object = index is not None and graph_diff.index_of(part_before) == origins[index]
        if not is_same_object or type(part_before) is not type(part_after):
            yield difference


def _change_text(before: object, after: object) -> str:
    """Says what a body did to a part, None where there was or is none."""
    if before is None:
        return "makes an attribute"
    if after is None:
        return "removes the attribute"
    if isinstance(before, graph.VariableDef):
        return "replaces the variable"
    return "changes a reference or static value"
