"""Observation of method calls on objects.

An observed object gets a subclass of its class whose methods go through the observer: Python looks
up `__call__` in the class, objects that are not observed pay nothing, and since the class is part
of the structure, copies inside a transformation are observed too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from weft.core.tracing import ThreadStack
from weft.nnx import containers, graph, versions
from weft.nnx.module import Module
from weft.nnx.pytree import Pytree, iter_graph

Interceptor = Callable[[Any, str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Function of the object, a method's name, the method and its arguments, which calls the method."""

_INTERCEPTED = "_intercepted_as"
_BASE_CLASSES = (Pytree, Module, containers.List, containers.Dict)


def iter_objects(node: object) -> Iterator[tuple[graph.Path, Pytree]]:
    """Yields the objects in a tree that have user-defined methods, with their paths."""
    for path, x in iter_graph(node):
        if isinstance(x, Pytree) and type(x) is not containers.List and not isinstance(x, dict):
            yield path, x


def intercept_calls(x: Pytree, observer: Interceptor) -> None:
    """Passes calls of an object's methods to an observer, a module-level function.

    Classes are cached per observer.
    """
    _set_class(x, _intercepted_class(type(x), observer))


def stop_intercepting(x: Pytree) -> None:
    """Undoes `intercept_calls`."""
    if "_original_class" in vars(type(x)):
        _set_class(x, vars(type(x))["_original_class"])


def original_class(x: object) -> type:
    """Returns the real class of an object."""
    cls = type(x)
    while "_original_class" in vars(cls):
        cls = vars(cls)["_original_class"]
    return cls


# Models inside a layer of another library, which exist only during their call.


_VISITORS = ThreadStack[Callable[[Pytree], None]]()


def visiting(
    visitor: Callable[[Pytree], None],
) -> contextlib.AbstractContextManager[Callable[[Pytree], None]]:
    """Calls a function with each model that a layer of another library is about to call.

    The model is discarded after the call; the function may observe its parts by `intercept_calls`.
    """
    return _VISITORS.push(visitor)


def visit_model(model: Pytree) -> None:
    """Passes a model to the functions of `visiting`."""
    for visitor in _VISITORS.items:
        visitor(model)


def _set_class(x: Pytree, cls: type) -> None:
    object.__setattr__(x, "__class__", cls)
    if x._info.watched:
        versions.STRUCTURE_VERSION.end()


def _intercepted_class(cls: type, observer: Interceptor) -> type:
    known = vars(cls).get(_INTERCEPTED)
    if known is None:
        known = {}
        setattr(cls, _INTERCEPTED, known)
    if observer not in known:
        methods = {name: _method(name, fn, observer) for name, fn in _methods(cls).items()}
        names = {"__qualname__": cls.__qualname__, "__module__": cls.__module__, "__slots__": ()}
        body = {**names, **methods, "_original_class": cls}
        known[observer] = type(cls)(cls.__name__, (cls,), body)
    return known[observer]


def _methods(cls: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base in _BASE_CLASSES or base.__module__ in ("builtins", "typing"):
            continue
        for name, value in vars(base).items():
            if name != "__call__" and name.startswith("_"):
                continue
            is_method = callable(value) and hasattr(value, "__get__")
            if is_method and not isinstance(value, staticmethod | classmethod | type):
                found[name] = value
            else:
                found.pop(name, None)
    return found


def _method(name: str, fn: Callable[..., Any], observer: Interceptor) -> Any:
    def method(self: Pytree, *args: Any, **kwargs: Any) -> Any:
        return observer(self, name, fn.__get__(self, type(self)), args, kwargs)

    method.__name__ = name
    method.__doc__ = getattr(fn, "__doc__", None)
    return method
