"""When two functions are the same: equal code, and equal values wherever the code can see.

JAX knows a function by its identity, so one that is made anew at each call is compiled at each
call. Here two functions are the same if they have the same code, and if what it sees in its
closure, its defaults and its globals is the same by value. What cannot be compared by value safely
(an array that can be written to, a tracer, an object that can change) makes a function equal to
itself alone: better compiled once too often than run once with another function's values.
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
    """Something that a function sees cannot be compared by value."""


class Same:
    """An object that is equal to itself alone; kept alive, so that its identity stays its own."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


_MAX_SHARED = 512
_shared: OrderedDict[Hashable, Any] = OrderedDict()


def shared_by_equal_functions(parts: Any, make: Callable[[], T]) -> T:
    """What was made from equal parts before, or `make()`.

    Args:
        parts: all that the object is made from: functions, and values of any kind.
        make: makes the object, which is kept for the next equal parts.
    """
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
    """Something that is made, or found among what was made, when it is first asked for.

    A function may see other values by then than when it was defined.

    Args:
        parts: see `shared_by_equal_functions`.
        make: likewise.
    """

    def __init__(self, parts: Any, make: Callable[[], T]):
        self._parts, self._make = parts, make

    @functools.cached_property
    def value(self) -> T:
        return shared_by_equal_functions(self._parts, self._make)


def by_value(value: Any) -> Hashable:
    """Returns the key of a value in a comparison: equal for equal values, and hashable.

    Args:
        value: anything. What can change and has its own way to compare is compared by its present
            state; what cannot be compared by value is equal to itself alone.
    """
    return _by_value(value, ())


def _by_value(value: Any, above: tuple[Any, ...]) -> Hashable:
    try:
        return _of_value(value, ())
    except _Incomparable:
        pass
    if any(value is x for x in above):
        return Same(value)  # it holds itself
    above = (*above, value)
    key = functools.partial(_by_value, above=above)
    # What has its own way to compare is compared so, but what it is made of one by one: 1, 1.0 and
    # True are equal to each other. So is what can change: its parts are as they are now.
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
    """Returns the key of a value without a hash, such as a `bytearray`: what pickle writes."""
    if type(value).__eq__ is object.__eq__:
        return Same(value)
    try:
        written = value.__reduce_ex__(4)
    except Exception:  # whatever its class raises, it cannot be written
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
    """A hashable value that is equal for equal functions; `above` are those that lead here."""
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
        raise _Incomparable  # it is another one after each run
    try:
        closure = [cell.cell_contents for cell in fn.__closure__ or ()]
    except ValueError:
        raise _Incomparable from None  # a name that has no value yet
    seen = fn.__globals__
    names = () if is_library else [name for name in _names(fn.__code__) if name in seen]
    # What it wraps is in its closure, too; a signature says how to call it, not what it does.
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
    """The names of outer functions and of the module to which a function writes."""
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
    """The global names in a function's code and in that of functions inside of it."""
    inside = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return tuple(sorted({*code.co_names, *(name for c in inside for name in _names(c))}))


# Each of a module's fields goes through these whenever it crosses, and all that a function sees: a
# union that is made anew at each look takes longer than the look.
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
        # One that stands in another function is made anew by each call of that.
        fixed = value.__closure__ is None and "<locals>" not in value.__qualname__
        return Same(value) if fixed and is_of_library(value) else _of_function(value, above)
    if isinstance(value, _PLAIN):
        return kind, value
    if isinstance(value, tuple):
        return type(value), tuple([_of_value(v, above) for v in value])
    if isinstance(value, _UNCHANGING):
        return Same(value)
    if isinstance(value, _FRACTIONS):
        return type(value), repr(value)  # 0.0 and -0.0 are not the same here
    if isinstance(value, np.generic):
        return type(value), value.tobytes()
    if isinstance(value, frozenset):
        return type(value), frozenset(_of_value(v, above) for v in value)
    # What a function holds may change before it runs again; what is given beside it does not.
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
    """Whether a function is JAX's, Weft's or the like, whose globals do not change."""
    # Functions that wrap others have the module of what they wrap, so the globals tell.
    return _is_library(fn.__globals__.get("__name__", ""))


@functools.lru_cache(maxsize=1024)
def _is_library(module: str) -> bool:
    return module.split(".")[0] in ("jax", "numpy", "optax", "weft")
