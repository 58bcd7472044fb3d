"""Functions that see the state of their carriers through two maps: transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from weft.lifting.creation import with_begun
from weft.lifting.crossing import Cargo, Kind, Parcel, Static, commit, depart, is_parcel, run

Groups = tuple[Any, ...]


def transform(
    kind: Kind,
    fn: Callable[..., Any],
    *,
    in_axes: Any = None,
    map_in: Callable[[Groups], Groups] = lambda groups: groups,
    map_out: Callable[[Groups, Groups], Groups] = lambda found, left: left,
    initialize: Callable[[Groups, Groups], Groups] | None = None,
) -> Callable[..., Any]:
    """Maps the state of carriers that a function sees.

    Args:
        in_axes: a prefix of the arguments; only the filters of `Roles` are used.
        map_in: from the groups of a carrier to those that `fn` sees.
        map_out: from the groups before and after `fn` to those written to the carrier.
        initialize: if given, `fn` first runs on the unmapped groups; maps the groups before and
            after that run to those of the carrier.
    """

    def call(*args: Any) -> Any:
        outer, cargo = depart(kind, args, in_axes)
        before = _groups(cargo.packed)
        if initialize is not None:
            results = run(kind, lambda args: fn(*args), cargo)
            initial = iter(map(initialize, before, _groups(results.parcels)))
            static, roles = cargo.static.value
            static = Static((kind.follow(static, results.static.value), roles))
            cargo = Cargo(static, _map_parcels(lambda _: next(initial), cargo.packed))
        found = _map_parcels(map_in, cargo.packed)
        results = run(kind, lambda args: fn(*args), cargo._replace(packed=found))
        left = map(map_out, _groups(found), _groups(results.parcels))
        results = results._replace(parcels=list(map(Parcel, left)))
        # State created before the second run consists of initial values.
        pairs = zip(_flat(before), _flat(_groups(cargo.packed)), strict=True)
        made = [new if new is not old else None for old, new in pairs]
        return commit(kind, outer, with_begun(kind, results, made))

    return call


def _flat(of_carriers: list[Groups]) -> list[Any]:
    return [group for groups in of_carriers for group in groups]


def _groups(packed: Any) -> list[Groups]:
    leaves = jax.tree.leaves(packed, is_leaf=is_parcel)
    return [leaf.groups for leaf in leaves if is_parcel(leaf)]


def _map_parcels(fn: Callable[[Groups], Groups], tree: Any) -> Any:
    return jax.tree.map(
        lambda x: Parcel(fn(x.groups)) if is_parcel(x) else x, tree, is_leaf=is_parcel
    )
