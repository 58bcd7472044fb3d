"""When the structure of objects has changed, and in which trace they may change.

A call that has seen an object before must know whether the object still looks the same, without
looking. So objects that some call remembers are *watched*, and whatever changes a watched object
other than the value of a variable makes a new *epoch*. A call compares the epoch with the one that
it remembers; where they differ, it looks again, once.
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
    """The present epoch, an object that is like no other.

    Attributes:
        now: the epoch.
        remembering: what remembers how objects look in it, and forgets when it ends, by id.
    """

    def __init__(self) -> None:
        self.now = object()
        self.remembering: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def end(self) -> None:
        """Begins another epoch."""
        self.now = object()
        for ref in self.remembering.valuerefs():
            if (x := ref()) is not None:
                x.forget()
        self.remembering.clear()


EPOCH = _Epoch()


class Watch:
    """What is known of one object beside its attributes.

    Attributes:
        trace: in which JAX trace the object was made.
        origin: where the program made it.
        watched: whether a call remembers how the object looks.
        marks: by attribute, whether it was said to be data (True) or static (False).
    """

    __slots__ = ("marks", "origin", "trace", "watched")

    def __init__(self, like: "Watch | None" = None) -> None:
        """A watch of an object made here and now, or with another one."""
        self.trace = current_trace() if like is None else like.trace
        self.origin = origin() if like is None else like.origin
        self.watched = False
        self.marks: dict[str, bool] = {}

    def check(self, what: Any) -> None:
        """Refuses a change of structure in another trace than the object's own.

        Args:
            what: the object, for the error.

        Raises:
            TraceContextError: inside of a transformation that the object did not go through.
        """
        trace, here = self.trace, current_trace()
        if trace is not here and trace != here:
            raise changed_elsewhere(what)

    def changed(self) -> None:
        """Notes a change of structure; after it, or another thread would remember what was."""
        if self.watched:
            EPOCH.end()


# Some classes of JAX do not show that they have a hash by value.
_OF_JAX = (
    jax.sharding.PartitionSpec,
    jax.sharding.Mesh,
    jax.sharding.AbstractMesh,
    jax.sharding.Sharding,
    jax.Device,
)
IMMUTABLE = (str, bytes, int, float, complex, type, np.dtype, np.generic, *_OF_JAX)


def cannot_change(x: Any) -> bool:
    """Whether a static value keeps its value: what has a hash by value does, and functions.

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
    except TypeError:  # something in it has none
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
    """Whether a value has a hash."""
    try:
        hash(x)
    except TypeError:
        return False
    return True


class Copies:
    """Static values as they are now; each caller of a compiled function gets its own copies.

    What has a hash is not copied: it counts as immutable, and may be compared by identity. What
    Python can neither hash nor pickle counts as immutable as well. All copies are equal.

    Args:
        values: what to copy, together, so that what they share is shared by the copies.
        kept: objects that are not copied wherever they are.
    """

    def __init__(self, values: Sequence[Any], kept: Iterable[Any] = ()):
        self._uncopied: dict[int, Any] = {id(x): x for x in kept}
        for value in values:
            try:
                self._written(value)
            except Exception:  # whatever a class raises that cannot be pickled
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
    """What of an object is static, compared by value.

    Attributes:
        value: anything.
    """

    __slots__ = ("_hash", "_key", "value")

    def __init__(self, value: Any):
        self.value = value
        self._key = by_value(value)
        self._hash = hash(self._key)

    def having(self, value: Any) -> Fixed:
        """This one with an equal value."""
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


# Most of what is static is of these types, and is never data.
PLAIN = frozenset((bool, int, str, bytes, type(None)))
# These are static as well, and none of them can change.
UNCHANGING = frozenset((float, complex, type, type(jnp.float32), types.FunctionType))
of_plain = functools.lru_cache(maxsize=4096, typed=True)(Fixed)
_of_library: dict[int, Fixed] = {}  # by the id of what is kept in it


def fixed(value: Any) -> Fixed:
    """A static value for comparison; made once for values that many objects have."""
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
    """Whether a value is a function or class of a library that is there all the time."""
    if type(value) is types.FunctionType:
        is_top = value.__closure__ is None and "<locals>" not in value.__qualname__
        return is_top and is_of_library(value)
    return isinstance(value, type) and value.__module__.startswith("jax.")
