"""Transfer of a `Scope` through a JAX transformation.

Only roots cross, the given scopes that are not below another one; scopes below are found again from
their roots. A group of a scope's state is a triple: variables, PRNG streams, and created variables.
Output groups contain only changed variables; created variables are returned with their initial
values in `created`, and among the variables only if written to again. Initial values thus cross
transformations like other values, along the same axes.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
from jax.tree_util import DictKey, KeyPath, keystr

from weft import errors, lifting
from weft.core import frozen_dict, meta, partial_eval
from weft.core import rngs as rngs_lib
from weft.core.filters import (
    CanonicalFilter,
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
from weft.lifting.kind import Parts, Returned
from weft.lifting.roles import Role
from weft.lifting.traces import TraceState, current_trace
from weft.typing import PyTree

Collections = Mapping[str, Any]  # variables by collection, scope and name


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


SelectedParts = tuple[tuple[Select, Role], ...]


class Group(NamedTuple):
    """Part of a scope's state.

    Attributes:
        variables: by collection, scope and name.
        created: initial values of variables that the call has created, nested as `variables`.
    """

    variables: dict[str, Any]
    streams: dict[str, LazyRng]
    created: dict[str, Any]


Groups = tuple[Group, ...]
_EMPTY = Group({}, {}, {})


@dataclasses.dataclass(frozen=True)
class _Root:
    """Static part of a scope, independent of its position in the tree.

    Attributes:
        lifts: collections that the transformation lifts.
        carried: collections that a loop carries.
        shared: collections that all iterations or indices share.
        empty_collections: existing immutable collections without variables in this scope.
        has_run: whether this function, or one around it, has run before to create its state.
        is_complete: whether all its state exist, see `ScopeKind.create_outside`.
    """

    mutable: CanonicalFilter
    flags: frozen_dict.FrozenDict[str, Any]
    counts: FrozenCounts
    lifts: CanonicalFilter
    carried: CanonicalFilter
    shared: CanonicalFilter
    empty_collections: frozenset[str]
    has_run: bool = False
    is_complete: bool = False
    path: Path = dataclasses.field(default=(), compare=False)
    debug_path: Path = dataclasses.field(default=(), compare=False)


class _Descendant(NamedTuple):
    """Static part of a scope below another one, which is found again from that root."""

    root: int
    path: Path


_Static = tuple[_Root | _Descendant, ...]


@dataclasses.dataclass(frozen=True)
class _Collected:
    """Static part of a scope after the function; `counts` is None for a scope below a root.

    `left_counts`, those of the scope, do not distinguish results.
    """

    counts: FrozenCounts | None
    left_counts: frozenset[tuple[tuple[int, str], int]] = dataclasses.field(
        compare=False
    )


class _Outer(NamedTuple):
    """The scopes of a call, which stay outside, and their static parts before it."""

    scopes: Sequence[Scope]
    static: _Static


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

    # The four stages of the transfer.

    def split(
        self, carriers: Sequence[Scope], parts: Sequence[Parts]
    ) -> tuple[_Outer, _Static, list[Groups]]:
        parts_of_scopes = list(map(_selected_parts, parts))
        static: list[_Root | _Descendant] = []
        groups: list[Groups] = []
        for i, (scope, scope_parts) in enumerate(
            zip(carriers, parts_of_scopes, strict=True)
        ):
            scope._check_valid()
            descendant = _find_ancestor(carriers, i)
            if descendant is None:
                root, root_groups = self._split_root(scope, scope_parts)
                static.append(root)
                groups.append(root_groups)
                continue
            if parts_of_scopes[descendant.root] != scope_parts:
                raise errors.RoleError(
                    f"{self.transformation}: the scope {scope.path_text!r} is below "
                    f"{carriers[descendant.root].path_text!r}, which is lifted otherwise; lift "
                    "both in the same way."
                )
            static.append(descendant)
            groups.append(
                (_EMPTY,) * len(scope_parts)
            )  # its state crosses with the root's
        return _Outer(carriers, tuple(static)), tuple(static), groups

    def _split_root(
        self, scope: Scope, parts: SelectedParts
    ) -> tuple[_Root, Groups]:
        store = scope._store
        # Of an outer trace, where the state of this call was created, see `create_outside`.
        is_outside = (
            scope.mutable is not False and store.trace != current_trace()
        )
        variables: dict[str, Any] = {}
        for col in store.collections:
            entries = store.entries(col, scope._below)
            if entries:
                variables[col] = entries
        variable_groups = group_collections(
            variables, [select.variables for select, _ in parts]
        )
        stream_groups = group_collections(
            scope.rngs, [select.rngs for select, _ in parts]
        )

        counts = scope._counts.below(scope._below)
        if not any(stream_groups):
            # No key can be drawn inside, so the surrounding loops do not matter.
            counts = FrozenCounts(counts.table)
        elif self.folds:
            folding_counts = Counts(counts)
            stream_groups = tuple(
                _fold_streams(streams, folding_counts)
                for streams in stream_groups
            )
            counts = folding_counts.freeze()

        groups: list[Group] = []
        group_parts = zip(parts, variable_groups, stream_groups, strict=True)
        for (select, _), group_variables, streams in group_parts:
            groups.append(
                Group(group_variables if select.enters else {}, streams, {})
            )

        lifts = _union_of([select.variables for select, _ in parts])
        empty_collections: set[str] = set()
        for col in (
            store.collections.keys() | store.empty_collections
        ) - variables.keys():
            # Missing variables of mutable collections are created inside.
            if in_filter(lifts, col) and not scope.is_mutable_collection(col):
                empty_collections.add(col)
        root = _Root(
            mutable=canonical(_mutable_filter(scope, parts)),
            flags=scope.flags,
            counts=counts,
            lifts=canonical(lifts),
            carried=_collections_with_role(parts, lifting.CARRY),
            shared=_collections_with_role(parts, None),
            empty_collections=frozenset(empty_collections),
            has_run=store.has_run or is_outside,
            is_complete=store.is_complete or is_outside,
            path=scope.path,
            debug_path=scope.debug_path,
        )
        return root, tuple(groups)

    def merge(
        self, static: _Static, groups: Sequence[Groups]
    ) -> tuple[None, list[Scope]]:
        roots: dict[int, Scope] = {}
        for i, (fields, scope_groups) in enumerate(
            zip(static, groups, strict=True)
        ):
            if isinstance(fields, _Root):
                roots[i] = self._merge_root(fields, scope_groups)
        scopes: list[Scope] = []
        for i, fields in enumerate(static):
            if isinstance(fields, _Root):
                scopes.append(roots[i])
                continue
            scope = roots[fields.root]
            for name in fields.path:
                scope = scope.push(name, reuse=True)
            scopes.append(scope)
        return None, scopes

    def _merge_root(self, fields: _Root, groups: Groups) -> Scope:
        variable_groups = tuple(group.variables for group in groups)
        stream_groups = tuple(group.streams for group in groups)
        if self.data_transform is not None:
            variable_groups, stream_groups = self.data_transform(
                variable_groups, stream_groups
            )
        variables: dict[str, Any] = {}
        for group_variables in variable_groups:
            variables.update(group_variables)
        streams: dict[str, LazyRng] = {}
        for group_streams in stream_groups:
            streams.update(group_streams)
        name = fields.debug_path[-1] if fields.debug_path else ""
        scope = Scope(
            variables,
            streams,
            name=fields.path[-1] if fields.path else None,
            mutable=from_canonical(fields.mutable),
            path=fields.path,
            debug_path=(
                *fields.debug_path[:-1],
                f"{self.transformation}({name})",
            ),
            flags=fields.flags,
        )
        store = scope._store
        store.lifted_by = self.transformation
        store.lifts = from_canonical(fields.lifts)
        store.empty_collections = fields.empty_collections
        store.has_run = fields.has_run
        store.is_complete = fields.is_complete
        scope._counts = Counts(fields.counts)
        return scope

    def collect(
        self,
        inner: None,
        static: _Static,
        carriers: Sequence[Scope],
        parts: Sequence[Parts],
        returned: Returned,
    ) -> tuple[tuple[_Collected, ...], list[Groups], list[Groups]]:
        if returned.carriers:
            path_text = returned.carriers[0].path_text
            raise errors.ReturnedScopeError(self.transformation, path_text)
        collected: list[_Collected] = []
        groups: list[Groups] = []
        for scope, fields, scope_parts in zip(
            carriers, static, parts, strict=True
        ):
            selects = [_as_select(where) for where, _ in scope_parts]
            if isinstance(fields, _Descendant):
                collected.append(_Collected(None, scope.left_counts))
                groups.append((_EMPTY,) * len(selects))
                continue
            counts = scope._counts.end(_created_scopes(scope._store, fields))
            collected.append(_Collected(counts, scope.left_counts))
            groups.append(_changed_groups(scope._store, selects))
            scope.invalidate()
        return tuple(collected), groups, []

    def commit(
        self,
        outer: _Outer,
        static: Sequence[_Collected],
        groups: Sequence[Sequence[Group | None]],
        new_groups: Sequence[Groups],
    ) -> list[Scope]:
        trace = current_trace()
        # All or nothing: nothing is written before all scopes were checked.
        for i, scope in enumerate(outer.scopes):
            scope._check_valid()
            if scope._store.trace != trace:
                _check_unchanged(
                    scope, outer.static[i], static[i].counts, groups[i]
                )
        for scope, collected, scope_groups in zip(
            outer.scopes, static, groups, strict=True
        ):
            scope.left_counts = collected.left_counts
            # The root above commits for this scope; a scope of an outer trace has no changes.
            if collected.counts is None or scope._store.trace != trace:
                continue
            if collected.counts.table:
                scope._counts.update_below(scope._below, collected.counts)
            for group in scope_groups:
                if group is not None and (group.created or group.variables):
                    _write(scope, group.created, only_new=True)
                    _write(scope, group.variables)
        return []

    # Created state.

    def needs_creation(self, scope: Scope, where: Filter) -> bool:
        """Returns whether variables of some collections can be created and no previous run has."""
        store = scope._store
        has_run = store.has_run or store.trace != current_trace()
        (variables,) = group_collections(scope.variables(), [where])
        if has_run and any(variables.values()):
            return False
        return not is_filter_empty(intersect_filters(where, scope.mutable))

    def create_outside(
        self,
        carriers: Sequence[Scope],
        parts: Sequence[Parts],
        call: Callable[[Sequence[Scope]], PyTree],
    ) -> None:
        """Creates the variables of a call inside of a JAX transformation that does not lift scopes.

        Their values must not depend on transformed values, so they are computed outside, once. For
        that, the call is traced on copies of the scopes. It then runs as if its variables had
        existed before: lifted functions inside of it do not create theirs again, so each of d
        nested transformations is traced at most d + 1 times.
        """
        for scope, scope_parts in zip(carriers, parts, strict=True):
            if scope.mutable is False or scope._store.trace == current_trace():
                continue
            mutable = _mutable_filter(scope, _selected_parts(scope_parts))
            if _creates_outside(scope._store, mutable):
                _create_outside(scope._store.trace, carriers, call)
                break

    def may_create(self, static: _Static, where: Select | Filter) -> bool:
        collections = _as_select(where).variables
        for fields in static:
            if isinstance(fields, _Root):
                mutable = from_canonical(fields.mutable)
                if not is_filter_empty(intersect_filters(collections, mutable)):
                    return True
        return False

    def created(self, inputs: Group, outputs: Group) -> Group | None:
        return Group(outputs.created, {}, {}) if outputs.created else None

    def union(self, group: Group, other: Group) -> Group:
        variables = _union(
            _union(group.variables, other.created), other.variables
        )
        return group._replace(variables=variables)

    def with_created(self, group: Group, created: Group) -> Group:
        return group._replace(created=_union(created.variables, group.created))

    # Keys, metadata and locations.

    def fork(self, group: Group, n: int) -> Group:
        if group.variables:
            raise errors.ForkError(
                f"{self.transformation}: the collections {sorted(group.variables)} are not PRNG "
                "streams and cannot be split; give them an axis."
            )
        streams: dict[str, LazyRng] = {}
        for name, stream in group.streams.items():
            streams[name] = stream.replace(rng=jax.random.split(stream.rng, n))
        return group._replace(streams=streams)

    def axis(
        self,
        static: _Static,
        carrier: int,
        sign: int,
        group: Group,
        axis: int,
        metadata: dict[Any, Any],
    ) -> Group:
        change_metadata = meta.add_axis if sign > 0 else meta.remove_axis
        path = _path_of(static[carrier])

        def changed(collections: Collections) -> dict[str, Any]:
            new_collections: dict[str, Any] = {}
            for col, entries in collections.items():
                with meta.about("/".join((col, *path))):
                    new_collections[col] = change_metadata(
                        entries, axis, metadata
                    )
            return new_collections

        return group._replace(
            variables=changed(group.variables), created=changed(group.created)
        )

    def location(
        self, static: _Static, carrier: int | None, path: KeyPath
    ) -> str:
        if carrier is None:
            return super().location(static, carrier, path)
        scope_path = _path_of(static[carrier])
        part, name, *inner_path = path
        if part.name == "streams":
            return f"the PRNG stream {name.key!r} of the scope {'/' + '/'.join(scope_path)!r}"
        # Keys of dicts are names of scopes and of the variable; what follows is in its value.
        keys = list(
            itertools.takewhile(
                lambda key: isinstance(key, DictKey), inner_path
            )
        )
        names = [name.key, *scope_path, *(key.key for key in keys)]
        variable = "/".join(map(str, names))
        return f"{variable!r}{keystr(tuple(inner_path[len(keys) :]))}"

    def static_of_run(
        self,
        static: _Static,
        created_by: Sequence[_Collected] | None = None,
        collected: Sequence[_Collected] | None = None,
    ) -> _Static:
        statics: list[_Root | _Descendant] = []
        for i, fields in enumerate(static):
            if isinstance(fields, _Root):
                creation_counts = (
                    None if created_by is None else created_by[i].counts
                )
                final_counts = (
                    None if collected is None else collected[i].counts
                )
                fields = self._with_counts(
                    fields, creation_counts, final_counts
                )
            statics.append(fields)
        return tuple(statics)

    def _with_counts(
        self,
        fields: _Root,
        creation_counts: FrozenCounts | None,
        final_counts: FrozenCounts | None,
    ) -> _Root:
        """Returns a scope's static part for a run.

        Args:
            creation_counts: the counts after the run that has created its state, if any.
            final_counts: the counts after this run, if known.
        """
        if creation_counts is None:
            if not self.counts_first_run:
                return fields
            counts = rngs_lib.counts_for_loop(fields.counts, final_counts)
            return dataclasses.replace(fields, counts=counts)
        if not self.counts_first_run:
            creation_counts = rngs_lib.counts_after_creation(
                fields.counts, creation_counts
            )
        draws = None if final_counts is None else final_counts.draws
        counts = dataclasses.replace(creation_counts, draws=draws)
        return dataclasses.replace(fields, counts=counts, has_run=True)

    def join(
        self, static: _Static, statics: Sequence[tuple[_Collected, ...]]
    ) -> tuple[_Collected, ...]:
        joined: list[_Collected] = []
        for branches in zip(*statics, strict=True):
            counts: FrozenCounts | None = None
            if branches[0].counts is not None:
                counts = functools.reduce(
                    rngs_lib.max_counts, [branch.counts for branch in branches]
                )
            left_counts = functools.reduce(
                rngs_lib.max_by_key, [branch.left_counts for branch in branches]
            )
            joined.append(_Collected(counts, left_counts))
        return tuple(joined)


def _changed_groups(store: VariableStore, selects: Sequence[Select]) -> Groups:
    """Returns the changed and created variables of a scope, by filter."""
    filters = [select.variables for select in selects]
    changed = group_collections(store.changes(), filters)
    created = group_collections(store.initial_values, filters)
    groups: list[Group] = []
    for select, variables, initial_values in zip(
        selects, changed, created, strict=True
    ):
        if select.enters:
            groups.append(Group(variables, {}, initial_values))
        else:
            # All variables outside are replaced, whether or not the function has created them.
            groups.append(Group(_union(initial_values, variables), {}, {}))
    return tuple(groups)


def _fold_streams(
    streams: Mapping[str, LazyRng], counts: Counts
) -> dict[str, LazyRng]:
    """Returns streams that restart from one key of each."""
    folded: dict[str, LazyRng] = {}
    for name, stream in streams.items():
        number = counts.draw(((), name))
        folded[name] = LazyRng(stream.at(number).as_jax_rng())
    return folded


def _path_of(fields: _Root | _Descendant) -> Path:
    return fields.path if isinstance(fields, _Root) else ()


def _selected_parts(parts: Parts) -> SelectedParts:
    return tuple((_as_select(where), role) for where, role in parts)


def _as_select(where: Select | Filter) -> Select:
    return where if isinstance(where, Select) else Select(where, where)


def _union_of(filters: Sequence[Filter]) -> Filter:
    return functools.reduce(union_filters, filters) if filters else False


def _collections_with_role(parts: SelectedParts, role: Role) -> CanonicalFilter:
    filters = [
        select.variables for select, part_role in parts if part_role is role
    ]
    return canonical(_union_of(filters))


def _created_scopes(
    store: VariableStore, fields: _Root
) -> CreatedScopes | None:
    """Returns the scopes of created state with which a surrounding loop must begin."""
    carried = frozenset(store.created_in(from_canonical(fields.carried)))
    shared = frozenset(store.created_in(from_canonical(fields.shared)))
    return CreatedScopes(carried, shared) if carried or shared else None


def _mutable_filter(scope: Scope, parts: SelectedParts) -> Filter:
    if scope.mutable is False:
        return False
    changeable = [
        intersect_filters(select.variables, select.out) for select, _ in parts
    ]
    return intersect_filters(scope.mutable, _union_of(changeable))


def _find_ancestor(scopes: Sequence[Scope], i: int) -> _Descendant | None:
    """Returns another scope that is above this one, or is the same and comes first."""
    scope = scopes[i]
    for j, other in enumerate(scopes):
        depth = len(other._below)
        is_above = (
            other._store is scope._store
            and scope._below[:depth] == other._below
        )
        is_other = depth < len(scope._below) or j < i
        if j == i or not is_above or not is_other:
            continue
        path = scope._below[depth:]
        ancestor = _find_ancestor(scopes, j)
        if ancestor is None:
            return _Descendant(j, path)
        return _Descendant(ancestor.root, (*ancestor.path, *path))
    return None


def _creates_outside(store: VariableStore, mutable: Filter) -> bool:
    return not store.is_complete and not is_filter_empty(mutable)


def _create_outside(
    trace: TraceState,
    carriers: Sequence[Scope],
    call: Callable[[Sequence[Scope]], PyTree],
) -> None:
    """Creates the variables of scopes of `trace` that `call` creates, see `ScopeKind`."""
    running_trace = trace()
    if running_trace is None:
        return
    # By identity, since several scopes may share a store or counts.
    outer_stores: dict[int, VariableStore] = {}
    counts: dict[int, Counts] = {}
    for scope in carriers:
        counts[id(scope._counts)] = Counts(scope._counts.freeze())
        if scope._store.trace == trace:
            outer_stores[id(scope._store)] = scope._store
    created: list[tuple[VariableStore, Entry]] = []
    changed: set[Entry] = set()

    def create() -> list[PyTree]:
        created.clear()
        copies: dict[int, VariableStore] = {}
        for scope in carriers:
            copies[id(scope._store)] = scope._store.copy(scope.mutable)
        scope_copies: list[Scope] = []
        for scope in carriers:
            copy = scope.copy(
                copies[id(scope._store)], counts[id(scope._counts)]
            )
            scope_copies.append(copy)
        call(scope_copies)

        values: list[PyTree] = []
        for store_id, store in outer_stores.items():
            for col, path, name in copies[store_id].created():
                created.append((store, (col, path, name)))
                values.append(copies[store_id].entries(col, path)[name])
        for store_id, store in outer_stores.items():
            for entry in copies[store_id].changed():
                changed.add(entry)
                if (store, entry) not in created:
                    raise _written_error(store, entry)
        return values

    def error(path: KeyPath) -> Exception:
        store, entry = created[path[0].idx]
        if entry in changed:
            return _written_error(store, entry)
        col, scope_path, name = entry
        variable = f"the first value of {name!r} of the collection {col!r}"
        problem = f"{variable} depends on what is transformed"
        return trace_error(problem, store.location(scope_path))

    values = partial_eval.evaluate_outside(running_trace, create, error)
    for (store, (col, path, name)), value in zip(created, values, strict=True):
        store.put(col, path, name, value)
    for scope in carriers:
        if id(scope._store) in outer_stores:
            scope._counts.update_below((), counts[id(scope._counts)].freeze())


def _check_unchanged(
    scope: Scope,
    fields: _Root | _Descendant,
    counts: FrozenCounts | None,
    groups: Sequence[Group | None],
) -> None:
    """Raises JaxTransformError if a call has created or changed variables, or has drawn keys."""
    if counts is None or isinstance(fields, _Descendant):
        return
    store = scope._store
    for group in groups:
        if group is None:
            continue
        for entry, value in (
            *_entries(scope, group.created),
            *_entries(scope, group.variables),
        ):
            col, path, name = entry
            if not is_same(store.entries(col, path).get(name), value):
                raise _written_error(store, entry)
    for (path, stream), _ in counts.table - fields.counts.table:
        raise trace_error(
            f"a key of the PRNG stream {stream!r} is drawn",
            store.location((*scope._below, *path)),
            "every index or iteration would draw the same",
        )
    # A run that created variables has counted its keys.
    if not _creates_outside(store, from_canonical(fields.mutable)):
        scope._counts.update_below(scope._below, counts)


def _written_error(store: VariableStore, entry: Entry) -> Exception:
    col, path, name = entry
    return trace_error(
        f"{name!r} of the collection {col!r} is written to",
        store.location(path),
    )


def _entries(
    scope: Scope, collections: Collections
) -> Iterator[tuple[Entry, PyTree]]:
    """Yields the variables of a group in mutable collections, with their values."""
    store = scope._store

    def walk(
        col: str, path: Path, entries: Mapping[str, Any]
    ) -> Iterator[tuple[Entry, PyTree]]:
        for name, value in entries.items():
            # A dict contains a scope, unless the variable of this name exists and is another value.
            is_scope = isinstance(
                store.entries(col, path).get(name, {}), Mapping
            )
            if type(value) is dict and value and is_scope:
                yield from walk(col, (*path, name), value)
            else:
                yield (col, path, name), value

    for col, entries in collections.items():
        if scope.is_mutable_collection(col):
            yield from walk(col, scope._below, entries)


def _write(
    scope: Scope, collections: Collections, only_new: bool = False
) -> None:
    store = scope._store
    for (col, path, name), value in _entries(scope, collections):
        if not (only_new and name in store.entries(col, path)):
            store.put(col, path, name, value)


def _union(
    entries: Mapping[str, Any], new_entries: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns nested dicts with the entries of both; those of the second one replace others."""
    result = dict(entries)
    for name, value in new_entries.items():
        if type(value) is dict and isinstance(result.get(name), Mapping):
            value = _union(result[name], value)
        result[name] = value
    return result
