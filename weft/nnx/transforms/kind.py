"""Objects at the border of a JAX transformation.

All objects of a call cross together, so that shared parts cross once. Only changed values come
back, and the graph only if references or static attributes have changed, or objects are returned.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from jax.custom_derivatives import zero_from_primal

from weft.errors import AxisMetadataError, BranchObjectsError, TransformArgumentError
from weft.lifting import CARRY, DIFF, Kind
from weft.lifting.kind import PureResults, Returned, StateNode, is_state_node
from weft.lifting.roles import changed_shared_message
from weft.lifting.traces import current_trace
from weft.nnx import graph, versions
from weft.nnx.containers import Dict, List
from weft.nnx.filters import Path
from weft.nnx.graph import Change, ContainerKey, FlatGraph, GraphDef, NodeDef, Owner, VariableDef
from weft.nnx.pytree import Pytree, TreePlaces, is_object, with_item
from weft.nnx.rngs import RngCount
from weft.nnx.split_merge import state
from weft.nnx.spmd import add_axis, has_axis_metadata, remove_axis
from weft.nnx.state import from_flat_state, path_text, to_flat_state
from weft.nnx.transforms import calls, graph_diff, object_state
from weft.nnx.transforms.object_state import ChangedObjects, Group, Groups, StaticObjects
from weft.nnx.variables import Variable, metadata_key

_MAX_CACHED_SPLITS = 64


class SharedStateChanged(Exception):
    """Ends the trace of a scan without graph updates whose body changes shared state.

    `paths` lead from objects to changed variables; `text` is the error if these cannot be carried.
    """

    def __init__(self, text: str, paths: Sequence[Path]):
        super().__init__(text, paths)
        self.text, self.paths = text, frozenset(path[2:] for path in paths)


@dataclasses.dataclass(frozen=True)
class ObjectKind(Kind):
    """The kind of objects and variables; see `weft.lifting.kind.Kind`.

    Attributes:
        transformation: its name, for errors.
        references: whether an object at two places is one object, not a pytree at each.
        structure: whether changes of references and static attributes come back.
        is_loop: whether the function runs repeatedly on its carry.
        replaces_objects: whether the body of a loop may put new variables and modules in the
            places of others; new lists and dicts are never refused.
        is_result_free: whether results have no roles, so that any argument may be returned.
        has_rule: whether the function has a rule for its derivatives. With `structure`, all
            differentiated values then come out of the rule, also unchanged ones.
    """

    carrier_types: ClassVar[tuple[type, ...]] = (Pytree, Variable)

    transformation: str
    references: bool = True
    structure: bool = True
    is_loop: bool = False
    replaces_objects: bool = True
    is_result_free: bool = False
    has_rule: bool = False

    def flatten(self, carriers: Sequence[Any], new: Sequence[Any] = ()) -> FlatGraph:
        """Splits the pair of the objects that go in and of new ones that come out."""
        pair = tuple(carriers), tuple(new)
        return graph.flatten_graph(pair, with_metadata=False, places=self.places())

    def places(self) -> TreePlaces | None:
        """Returns what notes the places of objects where these are trees."""
        return None if self.references else TreePlaces(calls.shared_object_error, calls.place_of)

    def split(self, carriers: Sequence[Any], filters: object_state.Filters):
        flat, static = self._split_from_cache(carriers, filters) or self._split_uncached(
            carriers, filters
        )
        groups: list[Groups] = [tuple({} for _ in wanted) for wanted in filters]
        for n, (leaf, (i, g)) in enumerate(zip(flat.leaves, static.places, strict=True)):
            groups[i][g][n] = leaf
        return flat, static, groups

    def _split_uncached(
        self, carriers: Sequence[Any], filters: object_state.Filters
    ) -> tuple[FlatGraph, StaticObjects]:
        flat = self.flatten(carriers)
        grouping = object_state.Grouping(filters, ())
        self._check_aliases(flat, grouping)
        places = tuple(grouping.place(path, leaf)[1:] for path, leaf in flat.items())
        index = {id(x): i for i, x in enumerate(flat.objects)}
        owners = tuple(owner and (index[id(owner[0])], owner[1]) for owner in flat.owners)
        is_tracked = flat.is_tracked and not any(owners)
        changing = () if flat.is_tracked else graph.mutable_static_values(flat)
        static = StaticObjects(flat.graphdef, places, owners, is_tracked, changing)
        if carriers and is_tracked and not flat.repeated and grouping.depends_only_on_structure:
            if len(self._split_cache) >= _MAX_CACHED_SPLITS:
                self._split_cache.clear()
            self._split_cache[tuple(map(type, carriers))] = static, filters
        return flat, static

    @functools.cached_property
    def _split_cache(self) -> dict[tuple[type, ...], tuple[StaticObjects, object_state.Filters]]:
        """Static halves by classes of objects; layers of a model often have equal structure."""
        # Not a field, since kinds are compared by these.
        return {}

    def _split_from_cache(
        self, carriers: Sequence[Any], filters: object_state.Filters
    ) -> tuple[FlatGraph, StaticObjects] | None:
        static, wanted = self._split_cache.get(tuple(map(type, carriers)), (None, None))
        if static is None or wanted != filters:
            return None
        _, known = static.graphdef.root.attributes[0]
        objects = graph.matching_objects([*enumerate(carriers)], known.attributes)
        if objects is None:
            return None
        return graph.flat_graph_of_variables(static.graphdef, objects), static

    def merge(self, static: StaticObjects, groups: Sequence[Groups]):
        leaves = [groups[i][g][n] for n, (i, g) in enumerate(static.places)]
        (carriers, _), objects = graph.build_graph(static.graphdef, leaves)
        variables = (x for x in objects if isinstance(x, Variable))
        held: list[Any] = []
        for owner, leaf in zip(static.owners, leaves, strict=True):
            held.append(next(variables) if owner is None else leaf)
        values = [x._value if isinstance(x, Variable) else x for x in held]
        metadata = [x._metadata if isinstance(x, Variable) else None for x in held]
        snapshots = None
        if static.is_tracked:
            snapshots = [(x, x._snapshot()) for x in objects if isinstance(x, Pytree)]
        inner = object_state.InnerObjects(static, objects, held, values, metadata, snapshots)
        return inner, list(carriers)

    def collect(
        self,
        inner: object_state.InnerObjects,
        static: StaticObjects,
        carriers: Sequence[Any],
        filters: object_state.Filters,
        returned: Returned,
    ):
        new, new_filters = returned.carriers, returned.parts
        call = versions.current_call()
        if new and call is not None:
            call.returned = calls.object_paths(returned.result, None)
        groups: list[Groups] = [tuple({} for _ in wanted) for wanted in filters]
        new_groups: list[Groups] = [tuple({} for _ in wanted) for wanted in new_filters]
        if not self.structure or (not new and inner.has_same_structure()):
            if self.is_loop and not inner.has_same_structure():
                changed = object_state.changed_loop_arrays(inner, self.flatten(carriers), filters)
                for n, array in changed.items():
                    i, g = static.places[n]
                    groups[i][g][n] = array
            shared: list[Path] = []
            for n, x in enumerate(inner.leaves):
                if isinstance(x, Variable) and (self.has_rule or inner.is_changed(x, n)):
                    i, g = static.places[n]
                    role = filters[i][g][1]
                    is_added = self._add_value(groups[i][g], x, None, role, inner, n)
                    if is_added and self.is_loop and not self.structure and role is None:
                        shared.append(static.graphdef.paths[n])
            if shared:
                text = changed_shared_message(self.transformation, calls.place_of(shared[0]))
                raise SharedStateChanged(text, shared)
            if not new:
                calls.record_value_paths(range(len(static.places)), static.graphdef.paths)
                return None, groups, new_groups
            carriers = ()
        flat = self.flatten(carriers, new)
        is_same = self.structure and inner.has_same_graph(flat)
        grouping = object_state.Grouping(filters, new_filters)
        if not is_same:
            self._check_captured(flat, inner)
            self._check_aliases(flat, grouping)
        # Without graph updates, an argument among the results is a new object.
        known_objects = inner.objects if self.structure else ()
        origin = {id(x): i for i, x in enumerate(known_objects)}
        origins = tuple(origin.get(id(x)) for x in flat.objects)
        replaced: dict[int, int] = {}
        if self.is_loop and self.structure and not is_same:
            replaced = self._replaced_objects(flat, origins, filters, inner)
        numbers = self._sort_into_groups((groups, new_groups), flat, grouping, inner, replaced)
        if is_same:
            return None, groups, new_groups
        if self.is_loop and self.structure:
            places = tuple(replaced.get(i, origin) for i, origin in enumerate(origins))
            object_state.check_loop_graph(static, flat, places, grouping)
        copies = object_state.static_snapshot(flat, static.graphdef)
        of_replaced: frozenset[int] = frozenset()
        if replaced:
            of_replaced = frozenset(_numbers_of(flat.graphdef, numbers, replaced))
        changed = ChangedObjects(flat.graphdef, origins, tuple(numbers), copies, of_replaced)
        return changed, groups, new_groups

    def _replaced_objects(
        self,
        flat: FlatGraph,
        origins: Sequence[int | None],
        filters: object_state.Filters,
        inner: object_state.InnerObjects,
    ) -> dict[int, int]:
        """Returns the new objects that count as those in whose places they are, by their indices.

        A loop carries their values; those of objects that all iterations share are dropped.
        """
        static, known = inner.static, inner.numbers()

        def may_replace(before: NodeDef | VariableDef) -> bool:
            # A plain list or dict of data has no identity in Flax, where it is not an object.
            if before.type in (List, Dict):
                return True
            if not self.replaces_objects or isinstance(before, NodeDef):
                return self.replaces_objects
            i, g = static.places[known[id(inner.objects[before.index])]]
            return filters[i][g][1] in (CARRY, None)

        return graph_diff.replaced_objects(static.graphdef, flat.graphdef, origins, may_replace)

    def _sort_into_groups(
        self,
        groups: tuple[list[Groups], list[Groups]],
        flat: FlatGraph,
        grouping: object_state.Grouping,
        inner: object_state.InnerObjects,
        replaced: dict[int, int],
    ) -> list[int]:
        """Puts new and changed values into groups, and returns the number of each value."""
        static = inner.static
        known = inner.numbers() if self.structure else {}
        former = {id(flat.objects[i]): id(inner.objects[j]) for i, j in replaced.items()}
        numbers: list[int] = []
        calls.record_value_paths(numbers, flat.graphdef.paths)
        for n, (path, leaf) in enumerate(flat.items()):
            owner = flat.owners[n]
            of_leaf = id(leaf if owner is None else owner[0])
            of_leaf = former.get(of_leaf, of_leaf)
            number = known.get(of_leaf if owner is None else (of_leaf, owner[1]))
            if number is None:
                number = len(inner.values) + n
                if getattr(leaf, "_metadata", None) and leaf._is_in_ref():
                    # JAX returns no reference; the caller's variable gets one of its own.
                    leaf = type(leaf).from_metadata(leaf._read(), leaf._metadata)
                part, i, g = grouping.place(path, leaf)
                groups[part][i][g][number] = leaf
            elif self.has_rule or inner.is_changed(leaf, number):
                i, g = static.places[number]
                role = grouping.roles((0, i))[g]
                self._add_value(groups[0][i][g], leaf, owner, role, inner, number)
            numbers.append(number)
        return numbers

    def _add_value(
        self,
        group: Group,
        leaf: Any,
        owner: Owner,
        role: Any,
        inner: object_state.InnerObjects,
        n: int,
    ) -> bool:
        """Adds an input value to a group if it has to come back; returns whether it has."""
        passed = inner.is_passed(leaf, owner, n)
        if self.has_rule and not passed and not inner.is_changed(leaf, n):
            passed = self.structure and role is DIFF and object_state.is_differentiable(leaf)
            if not passed:
                return False
        # Each iteration of a loop begins with the same shared values, as in Flax.
        if self.is_loop and self.structure and role is None:
            if not passed and not isinstance(leaf, RngCount):
                calls.warn_of_dropped_change(inner.static.graphdef.paths[n], leaf)
            return False
        group[n] = leaf
        if passed:
            group[~n] = None
        return True

    def _check_captured(self, flat: FlatGraph, inner: object_state.InnerObjects) -> None:
        here, inside = current_trace(), {id(x): i for i, x in enumerate(inner.objects)}
        for i, x in enumerate(flat.objects):
            if id(x) not in inside:
                if trace_of(x) != here:
                    raise calls.captured_object_error(x, graph.first_paths(flat.graphdef)[i])
            elif not self.structure and isinstance(x, Variable):
                paths = graph.first_paths(inner.static.graphdef), graph.first_paths(flat.graphdef)
                raise calls.shared_object_error(x, paths[0][inside[id(x)]], paths[1][i])

    def _check_aliases(self, flat: FlatGraph, grouping: object_state.Grouping) -> None:
        """Refuses objects that occur twice with different roles."""
        at_first = graph.first_paths(flat.graphdef) if flat.repeated else {}
        for index, path in flat.repeated:
            first = at_first[index]
            if self.has_rule and not self.structure and _holds_variables(flat.objects[index]):
                # A rule returns a gradient for each place, and aliases have one.
                raise calls.shared_object_error(flat.objects[index], first, path)
            if grouping.is_same(first, path) or (self.is_result_free and path[0] == 1):
                continue
            for leaf_path, leaf in flat.items():
                if leaf_path[: len(first)] == first:
                    other = (*path, *leaf_path[len(first) :])
                    roles = grouping.role(leaf_path, leaf), grouping.role(other, leaf)
                    if roles[0] != roles[1] or type(roles[0]) is not type(roles[1]):
                        raise calls.inconsistent_alias_error(
                            leaf, (leaf_path, roles[0]), (other, roles[1])
                        )

    def commit(
        self,
        outer: FlatGraph,
        static: ChangedObjects | None,
        groups: Sequence[Groups | None],
        new_groups: Sequence[Groups],
    ) -> list[Any]:
        found = dict(_entries(groups))
        if static is not None:
            found.update(_entries(new_groups))
        if static is None or static.copies is not None:
            _give_own_metadata(found, outer)
        replaced = frozenset() if static is None else static.replaced
        kept = [
            (n, outer.leaves[n], outer.owners[n], found[n])
            for n in found
            if 0 <= n < len(outer.leaves) and n not in replaced
        ]
        here, captured = current_trace(), []
        for n, leaf, owner, _ in kept:
            what = leaf if owner is None else owner[0]
            if trace_of(what) != here:
                # A captured object keeps its values, as it does where it is only read.
                if found.get(~n, n) is not None:
                    raise versions.foreign_trace_error(what)
                captured.append(what)
                del found[n]
        new: Sequence[Any] = ()
        changes: Sequence[Change] = ()
        if static is not None:
            leaves = [found[key] if key in found else outer.leaves[key] for key in static.keys]
            existing = {i: outer.objects[o] for i, o in enumerate(static.origins) if o is not None}
            graphdef = static.graphdef
            if static.copies is not None:
                graphdef = graph.with_static_values(graphdef, static.copies.made())
            (_, new), _, changes = graph.plan_graph(graphdef, leaves, existing=existing)
            graph.check_changes(changes)
            if captured and new:
                _check_not_returned(captured, new)
        # Nothing is refused from here on, so that either all changes are written or none.
        for n, leaf, owner, value in kept:
            if n in found:
                if found.get(~n, n) is None:
                    object_state.note_passed(leaf, owner, value)
                _write_value(leaf, owner, value)
        graph.apply_changes(changes)
        return list(new)

    def cotangents(self, static: ChangedObjects | None, packed: object) -> Any:
        """Returns the cotangents of a result for the function of a rule.

        Groups of a new object become a `State`, or in tree mode an object of its class.
        """
        if static is None:
            return packed
        results = dict(static.graphdef.root.attributes)[1]
        keys = dict(zip(static.graphdef.paths, static.keys, strict=True))
        numbers = itertools.count()

        def unpacked(x: object) -> Any:
            if not isinstance(x, StateNode):
                return x
            i, found = next(numbers), dict(_entries([x.groups]))
            at = {p[2:]: found[n] for p, n in keys.items() if p[:2] == (1, i) and n in found}
            if list(at) == [()]:
                return at[()]
            if self.structure:
                return from_flat_state(at.items())
            graphdef = GraphDef(results.attributes[i][1], list(at))
            return graph.build_graph(graphdef, at.values())[0]

        return jax.tree.map(unpacked, packed, is_leaf=is_state_node)

    def tangents(
        self, results: PureResults, tangent: object, of_inputs: Sequence[Any]
    ) -> PureResults:
        """Returns the tangents of packed results from that of a rule: the inverse of `cotangents`.

        Unchanged values that the result does not contain keep their tangents in `of_inputs`.

        Raises TransformArgumentError if a tangent is an object where the result has none, or for a
        value that the result does not have or the rule does not differentiate.
        """
        static: ChangedObjects | None = results.static.value
        numbers = [] if static is None else _result_numbers(static)
        returned = {n for of_object in numbers for n in of_object.values()}
        zeros: PureResults = jax.tree.map(zero_from_primal, results)
        by_group: dict[int, Group] = {}
        for node in jax.tree.leaves(zeros, is_leaf=is_state_node):
            if isinstance(node, StateNode):
                by_group |= {n: group for group in node.groups for n in group if n >= 0}
        own = dict(_entries([tuple(x for x in of_inputs if isinstance(x, dict))]))
        for n, group in by_group.items():
            if ~n in group and n not in returned:
                group[n] = own[n]
        parts = jax.tree.leaves(tangent, is_leaf=is_object)
        if static is None and not any(map(is_object, parts)):
            return zeros._replace(packed=tangent)
        leaves, tree = jax.tree.flatten(zeros.packed, is_leaf=is_state_node)
        indices = itertools.count()

        def packed_tangent(x: object, t: Any) -> Any:
            if not isinstance(x, StateNode):
                if is_object(t):
                    raise TransformArgumentError(
                        f"nnx.{self.transformation}: the rule returns a {type(t).__name__} as the "
                        "tangent of a result that is not an object; return its value."
                    )
                return t
            at = numbers[next(indices)]
            for path, value in to_flat_state(state(t) if is_object(t) else t):
                raw = value.get_raw_value() if isinstance(value, Variable) else value
                group = by_group.get(at.get(path, -1))
                if group is None and path in at and _is_float0(raw):
                    continue
                if group is None:
                    raise TransformArgumentError(
                        f"nnx.{self.transformation}: the rule returns a tangent at "
                        f"{path_text(path)!r}, where its result has no differentiated value; "
                        "return nnx.clone(...) of an argument, or remove the tangent."
                    )
                old = group[at[path]]
                is_variable = isinstance(old, Variable)
                group[at[path]] = old.copy(raw, _copy_ref=False) if is_variable else raw
            return x

        of_leaves = zip(leaves, tree.flatten_up_to(tangent), strict=True)
        return zeros._replace(packed=tree.unflatten([packed_tangent(*pair) for pair in of_leaves]))

    def axis(
        self,
        static: StaticObjects,
        carrier: int,
        sign: int,
        group: Group,
        axis: int,
        metadata: dict[Any, Any],
    ) -> Group:
        change = add_axis if sign > 0 else remove_axis

        def changed(n: int, x: object) -> Any:
            if not isinstance(x, Variable) or not has_axis_metadata(x):
                return x
            copied = x.copy()
            try:
                change(copied, axis, metadata)
            except AxisMetadataError as error:
                error.path = self.location(static, carrier, (jax.tree_util.DictKey(n),))
                raise
            return copied

        return {n: changed(n, x) for n, x in group.items()}

    def union(self, group: Group, other: Group) -> Group:
        return {**group, **{n: x for n, x in other.items() if n >= 0}}

    def join(self, static: StaticObjects, statics: Sequence[ChangedObjects | None]) -> Any:
        first, *others = [static.described() if of is None else of.described() for of in statics]
        for changed, other in zip(statics[1:], others, strict=True):
            if changed == statics[0]:
                continue
            parts = first.graphdef.root, other.graphdef.root
            difference = next(graph_diff.differences(parts, (first.origins, other.origins)), None)
            place, seen = "an object", ("changed", "unchanged")
            if difference is not None:
                place, seen = calls.place_of(difference.path), difference.seen
            raise BranchObjectsError(
                f"nnx.{self.transformation}: {place} is {seen[0]} after one branch, and {seen[1]} "
                "after another. All branches must leave the same structure, and may only differ in "
                "values of variables; make the same change in all of them, or before."
            )
        return statics[0]

    def location(
        self, static: StaticObjects, carrier: int | None, path: jax.tree_util.KeyPath
    ) -> str:
        if carrier is None:
            return calls.argument_at(path)
        return calls.place_of_value(static.path_of, path)


def _numbers_of(graphdef: GraphDef, keys: Sequence[int], objects: Collection[int]) -> Iterator[int]:
    """Yields the numbers of values in some of a graph's objects."""
    for (part, owner), key in zip(graph.leaf_defs(graphdef), keys, strict=True):
        if (part.index if isinstance(part, VariableDef) else owner and owner[0]) in objects:
            yield key


def _give_own_metadata(found: dict[int, Any], outer: FlatGraph) -> None:
    """Gives the caller's variables their own copies of mutable metadata."""
    at = [
        (n, name, value)
        for n, x in found.items()
        if isinstance(x, Variable)
        for name, value in x._metadata.items()
        if not versions.is_hashable(value)
    ]
    if not at:
        return
    there = (x._metadata.values() for x in outer.leaves if isinstance(x, Variable))
    made = versions.StaticSnapshot([value for _, _, value in at], itertools.chain(*there)).made()
    for (n, name, _), value in zip(at, made, strict=True):
        found[n] = found[n].copy(_copy_ref=False, **{name: value})


def trace_of(x: Pytree | Variable[Any]) -> Any:
    """Returns the trace in which an object or variable was created."""
    return x._trace if isinstance(x, Variable) else x._info.trace


def mark_watched(x: Pytree | Variable[Any]) -> bool:
    """Watches an object or variable for changes, and returns whether it was watched before."""
    if isinstance(x, Variable):
        before = x._watched
        object.__setattr__(x, "_watched", True)
        return before
    before, x._info.watched = x._info.watched, True
    return before


def _result_numbers(static: ChangedObjects) -> list[dict[Path, int]]:
    """Returns for each object in the results the numbers of its values, by path."""
    (_, results), _ = graph.build_graph(static.graphdef, map(np.asarray, static.keys))
    found = []
    for x in results:
        flat = graph.flatten_graph(x, with_metadata=False)
        values = (leaf._value if isinstance(leaf, Variable) else leaf for leaf in flat.leaves)
        found.append(dict(zip(flat.graphdef.paths, map(int, values), strict=True)))
    return found


def _holds_variables(x: Pytree | Variable[Any]) -> bool:
    return any(isinstance(leaf, Variable) for leaf in graph.flatten_graph(x).leaves)


def _is_float0(x: object) -> bool:
    return all(jax.dtypes.result_type(leaf) == jax.dtypes.float0 for leaf in jax.tree.leaves(x))


def _check_not_returned(captured: Sequence[Any], new: Sequence[Any]) -> None:
    """Refuses captured objects in results whose values come out of a rule."""
    flat = graph.flatten_graph(((), tuple(new)), with_metadata=False)
    paths, found = graph.first_paths(flat.graphdef), {id(x) for x in captured}
    for i, x in enumerate(flat.objects):
        if id(x) in found:
            raise calls.captured_object_error(x, paths[i])


def _entries(groups: Iterable[Groups | None]) -> Iterator[tuple[int, Any]]:
    return (item for of_object in groups for group in of_object or () for item in group.items())


def _write_value(leaf: Any, owner: Any, value: Any) -> None:
    if owner is not None:
        x, place = owner
        if isinstance(place, ContainerKey):
            container = dict(x._items())[place.name]
            place, value = place.name, with_item(container, place.keys, value)
        x._fill([(place, value)])
        return
    object.__setattr__(leaf, "_value", value._value)
    if metadata_key(value) != metadata_key(leaf):
        leaf.set_metadata(dict(value._metadata))
