"""What the lifted functions share: filters and axes as roles, and arguments as one tree."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from weft.core.filters import Filter
from weft.core.scope_kind import Select
from weft.lifting import FORK, Roles

Fn = Callable[..., Any]


class _Broadcast:
    """The sentinel `broadcast`."""

    def __repr__(self) -> str:
        return "broadcast"


broadcast = _Broadcast()
"""In the axes of a scan: the same in every iteration."""


def roles_of(
    axes: Mapping[Any, Any], rngs: Mapping[Any, bool], *first: tuple[Filter, Any]
) -> Roles:
    """The roles of a scope's collections and streams."""
    return Roles(
        (
            *((Select(where), role) for where, role in first),
            *((Select(where), axis) for where, axis in axes.items()),
            *((Select(rngs=where), FORK if split else None) for where, split in rngs.items()),
        )
    )


def shared(variables: Filter, rngs: Filter) -> Roles:
    """The roles of a scope of which everything crosses as it is."""
    return Roles(((Select(variables, rngs), None),))


def without_broadcast(axes: Any) -> Any:
    """Axes as the engine knows them."""
    is_leaf = lambda x: x is None or x is broadcast  # noqa: E731
    return jax.tree.map(lambda axis: None if axis is broadcast else axis, axes, is_leaf=is_leaf)


def spread(fn: Fn) -> Fn:
    """`fn` with its positional arguments as one tuple, and those with a name as one dict."""

    @functools.wraps(fn)
    def call(scope: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return fn(scope, *args, **kwargs)

    return call


def taking_all(fn: Fn, lifted: Fn) -> Fn:
    """The inverse of `spread`: takes the arguments as `fn` does."""

    @functools.wraps(fn)
    def call(scope: Any, *args: Any, **kwargs: Any) -> Any:
        return lifted(scope, args, kwargs)

    return call
