"""Tracking of structure changes, and of the traces in which objects may change.

A call that remembers an object must detect structure changes without traversing it. Remembered
objects are *watched*: any change of a watched object other than of a variable's value starts a new
*epoch*. A call traverses the object again only if the epoch differs from the remembered one.
"""

from __future__ import annotations

import functools
import io
import pickle
import types
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from weft.core.tracing import current_trace
from weft.lifting.functions import Same, by_value, is_of_library
from weft.nnx.naming import changed_elsewhere, origin


class _Epoch:
    """Current epoch, and by id the caches of object structures to clear at its end."""

    def __init__(self) -> None:
        self.now = object()
        self.remembering: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def end(self) -> None:
        """Starts another epoch."""
        self.now = object()
        for ref in self.remembering.valuerefs():
            if (x := ref()) is not None:
                x.forget()
        self.remembering.clear()


EPOCH = _Epoch()


class Watch:
    """Record of an object's origin and marks.

    Attributes:
        trace: JAX trace in which the object was made.
        origin: program position that made it.
        watched: whether a call remembers the object's structure.
        marks: by attribute, whether it is marked data (True) or static (False).
    """

    __slots__ = ("marks", "origin", "trace", "watched")

    def __init__(self, like: "Watch | None" = None) -> None:
        """Records an object made here and now, or with another one."""
        self.trace = current_trace() if like is None else like.trace
        self.origin = origin() if like is None else like.origin
        self.watched = False
        self.marks: dict[str, bool] = {}

    def check(self, what: Any) -> None:
        """Raises `TraceContextError` if the object belongs to another trace."""
        trace, here = self.trace, current_trace()
        if trace is not here and trace != here:
            raise changed_elsewhere(what)

    def changed(self) -> None:
        """Records a change of structure; call it after the change, for thread safety."""
        if self.watched:
            EPOCH.end()


# JAX classes that are hashed by value without defining `__hash__` themselves.
_OF_JAX = (
    jax.sharding.PartitionSpec,
    jax.sharding.Mesh,
    jax.sharding.AbstractMesh,
    jax.sharding.Sharding,
    jax.Device,
)
IMMUTABLE = (str, bytes, int, float, complex, type, np.dtype, np.generic, *_OF_JAX)


def cannot_change(x: Any) -> bool:
    """Returns whether a static value is immutable: hashable by value, or a function.

    A callable object without a hash, such as a dataclass with `__call__`, can change.
    """
    if isinstance(x, tuple | frozenset):
        return all(map(cannot_change, x))
    if x is None or x is ... or isinstance(x, IMMUTABLE) or type(x) in UNCHANGING:
        return True
    if callable(x):
        return is_hashable(x)
    if type(x).__hash__ in (None, object.__hash__):
        return False
    try:
        hash(x)
    except TypeError:  # an item is unhashable
        return False
    return True


def changing_parts(x: Any) -> Iterator[Same]:
    """Yields the parts of a static value that can change, each equal to itself alone."""
    if isinstance(x, tuple):
        for part in x:
            yield from changing_parts(part)
    elif not cannot_change(x):
        yield Same(x)


def is_hashable(x: Any) -> bool:
    """Returns whether a value has a hash."""
    try:
        hash(x)
    except TypeError:
        return False
    return True


class Copies:
    """Snapshot of static values; each caller of a compiled function gets its own copies.

    Hashable values count as immutable and are not copied, since they may be compared by identity;
    so do values that Python can neither hash nor pickle. All copies are equal.

    Args:
        values: values to copy together, so that sharing between them is preserved.
        kept: objects that are never copied.
    """

    def __init__(self, values: Sequence[Any], kept: Iterable[Any] = ()):
        self._uncopied: dict[int, Any] = {id(x): x for x in kept}
        for value in values:
            try:
                self._written(value)
            except Exception:  # an unpicklable class may raise anything
                self._uncopied[id(value)] = value
        self._of_all = self._written(list(values))

    def _written(self, x: Any) -> bytes:
        uncopied = self._uncopied

        class Pickler(pickle.Pickler):
            def persistent_id(self, x: Any) -> int | None:
                if id(x) not in uncopied:
                    if not is_hashable(x) and not isinstance(x, jax.Array):
                        return None
                    uncopied[id(x)] = x
                return id(x)

        file = io.BytesIO()
        Pickler(file, protocol=4).dump(x)
        return file.getvalue()

    def made(self) -> list[Any]:
        """Returns new copies of the values."""
        uncopied = self._uncopied

        class Unpickler(pickle.Unpickler):
            def persistent_load(self, pid: int) -> Any:
                return uncopied[pid]

        return Unpickler(io.BytesIO(self._of_all)).load()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Copies)

    def __hash__(self) -> int:
        return 0


class Fixed:
    """Static part of an object, compared by value."""

    __slots__ = ("_hash", "_key", "value")

    def __init__(self, value: Any):
        self.value = value
        self._key = by_value(value)
        self._hash = hash(self._key)

    def having(self, value: Any) -> Fixed:
        """Returns this one with an equal value."""
        made = object.__new__(Fixed)
        made.value, made._key, made._hash = value, self._key, self._hash
        return made

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Fixed) and self._hash == other._hash and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return repr(self.value)


# Most static values have these types, which are never data.
PLAIN = frozenset((bool, int, str, bytes, type(None)))
# These are static as well, and none of them can change.
UNCHANGING = frozenset((float, complex, type, type(jnp.float32), types.FunctionType))
of_plain = functools.lru_cache(maxsize=4096, typed=True)(Fixed)
_of_library: dict[int, Fixed] = {}  # by the id of what is kept in it


def fixed(value: Any) -> Fixed:
    """Returns a static value for comparison; cached for common values."""
    if (found := _of_library.get(id(value))) is not None:
        return found
    kind = type(value)
    if kind in PLAIN or (kind is float and value != 0.0):  # 0.0 and -0.0 are not the same here
        return of_plain(value)
    made = Fixed(value)
    if _is_top_of_library(value):
        _of_library[id(value)] = made
    return made


def _is_top_of_library(value: Any) -> bool:
    if type(value) is types.FunctionType:
        is_top = value.__closure__ is None and "<locals>" not in value.__qualname__
        return is_top and is_of_library(value)
    return isinstance(value, type) and value.__module__.startswith("jax.")
