"""Objects at the border of a JAX transformation.

All objects of a call cross together, so that shared parts cross once. Only changed values come
back, and the graph only if references or static attributes have changed, or objects are returned.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from weft.core.tracing import current_trace
from weft.errors import AxisMetadataError, BranchObjectsError
from weft.lifting import Kind, Roles
from weft.lifting.crossing import Parcel, is_parcel
from weft.lifting.scan import changes_shared
from weft.nnx.assembling import Change, check_changes, make_changes, plan_together, put_together
from weft.nnx.filters import Path
from weft.nnx.graph import (
    Flat,
    GraphDef,
    Within,
    changing_values,
    flat_of_variables,
    objects_alike,
    take_apart,
    unhashable_values,
    with_item,
    with_static_values,
)
from weft.nnx.naming import changed_elsewhere
from weft.nnx.pytree import Pytree
from weft.nnx.recording import RECORDING, Recording
from weft.nnx.rngs import RngCount, RngKey
from weft.nnx.spmd import add_axis, knows_axes, remove_axis
from weft.nnx.state import from_flat_state
from weft.nnx.structure import Copies, changing_parts, is_hashable
from weft.nnx.transforms.calls import (
    argument_at,
    captured_output,
    inconsistent_aliases,
    made_of_own_keys,
    note_values,
    place_of,
    place_of_value,
    shared_in_tree_mode,
)
from weft.nnx.transforms.differences import Difference
from weft.nnx.transforms.growth import Described, is_new, number_of, united
from weft.nnx.transforms.halves import (
    Changed,
    Group,
    Grouping,
    Groups,
    Inner,
    Static,
    Wanted,
    are_same,
    described,
    first_paths,
    is_changed,
    known_numbers,
    values_of,
)
from weft.nnx.transforms.making import (
    check_loop,
    check_loop_values,
    difference,
    grown_half,
    note_counts,
    note_made,
)
from weft.nnx.variables import Variable, metadata_key

_MAX_BEFORE = 64


class SharedChanges(Exception):
    """Ends the trace of a scan without graph updates whose body changes shared state.

    `paths` lead from each object to its changed variables; `text` is for the error if those cannot
    be carried.
    """

    def __init__(self, text: str, paths: Sequence[Path]):
        super().__init__(text, paths)
        self.text, self.paths = text, frozenset(path[2:] for path in paths)


@dataclasses.dataclass(frozen=True)
class AtPaths:
    """A filter of the values at some paths from their object."""

    paths: frozenset[Path]

    def __call__(self, path: Path, x: Any) -> bool:
        return path in self.paths


def is_object(x: Any) -> bool:
    """Returns whether `x` is an object or a variable, identified by reference."""
    return isinstance(x, Pytree | Variable)


@dataclasses.dataclass(frozen=True)
class ObjectKind(Kind):
    """The kind of objects and variables; see `weft.lifting.crossing.Kind`.

    Attributes:
        transformation: its name, for errors.
        references: whether an object may occur twice.
        structure: whether changes of references and static attributes come back.
        is_loop: whether the function runs repeatedly on its carry.
        is_branch: whether the function is one of several, only one of them running.
        is_result_free: whether results have no roles, so that any argument may be returned.
    """

    transformation: str
    references: bool = True
    structure: bool = True
    is_loop: bool = False
    is_branch: bool = False
    is_result_free: bool = False

    def wanted(self, roles: Roles) -> Wanted:
        return tuple(roles)

    def is_carrier(self, x: Any) -> bool:
        return is_object(x)

    def split(self, carriers: Sequence[Any], filters: Sequence[Wanted]):
        flat, static = self._as_before(carriers, filters) or self._seen(carriers, filters)
        groups: list[Groups] = [tuple({} for _ in wanted) for wanted in filters]
        for n, leaf, (i, g) in zip(static.numbers, flat.leaves, static.places, strict=True):
            groups[i][g][n] = leaf
        return flat, static, groups

    def _seen(self, carriers: Sequence[Any], filters: Sequence[Wanted]) -> tuple[Flat, Static]:
        flat = take_apart((tuple(carriers), ()), with_metadata=False)
        grouping = Grouping(filters, ())
        self._check_aliases(flat, grouping)
        at = zip(flat.graphdef.paths, flat.leaves, strict=True)
        places = tuple(grouping.place(path, leaf)[1:] for path, leaf in at)
        index = {id(x): i for i, x in enumerate(flat.objects)}
        owners = tuple(owner and (index[id(owner[0])], owner[1]) for owner in flat.owners)
        is_sure = flat.is_sure and not any(owners)
        changing = () if flat.is_sure else changing_values(flat)
        numbers, records = range(len(places)), RECORDING.now is not None
        static = Static(flat.graphdef, places, owners, is_sure, changing, numbers, records)
        if carriers and is_sure and not flat.again and grouping.is_of_structure:
            if len(self._before) >= _MAX_BEFORE:
                self._before.clear()
            self._before[tuple(map(type, carriers))] = static, filters
        return flat, static

    @functools.cached_property
    def _before(self) -> dict[tuple[type, ...], tuple[Static, Sequence[Wanted]]]:
        """Static halves by classes of objects; layers of a model often have equal structure."""
        return {}

    def _as_before(
        self, carriers: Sequence[Any], filters: Sequence[Wanted]
    ) -> tuple[Flat, Static] | None:
        static, wanted = self._before.get(tuple(map(type, carriers)), (None, None))
        if static is None or wanted != filters or static.records != (RECORDING.now is not None):
            return None
        _, known = static.graphdef.root.attributes[0]
        objects = objects_alike([*enumerate(carriers)], known.attributes)
        return None if objects is None else (flat_of_variables(static.graphdef, objects), static)

    def merge(self, static: Static, groups: Sequence[Groups]):
        at = zip(static.numbers, static.places, strict=True)
        leaves = [groups[i][g][n] for n, (i, g) in at]
        (carriers, _), objects = put_together(static.graphdef, leaves)
        held = [
            leaf if variable is None else variable
            for variable, leaf in values_of(static, objects, leaves)
        ]
        values = [x._value if isinstance(x, Variable) else x for x in held]
        metadata = [x._metadata if isinstance(x, Variable) else None for x in held]
        looks = [(x, x._look()) for x in objects if isinstance(x, Pytree)]
        recording = None
        if self._makes_before or static.records:
            recording = Recording([x for x in objects if isinstance(x, RngCount)])
        looks = looks if static.is_sure else None
        return Inner(objects, values, metadata, looks, recording), list(carriers)

    @property
    def _makes_before(self) -> bool:
        """True if objects that the function makes are made before it."""
        return self.structure and (self.is_loop or self.is_branch)

    def call(self, inner: Inner, fn: Callable[[Any], Any], args: Any) -> Any:
        if inner.recording is None:
            return fn(args)
        with inner.recording:
            return fn(args)

    def collect(
        self,
        inner: Inner,
        static: Static,
        carriers: Sequence[Any],
        filters: Sequence[Wanted],
        new: Sequence[Any],
        new_filters: Sequence[Wanted],
    ):
        groups: list[Groups] = [tuple({} for _ in wanted) for wanted in filters]
        new_groups: list[Groups] = [tuple({} for _ in wanted) for wanted in new_filters]
        if not self.structure or (not new and inner.looks_the_same()):
            if self.is_loop and not inner.looks_the_same():
                check_loop_values(static, carriers, filters, inner)
            shared: list[Path] = []
            for n, (variable, _) in enumerate(values_of(static, inner.objects, inner.values)):
                if variable is not None and is_changed(variable, inner, n):
                    i, g = static.places[n]
                    if not self._begins_again(variable, filters[i][g]):
                        groups[i][g][static.numbers[n]] = variable
                        if self.is_loop and not self.structure and filters[i][g][1] is None:
                            shared.append(static.graphdef.paths[n])
            if shared:
                text = changes_shared(self.transformation, place_of(shared[0]))
                raise SharedChanges(text, shared)
            if not new:
                note_values(static.numbers, static.graphdef.paths)
                return static.unchanged(), groups, new_groups
            carriers = ()
        flat = take_apart((tuple(carriers), tuple(new)), with_metadata=False)
        is_same = self.structure and _is_same(flat, inner, static)
        grouping = Grouping(filters, new_filters)
        if not is_same:
            self._check_captured(flat, inner, static)
            self._check_aliases(flat, grouping)
        keys, made = self._sorted_into((groups, new_groups), flat, grouping, inner, static)
        if is_same:
            return static.unchanged(), groups, new_groups
        origin = {id(x): i for i, x in enumerate(inner.objects)}
        origins = tuple(origin.get(id(x)) for x in flat.objects)
        found = Described(flat.graphdef, origins, keys)
        before = None
        if self.is_loop and self.structure:
            gained = check_loop(static, flat, found, grouping.is_own, inner.recording)
            if gained:
                before = grown_half(static, found, gained, made)
                note_counts(static, flat, inner, groups)
        elif made and static.records and not self.is_branch:
            note_counts(static, flat, inner, groups)
        copies = None if flat.is_sure else _copies(flat.graphdef, static.graphdef)
        if static.origins is not None:
            origins = tuple(None if o is None else static.origins[o] for o in origins)
        changed = Changed(flat.graphdef, origins, tuple(keys), copies, before)
        return changed, groups, new_groups

    def _sorted_into(
        self,
        groups: tuple[list[Groups], list[Groups]],
        flat: Flat,
        grouping: Grouping,
        inner: Inner,
        static: Static,
    ) -> tuple[list[int], dict[int, tuple[int, int]]]:
        """Puts new and changed values into groups; returns all numbers, and places of new ones."""
        known, recording = known_numbers(inner, static), inner.recording
        keys: list[int] = []
        made: dict[int, tuple[int, int]] = {}
        note_values(keys, flat.graphdef.paths)
        for n, (path, leaf) in enumerate(zip(flat.graphdef.paths, flat.leaves, strict=True)):
            owner = flat.owners[n]
            at = known.get(id(leaf) if owner is None else (id(owner[0]), owner[1]))
            if at is None:
                key = number_of(path) if self._makes_before else len(inner.values) + n
                part, i, g = grouping.place(path, leaf)
                groups[part][i][g][key] = leaf
                if part == 0:
                    made[key] = i, g
                is_wanted = static.records or (part == 0 and self._makes_before)
                if is_wanted and recording is not None and leaf in recording:
                    first = recording.first_value(leaf)
                    # Branches return the same structure.
                    if first is not leaf._value or (part == 1 and self.is_branch):
                        groups[part][i][g][~key] = first
            else:
                key = static.numbers[at]
                if is_changed(leaf, inner, at):
                    i, g = static.places[at]
                    if not self._begins_again(leaf, grouping.wanted(i, g)):
                        groups[0][i][g][key] = leaf
            keys.append(key)
        return keys, made

    def _begins_again(self, leaf: Any, wanted: tuple[Any, Any]) -> bool:
        """Returns whether to drop a change: of a key count that all iterations share."""
        is_shared = self.is_loop and self.structure and wanted[1] is None
        return is_shared and isinstance(leaf, RngCount)

    def _check_captured(self, flat: Flat, inner: Inner, static: Static) -> None:
        here, inside = current_trace(), {id(x): i for i, x in enumerate(inner.objects)}
        for i, x in enumerate(flat.objects):
            if id(x) not in inside:
                if trace_of(x) != here:
                    raise captured_output(x, first_paths(flat.graphdef)[i])
            elif not self.structure:
                paths = first_paths(static.graphdef), first_paths(flat.graphdef)
                raise shared_in_tree_mode(x, paths[0][inside[id(x)]], paths[1][i])

    def _check_aliases(self, flat: Flat, grouping: "Grouping") -> None:
        """Refuses objects that occur twice, where not allowed or with different roles."""
        at_first = first_paths(flat.graphdef) if flat.again else {}
        for index, path in flat.again:
            first = at_first[index]
            if not self.references or (not self.structure and path[0] == 1):
                raise shared_in_tree_mode(flat.objects[index], first, path)
            if grouping.is_same(first, path) or (self.is_result_free and path[0] == 1):
                continue
            for leaf_path, leaf in zip(flat.graphdef.paths, flat.leaves, strict=True):
                if leaf_path[: len(first)] == first:
                    other = (*path, *leaf_path[len(first) :])
                    roles = grouping.role(leaf_path, leaf), grouping.role(other, leaf)
                    if roles[0] != roles[1] or type(roles[0]) is not type(roles[1]):
                        raise inconsistent_aliases(leaf, (leaf_path, roles[0]), (other, roles[1]))

    def commit(
        self,
        outer: Flat,
        static: Changed | None,
        groups: Sequence[Groups | None],
        new_groups: Sequence[Groups],
    ) -> list[Any]:
        found = dict(_entries(groups))
        if static is not None:
            found.update(_entries(new_groups))
        if static is None or static.copies is not None:
            _give_own_metadata(found, outer)
        kept = [
            (outer.leaves[n], outer.owners[n], found[n])
            for n in found
            if 0 <= n < len(outer.leaves)
        ]
        here = current_trace()
        for leaf, owner, _ in kept:
            what = leaf if owner is None else owner[0]
            if trace_of(what) != here:
                raise changed_elsewhere(what)
        new: Sequence[Any] = ()
        changes: Sequence[Change] = ()
        objects: Sequence[Any] = ()
        if static is not None:
            leaves = [found[key] if key in found else outer.leaves[key] for key in static.keys]
            existing = {i: outer.objects[o] for i, o in enumerate(static.origins) if o is not None}
            graphdef = static.graphdef
            if static.copies is not None:
                graphdef = with_static_values(graphdef, static.copies.made())
            (_, new), objects, changes = plan_together(graphdef, leaves, existing=existing)
            check_changes(changes)
        # Nothing is refused from here on, so that either all changes are written or none.
        for leaf, owner, value in kept:
            _write(leaf, owner, value)
        make_changes(changes)
        if static is not None and (recording := RECORDING.now) is not None:
            note_made(recording, static, objects, found, outer)
        return list(new)

    def cotangents(self, static: Changed | None, packed: Any) -> Any:
        """Returns the cotangents of a result for the function of a rule.

        Groups of a new object become a `State`, or in tree mode an object of its class.
        """
        if static is None:
            return packed
        results = dict(static.graphdef.root.attributes)[1]
        keys = dict(zip(static.graphdef.paths, static.keys, strict=True))
        numbers = itertools.count()

        def unpacked(x: Any) -> Any:
            if not isinstance(x, Parcel):
                return x
            i, found = next(numbers), dict(_entries([x.groups]))
            at = {p[2:]: found[n] for p, n in keys.items() if p[:2] == (1, i) and n in found}
            if list(at) == [()]:
                return at[()]
            if self.structure:
                return from_flat_state(at.items())
            graphdef = GraphDef(results.attributes[i][1], list(at))
            return put_together(graphdef, at.values())[0]

        return jax.tree.map(unpacked, packed, is_leaf=is_parcel)

    def axis(
        self,
        static: Static,
        carrier: int,
        sign: int,
        group: Group,
        axis: int,
        metadata: dict[Any, Any],
    ) -> Group:
        change = add_axis if sign > 0 else remove_axis

        def changed(n: int, x: Any) -> Any:
            if not isinstance(x, Variable) or not knows_axes(x):
                return x
            copied = x.copy()
            try:
                change(copied, axis, metadata)
            except AxisMetadataError as error:
                error.path = self.place(static, carrier, (jax.tree_util.DictKey(n),))
                raise
            return copied

        return {n: changed(n, x) for n, x in group.items()}

    def may_create(self, static: Static, where: Any) -> bool:
        return self.is_loop and self.structure

    def created(self, before: Group, after: Group) -> Group | None:
        made = {
            n: x.copy(after.get(~n, x._value), _copy_ref=False)
            for n, x in after.items()
            if is_new(n) and n not in before and isinstance(x, Variable)
        }
        # The counts of keys with which a loop continues.
        made |= {~n: before[~n].copy(x) for n, x in after.items() if ~n in before}
        return made or None

    def resumed(
        self,
        static: Static,
        made: list[Group | None],
        used: Callable[[], Sequence[tuple[Group, Any]]],
    ) -> list[Group | None]:
        keys = dict(zip(static.graphdef.paths, static.numbers, strict=True))
        of_groups = used()
        is_used: dict[int, bool] = {}
        for group, role in of_groups:
            for n, x in group.items():
                if isinstance(x, RngKey):
                    is_used[n] = x._value is not False
                    if x._value is True and isinstance(role, int):
                        raise made_of_own_keys(static.path_of(n))

        def goes_on(n: int) -> bool:
            if is_new(n):
                return True
            path = static.path_of(n)
            key = None if path is None else keys.get((*path[:-1], "key"))
            return key is None or is_used.get(key, True)

        return [None if of is None else {n: x for n, x in of.items() if goes_on(n)} for of in made]

    def union(self, group: Group, other: Group) -> Group:
        return {**group, **{n: x for n, x in other.items() if n >= 0}}

    def begun(self, made: Group | None, result: Group | None) -> Group | None:
        if made is None or result is None:
            return result
        new = {n: x for n, x in made.items() if is_new(n)}
        return {**new, **result, **{~n: x._value for n, x in made.items()}}

    def follow(self, static: Static, before: Changed, after: Any = None) -> Static:
        return before.before or static

    def for_condition(self, static: Static, of_body: Static) -> Static:
        return of_body

    def join(self, static: Static, statics: Sequence[Changed | None]) -> Any:
        if all(after == statics[0] for after in statics[1:]):
            return statics[0]
        graphs = [described(static, changed) for changed in statics]
        is_copied = any(changed is not None and changed.copies is not None for changed in statics)
        one = None if is_copied else united(described(static, None), graphs)
        if one is not None:
            return Changed(one.graphdef, tuple(one.origins), tuple(one.numbers), None)
        others = [g for g, after in zip(graphs, statics, strict=True) if after != statics[0]]
        pairs = [(may_lack, graph) for may_lack in (True, False) for graph in others]
        found = (difference(graphs[0], graph, may_lack) for may_lack, graph in pairs)
        raise self._differs(next(filter(None, found), None))

    def _differs(self, found: Difference | None) -> Exception:
        at = "an object" if found is None else place_of(found.path)
        seen = ("changed", "unchanged") if found is None else found.seen
        return BranchObjectsError(
            f"nnx.{self.transformation}: {at} is {seen[0]} after one branch, and {seen[1]} after "
            "another. All branches must leave the same structure, and may only differ in values of "
            "variables; make the same change in all of them, or before."
        )

    def place(self, static: Static, carrier: int, path: Any) -> str:
        return place_of_value(static.path_of, path)

    def argument(self, path: Any) -> str:
        return argument_at(path)


def _is_same(flat: Flat, inner: Inner, static: Static) -> bool:
    return (
        are_same(flat.objects, inner.objects)
        and flat.graphdef == static.graphdef
        and (not static.changing or _shares_the_same(flat.graphdef, static.graphdef))
    )


def _shares_the_same(now: GraphDef, before: GraphDef) -> bool:
    """Returns whether no mutable static value replaces a different, possibly equal, input one."""
    old, new = ([*changing_parts((*unhashable_values(of),))] for of in (before, now))
    went_in = set(old)
    return all(a == b or a not in went_in for a, b in zip(new, old, strict=True))


def _copies(now: GraphDef, before: GraphDef) -> Copies:
    unchanged = changing_parts((*unhashable_values(before, is_unchanged=True),))
    return Copies(unhashable_values(now), [same.value for same in unchanged])


def _give_own_metadata(found: dict[int, Any], outer: Flat) -> None:
    """Gives the caller's variables their own copies of mutable metadata."""
    at = [
        (n, name, value)
        for n, x in found.items()
        if isinstance(x, Variable)
        for name, value in x._metadata.items()
        if not is_hashable(value)
    ]
    if not at:
        return
    there = (x._metadata.values() for x in outer.leaves if isinstance(x, Variable))
    made = Copies([value for _, _, value in at], itertools.chain(*there)).made()
    for (n, name, _), value in zip(at, made, strict=True):
        found[n] = found[n].copy(_copy_ref=False, **{name: value})


def trace_of(x: Any) -> Any:
    """Returns the trace in which an object or variable was created."""
    return x._trace if isinstance(x, Variable) else x._watch.trace


def watched(x: Any) -> bool:
    """Marks an object or variable as watched, and returns whether it already was."""
    if isinstance(x, Variable):
        before = x._watched
        object.__setattr__(x, "_watched", True)
        return before
    before, x._watch.watched = x._watch.watched, True
    return before


def _entries(groups: Iterable[Groups | None]) -> Iterator[tuple[int, Any]]:
    return (item for of_object in groups for group in of_object or () for item in group.items())


def _write(leaf: Any, owner: Any, value: Any) -> None:
    if owner is not None:
        x, place = owner
        if isinstance(place, Within):
            container = dict(x._items())[place.name]
            place, value = place.name, with_item(container, place.keys, value)
        x._put(place, value)
        return
    object.__setattr__(leaf, "_value", value._value)
    if metadata_key(value) != metadata_key(leaf):
        leaf.set_metadata(dict(value._metadata))
