"""Records about objects: changes of structure, the trace and the line that made them.

A call that remembers an object must detect structure changes without traversing it. Remembered
objects are *watched*: any change of a watched object other than of a variable's value starts a new
*version*. A call traverses the object again only if the version differs from the remembered one.

Errors name objects by these records, and by the open calls of transformations in this thread.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import io
import linecache
import pickle
import types
import weakref
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from types import CodeType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec, Sharding

from weft.core.tracing import ThreadStack
from weft.errors import TraceContextError
from weft.lifting import traces
from weft.lifting.static_keys import IdentityKey, value_key
from weft.lifting.traces import current_trace
from weft.typing import PyTree, has_shape_dtype

# An object or a variable of NNX; `pytree` and `variables` import this module.
PytreeOrVariable = object

StaticPart = Any
"""Value of any class that is not data: a part of the structure, compared by value."""


class _StructureVersion:
    """Current version, and by id the caches of object structures to clear at its end."""

    def __init__(self) -> None:
        self.now = object()
        self.dependents: weakref.WeakValueDictionary[int, Any] = (
            weakref.WeakValueDictionary()
        )

    def end(self) -> None:
        """Starts another version."""
        self.now = object()
        for reference in self.dependents.valuerefs():
            cache = reference()
            if cache is not None:
                cache.forget()
        self.dependents.clear()


STRUCTURE_VERSION = _StructureVersion()


@dataclasses.dataclass(frozen=True)
class TraceState:
    """Trace that runs when the object is created."""

    jax_trace: traces.TraceState = dataclasses.field(
        default_factory=current_trace
    )

    def is_valid(self) -> bool:
        """Returns whether the trace still runs."""
        return self.jax_trace == current_trace()


class ObjectInfo:
    """Record of an object's origin and marks.

    Attributes:
        trace: JAX trace in which the object was made.
        origin: program position that made it.
        watched: whether a call remembers the object's structure.
        marks: by attribute or item, whether it is marked data (True) or static (False).
        passed: see `weft.nnx.transforms.object_state.note_passed`.
    """

    __slots__ = ("marks", "origin", "passed", "trace", "watched")

    def __init__(self, like: ObjectInfo | None = None) -> None:
        if like is None:
            self.trace = current_trace()
            self.origin = origin()
        else:
            self.trace = like.trace
            self.origin = like.origin
        self.watched = False
        self.marks: dict[Any, bool] = {}

    def check(self, x: PytreeOrVariable) -> None:
        """Raises `TraceContextError` if the object, `x`, belongs to another trace."""
        running_trace = current_trace()
        if self.trace is not running_trace and self.trace != running_trace:
            raise foreign_trace_error(x)

    def changed(self) -> None:
        """Records a change of structure; call it after the change, for thread safety."""
        if self.watched:
            STRUCTURE_VERSION.end()


# JAX classes that are hashed by value without defining `__hash__` themselves.
_JAX_TYPES = (PartitionSpec, Mesh, AbstractMesh, Sharding, jax.Device)
IMMUTABLE_TYPES = (
    str,
    bytes,
    int,
    float,
    complex,
    type,
    np.dtype,
    np.generic,
    *_JAX_TYPES,
)


def is_immutable(x: StaticPart) -> bool:
    """Returns whether a static value is immutable: hashable by value, or a function.

    A callable object without a hash, such as a dataclass with `__call__`, can change.
    """
    if isinstance(x, tuple | frozenset):
        return all(map(is_immutable, x))
    if x is None or x is ... or isinstance(x, IMMUTABLE_TYPES):
        return True
    if type(x) in OTHER_STATIC_TYPES:
        return True
    if not is_hashable(x):
        return False
    # A class without a hash of its own is compared by identity, whatever changes in it.
    return callable(x) or type(x).__hash__ is not object.__hash__


def mutable_parts(x: StaticPart) -> Iterator[IdentityKey]:
    """Yields the parts of a static value that can change, each equal to itself alone."""
    if isinstance(x, tuple):
        for part in x:
            yield from mutable_parts(part)
    elif not is_immutable(x):
        yield IdentityKey(x)


def is_hashable(x: StaticPart) -> bool:
    """Returns whether a value has a hash."""
    try:
        hash(x)
    except TypeError:
        return False
    return True


class StaticSnapshot:
    """Snapshot of static values; each caller of a compiled function gets its own copies.

    Hashable values count as immutable and are not copied, since they may be compared by identity;
    so do values that Python can neither hash nor pickle. All copies are equal.

    Args:
        values: values to copy together, so that sharing between them is preserved.
        uncopied: objects that are never copied.
    """

    def __init__(
        self,
        values: Sequence[StaticPart],
        uncopied: Iterable[StaticPart] = (),
    ):
        self._uncopied_by_id: dict[int, StaticPart] = {
            id(x): x for x in uncopied
        }
        for value in values:
            try:
                self._pickle(value)
            except Exception:  # an unpicklable class may raise anything
                self._uncopied_by_id[id(value)] = value
        # Together, so that what two values share is shared in the copies too.
        self._pickled_values = self._pickle(list(values))

    def _pickle(self, value: StaticPart) -> bytes:
        uncopied_by_id = self._uncopied_by_id

        class Pickler(pickle.Pickler):
            def persistent_id(self, x: StaticPart) -> int | None:
                if id(x) not in uncopied_by_id:
                    if not is_hashable(x) and not isinstance(x, jax.Array):
                        return None
                    uncopied_by_id[id(x)] = x
                return id(x)

        file = io.BytesIO()
        Pickler(file, protocol=4).dump(value)
        return file.getvalue()

    def made(self) -> list[StaticPart]:
        """Returns new copies of the values."""
        uncopied_by_id = self._uncopied_by_id

        class Unpickler(pickle.Unpickler):
            def persistent_load(self, pid: int) -> StaticPart:
                return uncopied_by_id[pid]

        return Unpickler(io.BytesIO(self._pickled_values)).load()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StaticSnapshot)

    def __hash__(self) -> int:
        return 0


class StaticValue:
    """Static part of an object, compared by value."""

    __slots__ = ("_hash", "_key", "value")

    def __init__(self, value: StaticPart):
        self.value = value
        self._key = value_key(value)
        self._hash = hash(self._key)

    def with_value(self, value: StaticPart) -> StaticValue:
        """Returns this one with an equal value."""
        copy = object.__new__(StaticValue)
        copy.value = value
        copy._key = self._key
        copy._hash = self._hash
        return copy

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, StaticValue)
            and self._hash == other._hash
            and self._key == other._key
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return repr(self.value)


# Most static values have these types, which are never data.
PLAIN_TYPES = frozenset((bool, int, str, bytes, type(None)))
# These are static as well, and none of them can change.
OTHER_STATIC_TYPES = frozenset(
    (float, complex, type, type(jnp.float32), types.FunctionType)
)
_CLASS_TYPES = frozenset((type, type(jnp.float32)))
plain_static_value = functools.lru_cache(maxsize=4096, typed=True)(StaticValue)


def static_value(value: StaticPart) -> StaticValue:
    """Returns a static value for comparison; cached for common values."""
    cls = type(value)
    if cls in PLAIN_TYPES or cls in _CLASS_TYPES:
        return plain_static_value(value)
    # 0.0 and -0.0 are equal for the cache, but not for a trace.
    if cls is float and value != 0.0:
        return plain_static_value(value)
    # The cache keeps its values alive, and a closure may hold a model.
    if isinstance(value, types.FunctionType) and value.__closure__ is None:
        return plain_static_value(value)
    return StaticValue(value)


Origin = tuple[CodeType, int]


def origin() -> Origin:
    """Returns the program's position outside Weft; decoded on demand."""
    frame: Any = inspect.currentframe()
    while frame.f_back is not None:
        if not frame.f_globals.get("__name__", "").startswith("weft."):
            break
        frame = frame.f_back
    # Not the line, whose computation takes longer than that of all the rest.
    return frame.f_code, frame.f_lasti


def line_of(origin: Origin | None) -> str | None:
    """Returns file and line of an origin, relative to the working directory."""
    if origin is None:
        return None
    # Imports all of `weft.config`, so only for errors.
    from weft.config.config import Origin as ConfigOrigin

    code, _ = origin
    return str(ConfigOrigin(code.co_filename, _line_number(origin)))


def source_text(origin: Origin) -> str:
    """Returns file, line and source line of an origin."""
    code, _ = origin
    source_line = linecache.getline(code.co_filename, _line_number(origin))
    text = source_line.strip()
    return f"{line_of(origin)}: {text}" if text else f"{line_of(origin)}"


def _line_number(origin: Origin) -> int:
    code, instruction_offset = origin
    positions = list(code.co_positions())
    line, *_ = positions[instruction_offset // 2]  # two bytes per instruction
    return line or 0


def class_and_shape(x: PytreeOrVariable) -> str:
    """Returns the class of an object or a variable, with the shape of the variable's array."""
    cls = type(x)
    value = getattr(x, "_value", None)
    if not has_shape_dtype(value):
        return cls.__name__
    return f"{cls.__name__} of shape {value.shape}"


def foreign_trace_error(x: PytreeOrVariable) -> TraceContextError:
    """Returns the error about changing an object in a trace that did not create it."""
    call = current_call()
    title = "a JAX transformation" if call is None else call.title
    return TraceContextError(class_and_shape(x), title, describe_object(x))


def describe_object(x: PytreeOrVariable) -> str:
    """Describes an object, such as "was made at train.py:3"; empty if that is unknown."""
    info: ObjectInfo | None = getattr(x, "_info", None)
    if info is not None:
        line = line_of(info.origin)
    else:
        line = line_of(getattr(x, "_origin", None))  # that of a variable
    return "" if line is None else f"was made at {line}"


@dataclasses.dataclass
class TransformCall:
    """Call of a transformed function, open in its context, for errors in the user's names.

    Attributes:
        specs: the parameters that hold the roles of arguments and of results.
        names: names of `args`; by default those of the parameters of `fn`.
        place: position that transforms the function, by default the current one.
        given: places of the objects in the arguments of `fn`, if they differ from those in `args`.
            In words: the objects themselves belong to a trace that ends before the call does.
        returned: places of the objects in the result of `fn`.
        values: the numbers of the values after the call, and their paths.
    """

    transformation: str
    fn: Callable[..., object]
    args: PyTree
    specs: tuple[str, str]
    _: dataclasses.KW_ONLY
    names: list[str] | None = None
    named: Mapping[str, PyTree] = dataclasses.field(default_factory=dict)
    place: Origin | None = dataclasses.field(default_factory=origin)
    given: list[str] | None = None
    returned: list[str] = dataclasses.field(default_factory=list)
    values: tuple[Sequence[int], Sequence[tuple[Hashable, ...]]] = ((), ())

    @property
    def title(self) -> str:
        """The transformation and the function, as in `nnx.vmap(f)`."""
        name = getattr(self.fn, "__name__", type(self.fn).__name__)
        return f"nnx.{self.transformation}({name})"

    @property
    def line(self) -> str:
        """The source line that transforms the function."""
        if self.place is not None:
            return source_text(self.place)
        code: CodeType | None = getattr(self.fn, "__code__", None)
        if code is None:
            return self.title
        return source_text((code, 0))

    def __enter__(self) -> None:
        _OPEN.items.append(self)

    def __exit__(self, *_: object) -> None:
        _OPEN.items.pop()


_OPEN = ThreadStack[TransformCall]()


def current_call() -> TransformCall | None:
    """Returns the innermost open call of this thread."""
    return _OPEN.top
