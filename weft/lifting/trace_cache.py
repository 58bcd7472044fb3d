"""Functions that are traced once for equal code and equal structure of their arguments.

JAX identifies a function by identity, so a function redefined at each call is recompiled at each
call. Here, two functions are equal if they have the same code, and the values in their closures,
defaults and globals are equal. A value that cannot be compared safely (a mutable array, a tracer, a
mutable object) makes a function equal only to itself: recompiling is better than reusing another
function's values. For loops and branches, tracers in closures are inputs of the trace instead.
While a library replaces JAX's products, as for quantization, earlier traces are not shared.

Outside of `jax.jit`, a loop or a branch runs in a `jax.jit` for this reason, with static values as
structure; inside of another trace, this has no effect. An output that is an unchanged input is
replaced by the caller's value, which surrounding transformations recognize as unchanged.

Traces have large frames. CPython (since 3.11) allocates frames in chunks of 16 KB, enough for 60 to
100 calls. A call that finds its chunk full allocates another one and frees it on return. If a trace
crosses that boundary, thousands of its calls do so, and it takes up to 1.9 times as long. A frame
larger than a chunk gets its own chunk, with additional room.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import enum
import functools
import itertools
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import jax.core
import jax.numpy as jnp
import numpy as np

from weft.functional.arrays import INLINE
from weft.lifting.kind import Static, Units
from weft.lifting.signature import named_after
from weft.typing import Fn

T = TypeVar("T")
F = TypeVar("F", bound=types.FunctionType)


class _Incomparable(Exception):
    """Raised for a value that cannot be compared."""


class IdentityKey:
    """Object that is equal only to itself, kept alive so that its identity is not reused."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _products() -> tuple[Fn, ...]:
    return jax.lax.dot_general, jax.lax.conv_general_dilated, jnp.einsum, jnp.dot


_PRODUCTS = _products()
_CODES = tuple(fn.__code__ for fn in _PRODUCTS[:3])


def _replaced_products() -> tuple[IdentityKey, ...]:
    """Returns the identity of JAX's products if a library of quantization replaces one now."""
    now: tuple[Any, ...] = _products()
    if now == _PRODUCTS:
        now = now[0].__code__, now[1].__code__, now[2].__code__
        if now == _CODES:
            return ()
    return tuple(map(IdentityKey, now))


_MAX_CACHED = 512
_cache: OrderedDict[Hashable, Any] = OrderedDict()


def cached_for_equal_functions(parts: object, make: Callable[[], T]) -> T:
    """Returns the cached object of equal `parts`, all its inputs, or `make()`."""
    try:
        return _cached(parts, make)
    except _Incomparable:
        return make()


def _cached(parts: object, make: Callable[[], T]) -> T:
    key = _constant_key(parts, ()), _replaced_products()
    if key in _cache:
        _cache.move_to_end(key)
    else:
        _cache[key] = make()
        if len(_cache) > _MAX_CACHED:
            _cache.popitem(last=False)
    return _cache[key]


class LazyCached(Generic[T]):
    """Object that is created or found at the first use; see `cached_for_equal_functions`."""

    def __init__(self, parts: object, make: Callable[[], T]):
        self._parts, self._make = parts, make
        self._found: dict[Hashable, T] = {}

    @property
    def value(self) -> T:
        replaced = _replaced_products()
        if replaced not in self._found:
            self._found = {replaced: cached_for_equal_functions(self._parts, self._make)}
        return self._found[replaced]


def value_key(value: object) -> Hashable:
    """Returns a hashable key of a value, equal for equal values.

    Mutable values with their own comparison are compared by their present state; values that cannot
    be compared are equal only to themselves.
    """
    return _any_value_key(value, ())


def _any_value_key(value: Any, above: tuple[Any, ...]) -> Hashable:
    try:
        return _constant_key(value, ())
    except _Incomparable:
        pass
    if any(value is x for x in above):
        return IdentityKey(value)  # contains itself
    above = (*above, value)
    key = functools.partial(_any_value_key, above=above)
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
    if dataclasses.is_dataclass(value) and type(value).__eq__ is not object.__eq__:
        names = [field.name for field in dataclasses.fields(value)]
        return type(value), tuple(key(getattr(value, name)) for name in names)
    try:
        hash(value)
    except TypeError:
        return _pickled_key(value, key)
    return type(value), value


def _pickled_key(value: object, key: Callable[[Any], Hashable]) -> Hashable:
    """Returns the key of a value without a hash, such as a `bytearray`: its pickled form."""
    if type(value).__eq__ is object.__eq__:
        return IdentityKey(value)
    try:
        written = value.__reduce_ex__(4)
    except Exception:  # the class may raise anything
        return IdentityKey(value)
    if isinstance(written, str):
        return IdentityKey(value)
    # The last two entries of the five are iterators over items.
    parts = [list(x) if isinstance(x, Iterator) else x for x in written]
    return type(value), tuple(map(key, parts))


def _function_key(fn: object, above: tuple[Any, ...]) -> Hashable:
    """Returns a hashable key, equal for equal functions; `above` are enclosing values."""
    if isinstance(fn, functools.partial):
        above = (*above, fn)
        held = _constant_key(fn.args, above), _named_values_key(fn.keywords, above)
        return "partial", _function_key(fn.func, above), held
    if isinstance(fn, types.MethodType):
        above = (*above, fn)
        return "method", _function_key(fn.__func__, above), _constant_key(fn.__self__, above)
    if not isinstance(fn, types.FunctionType):
        return _constant_key(fn, above)
    if fn in above:
        return "recursion", above.index(fn)
    above = (*above, fn)
    # The globals of a library do not change, nor what its functions hold.
    is_library = is_library_function(fn)
    if not is_library and _assigned_outer_names(fn.__code__):
        raise _Incomparable  # differs after each run
    try:
        closure = [cell.cell_contents for cell in fn.__closure__ or ()]
    except ValueError:
        raise _Incomparable from None  # a name that has no value yet
    if is_library:
        closure = [frozenset(x) if isinstance(x, set) else x for x in closure]
    seen = fn.__globals__
    names = () if is_library else [name for name in _global_names(fn.__code__) if name in seen]
    # A wrapped function is also in the closure; a signature does not affect behavior.
    shown = ("__wrapped__", "__signature__")
    own = {k: v for k, v in fn.__dict__.items() if k not in shown} if fn.__dict__ else {}
    return (
        fn.__code__,
        IdentityKey(seen),
        tuple([_constant_key(value, above) for value in closure]),
        _constant_key(fn.__defaults__, above),
        _named_values_key(fn.__kwdefaults__, above) if fn.__kwdefaults__ else (),
        _named_values_key(own, above) if own else (),
        tuple([(name, _constant_key(seen[name], above)) for name in names]),
    )


def _named_values_key(values: Mapping[str, Any], above: tuple[Any, ...]) -> Hashable:
    return tuple([(name, _constant_key(value, above)) for name, value in sorted(values.items())])


@functools.lru_cache(maxsize=1024)
def _assigned_outer_names(code: types.CodeType) -> frozenset[str]:
    inside = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    names = {name for c in inside for name in _assigned_outer_names(c)} - {*code.co_cellvars}
    for step in dis.get_instructions(code):
        verb, _, place = step.opname.partition("_")
        is_outside = place == "GLOBAL" or (place == "DEREF" and step.argval in code.co_freevars)
        if verb in ("STORE", "DELETE") and is_outside:
            names.add(step.argval)
    return frozenset(names)


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    inside = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return tuple(sorted({*code.co_names, *(name for c in inside for name in _global_names(c))}))


# Used for each field of a crossing module and each value of a function: creating the union at each
# use would take longer than the check.
_PLAIN = (bool, int, str, bytes, type(None))
_PLAIN_TYPES = frozenset(_PLAIN)
_FLOAT_TYPES = (float, complex)
_IMMUTABLE_TYPES = (type, types.ModuleType, types.BuiltinFunctionType)
_BOUND_FUNCTION_TYPES = (types.MethodType, functools.partial)
_COMPARABLE_TYPES = (enum.Enum, np.dtype, jax.sharding.Sharding, jax.sharding.PartitionSpec)


def _constant_key(value: Any, above: tuple[Any, ...]) -> Hashable:
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return kind, value
    if kind is types.FunctionType:
        # A nested function is created again by each call of the outer one.
        fixed = value.__closure__ is None and "<locals>" not in value.__qualname__
        if fixed and is_library_function(value):
            return IdentityKey(value)
        return _function_key(value, above)
    if isinstance(value, _PLAIN):
        return kind, value
    if isinstance(value, tuple):
        return kind, tuple([_constant_key(v, above) for v in value])
    if isinstance(value, _IMMUTABLE_TYPES):
        return IdentityKey(value)
    if isinstance(value, _FLOAT_TYPES):
        return kind, repr(value)  # distinguishes 0.0 and -0.0
    if isinstance(value, np.generic):
        return kind, value.tobytes()
    if isinstance(value, frozenset):
        return kind, frozenset(_constant_key(v, above) for v in value)
    # A function's values may change before its next run; other given values do not.
    if not above and isinstance(value, list | set | dict):
        items = value.items() if isinstance(value, dict) else value
        return kind, tuple(_constant_key(item, above) for item in items)
    if isinstance(value, _BOUND_FUNCTION_TYPES):
        return _function_key(value, above)
    if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
        return IdentityKey(value)
    if isinstance(value, _COMPARABLE_TYPES):
        return kind, value
    if callable(value) and kind.__module__.split(".")[0] in ("jax", "jaxlib", "numpy"):
        # `jax.numpy.exp` and the like, or a policy of `jax.checkpoint`.
        return IdentityKey(value) if kind.__eq__ is object.__eq__ else (kind, value)
    if dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen:
        fields = [getattr(value, field.name) for field in dataclasses.fields(kind)]
        return kind, tuple(_constant_key(field, above) for field in fields)
    raise _Incomparable


def is_library_function(fn: types.FunctionType) -> bool:
    """Returns whether a function is from a library such as JAX, with fixed globals."""
    # Wrappers have the `__module__` of the wrapped function, so this uses the globals.
    return _is_library(fn.__globals__.get("__name__", ""))


@functools.lru_cache(maxsize=1024)
def _is_library(module: str) -> bool:
    return module.split(".")[0] in ("jax", "numpy", "optax", "weft")


def large_frame(fn: F) -> F:
    """Gives a function a frame with room for all calls below it, if its calls take long.

    Allocation of the frame takes 13 µs.
    """
    # A frame of 512 KB that is never written to. Its chunk has as much additional room, which is
    # enough for all calls within the default recursion limit.
    fn.__code__ = fn.__code__.replace(co_stacksize=1 << 16)
    return fn


@large_frame
def with_large_frame(fn: Callable[..., T], /, *args: object, **kwargs: object) -> T:
    """Calls a function with room for all calls below it, see `large_frame`."""
    return fn(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class _Captured:
    index: int


def _map_closures(fns: tuple[Any, ...], change: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Returns functions whose closures, also those of functions in there, have changed contents."""
    copies: dict[int, types.FunctionType] = {}

    def copied(x: Any) -> Any:
        if type(x) is not types.FunctionType or x.__closure__ is None:
            return change(x)
        if id(x) not in copies:
            cells = tuple(types.CellType() for _ in x.__closure__)
            fn = types.FunctionType(x.__code__, x.__globals__, x.__name__, x.__defaults__, cells)
            copies[id(x)] = fn
            fn.__kwdefaults__, fn.__qualname__ = x.__kwdefaults__, x.__qualname__
            fn.__module__, fn.__doc__ = x.__module__, x.__doc__
            fn.__dict__.update({name: copied(value) for name, value in x.__dict__.items()})
            for cell, of in zip(cells, x.__closure__, strict=True):
                cell.cell_contents = copied(of.cell_contents)
        return copies[id(x)]

    return tuple(map(copied, fns))


def _take_tracers(fns: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Any]]:
    """Returns functions with `_Captured` in place of the tracers in their closures, and those."""
    found: list[Any] = []

    def take(x: Any) -> Any:
        if not isinstance(x, jax.core.Tracer) or isinstance(x, jax.Ref):
            return x
        found.append(x)
        return _Captured(len(found) - 1)

    try:
        taken = _map_closures(fns, take)
    except ValueError:  # a name that has no value yet
        return fns, []
    return (taken, found) if found else (fns, found)


def jit_by_structure(fns: tuple[Fn, ...], options: Any, pure: Fn) -> Fn:
    """Returns a function of `static, units, *arrays` that is traced once for equal structure.

    It calls `pure(fns, static, units, *arrays)`, and returns unchanged inputs as given.

    Args:
        fns: the user's functions that `pure` calls; tracers in their closures are inputs.
        options: other values on which `pure` depends.
    """

    def make(fns: tuple[Fn, ...]) -> Fn:
        # Takes leaves instead of trees, since JAX flattens its arguments repeatedly.
        @large_frame
        def of_leaves(
            structure: Static, leaves: list[Any], captured: list[Any], *arrays: object
        ) -> tuple[Any, Static]:
            def give(x: Any) -> Any:
                return captured[x.index] if type(x) is _Captured else x

            static, layout, trees = structure.value
            rest = map(_unwrap_leaf, leaves)
            values = [tree.unflatten(itertools.islice(rest, tree.num_leaves)) for tree in trees]
            called = _map_closures(fns, give) if captured else fns
            results, tree = jax.tree.flatten(pure(called, static, Units(layout, values), *arrays))
            given = {id(x): i for i, x in enumerate(leaves) if isinstance(x, jax.Array | jax.Ref)}
            kept = {i: given[id(x)] for i, x in enumerate(results) if id(x) in given}
            changed = [x for i, x in enumerate(results) if i not in kept]
            return changed, Static((tree, tuple(kept.items())))

        return jax.jit(named_after(fns[-1], of_leaves), inline=INLINE)

    as_given = LazyCached((fns, options), lambda: make(fns))

    def call(static: object, units: Units, *arrays: object) -> Any:
        leaves, trees = [], []
        for value, role in units.pairs():
            of_value, tree = jax.tree.flatten(value)
            leaves.extend(map(_ignore_static, of_value) if role is None else of_value)
            trees.append(tree)
        structure = Static((static, units.layout, tuple(trees)))
        taken, captured = _take_tracers(fns)
        traced = None
        if captured:
            with contextlib.suppress(_Incomparable):
                traced = _cached((taken, options), lambda: make(taken))
        if traced is None:
            traced, captured = as_given.value, []
        changed, of_results = traced(structure, leaves, captured, *arrays)
        tree, kept = of_results.value
        own, others = dict(kept), iter(changed)
        return tree.unflatten(
            leaves[own[i]] if i in own else next(others) for i in range(tree.num_leaves)
        )

    return call


@jax.tree_util.register_static
class _IgnoredStatic(Static):
    """Static value that is equal to all others."""


def _ignore_static(x: object) -> Any:
    if isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct | jax.Ref):
        return x
    return _IgnoredStatic(x if isinstance(x, Hashable) else IdentityKey(x))


def _unwrap_leaf(x: object) -> Any:
    value = x.value if isinstance(x, _IgnoredStatic) else x
    return value.value if isinstance(value, IdentityKey) else value
