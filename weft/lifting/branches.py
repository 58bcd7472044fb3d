"""Branches: cond and switch.

State that only some branches create gets its initial value before, from the first branch that
creates it, and passes unchanged through the others. All begin with equal state and counters:

    traced = [trace(branch, state) for branch in branches]
    initial = what any branch creates, from the first one that does
    switch(index, traced, state, initial)

Each branch then returns only entries that some branch changes: its own value of an entry, or the
initial value.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import jax.core
import jax.numpy as jnp
from jax.tree_util import (
    KeyPath,
    keystr,
    tree_leaves_with_path,
    tree_map_with_path,
)

from weft.errors import BranchStructureError
from weft.lifting.kind import (
    Group,
    Kind,
    PureResults,
    StateNode,
    Static,
    call_pure,
    commit_results,
    is_state_node,
    split_args,
)
from weft.lifting.roles import Roles
from weft.lifting.signature import named_after
from weft.lifting.state_creation import (
    TracedFunction,
    final_results,
    groups_before_and_after,
)
from weft.lifting.units import Units
from weft.typing import ArrayLike, Fn, PyTree, Tensor

Created = Mapping[KeyPath, list["_TracedBranch"]]
"""The entries that branches create, by their paths, and the branches that create each."""


def switch(
    kind: Kind,
    branches: Sequence[Fn],
    *,
    in_axes: PyTree = None,
    names: Sequence[str] | None = None,
) -> Fn:
    """Applies `jax.lax.switch` to functions that take carriers, as `call(index, *args)`.

    Args:
        in_axes: a prefix of the arguments; only the filters of `Roles` are used.
        names: names of the branches in errors; by default "branch 0" and so on.

    Raises BranchStructureError if results or final states differ in structure, shape or dtype.
    """
    if names is None:
        names = [f"branch {i}" for i in range(len(branches))]

    def call(index: ArrayLike, *args: PyTree) -> PyTree:
        outer, pure_args = split_args(
            kind, args, in_axes, call=functools.partial(call, index)
        )
        units = Units.of_pure_args(kind, pure_args)
        traced = []
        for name, branch in zip(names, branches, strict=True):
            traced.append(_TracedBranch(name, branch, units))
        results = _run_switch(traced, units, index)
        return commit_results(kind, outer, results)

    return call


def cond(
    kind: Kind, true_fun: Fn, false_fun: Fn, *, in_axes: PyTree = None
) -> Fn:
    """Applies `jax.lax.cond` as `call(pred, *args)` to functions of carriers; see `switch`."""
    names = "false_fun", "true_fun"
    call_switch = switch(
        kind, (false_fun, true_fun), in_axes=in_axes, names=names
    )

    def call(pred: ArrayLike, *args: PyTree) -> PyTree:
        index = jnp.asarray(pred, bool).astype("int32")
        return call_switch(index, *args)

    return call


class _BranchResults(NamedTuple):
    """Results of the trace of a branch.

    Attributes:
        created: the new entries of each group, with initial values, or None.
        state: all entries of each group after the branch.
        packed: the branch's own results.
    """

    created: list[Group | None]
    state: list[Group]
    packed: PyTree


class _TracedBranch:
    """Branch that was traced once; entries of groups are identified by their paths.

    Attributes:
        types: the results, with types in place of arrays.
        numbers: the results, with the numbers of the trace's results in place of arrays.
        created_numbers, state_numbers: the numbers in `created` and in `state` by path.
        changed_paths: paths of changed entries.
        static: the static half that the branch has collected.
    """

    def __init__(self, name: str, fn: Fn, units: Units):
        self.name = name
        self.fn = fn
        self.static: Static = Static(None)
        self.changed_paths: list[KeyPath] = []
        kind = units.kind

        def run(values: list[PyTree]) -> _BranchResults:
            inside = units.with_values(values)
            results = call_pure(kind, fn, inside.pure_args())
            created: list[Group | None] = []
            state: list[Group] = []
            for group, changed_group, _ in groups_before_and_after(
                inside, results
            ):
                created.append(kind.created(group, changed_group))
                state.append(kind.union(group, changed_group))
            self.static = results.static
            entries_before = _by_path(inside.groups())
            self.changed_paths = []
            for path, entry in _by_path(state).items():
                if entries_before.get(path) is not entry:
                    self.changed_paths.append(path)
            return _BranchResults(created, state, results.packed)

        self.traced = TracedFunction(fn, run, units.values)
        self.types: _BranchResults = self.traced.shapes
        count = itertools.count()
        self.numbers: _BranchResults = jax.tree.map(
            lambda _: next(count), self.types
        )
        self.created_numbers = _by_path(self.numbers.created)
        self.state_numbers = _by_path(self.numbers.state)

    def keeps(self, path: KeyPath) -> bool:
        """Returns whether a created entry has its initial value after the branch.

        The traces are compared: each result of a `jit`, such as that of an inner switch, is a value
        of its own.
        """
        if path not in self.state_numbers:
            return False
        initial_number = self.created_numbers[path]
        return self.traced.is_like(
            initial_number, self.traced, self.state_numbers[path]
        )

    def creates_like(self, other: _TracedBranch, path: KeyPath) -> bool:
        """Returns whether both branches compute the initial value of an entry in the same way."""
        other_number = other.created_numbers[path]
        return self.traced.is_like(
            self.created_numbers[path], other.traced, other_number
        )


def _by_path(groups: PyTree) -> dict[KeyPath, PyTree]:
    return dict(tree_leaves_with_path(groups))


def _run_switch(
    branches: Sequence[_TracedBranch], units: Units, index: ArrayLike
) -> PureResults:
    """Runs a switch over branches that were traced, with the state that they create."""
    kind = units.kind
    _check_results(branches)
    static = kind.join(
        units.static, [branch.static.value for branch in branches]
    )
    created: dict[KeyPath, list[_TracedBranch]] = {}
    changed_paths: dict[KeyPath, None] = {}  # in order, each path once
    for branch in branches:
        for path in branch.created_numbers:
            created.setdefault(path, []).append(branch)
        changed_paths |= dict.fromkeys(branch.changed_paths)
    changed_paths |= dict.fromkeys(created)
    entry_sets = {
        frozenset((*branch.state_numbers, *created)) for branch in branches
    }
    if len(entry_sets) > 1:
        _check_same_structure(units, branches, created)

    # An initial value that all creating branches compute in the same way does not depend on the
    # taken branch, so it is not a result of the switch, which would vary with the index.
    fixed_paths = _fixed_paths(branches, created)
    initial = _initial_values(branches, units.values, created, fixed_paths)
    returned_initial = [path for path in created if path not in fixed_paths]
    returned_final: list[KeyPath] = []
    for path in changed_paths:
        is_fixed = path in fixed_paths and all(
            branch.keeps(path) for branch in created[path]
        )
        if not is_fixed:
            returned_final.append(path)

    def branch_fn(branch: _TracedBranch) -> Fn:
        def run(
            values: list[PyTree], initial_values: list[Tensor]
        ) -> tuple[list[Tensor], list[Tensor], PyTree]:
            leaves = jax.tree.leaves(branch.traced(values))
            initial = dict(zip(created, initial_values, strict=True))

            # Entries that this branch does not create have another branch's initial value.
            def entry(path: KeyPath, numbers: Mapping[KeyPath, int]) -> Tensor:
                return (
                    leaves[numbers[path]] if path in numbers else initial[path]
                )

            packed = jax.tree.map(leaves.__getitem__, branch.numbers.packed)
            return (
                [entry(path, branch.state_numbers) for path in returned_final],
                [
                    entry(path, branch.created_numbers)
                    for path in returned_initial
                ],
                packed,
            )

        return named_after(branch.fn, run)

    branch_fns = [branch_fn(branch) for branch in branches]
    try:
        final_values, initial_values, packed = jax.lax.switch(
            index, branch_fns, units.values, list(initial.values())
        )
    except TypeError:
        _check_same_structure(units, branches, created)
        raise  # it is the index that does not fit
    # An entry that nobody changes keeps its value from before, or its initial value.
    initial |= zip(returned_initial, initial_values, strict=True)
    final = _by_path(units.groups()) | initial
    final |= zip(returned_final, final_values, strict=True)

    created_groups: list[Group | None] = [None] * len(units.groups())
    for branch in branches:
        created_groups = _union_groups(
            kind, created_groups, branch.numbers.created
        )
    # All groups as any branch leaves them, with entries that the branch does not create.
    groups = _union_groups(kind, units.groups(), created_groups)
    groups = _union_groups(kind, groups, branches[0].numbers.state)
    created_groups = tree_map_with_path(
        lambda path, _: initial[path], created_groups
    )
    final_groups = iter(tree_map_with_path(lambda path, _: final[path], groups))
    state_nodes: list[StateNode] = []
    for roles in units.layout.leaf_roles:
        if isinstance(roles, Roles):
            state_nodes.append(
                StateNode(tuple(itertools.islice(final_groups, len(roles))))
            )
    results = PureResults(Static(static), state_nodes, packed)
    return final_results(kind, results, created_groups)


def _union_groups(
    kind: Kind,
    groups: Sequence[Group | None],
    other_groups: Sequence[Group | None],
) -> list[Group | None]:
    """Returns each group with the entries of another one; either may be None."""
    unions: list[Group | None] = []
    for group, other_group in zip(groups, other_groups, strict=True):
        if group is None or other_group is None:
            unions.append(other_group if group is None else group)
        else:
            unions.append(kind.union(group, other_group))
    return unions


def _fixed_paths(
    branches: Sequence[_TracedBranch], created: Created
) -> set[KeyPath]:
    """Returns the created entries with the same initial value in all branches that create them."""
    paths: set[KeyPath] = set()
    if len(branches) == 1:
        return paths
    for path, (first_branch, *other_branches) in created.items():
        if all(
            first_branch.creates_like(branch, path) for branch in other_branches
        ):
            paths.add(path)
    return paths


def _initial_values(
    branches: Sequence[_TracedBranch],
    values: list[PyTree],
    created: Created,
    fixed_paths: Collection[KeyPath],
) -> dict[KeyPath, Tensor | None]:
    """Returns initial values of entries from the first branch that creates each.

    Entries that all branches create, each with its own value, are None.
    """
    initial: dict[KeyPath, Tensor | None] = dict.fromkeys(created)
    for branch in branches:
        paths: list[KeyPath] = []
        for path, creating_branches in created.items():
            is_needed = path in fixed_paths or len(creating_branches) < len(
                branches
            )
            if is_needed and creating_branches[0] is branch:
                paths.append(path)
        if paths:
            numbers = [branch.created_numbers[path] for path in paths]
            initial |= zip(
                paths, branch.traced.only(numbers, values), strict=True
            )
    return initial


def _check_results(branches: Sequence[_TracedBranch]) -> None:
    """Raises BranchStructureError if the branches' own results differ in structure."""
    first_branch, *other_branches = branches
    structure = jax.tree.structure(
        first_branch.types.packed, is_leaf=is_state_node
    )
    for branch in other_branches:
        branch_structure = jax.tree.structure(
            branch.types.packed, is_leaf=is_state_node
        )
        if branch_structure != structure:
            raise BranchStructureError(
                f"{branch.name} returns another structure than {first_branch.name}: "
                f"{branch_structure} instead of {structure}; the branches return the same "
                "structure."
            )


def _check_same_structure(
    units: Units, branches: Sequence[_TracedBranch], created: Created
) -> None:
    """Raises BranchStructureError if a branch's results differ from the first one's."""
    types_of_branches = [
        _types_by_location(units, branch) for branch in branches
    ]
    created_locations = {units.location_in_groups(path) for path in created}
    first_name, first_types = branches[0].name, types_of_branches[0]
    for branch, types in zip(branches, types_of_branches, strict=True):
        # A branch that does not create an entry passes it on.
        for location in sorted(
            (types.keys() ^ first_types.keys()) - created_locations
        ):
            has, has_not = branch.name, first_name
            if location in first_types:
                has, has_not = has_not, has
            raise BranchStructureError(
                f"{location} is there after {has}, and not after {has_not}; the branches return, "
                "and leave in the state, the same structure."
            )

    initial_types: dict[str, jax.core.ShapedArray] = {}
    for branch in reversed(branches):
        for path, leaf_type in tree_leaves_with_path(branch.types.created):
            initial_types[units.location_in_groups(path)] = leaf_type
    first_seen: dict[str, tuple[str, jax.core.ShapedArray]] = {}
    for branch, types in zip(branches, types_of_branches, strict=True):
        for location, leaf_type in (initial_types | types).items():
            seen_in, seen_type = first_seen.setdefault(
                location, (branch.name, leaf_type)
            )
            if (leaf_type.shape, leaf_type.dtype) != (
                seen_type.shape,
                seen_type.dtype,
            ):
                raise BranchStructureError(
                    f"{location} is {leaf_type.str_short()} in {branch.name}, and "
                    f"{seen_type.str_short()} in {seen_in}; the branches return, and leave in the "
                    "state, the same shapes and dtypes."
                )


def _types_by_location(
    units: Units, branch: _TracedBranch
) -> dict[str, jax.core.ShapedArray]:
    """Returns the type of each entry and result after a branch, by its location for errors."""
    types: dict[str, jax.core.ShapedArray] = {}
    for path, leaf_type in tree_leaves_with_path(branch.types.state):
        types[units.location_in_groups(path)] = leaf_type
    # Returned carriers come after those of the arguments.
    carrier = sum(units.layout.is_state_node)
    for path, leaf in tree_leaves_with_path(
        branch.types.packed, is_leaf=is_state_node
    ):
        if not is_state_node(leaf):
            types[f"the result{keystr(path)}"] = leaf
            continue
        for (_, *path_in_group), leaf_type in tree_leaves_with_path(leaf):
            location = units.kind.location(
                units.static, carrier, tuple(path_in_group)
            )
            types[location] = leaf_type
        carrier += 1
    return types
