"""cond and switch: one of several functions runs, and the state comes out alike.

What only some of the branches make is made for all of them before, and passes unchanged through the
others. Every branch begins with the same state and the same counters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from weft.errors import BranchStructureError
from weft.lifting.creation import StateCreated, groups, has_created, traced_with_state, with_created
from weft.lifting.crossing import (
    Kind,
    Parcel,
    Results,
    Static,
    Units,
    commit,
    depart,
    is_parcel,
    run,
)
from weft.lifting.names import named_after
from weft.lifting.structure import traced_by_structure


def switch(
    kind: Kind,
    branches: Sequence[Callable[..., Any]],
    *,
    in_axes: Any = None,
    names: Sequence[str] | None = None,
) -> Callable[..., Any]:
    """`jax.lax.switch` of functions that take carriers.

    Args:
        kind: whose carriers cross.
        branches: functions of the same arguments, with results of the same structure.
        in_axes: a prefix of the arguments, of which only the filters of `Roles` are used.
        names: of the branches in errors; by default "branch 0" and so on.

    Returns:
        `call(index, *args)`.

    Raises:
        BranchStructureError: if the branches return, or leave in the state, values of different
            structure, shape or dtype.
    """
    pure = functools.partial(_chosen, kind, branches, names)
    chosen = traced_by_structure(tuple(branches), kind, pure)

    def call(index: Any, *args: Any) -> Any:
        outer, cargo = depart(kind, args, in_axes)
        units = Units.of_cargo(cargo)

        def create(static: Any, values: list[Any]) -> tuple[Any, list[Any]]:
            after = static
            for branch in branches:
                after, values = with_created(
                    kind, branch, static, units, values, values, (None,), again=True
                )
            return after, values

        def choose(static: Any, values: list[Any]) -> Results:
            results = chosen(static, units.having(values), index)
            joined, kept = results.static.value
            # What no branch has changed is what there was, so that a loop around may share it.
            found = _by_path(
                [v for v, is_group in zip(values, units.is_group, strict=True) if is_group]
            )
            of_groups = jax.tree_util.tree_map_with_path(
                lambda path, new: found[path] if path in kept else new,
                [group for parcel in results.parcels for group in parcel.groups],
            )
            whole = iter(of_groups)
            parcels = [Parcel(tuple(next(whole) for _ in p.groups)) for p in results.parcels]
            return results._replace(static=Static(joined), parcels=parcels)

        static, _ = cargo.static.value
        results = traced_with_state(
            kind, choose, create, static, units.values, units, in_loop=False
        )
        return commit(kind, outer, results)

    return call


def _chosen(
    kind: Kind,
    branches: Sequence[Callable[..., Any]],
    names: Sequence[str] | None,
    static: Any,
    units: Units,
    index: Any,
) -> Results:
    """The switch on pure values; the static half also says what no branch has changed."""
    traced: list[Results] = []
    unchanged: list[frozenset[Any]] = []

    def one(branch: Callable[..., Any]) -> Callable[[list[Any]], Any]:
        def of_values(values: list[Any]) -> Any:
            inside = units.having(values)
            cargo = inside.cargo(static)
            results = run(kind, lambda args: branch(*args), cargo)
            if has_created(kind, inside, results, (None,)):
                raise StateCreated
            # All that there was comes back, since another branch may change it.
            of_groups = groups(inside, results)
            wholes = [kind.union(before, after) for before, after, _ in of_groups]
            found = _by_path([before for before, _, _ in of_groups])
            after = _by_path(wholes)
            unchanged.append(frozenset(p for p, x in after.items() if found.get(p) is x))
            whole = iter(wholes)
            parcels = [Parcel(tuple(next(whole) for _ in p.groups)) for p in results.parcels]
            results = results._replace(parcels=parcels)
            traced.append(jax.tree.map(jax.typeof, results))
            return results.parcels, results.packed

        return named_after(branch, of_values)

    try:
        chosen = jax.lax.switch(index, [one(branch) for branch in branches], units.values)
    except TypeError:
        names = names or [f"branch {i}" for i in range(len(branches))]
        if len(traced) < len(branches):
            raise  # it is the index that does not fit
        _check_results(traced, names)
        kind.join(static, [r.static.value for r in traced])
        _check_alike(kind, static, traced, names)
        raise
    joined = kind.join(static, [r.static.value for r in traced])
    return Results(Static((joined, frozenset.intersection(*unchanged))), *chosen)


def cond(
    kind: Kind,
    true_fun: Callable[..., Any],
    false_fun: Callable[..., Any],
    *,
    in_axes: Any = None,
) -> Callable[..., Any]:
    """`jax.lax.cond` of functions that take carriers; see `switch`.

    Returns:
        `call(pred, *args)`.
    """
    chosen = switch(kind, (false_fun, true_fun), in_axes=in_axes, names=("false_fun", "true_fun"))

    def call(pred: Any, *args: Any) -> Any:
        return chosen(jax.numpy.asarray(pred, bool).astype("int32"), *args)

    return call


def _by_path(of_groups: list[Any]) -> dict[Any, Any]:
    return dict(jax.tree_util.tree_leaves_with_path(of_groups))


def _check_results(traced: Sequence[Results], names: Sequence[str]) -> None:
    """Raises BranchStructureError where the trees of branches' results differ."""
    trees = [jax.tree.structure(r.packed, is_leaf=is_parcel) for r in traced]
    for name, tree in zip(names[1:], trees[1:], strict=False):
        if tree != trees[0]:
            raise BranchStructureError(
                f"{name} returns another structure than {names[0]}: {tree} instead of {trees[0]}; "
                "what branches return is alike."
            )


def _check_alike(kind: Kind, static: Any, traced: Sequence[Results], names: Sequence[str]) -> None:
    """Raises BranchStructureError where a branch's results differ from the first one's."""
    for name, results in zip(names[1:], traced[1:], strict=False):
        ours, theirs = _by_place(kind, static, results), _by_place(kind, static, traced[0])
        for at in ours.keys() ^ theirs.keys():
            has, has_not = (name, names[0]) if at in ours else (names[0], name)
            raise BranchStructureError(
                f"{at} is there after {has}, and not after {has_not}; what branches return, and "
                "leave in the state, is alike."
            )
        for at, a in theirs.items():
            b = ours[at]
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                raise BranchStructureError(
                    f"{at} is {b.str_short()} in {name}, and {a.str_short()} in {names[0]}; what "
                    "branches return, and leave in the state, is alike."
                )


def _by_place(kind: Kind, static: Any, results: Results) -> dict[str, Any]:
    """All values of the results, by where they are."""
    found = {}
    for parcel in results.parcels:
        for path, x in jax.tree_util.tree_leaves_with_path(parcel):
            found[kind.place(static, path[1:])] = x
    for path, x in jax.tree_util.tree_leaves_with_path(results.packed, is_leaf=is_parcel):
        if is_parcel(x):
            for inside, value in jax.tree_util.tree_leaves_with_path(x):
                found[kind.place(static, inside[1:])] = value
        else:
            found[f"the result{jax.tree_util.keystr(path)}"] = x
    return found
