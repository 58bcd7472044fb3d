"""Branches: cond and switch.

State that only some branches create gets its initial value before, from the first branch that
creates it, and passes unchanged through the others. All begin with equal state and counters.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import jax

from weft.errors import BranchStructureError
from weft.lifting import kind as kind_lib
from weft.lifting import signature, state_creation
from weft.lifting.kind import Kind, PureResults, StateNode, Static
from weft.lifting.roles import Roles
from weft.lifting.units import Units
from weft.typing import ArrayLike, Fn


def switch(
    kind: Kind,
    branches: Sequence[Fn],
    *,
    in_axes: object = None,
    names: Sequence[str] | None = None,
) -> Fn:
    """Applies `jax.lax.switch` to functions that take carriers, as `call(index, *args)`.

    Args:
        in_axes: a prefix of the arguments; only the filters of `Roles` are used.
        names: names of the branches in errors; by default "branch 0" and so on.

    Raises BranchStructureError if results or final states differ in structure, shape or dtype.
    """

    def call(index: ArrayLike, *args: object) -> Any:
        outer, pure_args = kind_lib.split_args(
            kind, args, in_axes, call=functools.partial(call, index)
        )
        results = _run_switch(names, branches, Units.of_pure_args(kind, pure_args), index)
        return kind_lib.commit_results(kind, outer, results)

    return call


class _TracedBranch:
    """Branch that was traced once; leaves of groups are identified by their paths.

    Attributes:
        created: each group's new entries with initial values, or None; as in the next two, arrays
            are replaced by numbers of results of the trace.
        state: all entries of each group after the branch.
        created_at, state_at: the numbers in `created` and in `state` by path.
        changed: paths of changed entries.
    """

    def __init__(self, fn: Fn, units: Units):
        self.fn, kind = fn, units.kind
        self.static: Static = Static(None)
        self.changed: list[Any] = []

        def of_values(values: list[Any]) -> tuple[Any, ...]:
            inside = units.with_values(values)
            results = kind_lib.call_pure(kind, fn, inside.pure_args())
            of_groups = state_creation.groups_before_and_after(inside, results)
            made = [kind.created(before, after) for before, after, _ in of_groups]
            whole = [kind.union(before, after) for before, after, _ in of_groups]
            before = _by_path([before for before, _, _ in of_groups])
            after = _by_path(whole)
            self.changed = [p for p, x in after.items() if before.get(p) is not x]
            self.static = results.static
            return made, whole, results.packed

        self.traced = state_creation.TracedFunction(fn, of_values, units.values)
        self.shapes = self.traced.shapes
        count = itertools.count()
        numbers = jax.tree.map(lambda _: next(count), self.shapes)
        self.created, self.state, self.returned = numbers
        self.created_at, self.state_at = _by_path(self.created), _by_path(self.state)

    def keeps(self, path: Hashable) -> bool:
        """Returns whether a created entry has its initial value after the branch.

        The traces are compared: each result of a `jit`, such as that of an inner switch, is a value
        of its own.
        """
        if path not in self.state_at:
            return False
        return self.traced.is_like(self.created_at[path], self.traced, self.state_at[path])

    def leaves(self, values: list[Any]) -> list[Any]:
        """Returns the results of the trace."""
        return jax.tree.leaves(self.traced(values))


def _run_switch(
    names: Sequence[str] | None, branches: Sequence[Fn], units: Units, index: ArrayLike
) -> PureResults:
    kind = units.kind
    traced = [_TracedBranch(branch, units) for branch in branches]
    names = names or [f"branch {i}" for i in range(len(branches))]
    _check_results(traced, names)
    joined = kind.join(units.static, [branch.static.value for branch in traced])
    first = dict.fromkeys(path for branch in traced for path in branch.created_at)
    changed = dict.fromkeys(path for branch in traced for path in (*branch.changed, *first))
    if len({frozenset((*branch.state_at, *first)) for branch in traced}) > 1:
        _check_same_structure(units, traced, names, first)
    # An initial value that all creating branches compute in the same way does not depend on the
    # taken branch, so it is not a result of the switch, which would vary with the index.
    makers = {path: [branch for branch in traced if path in branch.created_at] for path in first}
    fixed = {
        path: of
        for path, of in makers.items()
        if len(traced) > 1 and _have_same_initial_value(path, of)
    }
    initial = _initial_values(traced, units.values, first, fixed)
    chosen_first = [path for path in first if path not in fixed]
    chosen = [
        p for p in changed if p not in fixed or not all(branch.keeps(p) for branch in fixed[p])
    ]

    def one(branch: _TracedBranch) -> Callable[[list[Any], list[Any]], Any]:
        def of_values(values: list[Any], initial: list[Any]) -> Any:
            leaves = branch.leaves(values)
            # Entries that this branch does not create have another branch's initial value.
            made_elsewhere = dict(zip(first, initial, strict=True))

            def pick(path: object, own: dict[Any, int]) -> Any:
                return leaves[own[path]] if path in own else made_elsewhere[path]

            return (
                [pick(path, branch.state_at) for path in chosen],
                [pick(path, branch.created_at) for path in chosen_first],
                jax.tree.map(leaves.__getitem__, branch.returned),
            )

        return signature.named_after(branch.fn, of_values)

    of_branches = [one(branch) for branch in traced]
    try:
        after, begun, packed = jax.lax.switch(
            index, of_branches, units.values, list(initial.values())
        )
    except TypeError:
        _check_same_structure(units, traced, names, first)
        raise  # it is the index that does not fit
    begun = {**initial, **dict(zip(chosen_first, begun, strict=True))}
    after = {**begun, **dict(zip(chosen, after, strict=True))}
    before = units.groups()
    union = functools.partial(_union_groups, kind)
    made = functools.reduce(union, [branch.created for branch in traced])
    # All groups as any branch leaves them, with entries that the branch does not create.
    there = union(union(before, made), traced[0].state)
    found = _by_path(before)
    made, whole = (
        jax.tree_util.tree_map_with_path(lambda path, _, of=of: of[path], groups)
        for groups, of in ((made, begun), (there, {**found, **after}))
    )
    rest = iter(whole)
    sizes = [len(role) for role in units.layout.leaf_roles if isinstance(role, Roles)]
    state_nodes = [StateNode(tuple(itertools.islice(rest, size))) for size in sizes]
    collected = Static(joined)
    return state_creation.final_results(kind, PureResults(collected, state_nodes, packed), made)


def _union_groups(kind: Kind, made: list[Any], more: list[Any]) -> list[Any]:
    return [
        a if b is None else b if a is None else kind.union(a, b)
        for a, b in zip(made, more, strict=True)
    ]


def _have_same_initial_value(path: object, makers: Sequence[_TracedBranch]) -> bool:
    begin, *others = makers
    return all(
        begin.traced.is_like(begin.created_at[path], other.traced, other.created_at[path])
        for other in others
    )


def _initial_values(
    traced: list[_TracedBranch], values: list[Any], first: dict[Any, None], fixed: Collection[Any]
) -> dict[Any, Any]:
    """Returns initial values of entries from the first branch that creates each.

    Entries that all branches create, each with its own value, are None.
    """
    found: dict[Any, Any] = {}
    rest = [p for p in first if p in fixed or not all(p in branch.created_at for branch in traced)]
    for branch in traced:
        paths = [path for path in rest if path in branch.created_at and path not in found]
        if paths:
            computed = branch.traced.only([branch.created_at[path] for path in paths], values)
            found.update(zip(paths, computed, strict=True))
    return {path: found.get(path) for path in first}


def cond(kind: Kind, true_fun: Fn, false_fun: Fn, *, in_axes: object = None) -> Fn:
    """Applies `jax.lax.cond` as `call(pred, *args)` to functions of carriers; see `switch`."""
    chosen = switch(kind, (false_fun, true_fun), in_axes=in_axes, names=("false_fun", "true_fun"))

    def call(pred: ArrayLike, *args: object) -> Any:
        return chosen(jax.numpy.asarray(pred, bool).astype("int32"), *args)

    return call


def _by_path(of_groups: list[Any]) -> dict[Any, Any]:
    return dict(jax.tree_util.tree_leaves_with_path(of_groups))


def _check_results(traced: Sequence[_TracedBranch], names: Sequence[str]) -> None:
    trees = [
        jax.tree.structure(branch.shapes[2], is_leaf=kind_lib.is_state_node) for branch in traced
    ]
    for name, tree in zip(names[1:], trees[1:], strict=False):
        if tree != trees[0]:
            raise BranchStructureError(
                f"{name} returns another structure than {names[0]}: {tree} instead of {trees[0]}; "
                "the branches return the same structure."
            )


def _check_same_structure(
    units: Units, traced: Sequence[_TracedBranch], names: Sequence[str], made: dict[Any, None]
) -> None:
    """Raises BranchStructureError if a branch's results differ from the first one's."""
    by_place = [_types_by_location(units, branch) for branch in traced]
    passing = {units.location_in_groups(path) for path in made}
    theirs = by_place[0]
    for name, ours in zip(names[1:], by_place[1:], strict=False):
        for at in sorted((ours.keys() ^ theirs.keys()) - passing):
            has, has_not = (name, names[0]) if at in ours else (names[0], name)
            raise BranchStructureError(
                f"{at} is there after {has}, and not after {has_not}; the branches return, and "
                "leave in the state, the same structure."
            )
    # A branch that does not make something passes it on as it was made.
    passed = {
        units.location_in_groups(path): x
        for branch in reversed(traced)
        for path, x in jax.tree_util.tree_leaves_with_path(branch.shapes[0])
    }
    shapes: dict[str, tuple[str, Any]] = {}
    for name, ours in zip(names, by_place, strict=True):
        for at, here in {**passed, **ours}.items():
            before, there = shapes.setdefault(at, (name, here))
            if (here.shape, here.dtype) != (there.shape, there.dtype):
                raise BranchStructureError(
                    f"{at} is {here.str_short()} in {name}, and {there.str_short()} in {before}; "
                    "the branches return, and leave in the state, the same shapes and dtypes."
                )


def _types_by_location(units: Units, branch: _TracedBranch) -> dict[str, Any]:
    _, whole, packed = branch.shapes
    found = {
        units.location_in_groups(path): x for path, x in jax.tree_util.tree_leaves_with_path(whole)
    }
    returned = itertools.count(sum(units.layout.is_state_node))
    for path, x in jax.tree_util.tree_leaves_with_path(packed, is_leaf=kind_lib.is_state_node):
        if kind_lib.is_state_node(x):
            carrier = next(returned)
            for inside, value in jax.tree_util.tree_leaves_with_path(x):
                found[units.kind.location(units.static, carrier, inside[1:])] = value
        else:
            found[f"the result{jax.tree_util.keystr(path)}"] = x
    return found
