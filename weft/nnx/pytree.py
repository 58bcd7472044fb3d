"""Base class of objects that transformations accept, and their data and static attributes.

An attribute is *data* if it is an array, a variable, such an object, or a container of those, or if
a number replaces data; all else is *static*, a part of the structure. `data` and `static` override
this. Lists and dicts become `List` and `Dict` (`weft.nnx.containers`), which track changes. To JAX
an object is a pytree of its data.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar, dataclass_transform, get_origin

import jax
import numpy as np

from weft.core.tracing import current_trace
from weft.errors import AttributeMarkError
from weft.lifting.functions import by_value
from weft.nnx.structure import PLAIN, Fixed, Watch, fixed, of_plain
from weft.nnx.variables import Variable

T = TypeVar("T")
_MISSING: Any = object()
_NUMBERS = (int, float, complex)
_VALUES = (Variable, jax.Array, np.ndarray)


class Marked:
    """Value on its way into an attribute, marked as data or static."""

    def __init__(self, value: Any, is_data: bool):
        self.value = value
        self.is_data = is_data

    def of(self, owner: Any, name: Any) -> Any:
        """Returns the value for an attribute or item of an object, after a check."""
        _check_static(owner, name, self.value, self.is_data)
        return self.value


def _check_static(owner: Any, name: Any, value: Any, mark: bool | None) -> None:
    if mark is False and _holds_data(value):
        raise AttributeMarkError(
            f"{type(owner).__name__}.{name} is static, and was given a {type(value).__name__}, "
            "which is or holds data; remove nnx.static, or give a value without arrays, "
            "variables and objects."
        )


def _holds_data(value: Any) -> bool:
    if type(value) is tuple:
        return any(map(_holds_data, value))
    if type(value) in _CONTAINERS.values():
        marks = value._watch.marks
        return any(marks.get(name) or _holds_data(item) for name, item in value._items())
    return is_data(value)


@dataclasses.dataclass(frozen=True)
class Mark:
    """Mark in the annotation of an attribute."""

    is_data: bool


Data = Annotated[T, Mark(True)]
Static = Annotated[T, Mark(False)]


def _mark(is_data: bool, value: Any, kwargs: dict[str, Any]) -> Any:
    if value is not _MISSING:
        return Marked(value, is_data)
    metadata = {**(kwargs.pop("metadata", None) or {}), "is_data": is_data}
    return dataclasses.field(metadata=metadata, **kwargs)


def data(value: Any = _MISSING, /, **kwargs: Any) -> Any:
    """Marks an attribute's value as data; without a value, returns such a `dataclasses.field`.

    Example:
        >>> from weft import nnx
        >>> class Scaled(nnx.Module):
        ...     def __init__(self):
        ...         self.scale = nnx.data(2.0)
        >>> jax.tree.leaves(Scaled())
        [2.0]
    """
    return _mark(True, value, kwargs)


def static(value: Any = _MISSING, /, **kwargs: Any) -> Any:
    """Marks an attribute's value as static; without a value, returns such a `dataclasses.field`.

    Raises:
        AttributeMarkError: on assignment, if the value contains data.

    Example:
        >>> from weft import nnx
        >>> class Layer(nnx.Module):
        ...     def __init__(self):
        ...         self.axes = nnx.static((0, 1))
        >>> jax.tree.leaves(Layer())
        []
    """
    return _mark(False, value, kwargs)


_DATA_TYPES: list[type] = []


def register_data_type(type_: type[T]) -> type[T]:
    """Declares instances of a class data in all attributes; usable as a decorator."""
    _DATA_TYPES.append(type_)
    return type_


def is_data(value: Any) -> bool:
    """Returns whether an unmarked attribute with this value is data.

    Example:
        >>> is_data(jax.numpy.ones(1)), is_data(1), is_data([jax.numpy.ones(1)])
        (True, False, True)
    """
    if isinstance(value, Variable | Pytree | jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return True
    if value is None or isinstance(value, str | bytes | int | float | complex | np.generic | type):
        return False
    if isinstance(value, list | tuple):
        return any(map(is_data, value))
    if isinstance(value, dict):
        return any(map(is_data, value.values()))
    if isinstance(value, tuple(_DATA_TYPES)):
        return True
    leaves = jax.tree.leaves(value)
    return not (len(leaves) == 1 and leaves[0] is value) and any(map(is_data, leaves))


def has_data(value: Any) -> bool:
    """Returns whether a value is or contains data."""
    return is_data(value)


@dataclass_transform(field_specifiers=(data, static))
def dataclass(cls: Any = None, /, **kwargs: Any) -> Any:
    """Makes a class a `dataclasses.dataclass` with the repr of objects.

    Fields can use `data(...)` and `static(...)`, also with `dataclasses.dataclass` itself.

    Example:
        >>> from weft import nnx
        >>> @nnx.dataclass
        ... class Scale(nnx.Pytree):
        ...     factor: float = nnx.data()
        ...     name: str = "scale"
        >>> jax.tree.leaves(Scale(2.0))
        [2.0]
    """
    if cls is None:
        return functools.partial(dataclass, **kwargs)
    return dataclasses.dataclass(**{"repr": False, **kwargs})(cls)


def _marks_of(cls: type) -> dict[str, bool]:
    marks = {}
    for name, annotation in vars(cls).get("__annotations__", {}).items():
        if isinstance(annotation, str):
            if found := re.match(r"(?:\w+\.)*(Data|Static)\[", annotation):
                marks[name] = found[1] == "Data"
        elif get_origin(annotation) is Annotated:
            marks.update((name, m.is_data) for m in annotation.__metadata__ if isinstance(m, Mark))
    for name, value in vars(cls).items():
        if isinstance(value, dataclasses.Field) and "is_data" in value.metadata:
            marks[name] = value.metadata["is_data"]
    return marks


class Pytree:
    """Base class of objects that transformations accept.

    `class Name(Pytree, pytree=False)` defines a subclass that is not a pytree to JAX.

    Example:
        >>> import jax.numpy as jnp
        >>> class Point(Pytree):
        ...     def __init__(self, x, name):
        ...         self.x, self.name = x, name
        >>> jax.tree.map(lambda v: v + 1, Point(jnp.array(1), "p")).x
        Array(2, dtype=int32, weak_type=True)
    """

    _watch: Watch
    _field_marks: Mapping[str, bool] = {}

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__new__(cls)
        object.__setattr__(made, "_watch", Watch())
        return made

    def __init_subclass__(cls, *, pytree: bool = True, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        inherited = [vars(base).get("_field_marks", {}) for base in reversed(cls.__mro__[1:])]
        cls._field_marks = {k: v for of in (*inherited, _marks_of(cls)) for k, v in of.items()}
        if pytree:
            _register(cls)

    def _items(self) -> list[tuple[Hashable, Any]]:
        attributes = dict(vars(self))
        del attributes["_watch"]
        return sorted(attributes.items())

    @classmethod
    def _blank(cls, like: Watch) -> Any:
        """Returns an object without attributes, with the origin of another one."""
        if cls.__new__ is not Pytree.__new__:
            return cls.__new__(cls)
        made = super().__new__(cls)
        object.__setattr__(made, "_watch", Watch(like))
        return made

    def _look(self) -> list[Any]:
        """Returns parts that remain identical until the object changes."""
        own, marks = vars(self), self._watch.marks
        return [type(self), len(own), *own, *own.values(), *marks, *marks.values()]

    @classmethod
    def _made_of(cls, items: Iterable[tuple[Any, Any]], marks: Mapping[str, bool]) -> Any:
        made = cls.__new__(cls)
        made._watch.marks.update(marks)
        made._fill(items)
        return made

    def _marks(self) -> tuple[tuple[Hashable, bool], ...]:
        """Returns the marks of attributes that differ from the default."""
        marks = self._watch.marks
        if not marks:
            return ()
        items = dict(self._items())
        kept = (n for n in marks if n in items and not (marks[n] and is_data(items[n])))
        return tuple((name, marks[name]) for name in sorted(kept, key=str))

    @staticmethod
    def _key(name: Any) -> Any:
        return jax.tree_util.GetAttrKey(name)

    def _fill(self, items: Iterable[tuple[Any, Any]]) -> None:
        vars(self).update(items)

    def _put(self, name: Any, value: Any) -> None:
        vars(self)[name] = value

    def _replace(self, items: Sequence[tuple[Any, Any]]) -> None:
        """Replaces all attributes; unchanged ones remain visible to other threads throughout."""
        self._fill(items)
        for name in vars(self).keys() - {"_watch", *(name for name, _ in items)}:
            del vars(self)[name]

    def _order(self) -> tuple[Hashable, ...] | None:
        """Returns the order of the attributes, if it matters and differs from that of `_items`."""
        return None

    def _is_already(
        self,
        items: Sequence[tuple[Any, Any]],
        marks: dict[str, bool],
        order: Sequence[Hashable] | None,
    ) -> bool:
        there = self._items()
        return (
            marks == self._watch.marks
            and order == self._order()
            and len(there) == len(items)
            and all(a is b and m == n for (m, a), (n, b) in zip(there, items, strict=True))
        )

    def _become(
        self,
        items: Sequence[tuple[Any, Any]],
        marks: dict[str, bool],
        order: Sequence[Hashable] | None = None,
    ) -> None:
        there = self._items()
        self._watch.marks = marks
        if order is not None:
            of_names = dict(items)
            items = [(name, of_names[name]) for name in order]
        if there:
            self._replace(items)
        else:
            self._fill(items)
        self._watch.changed()

    def _is_data(self, name: Hashable, value: Any) -> bool:
        marks = self._watch.marks
        return marks[name] if name in marks else is_data(value)  # pyright: ignore[reportArgumentType]

    def __setattr__(self, name: str, value: Any) -> None:
        watch, here = self._watch, current_trace()
        if watch.trace is not here and watch.trace != here:
            watch.check(self)
        kind = type(value)
        if (
            watch.marks
            or self._field_marks
            or kind in _HOLDING
            or (isinstance(value, _NUMBERS) and kind is not type(vars(self).get(name)))
        ):
            mark, value = self._marked(name, value)
            object.__setattr__(self, name, value)
            if mark is not None:
                watch.marks[name] = mark
            else:
                watch.marks.pop(name, None)
        else:  # fast path of most writes: no mark is needed
            object.__setattr__(self, name, value)
        if watch.watched:
            watch.changed()

    def _marked(self, name: str, value: Any) -> tuple[bool | None, Any]:
        """Returns the mark of an attribute's new value, and the value to store."""
        mark = self._watch.marks.get(name, self._field_marks.get(name))
        if isinstance(value, Marked):
            mark, value = value.is_data, value.value
        elif mark is None and isinstance(value, _NUMBERS):
            # A number in place of data remains data, so that the structure does not change.
            before = vars(self).get(name)
            mark = True if isinstance(before, _VALUES) else None
        if mark is False:
            _check_static(self, name, value, mark)
        return mark, tracked(value) if type(value) in _HOLDING else value

    def __delattr__(self, name: str) -> None:
        self._watch.check(self)
        object.__delattr__(self, name)
        self._watch.marks.pop(name, None)
        self._watch.changed()

    def __getstate__(self) -> dict[str, Any]:
        attributes = {k: v for k, v in vars(self).items() if k != "_watch"}
        marks = {k: v for k, v in self._watch.marks.items() if k in attributes}
        return {"attributes": attributes, "marks": marks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._watch.marks.update(state["marks"])
        vars(self).update(state["attributes"])

    def __repr__(self) -> str:
        from weft.nnx.display import shown

        return shown(self)


class _Structure:
    """Structure of an object without its data, compared by value.

    Attributes:
        parts: static values by name, None for data.
    """

    __slots__ = ("_key", "parts")

    def __init__(self, parts: list[tuple[Hashable, Fixed | None]]):
        self.parts = parts
        # The keys of a Dict can be anything, and 1 and True are equal.
        self._key = [(k if type(k) is str else by_value(k), part) for k, part in parts]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Structure) and self._key == other._key

    def __hash__(self) -> int:
        return hash(tuple(self._key))

    def __repr__(self) -> str:
        return repr(dict(self.parts))


def _parts(x: Pytree) -> tuple[list[tuple[Any, Any]], _Structure]:
    found, parts, marks = [], [], x._watch.marks
    for item in x._items():
        name, value = item
        if type(value) in PLAIN and name not in marks:
            parts.append((name, of_plain(value)))
        elif x._is_data(name, value):
            found.append(item)
            parts.append((name, None))
        else:
            parts.append((name, fixed(value)))
    return found, _Structure(parts)


def _flatten(x: Pytree) -> tuple[list[Any], _Structure]:
    found, structure = _parts(x)
    return [value for _, value in found], structure


def _flatten_with_keys(x: Pytree) -> tuple[list[Any], _Structure]:
    found, structure = _parts(x)
    return [(x._key(name), value) for name, value in found], structure


def _unflatten(cls: type[Pytree], structure: _Structure, children: Iterable[Any]) -> Pytree:
    of_data, items, marks = iter(children), [], {}
    for name, part in structure.parts:
        if part is not None:
            items.append((name, part.value))
            continue
        value = next(of_data)
        items.append((name, value))
        # Data remains data, whatever JAX replaces it with.
        if not is_data(value):
            marks[name] = True
    return cls._made_of(items, marks)


def _register(cls: type[Pytree]) -> None:
    jax.tree_util.register_pytree_with_keys(
        cls, _flatten_with_keys, functools.partial(_unflatten, cls), _flatten
    )


_CONTAINERS: dict[type, Callable[[Any], Any]] = {}
_HOLDING: set[type] = {tuple, Marked}


def register_container(kind: type, make: Callable[[Any], Any]) -> None:
    """Registers a tracked version of a container type, excluding subclasses, for attributes."""
    _CONTAINERS[kind] = make
    _HOLDING.add(kind)


def tracked(value: Any) -> Any:
    """Converts lists and dicts, also nested ones and those in tuples, to tracked versions.

    Raises:
        AttributeMarkError: if `data` or `static` is used inside a tuple.
    """
    kind = type(value)
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](value)
    if kind is Marked:
        raise AttributeMarkError(
            f"nnx.{'data' if value.is_data else 'static'}({value.value!r}) is inside a tuple or "
            "another mark; mark an attribute, or an item of a list or dict."
        )
    if kind is tuple:
        items = tuple(map(tracked, value))
        same = all(a is b for a, b in zip(items, value, strict=True))
        return value if same else items
    return value
