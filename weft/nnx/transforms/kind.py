"""How objects cross a JAX transformation.

All objects of a call cross together, so that what they share is there once. A group of an object's
state maps the number of a value among all of the call's to the variable or array itself; what comes
back has only what the function has changed. The static half is the graph without its values; it
comes back only where references or static attributes have changed, or objects are returned.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from weft.core.tracing import current_trace
from weft.errors import AxisMetadataError, BranchObjectsError
from weft.lifting import CARRY, Kind, Roles
from weft.lifting.crossing import Parcel, is_parcel
from weft.lifting.functions import Same
from weft.lifting.scan import changes_shared
from weft.nnx.assembling import Change, check_changes, make_changes, plan_together, put_together
from weft.nnx.filters import Everything, OfType, Path, Predicate, to_predicate
from weft.nnx.graph import (
    Flat,
    GraphDef,
    NodeDef,
    Ref,
    VariableDef,
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
from weft.nnx.rngs import RngCount
from weft.nnx.spmd import add_axis, knows_axes, remove_axis
from weft.nnx.state import from_flat_state
from weft.nnx.structure import Copies, changing_parts, is_hashable
from weft.nnx.transforms.calls import (
    argument_at,
    captured_output,
    changed_in_loop,
    inconsistent_aliases,
    note_values,
    place_of,
    place_of_value,
    shared_in_tree_mode,
    unmatched,
)
from weft.nnx.transforms.differences import first_difference
from weft.nnx.variables import Variable, metadata_key

Group = dict[int, Any]
Groups = tuple[Group, ...]
Wanted = tuple[tuple[Any, Any], ...]

_MAX_BEFORE = 64


class _Static(NamedTuple):
    """What of the objects of a call is no array.

    Attributes:
        graphdef: of the pair of these objects and no results, without metadata.
        places: for each value, the object among them and the group of it that it is in.
        owners: for a value that is no variable whose attribute it is, by index.
        is_sure: whether all values are variables, and nothing else can change within itself.
        changing: what is static and can change within itself, compared by identity as well. A
            program would otherwise serve another object of the same value, and find there what the
            first one has become since.
    """

    graphdef: GraphDef
    places: tuple[tuple[int, int], ...]
    owners: tuple[tuple[int, Hashable] | None, ...]
    is_sure: bool
    changing: tuple[Same, ...]


class _Changed(NamedTuple):
    """What has become of the graph.

    Attributes:
        graphdef: of the pair of the objects that went in and of the results.
        origins: for each object in it the index of the one that went in, None for a new one.
        keys: for each value in it the number of the one that went in, or a number after those.
        copies: of its `unhashable_values`, for each caller, without those that went in. None where
            nothing static can change, also in metadata.
    """

    graphdef: GraphDef
    origins: tuple[int | None, ...]
    keys: tuple[int, ...]
    copies: Copies | None


class SharedChanges(Exception):
    """Ends a trace of a scan without graph updates: its body changes what all iterations share.

    Attributes:
        paths: of the variables that it changes, each from its object on.
        text: of the error, where they cannot be carried.
    """

    def __init__(self, text: str, paths: Sequence[Path]):
        super().__init__(text, paths)
        self.text, self.paths = text, frozenset(path[2:] for path in paths)


@dataclasses.dataclass(frozen=True)
class AtPaths:
    """A filter of what is at some paths from its object on."""

    paths: frozenset[Path]

    def __call__(self, path: Path, x: Any) -> bool:
        return path in self.paths


class _Inner(NamedTuple):
    """The objects inside, and what their values were at first.

    Attributes:
        looks: what each object was made of, if that tells whether it has changed.
    """

    objects: list[Any]
    values: list[Any]
    metadata: list[Any]
    looks: list[tuple[Pytree, list[Any]]] | None

    def looks_the_same(self) -> bool:
        """Whether nothing but values and metadata of variables can have changed."""
        return self.looks is not None and all(_are_same(x._look(), look) for x, look in self.looks)


def is_object(x: Any) -> bool:
    """Whether `x` is an object or a variable, which is known by reference."""
    return isinstance(x, Pytree | Variable)


@dataclasses.dataclass(frozen=True)
class ObjectKind(Kind):
    """The kind of objects and variables; see `weft.lifting.crossing.Kind`.

    Attributes:
        transformation: its name, for errors.
        references: whether an object may be met twice.
        structure: whether changes of references and of static attributes come back.
        is_loop: whether the function runs several times on what it carries.
        is_result_free: whether nothing is said of results, so that an argument may be among them
            however it went in.
    """

    transformation: str
    references: bool = True
    structure: bool = True
    is_loop: bool = False
    is_result_free: bool = False

    def wanted(self, roles: Roles) -> Wanted:
        return tuple(roles)

    def is_carrier(self, x: Any) -> bool:
        return is_object(x)

    def split(self, carriers: Sequence[Any], filters: Sequence[Wanted]):
        flat, static = self._as_before(carriers, filters) or self._seen(carriers, filters)
        groups: list[Groups] = [tuple({} for _ in wanted) for wanted in filters]
        for n, (leaf, (i, g)) in enumerate(zip(flat.leaves, static.places, strict=True)):
            groups[i][g][n] = leaf
        return flat, static, groups

    def _seen(self, carriers: Sequence[Any], filters: Sequence[Wanted]) -> tuple[Flat, _Static]:
        flat = take_apart((tuple(carriers), ()), with_metadata=False)
        grouping = _Grouping(filters, ())
        self._check_aliases(flat, grouping)
        at = zip(flat.graphdef.paths, flat.leaves, strict=True)
        places = tuple(grouping.place(path, leaf)[1:] for path, leaf in at)
        index = {id(x): i for i, x in enumerate(flat.objects)}
        owners = tuple(owner and (index[id(owner[0])], owner[1]) for owner in flat.owners)
        is_sure = flat.is_sure and not any(owners)
        changing = () if flat.is_sure else changing_values(flat)
        static = _Static(flat.graphdef, places, owners, is_sure, changing)
        if carriers and is_sure and not flat.again and grouping.is_of_structure:
            if len(self._before) >= _MAX_BEFORE:
                self._before.clear()
            self._before[tuple(map(type, carriers))] = static, filters
        return flat, static

    @functools.cached_property
    def _before(self) -> dict[tuple[type, ...], tuple[_Static, Sequence[Wanted]]]:
        """What was seen of objects of the same classes: the layers of a model look alike."""
        return {}

    def _as_before(
        self, carriers: Sequence[Any], filters: Sequence[Wanted]
    ) -> tuple[Flat, _Static] | None:
        """What there is to see, if it is what was seen before."""
        static, wanted = self._before.get(tuple(map(type, carriers)), (None, None))
        if static is None or wanted != filters:
            return None
        _, known = static.graphdef.root.attributes[0]
        objects = objects_alike([*enumerate(carriers)], known.attributes)
        return None if objects is None else (flat_of_variables(static.graphdef, objects), static)

    def merge(self, static: _Static, groups: Sequence[Groups]):
        leaves = [groups[i][g][n] for n, (i, g) in enumerate(static.places)]
        (carriers, _), objects = put_together(static.graphdef, leaves)
        held = [
            leaf if variable is None else variable
            for variable, leaf in _values(static, objects, leaves)
        ]
        values = [x._value if isinstance(x, Variable) else x for x in held]
        metadata = [x._metadata if isinstance(x, Variable) else None for x in held]
        looks = [(x, x._look()) for x in objects if isinstance(x, Pytree)]
        return _Inner(objects, values, metadata, looks if static.is_sure else None), list(carriers)

    def collect(
        self,
        inner: _Inner,
        static: _Static,
        carriers: Sequence[Any],
        filters: Sequence[Wanted],
        new: Sequence[Any],
        new_filters: Sequence[Wanted],
    ):
        groups: list[Groups] = [tuple({} for _ in wanted) for wanted in filters]
        new_groups: list[Groups] = [tuple({} for _ in wanted) for wanted in new_filters]
        if not self.structure or (not new and inner.looks_the_same()):
            if self.is_loop and not inner.looks_the_same():
                _check_loop_values(static, carriers, filters, inner)
            shared: list[Path] = []
            for n, (variable, _) in enumerate(_values(static, inner.objects, inner.values)):
                if variable is not None and _is_changed(variable, inner, n):
                    i, g = static.places[n]
                    if not self._begins_again(variable, filters[i][g]):
                        groups[i][g][n] = variable
                        if self.is_loop and not self.structure and filters[i][g][1] is None:
                            shared.append(static.graphdef.paths[n])
            if shared:
                text = changes_shared(self.transformation, place_of(shared[0]))
                raise SharedChanges(text, shared)
            if not new:
                note_values(list(range(len(inner.values))), static.graphdef.paths)
                return None, groups, new_groups
            carriers = ()
        flat = take_apart((tuple(carriers), tuple(new)), with_metadata=False)
        is_same = self.structure and _is_same(flat, inner, static)
        grouping = _Grouping(filters, new_filters)
        if not is_same:
            self._check_captured(flat, inner, static)
            self._check_aliases(flat, grouping)
        known = _known(inner, static)
        keys: list[int] = []
        note_values(keys, flat.graphdef.paths)
        for n, (path, leaf) in enumerate(zip(flat.graphdef.paths, flat.leaves, strict=True)):
            owner = flat.owners[n]
            key = known.get(id(leaf) if owner is None else (id(owner[0]), owner[1]))
            if key is None:
                key = len(inner.values) + n
                part, i, g = grouping.place(path, leaf)
                (groups, new_groups)[part][i][g][key] = leaf
            elif _is_changed(leaf, inner, key):
                i, g = static.places[key]
                if not self._begins_again(leaf, filters[i][g]):
                    groups[i][g][key] = leaf
            keys.append(key)
        if is_same:
            return None, groups, new_groups
        origin = {id(x): i for i, x in enumerate(inner.objects)}
        origins = tuple(origin.get(id(x)) for x in flat.objects)
        if self.is_loop and self.structure:
            _check_loop(static, flat, origins, grouping.is_own)
        copies = None if flat.is_sure else _copies(flat.graphdef, static.graphdef)
        return _Changed(flat.graphdef, origins, tuple(keys), copies), groups, new_groups

    def _begins_again(self, leaf: Any, wanted: tuple[Any, Any]) -> bool:
        """Whether a change is left behind: of a count of keys that all iterations share."""
        is_shared = self.is_loop and self.structure and wanted[1] is None
        return is_shared and isinstance(leaf, RngCount)

    def _check_captured(self, flat: Flat, inner: _Inner, static: _Static) -> None:
        """Refuses objects from outside, and where structure stays outside those that went in."""
        here, inside = current_trace(), {id(x): i for i, x in enumerate(inner.objects)}
        for i, x in enumerate(flat.objects):
            if id(x) not in inside:
                if trace_of(x) != here:
                    raise captured_output(x, _first_paths(flat.graphdef)[i])
            elif not self.structure:
                paths = _first_paths(static.graphdef), _first_paths(flat.graphdef)
                raise shared_in_tree_mode(x, paths[0][inside[id(x)]], paths[1][i])

    def _check_aliases(self, flat: Flat, grouping: "_Grouping") -> None:
        """Refuses objects that are met twice, where that is not allowed or they cross twice."""
        first_paths = _first_paths(flat.graphdef) if flat.again else {}
        for index, path in flat.again:
            first = first_paths[index]
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
        static: _Changed | None,
        groups: Sequence[Groups | None],
        new_groups: Sequence[Groups],
    ) -> list[Any]:
        found = dict(_entries(groups))
        if static is not None:
            found.update(_entries(new_groups))
        if static is None or static.copies is not None:
            _give_own_metadata(found, outer)
        kept = [
            (outer.leaves[n], outer.owners[n], found[n]) for n in found if n < len(outer.leaves)
        ]
        here = current_trace()
        for leaf, owner, _ in kept:
            what = leaf if owner is None else owner[0]
            if trace_of(what) != here:
                raise changed_elsewhere(what)
        new: Sequence[Any] = ()
        changes: Sequence[Change] = ()
        if static is not None:
            leaves = [found[key] if key in found else outer.leaves[key] for key in static.keys]
            existing = {i: outer.objects[o] for i, o in enumerate(static.origins) if o is not None}
            graphdef = static.graphdef
            if static.copies is not None:
                graphdef = with_static_values(graphdef, static.copies.made())
            (_, new), _, changes = plan_together(graphdef, leaves, existing=existing)
            check_changes(changes)
        # From here on nothing is refused, so that all that has changed is written or nothing is.
        for leaf, owner, value in kept:
            _write(leaf, owner, value)
        make_changes(changes)
        return list(new)

    def cotangents(self, static: _Changed | None, packed: Any) -> Any:
        """Cotangents of a result, as the function of a rule knows them.

        Args:
            static: what was collected.
            packed: the cotangents; for an object that is new its groups. In its place comes a
                `State`, or where objects are plain pytrees an object of its class.
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
        static: _Static,
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

    def union(self, group: Group, other: Group) -> Group:
        return {**group, **other}

    def join(self, static: _Static, statics: Sequence[_Changed | None]) -> Any:
        for after in statics[1:]:
            if after != statics[0]:
                raise self._differs(static, statics[0], after)
        return statics[0]

    def _differs(self, static: _Static, *changed: _Changed | None) -> Exception:
        unchanged = range(len(_first_paths(static.graphdef)))
        first, second = (
            (static.graphdef, unchanged) if c is None else (c.graphdef, c.origins) for c in changed
        )
        found = first_difference((first[0], second[0]), (first[1], second[1]))
        at = "an object" if found is None else place_of(found.path)
        seen = ("otherwise", "as it was") if found is None else found.seen
        return BranchObjectsError(
            f"nnx.{self.transformation}: {at} is {seen[0]} after one branch, and {seen[1]} after "
            "another. What comes out must look alike whichever of them is taken, but for values of "
            "variables; change it alike in all of them, or before."
        )

    def place(self, static: _Static, carrier: int, path: Any) -> str:
        return place_of_value(static.graphdef.paths, path)

    def argument(self, path: Any) -> str:
        return argument_at(path)


class _Grouping:
    """To which group of which object a value belongs, and what was said of that group."""

    def __init__(self, of_args: Sequence[Wanted], of_results: Sequence[Wanted]):
        self._wanted = of_args, of_results
        self._predicates: Any = [
            [[to_predicate(where) for where, _ in of_object] for of_object in of_part]
            for of_part in self._wanted
        ]

    def place(self, path: Path, leaf: Any) -> tuple[int, int, int]:
        """Whether it is among the arguments or results, which of the objects there, which group.

        Raises:
            StateFilterError: if no filter matches.
        """
        part, i = path[:2]
        predicates: list[Predicate] = self._predicates[part][i]  # pyright: ignore[reportCallIssue, reportArgumentType]
        below = path[2:]
        for g, matches in enumerate(predicates):
            if type(matches) is Everything or matches(below, leaf):
                return part, i, g  # pyright: ignore[reportReturnType]
        raise unmatched(leaf, path, [where for where, _ in self._wanted[part][i]])  # pyright: ignore[reportCallIssue, reportArgumentType]

    @property
    def is_of_structure(self) -> bool:
        """Whether it is the same for all graphs with the same description."""
        every = (matches for part in self._predicates for of in part for matches in of)
        return all(isinstance(matches, Everything | OfType) for matches in every)

    def role(self, path: Path, leaf: Any) -> Any:
        """What was said of a value."""
        part, i, g = self.place(path, leaf)
        return self._wanted[part][i][g][1]

    def roles(self, path: Path) -> list[Any]:
        """All roles that were given to the object there."""
        part, i = path[:2]
        return [role for _, role in self._wanted[part][i]]  # pyright: ignore[reportCallIssue, reportArgumentType]

    def is_own(self, after: Flat, path: Path) -> bool:
        """Whether each iteration has its own of all values there, or of the whole object."""
        at = zip(after.graphdef.paths, after.leaves, strict=True)
        roles = [self.role(p, leaf) for p, leaf in at if p[: len(path)] == path]
        return all(isinstance(role, int) for role in roles or self.roles(path))

    def is_same(self, path: Path, other: Path) -> bool:
        """Whether the same one thing is said of all that is below either path."""
        of_path, of_other = (self._wanted[p[0]][p[1]] for p in (path, other))  # pyright: ignore[reportCallIssue, reportArgumentType]
        return len(of_path) == 1 and of_path == of_other


def _values(
    static: _Static, objects: Iterable[Any], leaves: Sequence[Any]
) -> Iterator[tuple[Variable[Any] | None, Any]]:
    """Each value with its variable, if it is in one."""
    variables = (x for x in objects if isinstance(x, Variable))
    for leaf, owner in zip(leaves, static.owners, strict=True):
        yield (next(variables) if owner is None else None), leaf


def _known(inner: _Inner, static: _Static) -> dict[Any, int]:
    """The numbers of the values that went in, by variable, or by owner and attribute."""
    known: dict[Any, int] = {}
    for n, (variable, _) in enumerate(_values(static, inner.objects, inner.values)):
        owner = static.owners[n]
        known[id(variable) if owner is None else (id(inner.objects[owner[0]]), owner[1])] = n
    return known


def _are_same(xs: list[Any], ys: list[Any]) -> bool:
    return len(xs) == len(ys) and all(map(operator.is_, xs, ys))


def _is_same(flat: Flat, inner: _Inner, static: _Static) -> bool:
    """Whether the graph is as it was, with the same objects at the same places."""
    return (
        _are_same(flat.objects, inner.objects)
        and flat.graphdef == static.graphdef
        and (not static.changing or _shares_the_same(flat.graphdef, static.graphdef))
    )


def _shares_the_same(now: GraphDef, before: GraphDef) -> bool:
    """Whether no static value that can change is at the place of another one that went in.

    A new one may be equal to the one in whose place it is; then that one stays outside.
    """
    old, new = ([*changing_parts((*unhashable_values(of),))] for of in (before, now))
    went_in = set(old)
    return all(a == b or a not in went_in for a, b in zip(new, old, strict=True))


def _copies(now: GraphDef, before: GraphDef) -> Copies:
    """Copies of the static values that a function has made or changed."""
    unchanged = changing_parts((*unhashable_values(before, is_unchanged=True),))
    return Copies(unhashable_values(now), [same.value for same in unchanged])


def _give_own_metadata(found: dict[int, Any], outer: Flat) -> None:
    """Has the caller's variables hold metadata of their own, where it can change."""
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


def _is_changed(leaf: Any, inner: _Inner, n: int) -> bool:
    before, now = inner.values[n], leaf
    if isinstance(leaf, Variable):
        now = leaf._value
        if leaf._metadata is not inner.metadata[n]:
            return True
    if now is before:
        return False
    old, new = jax.tree.leaves(before), jax.tree.leaves(now)
    return (
        len(old) != len(new)
        or any(a is not b for a, b in zip(old, new, strict=True))
        or jax.tree.structure(before) != jax.tree.structure(now)
    )


def _first_paths(graphdef: GraphDef) -> dict[int, Path]:
    """Where each object was met first."""
    paths: dict[int, Path] = {}

    def walk(part: Any, path: Path) -> None:
        if isinstance(part, VariableDef):
            paths[part.index] = path
        elif isinstance(part, NodeDef):
            if part.index is not None:
                paths[part.index] = path
            for name, below in part.attributes:
                walk(below, (*path, name))

    walk(graphdef.root, ())
    return paths


def trace_of(x: Any) -> Any:
    """The trace in which an object or variable was made."""
    return x._trace if isinstance(x, Variable) else x._watch.trace


def watched(x: Any) -> bool:
    """Has an object or variable watched from now on, and says whether it was before."""
    if isinstance(x, Variable):
        before = x._watched
        object.__setattr__(x, "_watched", True)
        return before
    before, x._watch.watched = x._watch.watched, True
    return before


def _entries(groups: Iterable[Groups | None]) -> Iterator[tuple[int, Any]]:
    return (item for of_object in groups for group in of_object or () for item in group.items())


def _write(leaf: Any, owner: Any, value: Any) -> None:
    """Gives a variable, or an attribute that is an array, a new value."""
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


def _check_loop_values(
    static: _Static, carriers: Sequence[Any], filters: Sequence[Wanted], inner: _Inner
) -> None:
    """Refuses what a loop without graph updates would drop: all but values of variables.

    Static values and new attributes of objects that the loop does not carry are dropped, as they
    are in every transformation without graph updates.
    """
    flat = take_apart((tuple(carriers), ()), with_metadata=False)
    now = dict(zip(flat.graphdef.paths, flat.leaves, strict=True))
    values = _values(static, inner.objects, inner.values)
    for n, (path, (variable, value)) in enumerate(zip(static.graphdef.paths, values, strict=True)):
        if variable is not None and now.get(path, variable) is not variable:
            raise changed_in_loop(path, "replaces the variable")
        if variable is None and _is_changed(now.get(path, value), inner, n):
            raise changed_in_loop(path, "changes the array")
    grouping = _Grouping(filters, ())

    def is_dropped(_: Flat, path: Path) -> bool:
        return not any(role is CARRY for role in grouping.roles(path))

    origin = {id(x): i for i, x in enumerate(inner.objects)}
    _check_loop(static, flat, [origin.get(id(x)) for x in flat.objects], is_dropped)


def _check_loop(
    static: _Static,
    after: Flat,
    origins: Sequence[int | None],
    may_change: Callable[[Flat, Path], bool],
) -> None:
    """Refuses changes of the graph, but where they may be."""

    def compare(a: Any, b: Any, path: Path) -> None:
        if isinstance(a, NodeDef) and isinstance(b, NodeDef) and a.type is b.type:
            old, new = dict(a.attributes), dict(b.attributes)
            for name in {**old, **new}:
                if name in old and name in new:
                    compare(old[name], new[name], (*path, name))
                elif not may_change(after, (*path, name)):
                    change = "makes an attribute" if name in new else "removes the attribute"
                    raise changed_in_loop((*path, name), change)
            return
        if isinstance(b, Ref | NodeDef | VariableDef):
            b_index = origins[b.index] if b.index is not None else None
            same = type(a) is type(b) and a.index == b_index
        else:
            same = a == b
        if not same and not may_change(after, path):
            raise changed_in_loop(path, "changes a reference or static value")

    old, new = (dict(root.attributes)[0] for root in (static.graphdef.root, after.graphdef.root))
    compare(old, new, (0,))
