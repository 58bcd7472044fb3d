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
        objects = graph.first_paths(self.graphdef)
        return NumberedGraph(self.graphdef, range(len(objects)))


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
        return self.snapshots is not None and all(
            are_identical(x._snapshot(), look) for x, look in self.snapshots
        )

    def has_same_graph(self, flat: graph.FlatGraph) -> bool:
        """Returns whether references and static values are those of the arguments."""
        now, before = flat.graphdef, self.static.graphdef
        return (
            are_identical(flat.objects, self.objects)
            and now == before
            and (not self.static.changing or _keeps_mutable_values(now, before))
        )

    def numbers(self) -> dict[Any, int]:
        """Returns the numbers of the values, by variable, or by owner and attribute."""
        known: dict[Any, int] = {}
        for n, (x, owner) in enumerate(zip(self.leaves, self.static.owners, strict=True)):
            known[id(x) if owner is None else (id(self.objects[owner[0]]), owner[1])] = n
        return known

    def is_changed(self, leaf: object, n: int) -> bool:
        """Returns whether a value, or a variable's metadata, differs from its initial one."""
        before, now = self.values[n], leaf
        if isinstance(leaf, Variable):
            now = leaf._value
            if leaf._metadata is not self.metadata[n]:
                return True
        return now is not before and not _is_same_value(before, now)

    def is_passed(self, leaf: Any, owner: graph.Owner, n: int) -> bool:
        """Returns whether custom rules alone have replaced the initial value."""
        known = _passed_values(leaf, owner)
        if known is None or (owner is None and leaf._metadata is not self.metadata[n]):
            return False
        now = leaf._value if owner is None else leaf
        return _is_same_value(known[0], self.values[n]) and _is_same_value(known[1], now)


class Grouping:
    """The groups of values, and the roles of these groups."""

    def __init__(self, of_args: Filters, of_results: Filters):
        # By the beginnings of paths: 0 for arguments or 1 for results, and an object's index.
        self._groups: dict[Path, list[tuple[Predicate, Any]]] = {
            (part, i): [(to_predicate(where), role) for where, role in of_object]
            for part, objects in enumerate((of_args, of_results))
            for i, of_object in enumerate(objects)
        }

    def place(self, path: Path, leaf: object) -> tuple[int, int, int]:
        """Returns 0 for an argument or 1 for a result, and the indices of the object and group.

        Raises StateFilterError if no filter matches.
        """
        groups = self._groups[at := path[:2]]
        for g, (matches, _) in enumerate(groups):
            if type(matches) is Everything or matches(path[2:], leaf):
                return *at, g  # pyright: ignore[reportReturnType]
        raise calls.unmatched_error(leaf, path, [where for where, _ in groups])

    @property
    def depends_only_on_structure(self) -> bool:
        """True if equal graph descriptions always have the same groups."""
        every = (matches for groups in self._groups.values() for matches, _ in groups)
        return all(isinstance(matches, Everything | OfType) for matches in every)

    def role(self, path: Path, leaf: object) -> Any:
        return self.roles(path)[self.place(path, leaf)[2]]

    def roles(self, path: Path) -> list[Any]:
        return [role for _, role in self._groups[path[:2]]]

    def is_mapped(self, after: graph.FlatGraph, path: Path) -> bool:
        roles = [self.role(p, leaf) for p, leaf in after.items() if p[: len(path)] == path]
        return all(isinstance(role, int) for role in roles or self.roles(path))

    def is_carried(self, path: Path) -> bool:
        """Returns whether a loop carries a part of the argument at the beginning of a path."""
        return any(role is CARRY for role in self.roles(path))

    def is_same(self, path: Path, other: Path) -> bool:
        of_path, of_other = self._groups[path[:2]], self._groups[other[:2]]
        return len(of_path) == 1 and of_path == of_other


def are_identical(xs: list[Any], ys: list[Any]) -> bool:
    """Returns whether two lists hold the same objects."""
    return len(xs) == len(ys) and all(map(operator.is_, xs, ys))


def _is_same_value(before: object, now: object) -> bool:
    old, new = jax.tree.leaves(before), jax.tree.leaves(now)
    return are_identical(old, new) and jax.tree.structure(before) == jax.tree.structure(now)


def is_differentiable(leaf: object) -> bool:
    """Returns whether a value, or a variable's one, has arrays of floats and no `jax.Ref`."""
    arrays = jax.tree.leaves(leaf._value if isinstance(leaf, Variable) else leaf)
    return not any(isinstance(x, jax.Ref) for x in arrays) and any(
        isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays
    )


def note_passed(leaf: Any, owner: graph.Owner, value: Any) -> None:
    """Notes, before `value` is written, that it is the present value out of a custom rule.

    A variable keeps both values in `_passed`, an object those of its arrays in `_info.passed`.
    """
    before = leaf
    if owner is None:
        before, value = leaf._value, value._value
    known = _passed_values(leaf, owner)
    if known is not None and _is_same_value(known[1], before):
        before = known[0]
    if owner is None:
        object.__setattr__(leaf, "_passed", (before, value))
    else:
        info = owner[0]._info
        info.passed = {**getattr(info, "passed", {}), owner[1]: (before, value)}


def _passed_values(leaf: Any, owner: graph.Owner) -> tuple[Any, Any] | None:
    if owner is None:
        return getattr(leaf, "_passed", None)
    return getattr(owner[0]._info, "passed", {}).get(owner[1])


def _keeps_mutable_values(now: graph.GraphDef, before: graph.GraphDef) -> bool:
    """Returns whether no mutable static value replaces a different, possibly equal, input one."""
    old, new = ([*mutable_parts((*graph.unhashable_static_values(of),))] for of in (before, now))
    went_in = set(old)
    return all(a == b or a not in went_in for a, b in zip(new, old, strict=True))


def static_snapshot(flat: graph.FlatGraph, before: graph.GraphDef) -> StaticSnapshot | None:
    """Returns a snapshot of the mutable static values of a graph, None if it cannot have any."""
    if flat.is_tracked:
        return None
    unchanged = mutable_parts((*graph.unhashable_static_values(before, is_unchanged=True),))
    now = graph.unhashable_static_values(flat.graphdef)
    return StaticSnapshot(now, [same.value for same in unchanged])


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
    variables = {id(x): i for i, x in enumerate(inner.objects) if isinstance(x, Variable)}
    places = {path: i for i, path in graph.first_paths(static.graphdef).items()}
    paths = graph.first_paths(flat.graphdef)
    origins = [
        variables.get(id(x)) if isinstance(x, Variable) else places.get(paths[i])
        for i, x in enumerate(flat.objects)
    ]
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
    before, now = (dict(of.root.attributes)[0] for of in (static.graphdef, after.graphdef))
    both_origins = static.described().origins, origins
    for difference in graph_diff.differences((before, now), both_origins, (0,)):
        old, new = difference.parts
        index = graph_diff.index_of(new)
        is_same_object = index is not None and graph_diff.index_of(old) == origins[index]
        if not is_same_object or type(old) is not type(new):
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
