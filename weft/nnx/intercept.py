"""Observation of method calls on objects.

An observed object gets a subclass of its class whose methods go through the observer: Python looks
up `__call__` in the class, objects that are not observed pay nothing, and since the class is part
of the structure, copies inside a transformation are observed too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from weft.core.tracing import ThreadStack
from weft.nnx import containers
from weft.nnx.filters import Path
from weft.nnx.module import Module
from weft.nnx.pytree import Pytree, iter_graph
from weft.typing import PyTree

T = TypeVar("T")
Interceptor = Callable[
    [Any, str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any
]
"""Function of the object, a method's name, the method and its arguments, which calls the method."""

_INTERCEPTED = "_intercepted_as"
"""Attribute of a class: its subclasses for observed objects, by observer."""

_ORIGINAL = "_original_class"
"""Attribute of such a subclass: the class itself."""
_BASE_CLASSES = (Pytree, Module, containers.List, containers.Dict)


def iter_objects(node: PyTree) -> Iterator[tuple[Path, Pytree]]:
    """Yields the objects in a tree that have user-defined methods, with their paths."""
    for path, x in iter_graph(node):
        is_container = type(x) is containers.List or isinstance(x, dict)
        if isinstance(x, Pytree) and not is_container:
            yield path, x


def intercept_calls(x: Pytree, observer: Interceptor) -> None:
    """Passes calls of an object's methods to an observer, a module-level function.

    Classes are cached per observer.
    """
    _set_class(x, _intercepted_class(type(x), observer))


def stop_intercepting(x: Pytree) -> None:
    """Undoes `intercept_calls`."""
    cls = type(x)
    if _ORIGINAL in vars(cls):
        _set_class(x, vars(cls)[_ORIGINAL])


def original_class(x: PyTree) -> type:
    """Returns the real class of an object."""
    cls = type(x)
    while _ORIGINAL in vars(cls):
        cls = vars(cls)[_ORIGINAL]
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
    x._info.changed()


def _intercepted_class(cls: type, observer: Interceptor) -> type:
    subclasses: dict[Interceptor, type] | None = vars(cls).get(_INTERCEPTED)
    if subclasses is None:
        subclasses = {}
        setattr(cls, _INTERCEPTED, subclasses)
    if observer not in subclasses:
        # It looks like the class itself, and adds no slots, which `__class__` could not be set to.
        body: dict[str, Any] = {
            "__qualname__": cls.__qualname__,
            "__module__": cls.__module__,
            "__slots__": (),
            _ORIGINAL: cls,
        }
        for name, method in _methods(cls).items():
            body[name] = _observed_method(name, method, observer)
        subclasses[observer] = type(cls)(cls.__name__, (cls,), body)
    return subclasses[observer]


def _methods(cls: type) -> dict[str, Callable[..., Any]]:
    """Returns the user-defined methods of a class, without private ones."""
    methods: dict[str, Callable[..., Any]] = {}
    for base in reversed(cls.__mro__):
        if base in _BASE_CLASSES or base.__module__ in ("builtins", "typing"):
            continue
        for name, value in vars(base).items():
            if name != "__call__" and name.startswith("_"):
                continue
            if _is_method(value):
                methods[name] = value
            else:
                methods.pop(name, None)  # hidden by an attribute
    return methods


def _is_method(value: Any) -> bool:
    if isinstance(value, staticmethod | classmethod | type):
        return False
    return callable(value) and hasattr(value, "__get__")


def _observed_method(
    name: str, fn: Callable[..., T], observer: Interceptor
) -> Callable[..., T]:
    def method(self: Pytree, *args: Any, **kwargs: Any) -> T:
        bound_method = fn.__get__(self, type(self))
        return observer(self, name, bound_method, args, kwargs)

    method.__name__ = name
    method.__doc__ = getattr(fn, "__doc__", None)
    return method
