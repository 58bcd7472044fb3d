"""Equality of functions: equal code, and equal values of all names that the code uses.

JAX identifies a function by identity, so a function redefined at each call is recompiled at each
call. Here, two functions are equal if they have the same code, and the values in their closures,
defaults and globals are equal. A value that cannot be compared safely (a mutable array, a tracer, a
mutable object) makes a function equal only to itself: recompiling is better than reusing another
function's values.
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import jax
import jax.core
import numpy as np

T = TypeVar("T")


class _Incomparable(Exception):
    """Raised for a value that cannot be compared."""


class Same:
    """Object that is equal only to itself, kept alive so that its identity is not reused."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


_MAX_SHARED = 512
_shared: OrderedDict[Hashable, Any] = OrderedDict()


def shared_by_equal_functions(parts: Any, make: Callable[[], T]) -> T:
    """Returns the cached object of equal `parts`, all its inputs, or `make()`."""
    try:
        key = _of_value(parts, ())
    except _Incomparable:
        return make()
    if key in _shared:
        _shared.move_to_end(key)
    else:
        _shared[key] = make()
        if len(_shared) > _MAX_SHARED:
            _shared.popitem(last=False)
    return _shared[key]


class AtFirstCall(Generic[T]):
    """Object that is created or found at the first use; see `shared_by_equal_functions`."""

    def __init__(self, parts: Any, make: Callable[[], T]):
        self._parts, self._make = parts, make

    @functools.cached_property
    def value(self) -> T:
        return shared_by_equal_functions(self._parts, self._make)


def by_value(value: Any) -> Hashable:
    """Returns a hashable key of a value, equal for equal values.

    Mutable values with their own comparison are compared by their present state; values that cannot
    be compared are equal only to themselves.
    """
    return _by_value(value, ())


def _by_value(value: Any, above: tuple[Any, ...]) -> Hashable:
    try:
        return _of_value(value, ())
    except _Incomparable:
        pass
    if any(value is x for x in above):
        return Same(value)  # contains itself
    above = (*above, value)
    key = functools.partial(_by_value, above=above)
    # Values with their own comparison are compared by it, but part by part, since 1, 1.0 and True
    # are equal. Mutable values are compared by their present parts.
    if isinstance(value, tuple | list | deque):
        return type(value), tuple(map(key, value))
    if isinstance(value, frozenset | set):
        return type(value), frozenset(map(key, value))
    if isinstance(value, Mapping):
        return type(value), tuple((key(k), key(v)) for k, v in value.items())
    if isinstance(value, types.SimpleNamespace):
        return type(value), key(vars(value))
    if _is_compared_by_fields(value):
        names = [field.name for field in dataclasses.fields(value)]
        return type(value), tuple(key(getattr(value, name)) for name in names)
    try:
        hash(value)
    except TypeError:
        return _by_state(value, key)
    return type(value), value


def _by_state(value: Any, key: Callable[[Any], Hashable]) -> Hashable:
    """Returns the key of a value without a hash, such as a `bytearray`: its pickled form."""
    if type(value).__eq__ is object.__eq__:
        return Same(value)
    try:
        written = value.__reduce_ex__(4)
    except Exception:  # the class may raise anything
        return Same(value)
    if isinstance(written, str):
        return Same(value)
    # The last two entries of the five are iterators over items.
    parts = [list(x) if isinstance(x, Iterator) else x for x in written]
    return type(value), tuple(map(key, parts))


def _is_compared_by_fields(value: Any) -> bool:
    return (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and type(value).__eq__ is not object.__eq__
    )


def _is_frozen_dataclass(value: Any) -> bool:
    return (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and type(value).__dataclass_params__.frozen  # pyright: ignore[reportAttributeAccessIssue]
    )


def _of_function(fn: Any, above: tuple[Any, ...]) -> Hashable:
    """Returns a hashable key, equal for equal functions; `above` are enclosing values."""
    if isinstance(fn, functools.partial):
        above = (*above, fn)
        held = _of_value(fn.args, above), _of_named(fn.keywords, above)
        return "partial", _of_function(fn.func, above), held
    if isinstance(fn, types.MethodType):
        above = (*above, fn)
        return "method", _of_function(fn.__func__, above), _of_value(fn.__self__, above)
    if not isinstance(fn, types.FunctionType):
        return _of_value(fn, above)
    if fn in above:
        return "recursion", above.index(fn)
    above = (*above, fn)
    # The globals of a library do not change.
    is_library = is_of_library(fn)
    if not is_library and _written_outside(fn.__code__):
        raise _Incomparable  # differs after each run
    try:
        closure = [cell.cell_contents for cell in fn.__closure__ or ()]
    except ValueError:
        raise _Incomparable from None  # a name that has no value yet
    seen = fn.__globals__
    names = () if is_library else [name for name in _names(fn.__code__) if name in seen]
    # A wrapped function is also in the closure; a signature does not affect behavior.
    shown = ("__wrapped__", "__signature__")
    own = {k: v for k, v in fn.__dict__.items() if k not in shown} if fn.__dict__ else {}
    return (
        fn.__code__,
        Same(seen),
        tuple([_of_value(value, above) for value in closure]),
        _of_value(fn.__defaults__, above),
        _of_named(fn.__kwdefaults__, above) if fn.__kwdefaults__ else (),
        _of_named(own, above) if own else (),
        tuple([(name, _of_value(seen[name], above)) for name in names]),
    )


def _of_named(values: Mapping[str, Any], above: tuple[Any, ...]) -> Hashable:
    return tuple([(name, _of_value(value, above)) for name, value in sorted(values.items())])


@functools.lru_cache(maxsize=1024)
def _written_outside(code: types.CodeType) -> frozenset[str]:
    """Returns the names of outer functions and of the module that a function assigns to."""
    inside = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    names = {name for c in inside for name in _written_outside(c)} - {*code.co_cellvars}
    for step in dis.get_instructions(code):
        verb, _, place = step.opname.partition("_")
        is_outside = place == "GLOBAL" or (place == "DEREF" and step.argval in code.co_freevars)
        if verb in ("STORE", "DELETE") and is_outside:
            names.add(step.argval)
    return frozenset(names)


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Returns the global names in a function's code, including nested functions."""
    inside = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return tuple(sorted({*code.co_names, *(name for c in inside for name in _names(c))}))


# Used for each field of a crossing module and each value of a function: creating the union at each
# use would take longer than the check.
_PLAIN = (bool, int, str, bytes, type(None))
_PLAIN_TYPES = frozenset(_PLAIN)
_FRACTIONS = (float, complex)
_UNCHANGING = (type, types.ModuleType, types.BuiltinFunctionType)
_BOUND = (types.MethodType, functools.partial)
_BY_EQUALITY = (enum.Enum, np.dtype, jax.sharding.Sharding, jax.sharding.PartitionSpec)


def _of_value(value: Any, above: tuple[Any, ...]) -> Hashable:
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return kind, value
    if kind is types.FunctionType:
        # A nested function is created again by each call of the outer one.
        fixed = value.__closure__ is None and "<locals>" not in value.__qualname__
        return Same(value) if fixed and is_of_library(value) else _of_function(value, above)
    if isinstance(value, _PLAIN):
        return kind, value
    if isinstance(value, tuple):
        return type(value), tuple([_of_value(v, above) for v in value])
    if isinstance(value, _UNCHANGING):
        return Same(value)
    if isinstance(value, _FRACTIONS):
        return type(value), repr(value)  # distinguishes 0.0 and -0.0
    if isinstance(value, np.generic):
        return type(value), value.tobytes()
    if isinstance(value, frozenset):
        return type(value), frozenset(_of_value(v, above) for v in value)
    # A function's values may change before its next run; other given values do not.
    if not above and isinstance(value, list | set):
        return type(value), tuple(_of_value(v, above) for v in value)
    if not above and isinstance(value, dict):
        items = tuple((_of_value(k, above), _of_value(v, above)) for k, v in value.items())
        return type(value), items
    if isinstance(value, _BOUND):
        return _of_function(value, above)
    if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
        return Same(value)
    if isinstance(value, _BY_EQUALITY):
        return type(value), value
    if callable(value) and type(value).__module__.split(".")[0] in ("jax", "jaxlib", "numpy"):
        return Same(value)  # jax.numpy.exp and the like
    if _is_frozen_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]  # pyright: ignore[reportArgumentType]
        fields = (getattr(value, name) for name in names)
        return type(value), tuple(_of_value(field, above) for field in fields)
    raise _Incomparable


def is_of_library(fn: types.FunctionType) -> bool:
    """Returns whether a function is from a library such as JAX, with fixed globals."""
    # Wrappers have the `__module__` of the wrapped function, so this uses the globals.
    return _is_library(fn.__globals__.get("__name__", ""))


@functools.lru_cache(maxsize=1024)
def _is_library(module: str) -> bool:
    return module.split(".")[0] in ("jax", "numpy", "optax", "weft")
