"""Transfer of a `Scope` through a JAX transformation.

Only roots cross, the given scopes that are not below another one; scopes below are found again from
their roots. A group of a scope's state is a triple: variables, PRNG streams, and created variables.
Output groups contain only changed variables; created variables are returned with their initial
values in `made`, and among the variables only if written to again. Initial values thus cross
transformations like other values, along the same axes.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax

from weft import errors, lifting
from weft.core import frozen_dict, meta, partial_eval
from weft.core import rngs as rngs_lib
from weft.core.filters import (
    Filter,
    canonical,
    from_canonical,
    group_collections,
    in_filter,
    intersect_filters,
    is_filter_empty,
    union_filters,
)
from weft.core.rngs import Counts, CreatedScopes, FrozenCounts, LazyRng, Path
from weft.core.scope import Scope
from weft.core.tracing import trace_error
from weft.core.variable_store import Entry, VariableStore, is_same
from weft.lifting.kind import Parts
from weft.lifting.traces import TraceState, current_trace


@dataclasses.dataclass(frozen=True)
class Select:
    """Filter of a group by collections and PRNG streams.

    Attributes:
        out: selects those that may change.
        enters: whether the function sees their values; otherwise the results replace them.
    """

    variables: Filter = False
    rngs: Filter = False
    out: Filter = True
    enters: bool = True


class Group(NamedTuple):
    """Part of a scope's state.

    Attributes:
        variables: by collection, scope and name.
        made: initial values of variables that the call has created, nested as `variables`.
    """

    variables: dict[str, Any]
    streams: dict[str, LazyRng]
    made: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Root:
    """Static part of a scope, independent of its position in the tree.

    Attributes:
        carried: collections that a loop carries.
        shared: collections that all iterations or indices share.
        given: existing immutable collections without variables in this scope.
        has_run: whether this function, or one around it, has run before to create its state.
        is_complete: whether all its state exists, see `ScopeKind.create_outside`.
    """

    mutable: Any
    flags: frozen_dict.FrozenDict
    counts: FrozenCounts
    lifts: Any
    carried: Any
    shared: Any
    given: frozenset[str]
    has_run: bool = False
    is_complete: bool = False
    path: Path = dataclasses.field(default=(), compare=False)
    debug_path: Path = dataclasses.field(default=(), compare=False)


@dataclasses.dataclass(frozen=True)
class _Collected:
    """Static part of a scope after the function; `counts` is None for a scope below a root.

    `left`, the scope's `left_counts`, does not distinguish results.
    """

    counts: FrozenCounts | None
    left: frozenset[tuple[tuple[int, str], int]] = dataclasses.field(compare=False)


class _Descendant(NamedTuple):
    root: int
    path: Path


@dataclasses.dataclass(frozen=True)
class ScopeKind(lifting.Kind):
    """Kind of `Scope`; see `weft.lifting.kind.Kind`.

    Attributes:
        folds: whether PRNG streams restart inside from keys drawn outside, whatever the position.
        counts_first_run: whether a loop counts keys as if its body had run once before.
        data_transform: maps groups of variables and of streams to those that are merged.
    """

    transformation: str
    folds: bool = False
    counts_first_run: bool = True
    data_transform: Callable[[Any, Any], tuple[Any, Any]] | None = None
    carrier_types: ClassVar[tuple[type, ...]] = (Scope,)
    carriers_are_leaves: ClassVar[bool] = True

    def needs_creation(self, scope: Scope, where: Filter) -> bool:
        """Returns whether variables of some collections can be created and no previous run has."""
        made = group_collections(scope.variables(), [where])[0]
        store = scope._store
        has_run = store.has_run or store.trace != current_trace()
        is_made = has_run and any(made.values())
        return not is_made and not is_filter_empty(intersect_filters(where, scope.mutable))

    def create_outside(self, carriers, parts, call):
        """Creates the variables of a call inside of a JAX transformation that does not lift scopes.

        Their values must not depend on transformed values, so they are computed outside, once. For
        that, the call is traced on copies of the scopes. It then runs as if its variables had
        existed before: lifted functions inside of it do not create theirs again, so each of d
        nested transformations is traced at most d + 1 times.
        """
        for i, scope in enumerate(carriers):
            if scope.mutable is False or scope._store.trace == current_trace():
                continue
            if _creates_outside(scope._store, _mutable_filter(scope, _selects(parts[i]))):
                _create_outside(scope._store.trace, carriers, call)
                break

    def split(self, carriers: Sequence[Scope], parts: Sequence[Parts]):
        filters = list(map(_selects, parts))
        statics: list[_Root | _Descendant] = []
        groups: list[tuple[Group, ...]] = []
        for i, (scope, wanted) in enumerate(zip(carriers, filters, strict=True)):
            scope._check_valid()
            below = _find_ancestor(carriers, i)
            if below is not None:
                if filters[below.root] != wanted:
                    raise errors.RoleError(
                        f"{self.transformation}: the scope {scope.path_text!r} is below "
                        f"{carriers[below.root].path_text!r}, which is lifted otherwise; lift both "
                        "in the same way."
                    )
                statics.append(below)
                groups.append(tuple(Group({}, {}, {}) for _ in wanted))
                continue
            counts = scope._counts.below(scope._below)
            store = scope._store
            is_outside = scope.mutable is not False and store.trace != current_trace()
            found = {col: store.entries(col, scope._below) for col in store.collections}
            variables = {col: entries for col, entries in found.items() if entries}
            of_vars = group_collections(variables, [where.variables for where, _ in wanted])
            of_rngs = group_collections(scope.rngs, [where.rngs for where, _ in wanted])
            if not any(of_rngs):
                # No key can be drawn inside, so the surrounding loops do not matter.
                counts = FrozenCounts(counts.table)
            elif self.folds:
                folding = Counts(counts)
                of_rngs = tuple(_fold_streams(streams, folding) for streams in of_rngs)
                counts = folding.freeze()
            groups.append(
                tuple(
                    Group(v if where.enters else {}, r, {})
                    for v, r, (where, _) in zip(of_vars, of_rngs, wanted, strict=True)
                )
            )
            lifts = _union_of([where.variables for where, _ in wanted])
            empty = (store.collections.keys() | store.given) - variables.keys()
            statics.append(
                _Root(
                    canonical(_mutable_filter(scope, wanted)),
                    scope.flags,
                    counts,
                    canonical(lifts),
                    _collections_with_role(wanted, lifting.CARRY),
                    _collections_with_role(wanted, None),
                    # Missing variables of mutable collections are created inside.
                    frozenset(
                        col
                        for col in empty
                        if in_filter(lifts, col) and not scope.is_mutable_collection(col)
                    ),
                    has_run=store.has_run or is_outside,
                    is_complete=store.is_complete or is_outside,
                    path=scope.path,
                    debug_path=scope.debug_path,
                )
            )
        static = tuple(statics)
        return (carriers, static), static, groups

    def merge(self, static, groups):
        roots: dict[int, Scope] = {}
        for i, (fields, of_scope) in enumerate(zip(static, groups, strict=True)):
            if isinstance(fields, _Descendant):
                continue
            name = fields.debug_path[-1] if fields.debug_path else ""
            of_vars = tuple(group.variables for group in of_scope)
            of_rngs = tuple(group.streams for group in of_scope)
            if (change := self.data_transform) is not None:
                of_vars, of_rngs = change(of_vars, of_rngs)
            roots[i] = scope = Scope(
                {col: v for variables in of_vars for col, v in variables.items()},
                {stream: r for streams in of_rngs for stream, r in streams.items()},
                name=fields.path[-1] if fields.path else None,
                mutable=from_canonical(fields.mutable),
                path=fields.path,
                debug_path=(*fields.debug_path[:-1], f"{self.transformation}({name})"),
                flags=fields.flags,
            )
            scope._store.lifted_by = self.transformation
            scope._store.lifts = from_canonical(fields.lifts)
            scope._store.given = fields.given
            scope._store.has_run = fields.has_run
            scope._store.is_complete = fields.is_complete
            scope._counts = Counts(fields.counts)

        def found(fields: _Descendant) -> Scope:
            scope = roots[fields.root]
            for name in fields.path:
                scope = scope.push(name, reuse=True)
            return scope

        return None, [
            found(fields) if isinstance(fields, _Descendant) else roots[i]
            for i, fields in enumerate(static)
        ]

    def collect(self, inner, static, carriers, parts, returned):
        if returned.carriers:
            first = returned.carriers[0]
            raise errors.ReturnedScopeError(self.transformation, first.path_text)
        collected: list[_Collected] = []
        groups = []
        for scope, fields, of_scope in zip(carriers, static, parts, strict=True):
            wanted = _selects(of_scope)
            if isinstance(fields, _Descendant):
                collected.append(_Collected(None, scope.left_counts))
                groups.append(tuple(Group({}, {}, {}) for _ in wanted))
                continue
            store = scope._store
            counts = scope._counts.end(_created_scopes(store, fields))
            collected.append(_Collected(counts, scope.left_counts))
            where = [select.variables for select, _ in wanted]
            of_vars = group_collections(store.changes(), where)
            of_made = group_collections(store.made, where)
            groups.append(
                tuple(
                    Group(v, {}, m) if select.enters else Group(_union(m, v), {}, {})
                    for v, m, (select, _) in zip(of_vars, of_made, wanted, strict=True)
                )
            )
            scope.invalidate()
        return tuple(collected), groups, []

    def commit(self, outer, static, groups, new_groups):
        here = current_trace()
        scopes, before = outer
        for i, scope in enumerate(scopes):
            scope._check_valid()
            if scope._store.trace != here:
                _check_unchanged(scope, before[i], static[i].counts, groups[i])
        for scope, after, of_scope in zip(scopes, static, groups, strict=True):
            scope.left_counts = after.left
            if after.counts is None or scope._store.trace != here:
                continue
            if after.counts.table:
                scope._counts.update_below(scope._below, after.counts)
            for group in of_scope:
                if group is not None and (group.made or group.variables):
                    _write(scope, group.made, only_new=True)
                    _write(scope, group.variables)
        return []

    def fork(self, group: Group, n: int) -> Group:
        if group.variables:
            raise errors.ForkError(
                f"{self.transformation}: the collections {sorted(group.variables)} are not PRNG "
                "streams and cannot be split; give them an axis."
            )
        streams = {
            name: stream.replace(rng=jax.random.split(stream.rng, n))
            for name, stream in group.streams.items()
        }
        return group._replace(streams=streams)

    def axis(self, static, carrier, sign, group, axis, metadata):
        change = meta.add_axis if sign > 0 else meta.remove_axis

        def changed(collections: dict[str, Any]) -> dict[str, Any]:
            boxes = {}
            for col, entries in collections.items():
                with meta.about("/".join((col, *_path_of(static[carrier])))):
                    boxes[col] = change(entries, axis, metadata)
            return boxes

        return group._replace(variables=changed(group.variables), made=changed(group.made))

    def location(self, static, carrier, path) -> str:
        if carrier is None:
            return super().location(static, carrier, path)
        part, name, *below = path
        above = _path_of(static[carrier])
        if part.name == "streams":
            return f"the PRNG stream {name.key!r} of the scope {'/' + '/'.join(above)!r}"
        keys = list(itertools.takewhile(lambda k: isinstance(k, jax.tree_util.DictKey), below))
        shown = "/".join(map(str, (name.key, *above, *(key.key for key in keys))))
        return f"{shown!r}{jax.tree_util.keystr(tuple(below[len(keys) :]))}"

    def may_create(self, static, where) -> bool:
        of_vars = _as_select(where).variables
        return any(
            isinstance(s, _Root)
            and not is_filter_empty(intersect_filters(of_vars, from_canonical(s.mutable)))
            for s in static
        )

    def created(self, before: Group, after: Group) -> Group | None:
        return Group(after.made, {}, {}) if after.made else None

    def union(self, group: Group, other: Group) -> Group:
        variables = _union(_union(group.variables, other.made), other.variables)
        return group._replace(variables=variables)

    def with_created(self, group: Group, created: Group) -> Group:
        return group._replace(made=_union(created.variables, group.made))

    def static_of_run(self, static, created_by=None, collected=None):
        statics: list[_Root | _Descendant] = []
        for i, fields in enumerate(static):
            if isinstance(fields, _Root):
                creating_counts = None if created_by is None else created_by[i].counts
                counts_after = None if collected is None else collected[i].counts
                fields = self._with_counts(fields, creating_counts, counts_after)
            statics.append(fields)
        return tuple(statics)

    def _with_counts(
        self, fields: _Root, made: FrozenCounts | None, known: FrozenCounts | None
    ) -> _Root:
        """Returns a scope's static part for a run.

        Args:
            made: the counts after the run that has created its state, if any.
            known: the counts after this run, if known.
        """
        if made is None:
            if not self.counts_first_run:
                return fields
            counts = rngs_lib.counts_for_loop(fields.counts, known)
            return dataclasses.replace(fields, counts=counts)
        if not self.counts_first_run:
            made = rngs_lib.counts_after_creation(fields.counts, made)
        counts = dataclasses.replace(made, draws=known and known.draws)
        return dataclasses.replace(fields, counts=counts, has_run=True)

    def join(self, static, statics):
        return tuple(
            _Collected(
                of_scope[0].counts
                and functools.reduce(rngs_lib.max_counts, (branch.counts for branch in of_scope)),
                functools.reduce(rngs_lib.max_by_key, (branch.left for branch in of_scope)),
            )
            for of_scope in zip(*statics, strict=True)
        )


def _fold_streams(streams: Mapping[str, LazyRng], counts: Counts) -> dict[str, LazyRng]:
    """Returns streams that restart from one key of each."""
    return {
        name: LazyRng(stream.at(counts.draw(((), name))).as_jax_rng())
        for name, stream in streams.items()
    }


def _path_of(fields: _Root | _Descendant) -> Path:
    return fields.path if isinstance(fields, _Root) else ()


def _selects(parts: Parts) -> tuple[tuple[Select, Any], ...]:
    return tuple((_as_select(where), role) for where, role in parts)


def _as_select(where: Any) -> Select:
    return where if isinstance(where, Select) else Select(where, where)


def _union_of(filters: Sequence[Filter]) -> Filter:
    return functools.reduce(union_filters, filters) if filters else False


def _collections_with_role(wanted: Sequence[tuple[Select, Any]], role: object) -> Any:
    return canonical(_union_of([where.variables for where, r in wanted if r is role]))


def _created_scopes(store: VariableStore, fields: _Root) -> CreatedScopes | None:
    """Returns the scopes of created state with which a surrounding loop must begin."""
    carried, shared = (
        frozenset(store.created_in(from_canonical(where)))
        for where in (fields.carried, fields.shared)
    )
    return CreatedScopes(carried, shared) if carried or shared else None


def _mutable_filter(scope: Scope, wanted: Sequence[tuple[Select, Any]]) -> Filter:
    if scope.mutable is False:
        return False
    changeable = [intersect_filters(where.variables, where.out) for where, _ in wanted]
    return intersect_filters(scope.mutable, _union_of(changeable))


def _find_ancestor(scopes: Sequence[Scope], i: int) -> _Descendant | None:
    """Returns another scope that is above this one, or is the same and comes first."""
    scope = scopes[i]
    for j, other in enumerate(scopes):
        n = len(other._below)
        above = other._store is scope._store and scope._below[:n] == other._below
        if j != i and above and (n < len(scope._below) or j < i):
            outer = _find_ancestor(scopes, j)
            return (
                _Descendant(j, scope._below[n:])
                if outer is None
                else _Descendant(outer.root, (*outer.path, *scope._below[n:]))
            )
    return None


def _creates_outside(store: VariableStore, mutable: Filter) -> bool:
    return not store.is_complete and not is_filter_empty(mutable)


def _create_outside(
    trace: TraceState, carriers: Sequence[Scope], call: Callable[[Sequence[Scope]], Any]
) -> None:
    """Creates the variables of scopes of `trace` that `call` creates, see `ScopeKind`."""
    if (running := trace()) is None:
        return
    outside = {id(scope._store): scope._store for scope in carriers}
    outside = {i: store for i, store in outside.items() if store.trace == trace}
    counts = {id(scope._counts): Counts(scope._counts.freeze()) for scope in carriers}
    created: list[tuple[VariableStore, Entry]] = []
    changed: set[Entry] = set()

    def values() -> list[Any]:
        stores = {id(s._store): s._store.copy(s.mutable) for s in carriers}
        call([s.copy(stores[id(s._store)], counts[id(s._counts)]) for s in carriers])
        created[:] = [(outside[i], entry) for i in outside for entry in stores[i].created()]
        changed.update(entry for i in outside for entry in stores[i].changed())
        for store, entry in ((outside[i], e) for i in outside for e in stores[i].changed()):
            if (store, entry) not in created:
                raise _written_error(store, entry)
        found = (stores[id(store)].entries(col, path) for store, (col, path, _) in created)
        return [of[name] for of, (_, (_, _, name)) in zip(found, created, strict=True)]

    def error(path: Any) -> Exception:
        store, (col, where, name) = created[path[0].idx]
        if (col, where, name) in changed:
            return _written_error(store, (col, where, name))
        variable = f"the first value of {name!r} of the collection {col!r}"
        return trace_error(f"{variable} depends on what is transformed", store.where(where))

    computed = partial_eval.evaluate_outside(running, values, error)
    for (store, (col, where, name)), value in zip(created, computed, strict=True):
        store.put(col, where, name, value)
    for scope in carriers:
        if id(scope._store) in outside:
            scope._counts.update_below((), counts[id(scope._counts)].freeze())


def _check_unchanged(
    scope: Scope,
    before: _Root | _Descendant,
    after: FrozenCounts | None,
    of_scope: Sequence[Group | None],
) -> None:
    """Raises JaxTransformError if a call has created or changed variables, or has drawn keys."""
    if after is None or isinstance(before, _Descendant):
        return
    store = scope._store
    for group in of_scope:
        for part in (group.made, group.variables) if group is not None else ():
            for (col, path, name), value in _entries(scope, part):
                if not is_same(store.entries(col, path).get(name), value):
                    raise _written_error(store, (col, path, name))
    for (path, stream), _ in after.table - before.counts.table:
        raise trace_error(
            f"a key of the PRNG stream {stream!r} is drawn",
            store.where((*scope._below, *path)),
            "every index or iteration would draw the same",
        )
    # A run that created variables has counted its keys.
    if not _creates_outside(store, from_canonical(before.mutable)):
        scope._counts.update_below(scope._below, after)


def _written_error(store: VariableStore, entry: Entry) -> Exception:
    col, path, name = entry
    return trace_error(f"{name!r} of the collection {col!r} is written to", store.where(path))


def _entries(scope: Scope, group: Mapping[str, Any]) -> Iterator[tuple[Entry, Any]]:
    """Yields the variables of a group in mutable collections, with their values."""
    store = scope._store

    def walk(col: str, path: Path, entries: Mapping[str, Any]) -> Iterator[tuple[Entry, Any]]:
        for name, value in entries.items():
            there = store.entries(col, path).get(name, {})
            if type(value) is dict and value and isinstance(there, Mapping):
                yield from walk(col, (*path, name), value)
            else:
                yield (col, path, name), value

    for col, entries in group.items():
        if scope.is_mutable_collection(col):
            yield from walk(col, scope._below, entries)


def _write(scope: Scope, group: Mapping[str, Any], only_new: bool = False) -> None:
    store = scope._store
    for (col, path, name), value in _entries(scope, group):
        if not (only_new and name in store.entries(col, path)):
            store.put(col, path, name, value)


def _union(a: Any, b: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(a)
    for name, value in b.items():
        below = type(value) is dict and isinstance(result.get(name), Mapping)
        result[name] = _union(result[name], value) if below else value
    return result
