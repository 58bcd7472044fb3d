"""Nested changes of immutable containers, written as assignments.

A cursor points to a container and records assignments below it, without changing the container.
`build` returns a copy with the changes: `c.params["dense"]["bias"] = b` and `c.build()` copy a
struct and the two dicts in it. Containers are mappings, lists, tuples, named tuples and
dataclasses; other values are leaves.
"""

import copy
import dataclasses
import enum
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import (
    Any,
    Generic,
    NamedTuple,
    Protocol,
    TypeVar,
    runtime_checkable,
)

from weft import errors
from weft.config import values
from weft.core.frozen_dict import FrozenDict as FrozenDict
from weft.errors import CursorFindError as CursorFindError
from weft.errors import TraverseTreeError as TraverseTreeError

A = TypeVar("A")
R = TypeVar("R")


def is_named_tuple(obj: object) -> bool:
    """Returns whether `obj` is an instance of a named tuple class."""
    return values.is_named_tuple(obj)


@runtime_checkable
class Indexable(Protocol):
    """Protocol of objects with elements."""

    def __getitem__(self, key: object) -> Any: ...


class AccessType(enum.Enum):
    """Kind of access from the parent cursor."""

    ITEM = enum.auto()
    ATTR = enum.auto()


@dataclasses.dataclass
class ParentKey(Generic[A]):
    """Parent of a cursor, and its key, index or name there."""

    parent: "Cursor[A]"
    key: Any
    access_type: AccessType


class _Entry(NamedTuple):
    key: Any
    access: AccessType
    name: str
    value: Any


def _entries(obj: object) -> Iterator[_Entry]:
    if isinstance(obj, Mapping):
        for key in obj:
            yield _Entry(key, AccessType.ITEM, str(key), obj[key])
    elif isinstance(obj, list | tuple):
        names = getattr(obj, "_fields", None)
        for i, value in enumerate(obj):
            name = names[i] if names else str(i)
            yield _Entry(i, AccessType.ITEM, name, value)
    else:
        for name in _fields(obj):
            yield _Entry(name, AccessType.ATTR, name, getattr(obj, name))


def _fields(obj: object) -> list[str]:
    """Returns the names of the fields of a dataclass that a copy may have other values for."""
    if isinstance(obj, type) or not dataclasses.is_dataclass(obj):
        return []
    return [field.name for field in dataclasses.fields(obj) if field.init]


def _built(value: Any) -> Any:
    """Returns a value, and for a cursor the value at its place."""
    return value.build() if isinstance(value, Cursor) else value


# The operators of cursors, which act on their values.


def _unary(function: Callable[..., R]) -> Callable[..., R]:
    def call(self: "Cursor[Any]", *args: Any) -> R:
        return function(self.build(), *args)

    return call


def _binary(function: Callable[[Any, Any], R]) -> Callable[..., R]:
    def call(self: "Cursor[Any]", other: Any) -> R:
        return function(self.build(), _built(other))

    return call


def _reflected(function: Callable[[Any, Any], R]) -> Callable[..., R]:
    def call(self: "Cursor[Any]", other: Any) -> R:
        return function(other, self.build())

    return call


def cursor(obj: A) -> "Cursor[A]":
    """Returns a cursor that points to a container.

    >>> params = {"dense": {"kernel": 1, "bias": [2, 3]}, "scale": 4}
    >>> c = cursor(params)
    >>> c["dense"]["bias"][0] = 20
    >>> c["scale"] += 1
    >>> c.build()
    {'dense': {'kernel': 1, 'bias': [20, 3]}, 'scale': 5}
    >>> cursor(params)["dense"]["kernel"].set(10)["dense"]["kernel"], params["scale"]
    (10, 4)
    """
    return Cursor(obj, None)


class Cursor(Generic[A]):
    """A place in nested containers, with pending changes below it.

    In comparisons and arithmetic, it acts as the value at that place, changes included.

    Args:
        obj: the value.
        parent_key: parent and key; None for a root cursor.
    """

    __slots__ = ("_assigned", "_children", "_obj", "_parent_key")
    _obj: Any
    _parent_key: ParentKey[Any] | None
    _children: dict[Any, "Cursor[Any]"]
    _assigned: set[Any]

    def __init__(self, obj: A, parent_key: ParentKey[Any] | None):
        if not isinstance(parent_key, ParentKey | None):
            raise errors.CursorTypeError(
                f"parent_key={parent_key!r} is not where a cursor is; call weft.cursor.cursor(obj)."
            )
        # An assignment to an attribute of a cursor is one to its place.
        object.__setattr__(self, "_obj", obj)
        object.__setattr__(self, "_parent_key", parent_key)
        object.__setattr__(self, "_children", {})
        object.__setattr__(self, "_assigned", set())

    def __getitem__(self, key: object) -> "Cursor[Any]":
        obj = self._obj
        if not isinstance(obj, Indexable):
            raise errors.CursorTypeError(
                f"{self._path} is {obj!r}, which has no elements."
            )
        if isinstance(obj, Mapping):
            if key in self._children:
                return self._children[key]
            if key not in obj:
                raise errors.CursorKeyError(
                    f"{self._path} has no entry {key!r}, it has {list(obj)}; assign to it to add "
                    "one."
                )
        elif isinstance(obj, list | tuple):
            key = self._index(key)
        return self._child(key, AccessType.ITEM, obj[key])

    def __getattr__(self, name: str) -> "Cursor[Any]":
        # Whoever asks for special methods, or copies half an object, must not be led on.
        if name in Cursor.__slots__ or (
            name.startswith("__") and name.endswith("__")
        ):
            raise AttributeError(name)
        if is_named_tuple(self._obj) and name in self._obj._fields:
            return self[self._obj._fields.index(name)]
        if not hasattr(self._obj, name):
            raise errors.CursorAttributeError(
                f"{self._path} has no attribute {name!r}, it is {self._obj!r}; an entry of a "
                f"mapping is written [{name!r}]."
            )
        return self._child(name, AccessType.ATTR, getattr(self._obj, name))

    def _child(
        self, key: object, access: AccessType, value: object
    ) -> "Cursor[Any]":
        """Returns the cursor of a place, which has this value unless changes are pending there."""
        if not self._is_replaceable(
            key, access
        ):  # a method, an element of an array, ...
            return Cursor(value, ParentKey(self, key, access))
        if key not in self._children:
            self._children[key] = Cursor(value, ParentKey(self, key, access))
        return self._children[key]

    def _is_replaceable(self, key: object, access: AccessType) -> bool:
        """Returns whether a copy of the value could have another entry there."""
        if isinstance(self._obj, Mapping | list | tuple):
            return access is AccessType.ITEM
        return access is AccessType.ATTR and key in _fields(self._obj)

    def _index(self, key: Any) -> int:
        if isinstance(key, slice):
            raise errors.CursorTypeError(
                f"{self._path} was indexed with {key}, and a cursor points to one element; loop "
                "over the indices."
            )
        length = len(self._obj)
        index = operator.index(key)
        if not -length <= index < length:
            raise errors.CursorIndexError(
                f"{self._path} has {length} elements and none at {index}."
            )
        return index % length

    def __setitem__(self, key: object, value: object) -> None:
        self._check_replaceable(key, AccessType.ITEM)
        if not isinstance(self._obj, Mapping):
            key = self._index(key)
        self._assign(key, AccessType.ITEM, value)

    def __setattr__(self, name: str, value: object) -> None:
        if is_named_tuple(self._obj) and name in self._obj._fields:
            self[self._obj._fields.index(name)] = value
            return
        self._check_replaceable(name, AccessType.ATTR)
        self._assign(name, AccessType.ATTR, value)

    def _check_replaceable(self, key: object, access: AccessType) -> None:
        """Raises if changes at this place could not be copied."""
        if not self._is_replaceable(key, access):
            problem = f"{self._path}{_access_text(key, access)} cannot be set"
            class_name = type(self._obj).__name__
            fields = _fields(self._obj)
            if fields:
                raise errors.CursorAttributeError(
                    f"{problem}: a {class_name} has the fields {fields}."
                )
            if isinstance(self._obj, Mapping | list | tuple):
                raise errors.CursorTypeError(
                    f"{problem}: write [{key!r}] for an element of a {class_name}."
                )
            raise errors.CursorTypeError(
                f"{problem}: a {class_name} is changed as a whole, an array as in "
                "c['w'] = array.at[i].set(x)."
            )
        if self._parent_key is not None:
            place = self._parent_key
            place.parent._check_replaceable(place.key, place.access_type)

    def _assign(self, key: object, access: AccessType, value: object) -> None:
        self._children[key] = Cursor(
            _built(value), ParentKey(self, key, access)
        )
        self._assigned.add(key)

    def set(self, value: object) -> Any:
        """Returns a copy of the root cursor's container with another value here.

        >>> cursor({"a": (1, 2)})["a"][1].set(5)
        {'a': (1, 5)}
        """
        place = self._parent_key
        if place is None:
            return _built(value)
        place.parent._check_replaceable(place.key, place.access_type)
        place.parent._assign(place.key, place.access_type, value)
        root = place.parent
        while root._parent_key is not None:
            root = root._parent_key.parent
        return root.build()

    def build(self) -> A:
        """Returns a copy of the container with all changes below this cursor."""
        return self._rebuild()

    def _rebuild(self) -> Any:
        obj = self._obj
        new_values: dict[Any, Any] = {}
        for key, child in self._children.items():
            if self._is_changed(key):
                new_values[key] = child.build()
        if isinstance(obj, dict | list):
            changed: Any = copy.copy(obj)
            for key, value in new_values.items():
                changed[key] = value
            return changed
        if isinstance(obj, Mapping):
            mapping_class: Any = type(obj)
            return mapping_class({**obj, **new_values})
        if isinstance(obj, tuple):
            make_tuple = getattr(obj, "_make", type(obj))
            return make_tuple(
                [new_values.get(i, element) for i, element in enumerate(obj)]
            )
        if not new_values:
            return obj  # which may be a leaf
        return dataclasses.replace(obj, **new_values)

    def _is_changed(self, key: object) -> bool:
        child = self._children[key]
        return key in self._assigned or any(
            map(child._is_changed, child._children)
        )

    def apply_update(self, update_fn: Callable[[str, Any], Any]) -> "Cursor[A]":
        """Records `update_fn(path, value)` where it differs from the value; returns this cursor.

        Paths are relative to this cursor and joined by `/`; values include changes. The function is
        not called below replaced values.

        Raises TraverseTreeError if `update_fn` is not a function.

        >>> double = lambda path, value: 2 * value if path.endswith("b") else value
        >>> cursor({"a": {"b": 1, "c": 2}}).apply_update(double).build()
        {'a': {'b': 2, 'c': 2}}
        """
        if not callable(update_fn):
            raise TraverseTreeError(update_fn, None)

        def update(place: Cursor[Any], value: object, prefix: str) -> None:
            for key, access, name, child in _entries(value):
                new_child = update_fn(prefix + name, child)
                if new_child is not child:
                    place._assign(key, access, new_child)
                    continue
                update(
                    place._child(key, access, child), child, f"{prefix}{name}/"
                )

        update(self, self.build(), "")
        return self

    def find(self, cond_fn: Callable[[str, Any], Any]) -> "Cursor[Any]":
        """Returns the only place below where `cond_fn(path, value)` is true.

        Paths are relative to this cursor and joined by `/`; values include changes. The function is
        not called below a match.

        Raises:
            CursorFindError: if there is no match, or more than one.
            TraverseTreeError: if `cond_fn` is not a function.

        >>> cursor({"a": {"bias": 1}, "b": 2}).find(lambda path, _: "bias" in path).set(0)
        {'a': {'bias': 0}, 'b': 2}
        """
        matches = self.find_all(cond_fn)
        match = next(matches, None)
        if match is None:
            names = [entry.name for entry in _entries(self.build())]
            raise CursorFindError(
                among=f" below {self._path}, which has {names}"
            )
        for other_match in matches:
            raise CursorFindError(match._path, other_match._path)
        return match

    def find_all(
        self, cond_fn: Callable[[str, Any], Any]
    ) -> Iterator["Cursor[Any]"]:
        """Returns all places below where a condition is true, see `find`.

        Raises TraverseTreeError if `cond_fn` is not a function.

        >>> c = cursor({"a": {"bias": 1, "scale": 2}, "b": {"bias": 3}})
        >>> for layer in c.find_all(lambda path, value: "bias" in value):
        ...     layer["bias"] *= 10
        >>> c.build()
        {'a': {'bias': 10, 'scale': 2}, 'b': {'bias': 30}}
        """
        if not callable(cond_fn):
            raise TraverseTreeError(None, cond_fn)

        def search(
            place: Cursor[Any], value: object, prefix: str
        ) -> Iterator[Cursor[Any]]:
            for key, access, name, child in _entries(value):
                child_place = place._child(key, access, child)
                if cond_fn(prefix + name, child):
                    yield child_place
                else:
                    yield from search(child_place, child, f"{prefix}{name}/")

        return search(self, self.build(), "")

    @property
    def _path(self) -> str:
        if self._parent_key is None:
            return "cursor"
        place = self._parent_key
        return place.parent._path + _access_text(place.key, place.access_type)

    def __repr__(self) -> str:
        changes = {
            key: child
            for key, child in self._children.items()
            if self._is_changed(key)
        }
        if not changes:
            return f"Cursor({self._obj!r})"
        return f"Cursor({self._obj!r}, changes={changes})"

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._obj, list | tuple):
            return (self[i] for i in range(len(self._obj)))
        if isinstance(self._obj, Mapping):
            return iter({**self._obj, **self._children})
        raise errors.CursorTypeError(
            f"{self._path} is {self._obj!r}, and only lists, tuples and mappings are iterated over."
        )

    def __reversed__(self) -> Iterator[Any]:
        return reversed(list(self))

    def __contains__(self, value: object) -> bool:
        built: Any = self.build()
        return value in built

    __str__, __len__, __bool__ = _unary(str), _unary(len), _unary(bool)
    __neg__, __pos__, __invert__ = map(
        _unary, (operator.neg, operator.pos, operator.invert)
    )
    __abs__, __round__ = _unary(abs), _unary(round)
    __eq__, __ne__ = _binary(operator.eq), _binary(operator.ne)
    __hash__: None = None  # pyright: ignore[reportIncompatibleMethodOverride]
    __lt__, __le__, __gt__, __ge__ = map(
        _binary, (operator.lt, operator.le, operator.gt, operator.ge)
    )
    __add__, __radd__ = _binary(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _binary(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _binary(operator.mul), _reflected(operator.mul)
    __matmul__, __rmatmul__ = (
        _binary(operator.matmul),
        _reflected(operator.matmul),
    )
    __truediv__, __rtruediv__ = (
        _binary(operator.truediv),
        _reflected(operator.truediv),
    )
    __floordiv__, __rfloordiv__ = (
        _binary(operator.floordiv),
        _reflected(operator.floordiv),
    )
    __mod__, __rmod__ = _binary(operator.mod), _reflected(operator.mod)
    __lshift__, __rlshift__ = (
        _binary(operator.lshift),
        _reflected(operator.lshift),
    )
    __rshift__, __rrshift__ = (
        _binary(operator.rshift),
        _reflected(operator.rshift),
    )
    __and__, __rand__ = _binary(operator.and_), _reflected(operator.and_)
    __or__, __ror__ = _binary(operator.or_), _reflected(operator.or_)
    __xor__, __rxor__ = _binary(operator.xor), _reflected(operator.xor)
    __pow__, __rpow__ = _binary(pow), _reflected(pow)
    __divmod__, __rdivmod__ = _binary(divmod), _reflected(divmod)


def _access_text(key: object, access: AccessType) -> str:
    return f"[{key!r}]" if access is AccessType.ITEM else f".{key}"
