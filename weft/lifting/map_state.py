"""Functions that see the state of their carriers through two maps: map_state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from weft.lifting.kind import (
    Kind,
    PureArgs,
    StateNode,
    Static,
    call_pure,
    commit_results,
    is_state_node,
    split_args,
)
from weft.lifting.state_creation import with_initial_values

Groups = tuple[Any, ...]


def map_state(
    kind: Kind,
    fn: Callable[..., Any],
    *,
    in_axes: object = None,
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

    def call(*args: object) -> Any:
        outer, pure_args = split_args(kind, args, in_axes)
        before = _groups_of(pure_args.packed)
        if initialize is not None:
            results = call_pure(kind, fn, pure_args)
            initial = iter(map(initialize, before, _groups_of(results.state_nodes)))
            static, roles = pure_args.static.value
            static = Static((kind.static_after_creation(static, results.static.value), roles))
            pure_args = PureArgs(
                static, _map_state_nodes(lambda _: next(initial), pure_args.packed)
            )
        found = _map_state_nodes(map_in, pure_args.packed)
        results = call_pure(kind, fn, pure_args._replace(packed=found))
        left = map(map_out, _groups_of(found), _groups_of(results.state_nodes))
        results = results._replace(state_nodes=list(map(StateNode, left)))
        # State created before the second run consists of initial values.
        pairs = zip(
            _flatten_groups(before), _flatten_groups(_groups_of(pure_args.packed)), strict=True
        )
        made = [new if new is not old else None for old, new in pairs]
        return commit_results(kind, outer, with_initial_values(kind, results, made))

    return call


def _flatten_groups(of_carriers: list[Groups]) -> list[Any]:
    return [group for groups in of_carriers for group in groups]


def _groups_of(packed: object) -> list[Groups]:
    leaves = jax.tree.leaves(packed, is_leaf=is_state_node)
    return [leaf.groups for leaf in leaves if is_state_node(leaf)]


def _map_state_nodes(fn: Callable[[Groups], Groups], tree: object) -> Any:
    return jax.tree.map(
        lambda x: StateNode(fn(x.groups)) if is_state_node(x) else x, tree, is_leaf=is_state_node
    )
