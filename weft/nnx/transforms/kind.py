"""Objects at the border of a JAX transformation.

All objects of a call cross together, so that shared parts cross once. Only changed values come
back, and the graph only if references or static attributes have changed, or objects are returned.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from jax.custom_derivatives import zero_from_primal

from weft.errors import (
    AxisMetadataError,
    BranchObjectsError,
    TransformArgumentError,
)
from weft.lifting import CARRY, DIFF, Kind
from weft.lifting.kind import PureResults, Returned, StateNode, is_state_node
from weft.lifting.roles import Role, changed_shared_message
from weft.lifting.traces import TraceState, current_trace
from weft.nnx import graph, versions
from weft.nnx.containers import Dict, List
from weft.nnx.filters import Path
from weft.nnx.graph import (
    Change,
    ContainerKey,
    FlatGraph,
    GraphDef,
    NodeDef,
    Owner,
    VariableDef,
)
from weft.nnx.pytree import Pytree, TreePlaces, is_object, with_item
from weft.nnx.rngs import RngCount
from weft.nnx.split_merge import state
from weft.nnx.spmd import add_axis, has_axis_metadata, remove_axis
from weft.nnx.state import from_flat_state, path_text, to_flat_state
from weft.nnx.transforms import calls, graph_diff, object_state
from weft.nnx.transforms.object_state import (
    ChangedObjects,
    Filters,
    Group,
    Grouping,
    Groups,
    InnerObjects,
    Leaf,
    Object,
    PassedValue,
    StaticObjects,
    empty_groups,
    is_differentiable,
    leaf_key,
    merged_groups,
    value_of_leaf,
    with_value,
    without_mark,
)
from weft.nnx.variables import Variable, metadata_key
from weft.typing import PyTree

_MAX_CACHED_SPLITS = 64


class SharedStateChanged(Exception):
    """Ends the trace of a scan without graph updates whose body changes shared state.

    `paths` lead from objects to changed variables; `text` is the error if these cannot be carried.
    """

    def __init__(self, text: str, paths: Sequence[Path]):
        super().__init__(text, paths)
        self.text = text
        self.paths = frozenset(path[2:] for path in paths)


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

    def flatten(
        self, carriers: Sequence[Object], new: Sequence[Object] = ()
    ) -> FlatGraph:
        """Splits the pair of the objects that go in and of new ones that come out."""
        pair = tuple(carriers), tuple(new)
        return graph.flatten_graph(
            pair, with_metadata=False, places=self.places()
        )

    def places(self) -> TreePlaces | None:
        """Returns what notes the places of objects where these are trees."""
        if self.references:
            return None
        return TreePlaces(calls.shared_object_error, calls.place_of)

    # Outside: carriers -> groups.

    def split(self, carriers: Sequence[Object], filters: Filters):
        cached_split = self._split_from_cache(carriers, filters)
        if cached_split is None:
            flat, static = self._split_uncached(carriers, filters)
        else:
            flat, static = cached_split
        groups = empty_groups(filters)
        for n, (_, i, g) in enumerate(static.places):
            groups[i][g][n] = flat.leaves[n]
        return flat, static, groups

    def _split_uncached(
        self, carriers: Sequence[Object], filters: Filters
    ) -> tuple[FlatGraph, StaticObjects]:
        flat = self.flatten(carriers)
        grouping = object_state.Grouping(filters, ())
        self._check_aliases(flat, grouping)
        places = [grouping.place(path, leaf) for path, leaf in flat.items()]
        # The static half refers to objects by index, since it outlives the call.
        object_indices = _indices_by_id(flat.objects)
        owners: list[tuple[int, Hashable] | None] = []
        for owner in flat.owners:
            if owner is not None:
                x, attribute = owner
                owner = object_indices[id(x)], attribute
            owners.append(owner)
        is_tracked = flat.is_tracked and not any(owners)
        changing = () if flat.is_tracked else graph.mutable_static_values(flat)
        static = StaticObjects(
            flat.graphdef, tuple(places), tuple(owners), is_tracked, changing
        )
        # What `matching_objects` compares has to say all that the static half does.
        is_cacheable = is_tracked and not flat.repeated
        if carriers and is_cacheable and grouping.depends_only_on_structure:
            if len(self._split_cache) >= _MAX_CACHED_SPLITS:
                self._split_cache.clear()
            classes = tuple(map(type, carriers))
            self._split_cache[classes] = _CachedSplit(static, filters)
        return flat, static

    @functools.cached_property
    def _split_cache(self) -> dict[tuple[type, ...], _CachedSplit]:
        """Static halves by classes of objects; layers of a model often have equal structure."""
        # Not a field, since kinds are compared by these.
        return {}

    def _split_from_cache(
        self, carriers: Sequence[Object], filters: Filters
    ) -> tuple[FlatGraph, StaticObjects] | None:
        cached_split = self._split_cache.get(tuple(map(type, carriers)))
        if cached_split is None or cached_split.filters != filters:
            return None
        graphdef = cached_split.static.graphdef
        # The description is of a pair; its first part is the tuple of the carriers.
        _, carriers_def = graphdef.root.attributes[0]
        objects = graph.matching_objects(
            list(enumerate(carriers)), carriers_def.attributes
        )
        if objects is None:
            return None
        flat = graph.flat_graph_of_variables(graphdef, objects)
        return flat, cached_split.static

    def _check_aliases(self, flat: FlatGraph, grouping: Grouping) -> None:
        """Refuses objects that occur twice with different roles."""
        if not flat.repeated:
            return
        first_paths = graph.first_paths(flat.graphdef)
        for index, path in flat.repeated:
            x = flat.objects[index]
            first_path = first_paths[index]
            is_pure_rule = self.has_rule and not self.structure
            if is_pure_rule and _holds_variables(x):
                # A rule returns a gradient for each place, and aliases have one.
                raise calls.shared_object_error(x, first_path, path)
            is_free = self.is_result_free and path[0] == 1
            if is_free or grouping.is_same(first_path, path):
                continue
            for leaf_path, leaf in flat.items():
                if leaf_path[: len(first_path)] != first_path:
                    continue
                alias_path = (*path, *leaf_path[len(first_path) :])
                role = grouping.role(leaf_path, leaf)
                alias_role = grouping.role(alias_path, leaf)
                # True and 1 are equal, and different roles.
                if role != alias_role or type(role) is not type(alias_role):
                    raise calls.inconsistent_alias_error(
                        leaf, (leaf_path, role), (alias_path, alias_role)
                    )

    # Inside: groups -> new carriers, and what the function has changed -> groups.

    def merge(self, static: StaticObjects, groups: Sequence[Groups]):
        leaves = [groups[i][g][n] for n, (_, i, g) in enumerate(static.places)]
        (carriers, _), objects = graph.build_graph(static.graphdef, leaves)
        # The initial values are remembered, and what is still the same afterwards stays inside.
        variables = (x for x in objects if isinstance(x, Variable))
        inner_leaves: list[Leaf] = []
        values: list[PyTree] = []
        metadata: list[dict[str, Any] | None] = []
        for owner, leaf in zip(static.owners, leaves, strict=True):
            if owner is None:
                variable = next(variables)
                inner_leaves.append(variable)
                values.append(variable._value)
                metadata.append(variable._metadata)
            else:
                inner_leaves.append(leaf)
                values.append(leaf)
                metadata.append(None)
        snapshots: list[tuple[Pytree, list[Any]]] | None = None
        if static.is_tracked:
            snapshots = []
            for x in objects:
                if isinstance(x, Pytree):
                    snapshots.append((x, x._snapshot()))
        inner = InnerObjects(
            static, objects, inner_leaves, values, metadata, snapshots
        )
        return inner, list(carriers)

    def collect(
        self,
        inner: InnerObjects,
        static: StaticObjects,
        carriers: Sequence[Object],
        filters: Filters,
        returned: Returned,
    ):
        call = versions.current_call()
        if returned.carriers and call is not None:
            call.returned = calls.object_paths(returned.result, None)
        groups = empty_groups(filters)
        # A walk of the graph costs the most, so it is made only if more than values may have
        # changed, or objects are returned.
        if self.structure:
            if returned.carriers or not inner.has_same_structure():
                return self._collect_graph(
                    inner, carriers, groups, filters, returned
                )
            self._collect_values(inner, groups, filters)
        else:
            # Arguments give back their values alone, and results are new objects.
            if self.is_loop and not inner.has_same_structure():
                arrays = object_state.changed_loop_arrays(
                    inner, self.flatten(carriers), filters
                )
                for n, array in arrays.items():
                    _, i, g = static.places[n]
                    groups[i][g][n] = array
            self._collect_values(inner, groups, filters)
            if returned.carriers:
                return self._collect_graph(inner, (), groups, filters, returned)
        numbers = range(len(static.places))
        calls.record_value_paths(numbers, static.graphdef.paths)
        return None, groups, []

    def _collect_values(
        self, inner: InnerObjects, groups: list[Groups], filters: Filters
    ) -> None:
        """Puts changed variables into groups.

        Raises SharedStateChanged if they are shared in a loop without graph updates.
        """
        static = inner.static
        shared_paths: list[Path] = []
        for n, leaf in enumerate(inner.leaves):
            if not isinstance(leaf, Variable):
                continue
            if not self.has_rule and not inner.is_changed(leaf, n):
                continue
            _, i, g = static.places[n]
            _, role = filters[i][g]
            output = self._output_leaf(inner, n, leaf, None, role)
            if output is not None:
                groups[i][g][n] = output
                if role is None:
                    shared_paths.append(static.graphdef.paths[n])
        if shared_paths and self.is_loop:
            text = changed_shared_message(
                self.transformation, calls.place_of(shared_paths[0])
            )
            raise SharedStateChanged(text, shared_paths)

    def _collect_graph(
        self,
        inner: InnerObjects,
        carriers: Sequence[Object],
        groups: list[Groups],
        filters: Filters,
        returned: Returned,
    ) -> tuple[ChangedObjects | None, list[Groups], list[Groups]]:
        """Puts changed and new values into groups, and describes a changed graph.

        Without graph updates, `carriers` is empty and the groups have the changed values.
        """
        static = inner.static
        new_groups = empty_groups(returned.parts)
        flat = self.flatten(carriers, returned.carriers)
        grouping = Grouping(filters, returned.parts)
        if self.structure and inner.has_same_graph(flat):
            self._sort_into_groups(
                groups, new_groups, flat, grouping, inner, {}
            )
            return None, groups, new_groups

        self._check_captured(flat, inner)
        self._check_aliases(flat, grouping)
        # Without graph updates, an argument among the results is a new object.
        object_indices: dict[int, int] = {}
        if self.structure:
            object_indices = _indices_by_id(inner.objects)
        origins = tuple([object_indices.get(id(x)) for x in flat.objects])
        is_graph_loop = self.is_loop and self.structure
        replaced: dict[int, int] = {}
        if is_graph_loop:
            replaced = self._replaced_objects(flat, origins, filters, inner)
        numbers = self._sort_into_groups(
            groups, new_groups, flat, grouping, inner, replaced
        )
        if is_graph_loop:
            places: list[int | None] = []
            for i, origin in enumerate(origins):
                places.append(replaced.get(i, origin))
            object_state.check_loop_graph(static, flat, places, grouping)
        changed = ChangedObjects(
            flat.graphdef,
            origins,
            tuple(numbers),
            object_state.static_snapshot(flat, static.graphdef),
            _numbers_in_objects(flat.graphdef, numbers, replaced),
        )
        return changed, groups, new_groups

    def _check_captured(self, flat: FlatGraph, inner: InnerObjects) -> None:
        """Refuses objects from outside, and without graph updates variables of arguments."""
        object_indices = _indices_by_id(inner.objects)
        trace = current_trace()
        for i, x in enumerate(flat.objects):
            if id(x) not in object_indices:
                if trace_of(x) != trace:
                    path = graph.first_paths(flat.graphdef)[i]
                    raise calls.captured_object_error(x, path)
            elif not self.structure and isinstance(x, Variable):
                input_paths = graph.first_paths(inner.static.graphdef)
                input_path = input_paths[object_indices[id(x)]]
                path = graph.first_paths(flat.graphdef)[i]
                raise calls.shared_object_error(x, input_path, path)

    def _replaced_objects(
        self,
        flat: FlatGraph,
        origins: Sequence[int | None],
        filters: Filters,
        inner: InnerObjects,
    ) -> dict[int, int]:
        """Returns the new objects that count as those in whose places they are, by their indices.

        A loop carries their values; those of objects that all iterations share are dropped.
        """
        static = inner.static
        numbers_by_key = inner.numbers()

        def may_replace(initial: NodeDef | VariableDef) -> bool:
            # A plain list or dict of data has no identity in Flax, where it is not an object.
            if initial.type in (List, Dict):
                return True
            if not self.replaces_objects or isinstance(initial, NodeDef):
                return self.replaces_objects
            variable = inner.objects[initial.index]
            number = numbers_by_key[leaf_key(variable, None)]
            _, i, g = static.places[number]
            _, role = filters[i][g]
            return role in (CARRY, None)

        return graph_diff.replaced_objects(
            static.graphdef, flat.graphdef, origins, may_replace
        )

    def _sort_into_groups(
        self,
        groups: list[Groups],
        new_groups: list[Groups],
        flat: FlatGraph,
        grouping: Grouping,
        inner: InnerObjects,
        replaced: dict[int, int],
    ) -> list[int]:
        """Puts new and changed values into groups, and returns the number of each value."""
        static = inner.static
        numbers_by_key = inner.numbers() if self.structure else {}
        replaced_ids: dict[int, int] = {}
        for new_index, old_index in replaced.items():
            new_id = id(flat.objects[new_index])
            replaced_ids[new_id] = id(inner.objects[old_index])
        groups_by_part = (groups, new_groups)
        numbers: list[int] = []
        calls.record_value_paths(numbers, flat.graphdef.paths)
        leaves_and_owners = zip(flat.items(), flat.owners, strict=True)
        for n, ((path, leaf), owner) in enumerate(leaves_and_owners):
            object_id, attribute = leaf_key(leaf, owner)
            if object_id in replaced_ids:
                object_id = replaced_ids[object_id]
            number = numbers_by_key.get((object_id, attribute))
            if number is None:
                # Numbers of new values come after those of the inputs.
                number = len(inner.values) + n
                part, i, g = grouping.place(path, leaf)
                if isinstance(leaf, Variable) and leaf._metadata:
                    leaf = _without_ref(leaf)
                groups_by_part[part][i][g][number] = leaf
            elif self.has_rule or inner.is_changed(leaf, number):
                _, i, g = static.places[number]
                role = grouping.roles((0, i))[g]
                output = self._output_leaf(inner, number, leaf, owner, role)
                if output is not None:
                    groups[i][g][number] = output
            numbers.append(number)
        return numbers

    def _output_leaf(
        self, inner: InnerObjects, n: int, leaf: Leaf, owner: Owner, role: Role
    ) -> Leaf | None:
        """Returns a changed input value as it comes back, None if it does not have to.

        If the function has a rule, also an unchanged one.
        """
        is_passed = inner.is_passed(leaf, owner, n)
        if self.has_rule and not is_passed and not inner.is_changed(leaf, n):
            is_differentiated = self.structure and role is DIFF
            if not is_differentiated or not is_differentiable(leaf):
                return None
            is_passed = True
        # Each iteration of a loop begins with the same shared values, as in Flax.
        if self.is_loop and self.structure and role is None:
            if not is_passed and not isinstance(leaf, RngCount):
                calls.warn_of_dropped_change(
                    inner.static.graphdef.paths[n], leaf
                )
            return None
        return PassedValue(leaf) if is_passed else leaf

    # Outside again: groups -> the caller's carriers.

    def commit(
        self,
        outer: FlatGraph,
        static: ChangedObjects | None,
        groups: Sequence[Groups],
        new_groups: Sequence[Groups],
    ) -> list[Object]:
        outputs = merged_groups(groups)
        passed: set[int] = set()
        for n, leaf in outputs.items():
            if isinstance(leaf, PassedValue):
                passed.add(n)
                outputs[n] = leaf.value
        if static is not None:
            outputs.update(merged_groups(new_groups))
        if static is None or static.copies is not None:
            _give_own_metadata(outputs, outer)

        # The caller's variables and attributes that are to be written. A new variable or object
        # comes with its values, also in the place of another one.
        replaced: frozenset[int] = frozenset()
        if static is not None:
            replaced = static.replaced
        num_inputs = len(outer.leaves)
        trace = current_trace()
        written: list[int] = []
        captured: list[Object] = []
        for n in list(outputs):
            if n >= num_inputs or n in replaced:
                continue
            x, owner = outer.leaves[n], outer.owners[n]
            if owner is not None:
                x, _ = owner
            if trace_of(x) == trace:
                written.append(n)
            elif n in passed:
                # A captured object keeps its values, as it does where it is only read.
                captured.append(x)
                del outputs[n]
            else:
                raise versions.foreign_trace_error(x)
        new: Sequence[Object] = ()
        changes: Sequence[Change] = ()
        if static is not None:
            new, changes = _plan_changes(outer, static, outputs)
            graph.check_changes(changes)
            if captured and new:
                _check_not_returned(captured, new)
        # Nothing is refused from here on, so that either all changes are written or none.
        for n in written:
            leaf, owner = outer.leaves[n], outer.owners[n]
            if n in passed:
                object_state.note_passed(leaf, owner, outputs[n])
            _write_leaf(leaf, owner, outputs[n])
        graph.apply_changes(changes)
        return list(new)

    # Rules for derivatives.

    def cotangents(
        self, static: ChangedObjects | None, packed: PyTree
    ) -> PyTree:
        """Returns the cotangents of a result for the function of a rule.

        Groups of a new object become a `State`, or in tree mode an object of its class.
        """
        if static is None:
            return packed
        results_def = dict(static.graphdef.root.attributes)[1]
        numbers = _result_numbers(static)
        nodes, structure = jax.tree.flatten(packed, is_leaf=is_state_node)
        object_indices = itertools.count()
        for position, node in enumerate(nodes):
            if not isinstance(node, StateNode):
                continue
            i = next(object_indices)
            cotangents = merged_groups([node.groups])
            cotangent_by_path: dict[Path, Leaf] = {}
            for path, n in numbers[i].items():
                if n in cotangents:
                    cotangent_by_path[path] = cotangents[n]
            if list(cotangent_by_path) == [()]:
                nodes[position] = cotangent_by_path[()]
            elif self.structure:
                nodes[position] = from_flat_state(cotangent_by_path.items())
            else:
                _, result_def = results_def.attributes[i]
                nodes[position], _ = graph.build_graph(
                    GraphDef(result_def, list(cotangent_by_path)),
                    cotangent_by_path.values(),
                )
        return structure.unflatten(nodes)

    def tangents(
        self,
        results: PureResults,
        tangent: PyTree,
        input_tangents: Sequence[Group | PyTree],
    ) -> PureResults:
        """Returns the tangents of packed results from that of a rule: the inverse of `cotangents`.

        Unchanged values that the result does not contain keep their tangents in `input_tangents`.

        Raises TransformArgumentError if a tangent is an object where the result has none, or for a
        value that the result does not have or the rule does not differentiate.
        """
        static: ChangedObjects | None = results.static.value
        numbers: list[dict[Path, int]] = []
        if static is not None:
            numbers = _result_numbers(static)
        # Zeros at first, which are then replaced in their groups.
        tangents: PureResults = jax.tree.map(zero_from_primal, results)
        group_of_number: dict[int, Group] = {}
        for node in jax.tree.leaves(tangents, is_leaf=is_state_node):
            if isinstance(node, StateNode):
                for group in node.groups:
                    group_of_number.update(dict.fromkeys(group, group))

        returned_numbers: set[int] = set()
        for numbers_by_path in numbers:
            returned_numbers.update(numbers_by_path.values())
        input_groups = [x for x in input_tangents if isinstance(x, dict)]
        unchanged = merged_groups([input_groups])
        for n, group in group_of_number.items():
            if isinstance(group[n], PassedValue) and n not in returned_numbers:
                group[n] = PassedValue(unchanged[n])

        rule_leaves = jax.tree.leaves(tangent, is_leaf=is_object)
        if static is None and not any(map(is_object, rule_leaves)):
            return tangents._replace(packed=tangent)
        nodes, structure = jax.tree.flatten(
            tangents.packed, is_leaf=is_state_node
        )
        object_indices = itertools.count()
        node_tangents = structure.flatten_up_to(tangent)
        for position, node_tangent in enumerate(node_tangents):
            if isinstance(nodes[position], StateNode):
                numbers_by_path = numbers[next(object_indices)]
                self._fill_tangents(
                    node_tangent, numbers_by_path, group_of_number
                )
            elif is_object(node_tangent):
                raise TransformArgumentError(
                    f"nnx.{self.transformation}: the rule returns a "
                    f"{type(node_tangent).__name__} as the tangent of a result that is not an "
                    "object; return its value."
                )
            else:
                nodes[position] = node_tangent
        return tangents._replace(packed=structure.unflatten(nodes))

    def _fill_tangents(
        self,
        tangent: PyTree,
        numbers_by_path: dict[Path, int],
        group_of_number: dict[int, Group],
    ) -> None:
        """Replaces zeros in groups by the tangent of an object, a `State` or another object."""
        tangent_state = tangent
        if is_object(tangent):
            tangent_state = state(tangent)
        for path, leaf in to_flat_state(tangent_state):
            value = leaf
            if isinstance(leaf, Variable):
                value = leaf.get_raw_value()
            n = numbers_by_path.get(path)
            if n in group_of_number:
                group = group_of_number[n]
                group[n] = with_value(group[n], value)
            elif n is None or not _is_float0(value):
                raise TransformArgumentError(
                    f"nnx.{self.transformation}: the rule returns a tangent at "
                    f"{path_text(path)!r}, where its result has no differentiated value; "
                    "return nnx.clone(...) of an argument, or remove the tangent."
                )

    # Axis metadata, loops, branches and errors.

    def axis(
        self,
        static: StaticObjects,
        carrier: int,
        sign: int,
        group: Group,
        axis: int,
        metadata: dict[Any, Any],
    ) -> Group:
        change_axis = add_axis if sign > 0 else remove_axis
        changed: Group = {}
        for n, leaf in group.items():
            variable = without_mark(leaf)
            if isinstance(variable, Variable) and has_axis_metadata(variable):
                variable = variable.copy()
                try:
                    change_axis(variable, axis, metadata)
                except AxisMetadataError as error:
                    path = (jax.tree_util.DictKey(n),)
                    error.path = self.location(static, carrier, path)
                    raise
                is_passed = isinstance(leaf, PassedValue)
                leaf = PassedValue(variable) if is_passed else variable
            changed[n] = leaf
        return changed

    def union(self, group: Group, other: Group) -> Group:
        union = dict(group)
        for n, leaf in other.items():
            union[n] = without_mark(leaf)
        return union

    def join(
        self, static: StaticObjects, statics: Sequence[ChangedObjects | None]
    ) -> ChangedObjects | None:
        first = statics[0]
        for other in statics[1:]:
            if first == other:
                continue
            # A branch without changes leaves the graph of the arguments.
            first_graph = (first or static).described()
            other_graph = (other or static).described()
            difference = first_graph.first_difference(other_graph)
            place = "an object"
            first_text, other_text = ("changed", "unchanged")
            if difference is not None:
                place = calls.place_of(difference.path)
                first_text, other_text = difference.texts
            raise BranchObjectsError(
                f"nnx.{self.transformation}: {place} is {first_text} after one branch, and "
                f"{other_text} after another. All branches must leave the same structure, and may "
                "only differ in values of variables; make the same change in all of them, or "
                "before."
            )
        return first

    def location(
        self,
        static: StaticObjects,
        carrier: int | None,
        path: jax.tree_util.KeyPath,
    ) -> str:
        if carrier is None:
            return calls.argument_at(path)
        return calls.place_of_value(static.path_of, path)


class _CachedSplit(NamedTuple):
    static: StaticObjects
    filters: Filters


def _indices_by_id(objects: Iterable[Object]) -> dict[int, int]:
    return {id(x): i for i, x in enumerate(objects)}


def _numbers_in_objects(
    graphdef: GraphDef, numbers: Sequence[int], indices: Collection[int]
) -> frozenset[int]:
    """Returns the numbers of the values in some of a graph's objects."""
    if not indices:
        return frozenset()
    selected: set[int] = set()
    leaf_defs = graph.leaf_defs(graphdef)
    for (part, owner), number in zip(leaf_defs, numbers, strict=True):
        index = part.index if owner is None else owner[0]
        if index in indices:
            selected.add(number)
    return frozenset(selected)


def _without_ref(variable: Variable[Any]) -> Variable[Any]:
    """Returns a new variable as JAX can return it: it returns no reference.

    The caller's variable gets a reference of its own.
    """
    if not variable._is_in_ref():
        return variable
    value = variable._read()
    return type(variable).from_metadata(value, variable._metadata)


def _plan_changes(
    outer: FlatGraph, static: ChangedObjects, outputs: Group
) -> tuple[Sequence[Object], Sequence[Change]]:
    """Returns the new objects among the results, and the changes of existing ones."""
    leaves: list[Leaf] = []
    for n in static.keys:
        leaves.append(outputs[n] if n in outputs else outer.leaves[n])
    existing: dict[int, Object] = {}
    for i, origin in enumerate(static.origins):
        if origin is not None:
            existing[i] = outer.objects[origin]
    graphdef = static.graphdef
    if static.copies is not None:
        graphdef = graph.with_static_values(graphdef, static.copies.made())
    (_, new), _, changes = graph.plan_graph(graphdef, leaves, existing=existing)
    return new, changes


def _give_own_metadata(outputs: Group, outer: FlatGraph) -> None:
    """Gives the caller's variables their own copies of mutable metadata."""
    entries: list[tuple[int, str, Any]] = []
    for n, leaf in outputs.items():
        if isinstance(leaf, Variable):
            for name, value in leaf._metadata.items():
                if not versions.is_hashable(value):
                    entries.append((n, name, value))
    if not entries:
        return
    values = [value for _, _, value in entries]
    outer_values: list[Any] = []
    for leaf in outer.leaves:
        if isinstance(leaf, Variable):
            outer_values.extend(leaf._metadata.values())
    copies = versions.StaticSnapshot(values, outer_values).made()
    for (n, name, _), value in zip(entries, copies, strict=True):
        outputs[n] = outputs[n].copy(_copy_ref=False, **{name: value})


def _write_leaf(leaf: Leaf, owner: Owner, new_leaf: Leaf) -> None:
    """Writes a value to the caller's variable, or to the attribute of an object."""
    if owner is not None:
        x, attribute = owner
        if isinstance(attribute, ContainerKey):
            container = dict(x._items())[attribute.name]
            new_leaf = with_item(container, attribute.keys, new_leaf)
            attribute = attribute.name
        x._fill([(attribute, new_leaf)])
        return
    object.__setattr__(leaf, "_value", new_leaf._value)
    if metadata_key(new_leaf) != metadata_key(leaf):
        leaf.set_metadata(dict(new_leaf._metadata))


def _check_not_returned(
    captured: Sequence[Object], new: Sequence[Object]
) -> None:
    """Refuses captured objects in results whose values come out of a rule."""
    flat = graph.flatten_graph(((), tuple(new)), with_metadata=False)
    captured_ids = {id(x) for x in captured}
    for i, x in enumerate(flat.objects):
        if id(x) in captured_ids:
            path = graph.first_paths(flat.graphdef)[i]
            raise calls.captured_object_error(x, path)


def _result_numbers(static: ChangedObjects) -> list[dict[Path, int]]:
    """Returns for each object in the results the numbers of its values, by path."""
    # A graph whose values are their numbers: an object in two results is in both.
    (_, results), _ = graph.build_graph(
        static.graphdef, map(np.asarray, static.keys)
    )
    numbers: list[dict[Path, int]] = []
    for x in results:
        numbers_by_path: dict[Path, int] = {}
        for path, leaf in graph.flatten_graph(x, with_metadata=False).items():
            numbers_by_path[path] = int(value_of_leaf(leaf))
        numbers.append(numbers_by_path)
    return numbers


def _holds_variables(x: Object) -> bool:
    leaves = graph.flatten_graph(x).leaves
    return any(isinstance(leaf, Variable) for leaf in leaves)


def _is_float0(x: PyTree) -> bool:
    """Returns whether all leaves have the dtype of tangents of integers."""
    return all(
        jax.dtypes.result_type(leaf) == jax.dtypes.float0
        for leaf in jax.tree.leaves(x)
    )


def trace_of(x: Object) -> TraceState:
    """Returns the trace in which an object or variable was created."""
    return x._trace if isinstance(x, Variable) else x._info.trace


def mark_watched(x: Object) -> bool:
    """Watches an object or variable for changes, and returns whether it was watched before."""
    if isinstance(x, Variable):
        was_watched = x._watched
        object.__setattr__(x, "_watched", True)
        return was_watched
    was_watched = x._info.watched
    x._info.watched = True
    return was_watched
