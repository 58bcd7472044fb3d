"""Functions with changed variables or PRNG streams."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from weft import lifting
from weft.core.filters import Filter, subtract_filters
from weft.core.lift.common import Fn, shared, spread, taking_all
from weft.core.rngs import Stream
from weft.core.scope_kind import Group, ScopeKind, Select
from weft.lifting import Roles

Map = Callable[[Any], Any]


def _same(variables: Any) -> Any:
    return variables


def map_variables(
    fn: Fn,
    mapped_collections: Filter,
    map_in_fn: Map = _same,
    map_out_fn: Map = _same,
    init: bool = False,
    mutable: bool = False,
    rngs: Filter = True,
    variables: Filter = True,
) -> Fn:
    """Maps the variables that `fn(scope, *args)` sees.

    Args:
        mapped_collections: collections to map.
        map_in_fn: maps the dict of those collections to the one that `fn` sees.
        map_out_fn: maps the dict that `fn` leaves to the one to store.
        init: whether `fn` first runs on the unmapped collections, to create missing variables if
            the collections are mutable.
        mutable: whether `fn` may change the mapped collections.

    Example:
        >>> from weft.core import init, lift, nn
        >>> def transposed(variables):
        ...     return jax.tree.map(lambda x: x.T, variables)
        >>> decode = lift.map_variables(nn.dense, "params", transposed)
        >>> def tied(scope, x):
        ...     hidden = nn.dense(scope, x, 2, bias=False)
        ...     return decode(scope.rewound(), hidden, 3, bias=False)
        >>> init(tied)(jax.random.key(0), jax.numpy.ones(3))[0].shape
        (3,)
    """
    kind = ScopeKind("map_variables")

    def map_in(groups: tuple[Group, ...]) -> tuple[Group, ...]:
        return _changed(map_in_fn, groups[0]), *groups[1:]

    def map_all_out(found: tuple[Group, ...], left: tuple[Group, ...]) -> tuple[Group, ...]:
        initial = kind.union(found[0], Group({}, {}, left[0].made))
        made = map_out_fn(initial.variables) if left[0].made else {}
        changed = _changed(map_out_fn, kind.union(found[0], left[0]))
        return changed._replace(made=made), *left[1:]

    def map_out(found: tuple[Group, ...], left: tuple[Group, ...]) -> tuple[Group, ...]:
        return map_all_out(found, left) if left[0].variables or left[0].made else left

    def initialize(before: tuple[Group, ...], after: tuple[Group, ...]) -> tuple[Group, ...]:
        return _changed(map_out_fn, kind.union(before[0], after[0])), *before[1:]

    mapped = Select(mapped_collections, out=mutable or init)
    rest = Select(subtract_filters(variables, mapped_collections), rngs)
    lift = functools.partial(
        lifting.transform,
        kind,
        spread(fn),
        in_axes=(Roles(((mapped, None), (rest, None))), None, None),
        map_in=map_in,
    )
    plain = lift(map_out=map_all_out if mutable else map_out)
    initializing = lift(map_out=map_all_out, initialize=initialize)

    def lifted(scope: Any, args: Any, kwargs: Any) -> Any:
        scopes = jax.tree.leaves(scope, is_leaf=kind.is_carrier)
        makes = init and any(kind.is_to_make(s, mapped_collections) for s in scopes)
        return (initializing if makes else plain)(scope, args, kwargs)

    return taking_all(fn, lifted)


def _changed(fn: Map, group: Group) -> Group:
    return Group(fn(group.variables), group.streams, {})


def swap_collection(fn: Fn, col_a: str, col_b: str) -> Fn:
    """Swaps two collections that `fn(scope, *args)` sees."""

    def swap(collections: dict[str, Any]) -> dict[str, Any]:
        names = {col_a: col_b, col_b: col_a}
        return {names[col]: variables for col, variables in collections.items()}

    return map_variables(fn, (col_a, col_b), swap, swap, mutable=True)


def fold_rngs(fn: Fn, variables: Filter = True, rngs: Filter = True) -> Fn:
    """Restarts the PRNG streams that `fn(scope, *args)` sees from a key drawn of each."""
    in_axes = (shared(variables, rngs), None, None)
    kind = ScopeKind("fold_rngs", folds=True)
    return taking_all(fn, lifting.transform(kind, spread(fn), in_axes=in_axes))


def tree_map_rngs(fn: Map, tree: Any) -> Any:
    """Maps the keys of PRNG streams, as in the groups of `pack`.

    `fn` maps a key to its replacement, such as several keys along a new axis.
    """

    def map_one(stream: Any) -> Any:
        return stream.replace(key=fn(stream.key)) if isinstance(stream, Stream) else fn(stream)

    return jax.tree.map(map_one, tree, is_leaf=lambda x: isinstance(x, Stream))
