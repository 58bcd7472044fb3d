"""Hashable keys of static values, for caches of traces and for comparing structure.

Two static values are equal if a trace cannot tell them apart. 1, 1.0 and True are equal for Python
but not for a trace, so keys contain the types of values. Functions are compared by identity, as in
JAX: a lambda that is made again for each call is another function, and compiled again.
"""

import dataclasses
import functools
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Used for each field of a module that crosses a transformation, so the common types come first.
_PLAIN_TYPES = frozenset((bool, int, str, bytes, type(None)))
_IDENTITY_TYPES = (
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.FunctionType,
)

PartKey = Callable[[Any], Hashable]


class IdentityKey:
    """Object that is equal only to itself, kept alive so that its identity is not reused."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def jax_products() -> tuple[IdentityKey, ...]:
    """Returns the identities of JAX's products, which libraries of quantization replace.

    A trace with other products is another trace: it may not be reused while they are replaced.
    """
    products = (
        jax.lax.dot_general,
        jax.lax.conv_general_dilated,
        jnp.einsum,
        jnp.dot,
    )
    return tuple(map(IdentityKey, products))


def value_key(value: Any) -> Hashable:
    """Returns a hashable key of a static value, equal for values that a trace cannot tell apart.

    Containers, frozen dataclasses and values with a comparison of their own are compared by their
    present parts; functions, classes, arrays and all other values by identity.

    >>> value_key([1, "a"]) == value_key([1, "a"]), value_key(1) == value_key(True)
    (True, False)
    """
    return _key(value, ())


def _key(value: Any, containers: tuple[Any, ...]) -> Hashable:
    """Returns the key of a value inside of `containers`."""
    cls = type(value)
    if cls in _PLAIN_TYPES:
        return cls, value
    if isinstance(value, _IDENTITY_TYPES):
        return IdentityKey(value)
    if isinstance(value, float | complex):
        return cls, repr(value)  # distinguishes 0.0 and -0.0
    if isinstance(value, np.generic):
        return cls, value.tobytes()
    if isinstance(value, jax.Array):
        return IdentityKey(value)
    if any(value is container for container in containers):
        return IdentityKey(value)  # a container that contains itself
    return _compound_key(
        value, functools.partial(_key, containers=(*containers, value))
    )


def _compound_key(value: Any, part_key: PartKey) -> Hashable:
    """Returns the key of a value with parts; `part_key` returns the key of a part."""
    cls = type(value)
    if isinstance(value, functools.partial):
        keywords = dict(sorted(value.keywords.items()))
        return (
            cls,
            part_key(value.func),
            part_key(value.args),
            part_key(keywords),
        )
    if isinstance(value, types.MethodType):
        return cls, IdentityKey(value.__func__), part_key(value.__self__)
    if isinstance(value, tuple | list | deque):
        return cls, tuple(map(part_key, value))
    if isinstance(value, frozenset | set):
        return cls, frozenset(map(part_key, value))
    if isinstance(value, Mapping):
        items: list[Hashable] = []
        for name, item in value.items():
            items.append((part_key(name), part_key(item)))
        return cls, tuple(items)
    if isinstance(value, types.SimpleNamespace):
        return cls, part_key(vars(value))
    if dataclasses.is_dataclass(value) and cls.__eq__ is not object.__eq__:
        fields = dataclasses.fields(value)
        return cls, tuple(
            part_key(getattr(value, field.name)) for field in fields
        )
    try:
        hash(value)
    except TypeError:
        return _pickled_key(value, part_key)
    return cls, value


def _pickled_key(value: Any, part_key: PartKey) -> Hashable:
    """Returns the key of a value without a hash, such as a `bytearray`: its pickled form."""
    cls = type(value)
    if cls.__eq__ is object.__eq__:
        return IdentityKey(value)
    try:
        pickled = value.__reduce_ex__(4)
    except Exception:  # the class may raise anything
        return IdentityKey(value)
    if isinstance(pickled, str):
        return IdentityKey(value)
    part_keys: list[Hashable] = []
    for part in pickled:
        # The last two of the five parts are iterators over items.
        part_keys.append(
            part_key(list(part) if isinstance(part, Iterator) else part)
        )
    return cls, tuple(part_keys)
