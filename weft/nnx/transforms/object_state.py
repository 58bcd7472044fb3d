"""The static half of a call's objects, and their state inside the call.

A group of an object's state maps the number of a value in the call to the variable or array. Extra
data of a value is at `~number`: the first value of a new variable or array, a key count at the time
when the last variable was made, or None for a value that a custom rule has returned unchanged. Such
a value has the gradient of the rule, so it is written like a changed one, except where only real
changes are refused: in objects that all iterations of a loop share, and in captured ones.

A loop carries what its body makes, from the first values on: the graph after the first iteration
must be that after every iteration. An object that takes the place of another one in each iteration
counts as the same. `check_loop_graph` finds what was made, and refuses all other changes.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from weft.lifting import CARRY, kind, static_keys
from weft.lifting.traces import current_trace
from weft.nnx import graph, versions
from weft.nnx.filters import Everything, OfType, Path, Predicate, to_predicate
from weft.nnx.pytree import Pytree, children, with_item
from weft.nnx.transforms import calls, graph_diff
from weft.nnx.transforms.graph_diff import Difference, NumberedGraph, ObjectTable
from weft.nnx.variables import Variable
from weft.nnx.versions import Recording, StaticSnapshot, StaticValue, is_hashable, mutable_parts

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
        records: whether an enclosing loop or branch needs the first values of new variables.
        origins: if a loop's body made objects, for each the caller's one, None for a new one.
        temporary: in the first run of an enclosing loop, the indices of `temporary_objects`.
    """

    graphdef: graph.GraphDef
    places: tuple[tuple[int, int], ...]
    owners: tuple[tuple[int, Hashable] | None, ...]
    is_tracked: bool
    changing: tuple[static_keys.IdentityKey, ...]
    numbers: Sequence[int]
    records: bool
    origins: tuple[int | None, ...] | None = None
    temporary: frozenset[int] | None = None

    def path_of(self, number: int) -> Path | None:
        """Returns the path of an input value."""
        return dict(zip(self.numbers, self.graphdef.paths, strict=True)).get(number)

    def described(self) -> NumberedGraph:
        objects = graph.first_paths(self.graphdef)
        return NumberedGraph(self.graphdef, range(len(objects)), self.numbers)

    def unchanged(self) -> "ChangedObjects | None":
        if self.origins is None:
            return None
        return ChangedObjects(self.graphdef, self.origins, tuple(self.numbers), None)


class ChangedObjects(NamedTuple):
    """The graph after a call, of the input objects and of the results.

    Attributes:
        origins: for each object the index of the input one, None for a new one.
        keys: for each value the number of the input one, or a number after those.
        copies: copies of new `unhashable_values`, for each caller; None if nothing is mutable.
        before: if a loop's body made attributes, the static half for the body that finds them.
        replaced: numbers of input values whose variable or object was replaced by a new one.
        is_temporary: whether only temporary objects have gained attributes.
    """

    graphdef: graph.GraphDef
    origins: tuple[int | None, ...]
    keys: tuple[int, ...]
    copies: StaticSnapshot | None
    before: StaticObjects | None = None
    replaced: frozenset[int] = frozenset()
    is_temporary: bool = False

    def described(self) -> NumberedGraph:
        return NumberedGraph(self.graphdef, self.origins, self.keys)


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
    recording: Recording | None

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

    def add_key_counts(self, flat: graph.FlatGraph, groups: Sequence[Groups]) -> None:
        """Adds the key counts at the time when the last variable was made to the groups."""
        if self.recording is None:
            return
        new = [leaf for leaf in flat.leaves if leaf in self.recording]
        numbers = {id(x): n for n, x in enumerate(self.leaves)}
        for count, value in self.recording.counts_after(new):
            n = numbers[id(count)]
            i, g = self.static.places[n]
            groups[i][g][~self.static.numbers[n]] = value


def temporary_objects(flat: graph.FlatGraph) -> frozenset[int] | None:
    """Returns the indices of objects that each iteration of an enclosing loop makes for itself.

    None outside of the first run of such a loop.
    """
    recording = versions.RECORDING.now
    if recording is None or recording.kept is None or recording.trace != current_trace():
        return None
    kept = graph.flatten_graph((tuple(recording.kept), ()), with_metadata=False)
    known = set(map(id, kept.objects))
    return frozenset(i for i, x in enumerate(flat.objects) if id(x) not in known)


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


def first_value(recording: Recording, leaf: Any, owner: graph.Owner) -> Any:
    """Returns the first value of a variable, or of an array in an attribute."""
    if owner is None:
        return recording.first_value(leaf)
    x, (name, keys) = owner[0], _name_and_keys(owner[1])
    value = recording.first_attribute(x, name, dict(x._items())[name])
    for key in keys:
        value = dict(children(value))[key]
    return value


def is_made_by_branch(recording: Recording, leaf: Any, owner: graph.Owner) -> bool:
    """Returns whether only some branches have made a variable, or an array in an attribute."""
    if owner is None:
        return recording.is_of_branch(leaf)
    return recording.is_of_branch(owner[0], _name_and_keys(owner[1])[0])


def _name_and_keys(place: Hashable) -> tuple[Hashable, tuple[Hashable, ...]]:
    return (place.name, place.keys) if isinstance(place, graph.ContainerKey) else (place, ())


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


def branch_difference(a: NumberedGraph, b: NumberedGraph, may_lack: bool) -> Difference | None:
    """Returns the first difference; `may_lack` ignores attributes that can be made earlier."""
    tables = ObjectTable.of(a), ObjectTable.of(b)
    for found in graph_diff.differences((a.graphdef.root, b.graphdef.root), (a.origins, b.origins)):
        has_it = tables[1 if found.parts[0] is None else 0]
        is_attribute = may_lack and None in found.parts
        if not (is_attribute and has_it.can_hoist(found.owner, found.path[-1])):
            return found
    return None


def with_created_objects(
    static: StaticObjects,
    found: NumberedGraph,
    gained: Sequence[tuple[int, Hashable]],
    made: dict[int, tuple[int, int]],
) -> StaticObjects:
    """Returns the static half of objects that have gained attributes.

    `gained` has numbers of objects and attributes; `made` argument and group of each new value.
    """
    one = graph_diff.with_new_attributes(static.described(), found, gained)
    places = {**dict(zip(static.numbers, static.places, strict=True)), **made}
    owners = tuple(owner for _, owner in graph.leaf_defs(one.graphdef))
    outer, temporary = static.origins, static.temporary
    if temporary is not None:
        # New objects that others hold are found from those.
        temporary = frozenset(i for i, o in enumerate(one.origins) if o is None or o in temporary)
    return static._replace(
        graphdef=one.graphdef,
        places=tuple(places[n] for n in one.numbers),
        owners=owners,
        is_tracked=static.is_tracked and not any(owners),
        numbers=tuple(one.numbers),
        origins=tuple(o if o is None or outer is None else outer[o] for o in one.origins),
        temporary=temporary,
    )


def record_created(
    recording: Recording,
    static: ChangedObjects,
    objects: Sequence[Any],
    found: dict[int, Any],
    outer: graph.FlatGraph,
    is_branch: bool,
) -> None:
    """Records what a transformation has made, with first values."""
    size = len(outer.leaves)
    counts = {id(outer.leaves[~n]): x for n, x in found.items() if ~size < n < 0 and x is not None}
    for (part, owner), key in zip(graph.leaf_defs(static.graphdef), static.keys, strict=True):
        if isinstance(part, graph.VariableDef) and static.origins[part.index] is None:
            made = objects[part.index]
            first = made._value if key < size else found.get(~key, made._value)
            recording.note(made, first, counts)
            if is_branch or ~key in found:
                recording.note_branch(made)
        elif owner is not None and key >= size:
            x, (name, keys) = objects[owner[0]], _name_and_keys(owner[1])
            value = dict(x._items())[name]
            first = found.get(~key, found[key])
            before = recording.first_attribute(x, name, value)
            recording.forget_attribute(x, name)
            recording.note_attribute(x, name, with_item(before, keys, first))
            if is_branch or ~key in found:
                recording.note_branch(x, name)


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
    found = NumberedGraph(flat.graphdef, origins, range(len(flat.leaves)))
    grouping = Grouping(filters, ())
    for path, parts, _ in _changes_of_arguments(static, found):
        if grouping.is_carried(path):
            raise calls.loop_change_error(path, _change_text(*parts))
        calls.warn_of_dropped_structure(path, _change_text(*parts))
    return changed


def check_loop_graph(
    static: StaticObjects,
    after: graph.FlatGraph,
    found: NumberedGraph,
    grouping: Grouping,
    recording: Recording | None,
) -> list[tuple[int, Hashable]]:
    """Refuses changes of the graph that a loop with graph updates cannot have.

    Each iteration has its own part of a mapped object. Static values of a shared one are the same
    at the beginning of each iteration, and so at its end.

    Args:
        found: the graph after, where an object that replaces another one has its number.

    Returns the attributes to make before the loop: indices of their objects, and names.
    """
    gained: list[Any] = []
    objects = ObjectTable.of(found)
    known = dict(zip(found.numbers, after.leaves, strict=True))
    is_later = static.origins is not None  # the attributes were already made

    def is_made(ident: int | None, name: Hashable) -> bool:
        return (
            recording is not None
            and not is_later
            and objects.can_hoist(ident, name, is_always_made=True)
            and all(is_recorded(known[n], recording) for n in objects.variable_numbers(ident, name))
        )

    for path, (a, b), owner in _changes_of_arguments(static, found):
        is_static = all(part is None or isinstance(part, StaticValue) for part in (a, b))
        if grouping.is_mapped(after, path) or (is_static and not grouping.is_carried(path)):
            continue
        if a is None and is_made(owner, path[-1]):
            gained.append((owner, path[-1]))
            continue
        error, change = calls.loop_change_error, _change_text(a, b)
        if is_later:
            error = calls.changed_creation_error
            if isinstance(a, StaticValue) and isinstance(b, StaticValue):
                change = f"changes {a.value!r} to {b.value!r}"
        raise error(path, change)
    return gained


def _changes_of_arguments(
    static: StaticObjects, found: NumberedGraph
) -> Iterator[tuple[Path, tuple[Any, Any], int | None]]:
    """Yields the path of each change of the arguments' graph, its parts, and `Difference.owner`.

    Marks, order and class of an object may change.
    """
    old, new = (dict(graphdef.root.attributes)[0] for graphdef in (static.graphdef, found.graphdef))
    origins = static.described().origins, found.origins
    for path, _, (a, b), owner in graph_diff.differences((old, new), origins, (0,)):
        index = graph_diff.index_of(b)
        is_same = index is not None and graph_diff.index_of(a) == found.origins[index]
        if not is_same or type(a) is not type(b):
            yield path, (a, b), owner


def _change_text(before: object, after: object) -> str:
    """Says what a body did to a part, None where there was or is none."""
    if before is None:
        return "makes an attribute"
    if after is None:
        return "removes the attribute"
    if isinstance(before, graph.VariableDef):
        return "replaces the variable"
    return "changes a reference or static value"


def is_recorded(variable: Variable[Any], recording: Recording) -> bool:
    """Returns whether a variable was made in the function, with a value that a loop can carry."""
    is_static = all(map(is_hashable, variable._metadata.values()))
    return is_static and not variable._is_in_ref() and variable in recording


def initial_groups(
    made: list[Group | None], changes: kind.CarryChanges | None
) -> tuple[list[Group | None], list[Group | None]]:
    """Returns the values with which a loop begins, and those of them that the loop reads.

    See `weft.lifting.kind.Kind.initial_state`.

    Raises LoopStructureError if iterations compute a value from the previous one, which the first
    iteration makes without one.
    """
    groups: list[Group | None] = []
    needed: list[Group | None] = []
    for i, of in enumerate(made):
        begin = None if of is None else {n: x for n, x in of.items() if n >= 0}
        unread = frozenset()
        if of is not None and begin is not None and changes is not None:
            is_changed, is_read = (
                {n for n, x in (where[i] or {}).items() if any(jax.tree.leaves(x))}
                for where in (changes.changed, changes.read)
            )
            of_body = changes.after
            replaced = frozenset() if of_body is None else of_body.replaced
            for n in filter(graph_diff.is_new_number, begin):
                if n not in is_changed and ~n in of:
                    x = begin[n]
                    begin[n] = x.copy(of[~n]) if isinstance(x, Variable) else of[~n]
                elif n in is_changed & is_read and (n in replaced or ~n not in of):
                    raise calls.read_creation_error(changes.static.path_of(n))
            unread = is_changed - is_read
        groups.append(begin)
        new = filter(graph_diff.is_new_number, begin or ())
        needed.append({n: (begin or {})[n] for n in new if n not in unread})
    return groups, needed


def as_carried(first: Any, now: Any) -> Any:
    """Returns the first value of what a body makes in the types of its last value.

    None if the first one has another structure, shape or dtype.
    """
    (begin, tree), (end, other) = jax.tree.flatten(first), jax.tree.flatten(now)
    if tree != other:
        return None
    cast = []
    for x, a, b in zip(begin, map(jax.typeof, begin), map(jax.typeof, end), strict=True):
        if a.shape != b.shape or (a.dtype != b.dtype and not a.weak_type):
            return None
        cast.append(x if a.dtype == b.dtype else jnp.asarray(x, b.dtype))
    return tree.unflatten(cast)
