"""Shared helpers of lifted functions: roles from filters and axes, arguments as one tree."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from weft.core.filters import Filter
from weft.core.scope_kind import Select
from weft.lifting import FORK, Roles

Fn = Callable[..., Any]


class _Broadcast:
    """Sentinel `broadcast`."""

    def __repr__(self) -> str:
        return "broadcast"


broadcast = _Broadcast()
"""Axis of a scan for values shared by all iterations."""


def roles_of(
    axes: Mapping[Any, Any], rngs: Mapping[Any, bool], *first: tuple[Filter, Any]
) -> Roles:
    """Returns the roles of a scope's collections and streams."""
    return Roles(
        (
            *((Select(where), role) for where, role in first),
            *((Select(where), axis) for where, axis in axes.items()),
            *((Select(rngs=where), FORK if split else None) for where, split in rngs.items()),
        )
    )


def shared(variables: Filter, rngs: Filter) -> Roles:
    """Returns the roles of a scope that crosses unchanged."""
    return Roles(((Select(variables, rngs), None),))


def without_broadcast(axes: Any) -> Any:
    """Returns axes with the engine's value for `broadcast`."""
    is_leaf = lambda x: x is None or x is broadcast  # noqa: E731
    return jax.tree.map(lambda axis: None if axis is broadcast else axis, axes, is_leaf=is_leaf)


def spread(fn: Fn) -> Fn:
    """Wraps `fn` to take its positional arguments as a tuple and keyword arguments as a dict."""

    @functools.wraps(fn)
    def call(scope: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return fn(scope, *args, **kwargs)

    return call


def taking_all(fn: Fn, lifted: Fn) -> Fn:
    """Inverts `spread`: takes the arguments as `fn` does."""

    @functools.wraps(fn)
    def call(scope: Any, *args: Any, **kwargs: Any) -> Any:
        return lifted(scope, args, kwargs)

    return call
