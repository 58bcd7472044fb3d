"""The names of modules in what JAX compiles.

While a trace is running, the call of a module opens a `jax.named_scope` with the name under which
the module that calls it holds it. So profiles and compiled text say which layer an operation is of.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import jax

from weft.core.tracing import is_tracing
from weft.nnx.pytree import Pytree


class _Running(threading.local):
    """The modules that are called, each with the names of those that it holds, by id."""

    def __init__(self) -> None:
        self.calls: list[tuple[Pytree | None, dict[int, str]]] = [(None, {})]


_RUNNING = _Running()


def named_call(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The `__call__` of a class of modules, in the scope of the module.

    Args:
        fn: as the class defines it.
    """

    @functools.wraps(fn)
    def __call__(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not is_tracing():
            return fn(self, *args, **kwargs)
        calls = _RUNNING.calls
        above, names = calls[-1]
        if above is self:  # the method of a base class
            return fn(self, *args, **kwargs)
        calls.append((self, _names_of(self)))
        try:
            with jax.named_scope(names.get(id(self)) or type(self).__name__):
                return fn(self, *args, **kwargs)
        finally:
            calls.pop()

    return __call__


def _names_of(module: Pytree) -> dict[int, str]:
    """The attribute, and the keys below it, by which a module holds each other one."""
    names: dict[int, str] = {}

    def note(name: str, value: Any) -> None:
        if isinstance(value, list | dict):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                note(f"{name}_{key}", item)
        elif isinstance(value, Pytree):
            names.setdefault(id(value), name)

    for name, value in vars(module).items():
        if isinstance(value, Pytree):
            note(name, value)
    return names
