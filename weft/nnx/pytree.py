"""Base class of objects that transformations accept, and their data and static attributes.

An attribute is *data* if it is an array, a variable, such an object, or a container of those, or if
a number replaces data; all else is *static*, a part of the structure. `data` and `static` override
this. Lists and dicts become `List` and `Dict` (`weft.nnx.containers`), which track changes. To JAX
an object is a pytree of its data.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
import types
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import (
    Annotated,
    Any,
    Self,
    TypeGuard,
    TypeVar,
    dataclass_transform,
    get_origin,
    overload,
)

import jax
import numpy as np

from weft.core.display import join_lines
from weft.errors import (
    AttributeMarkError,
    GraphStructureError,
    ObjectArgumentError,
    SharedObjectError,
)
from weft.lifting.kind import Structure
from weft.lifting.traces import current_trace
from weft.nnx import settings, versions
from weft.nnx.display import Enclosing, Shown, object_repr, size_text
from weft.nnx.filters import Path
from weft.nnx.state import path_text
from weft.nnx.variables import Variable
from weft.nnx.versions import (
    PLAIN_TYPES,
    ObjectInfo,
    StaticValue,
    plain_static_value,
)
from weft.typing import MISSING, PyTree

T = TypeVar("T")
Items = Sequence[tuple[Any, PyTree]]
"""Attributes and items of an object, by name or key."""
KeyEntry = Any
"""Part of a path of JAX, such as a `DictKey`."""

_NUMBERS = (int, float, complex)
_VALUES = (Variable, jax.Array, np.ndarray)


class MarkedValue:
    """Value on its way into an attribute, marked as data or static."""

    def __init__(self, value: PyTree, is_data: bool):
        self.value = value
        self.is_data = is_data

    def of(self, owner: Pytree, name: Hashable) -> PyTree:
        """Returns the value for an attribute or item of an object, after a check."""
        if not self.is_data:
            _check_static(owner, name, self.value)
        return self.value


def _check_static(owner: Pytree, name: Hashable, value: PyTree) -> None:
    if holds_data(value):
        raise AttributeMarkError(
            f"{type(owner).__name__}.{name} is static, and was given a {type(value).__name__}, "
            "which is or holds data; remove nnx.static, or give a value without arrays, "
            "variables and objects."
        )


def holds_data(value: PyTree) -> bool:
    """Returns whether a static value is or holds data; a `List` or `Dict` may be without."""
    if type(value) is tuple:
        return any(map(holds_data, value))
    if type(value) not in _CONTAINERS.values():
        return is_data(value)
    marks = value._info.marks
    return any(
        marks.get(name) or holds_data(item) for name, item in value._items()
    )


@dataclasses.dataclass(frozen=True)
class Mark:
    """Mark in the annotation of an attribute."""

    is_data: bool


Data = Annotated[T, Mark(True)]
"""Annotates an attribute whose value is data: `x: Data[Any]`. See `data`."""
Static = Annotated[T, Mark(False)]
"""Annotates an attribute whose value is static: `x: Static[int]`. See `static`."""


def _mark(is_data: bool, value: PyTree, field_options: dict[str, Any]) -> Any:
    if value is not MISSING:
        return MarkedValue(value, is_data)
    metadata = field_options.pop("metadata", None) or {}
    return dataclasses.field(
        metadata={**metadata, "is_data": is_data}, **field_options
    )


def data(value: PyTree = MISSING, /, **kwargs: Any) -> Any:
    """Marks an attribute's value as data; without a value, returns such a `dataclasses.field`.

    >>> class Scaled(nnx.Module):
    ...     def __init__(self):
    ...         self.scale = nnx.data(2.0)
    >>> jax.tree.leaves(Scaled())
    [2.0]
    """
    return _mark(True, value, kwargs)


def static(value: PyTree = MISSING, /, **kwargs: Any) -> Any:
    """Marks an attribute's value as static; without a value, returns such a `dataclasses.field`.

    Raises AttributeMarkError on assignment, if the value contains data.

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


def is_data(value: PyTree) -> bool:
    """Returns whether an unmarked attribute with this value is data.

    >>> is_data(jax.numpy.ones(1)), is_data(1), is_data([jax.numpy.ones(1)])
    (True, False, True)
    """
    if isinstance(
        value, Variable | Pytree | jax.Array | np.ndarray | jax.ShapeDtypeStruct
    ):
        return True
    if value is None or isinstance(
        value, str | bytes | int | float | complex | np.generic | type
    ):
        return False
    if isinstance(value, list | tuple):
        return any(map(is_data, value))
    if isinstance(value, dict):
        return any(map(is_data, value.values()))
    if isinstance(value, tuple(_DATA_TYPES)):
        return True
    # A container of another class; a value that JAX does not take apart is static.
    leaves = jax.tree.leaves(value)
    is_leaf = len(leaves) == 1 and leaves[0] is value
    return not is_leaf and any(map(is_data, leaves))


def has_data(value: PyTree) -> bool:
    """Returns whether a value is or contains data."""
    return is_data(value)


@overload
@dataclass_transform(field_specifiers=(data, static))
def dataclass(cls: type[T], /, **kwargs: Any) -> type[T]: ...
@overload
@dataclass_transform(field_specifiers=(data, static))
def dataclass(**kwargs: Any) -> Callable[[type[T]], type[T]]: ...
def dataclass(
    cls: type[T] | None = None, /, **kwargs: Any
) -> type[T] | Callable[[type[T]], type[T]]:
    """Makes a class a `dataclasses.dataclass` with the repr of objects.

    Fields can use `data(...)` and `static(...)`, also with `dataclasses.dataclass` itself.

    >>> @nnx.dataclass
    ... class Scale(nnx.Pytree):
    ...     factor: float = nnx.data()
    ...     name: str = "scale"
    >>> jax.tree.leaves(Scale(2.0))
    [2.0]
    """
    if cls is None:

        def decorator(cls: type[T]) -> type[T]:
            return dataclass(cls, **kwargs)

        return decorator
    options = {"repr": False, **kwargs}
    return dataclasses.dataclass(**options)(cls)


def _class_marks(cls: type) -> dict[str, bool]:
    """Returns the marks of attributes that a class itself annotates or declares as fields."""
    marks: dict[str, bool] = {}
    for name, annotation in vars(cls).get("__annotations__", {}).items():
        if isinstance(annotation, str):
            # The text of an annotation in a module with `from __future__ import annotations`.
            match = re.match(r"(?:\w+\.)*(Data|Static)\[", annotation)
            if match is not None:
                marks[name] = match[1] == "Data"
        elif get_origin(annotation) is Annotated:
            for metadata in annotation.__metadata__:
                if isinstance(metadata, Mark):
                    marks[name] = metadata.is_data
    for name, value in vars(cls).items():
        if isinstance(value, dataclasses.Field) and "is_data" in value.metadata:
            marks[name] = value.metadata["is_data"]
    return marks


class Pytree(Shown):
    """Base class of objects that transformations accept.

    `class Name(Pytree, pytree=False)` defines a subclass that is not a pytree to JAX.

    >>> class Point(Pytree):
    ...     def __init__(self, x, name):
    ...         self.x, self.name = x, name
    >>> jax.tree.map(lambda v: v + 1, Point(jnp.array(1), "p")).x
    Array(2, dtype=int32, weak_type=True)
    """

    _info: ObjectInfo
    _field_marks: Mapping[str, bool] = {}
    _is_jax_pytree: bool = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        instance = super().__new__(cls)
        object.__setattr__(instance, "_info", ObjectInfo())
        return instance

    def __init_subclass__(
        cls, *, pytree: bool = True, **kwargs: object
    ) -> None:
        super().__init_subclass__(**kwargs)
        field_marks: dict[str, bool] = {}
        for base in reversed(cls.__mro__[1:]):
            field_marks.update(vars(base).get("_field_marks", {}))
        field_marks.update(_class_marks(cls))
        cls._field_marks = field_marks
        cls._is_jax_pytree = pytree
        if pytree:
            unflatten = functools.partial(_unflatten, cls)
            jax.tree_util.register_pytree_with_keys(
                cls, _flatten_with_keys, unflatten, _flatten
            )

    def _items(self) -> list[tuple[Hashable, PyTree]]:
        """Returns the attributes and items, sorted by name."""
        attributes = dict(vars(self))
        del attributes["_info"]
        return sorted(attributes.items())

    @classmethod
    def _new_like(cls, like: ObjectInfo) -> Self:
        """Returns a new object without attributes, which remembers the origin of another one."""
        if cls.__new__ is not Pytree.__new__:
            return cls.__new__(cls)
        instance = super().__new__(cls)
        object.__setattr__(instance, "_info", ObjectInfo(like))
        return instance

    def _snapshot(self) -> list[PyTree]:
        """Returns parts that remain identical until the object changes."""
        attributes = vars(self)
        marks = self._info.marks
        return [
            type(self),
            len(attributes),
            *attributes,
            *attributes.values(),
            *marks,
            *marks.values(),
        ]

    @classmethod
    def _from_items(
        cls, items: Iterable[tuple[Any, PyTree]], marks: Mapping[str, bool]
    ) -> Self:
        instance = cls.__new__(cls)
        instance._info.marks.update(marks)
        instance._fill(items)
        return instance

    def _marks(self) -> tuple[tuple[Hashable, bool], ...]:
        """Returns the marks that say something else than the values of the attributes."""
        marks = self._info.marks
        if not marks:
            return ()
        items = dict(self._items())
        needed_marks: list[tuple[Hashable, bool]] = []
        for name in sorted(marks, key=str):
            is_marked_data = marks[name]
            if name in items and not (is_marked_data and is_data(items[name])):
                needed_marks.append((name, is_marked_data))
        return tuple(needed_marks)

    @staticmethod
    def _key(name: Hashable) -> KeyEntry:
        """Returns the name of an attribute or item in a path of JAX."""
        return jax.tree_util.GetAttrKey(name)  # pyright: ignore[reportArgumentType]

    def _fill(self, items: Iterable[tuple[Any, PyTree]]) -> None:
        """Sets attributes and items without checks and records; those of a list in order."""
        vars(self).update(items)

    def _replace(self, items: Items) -> None:
        """Replaces all attributes; unchanged ones remain visible to other threads throughout."""
        self._fill(items)
        names = {name for name, _ in items}
        for name in vars(self).keys() - names - {"_info"}:
            del vars(self)[name]

    def _order(self) -> tuple[Hashable, ...] | None:
        """Returns the order of the attributes, if it matters and differs from that of `_items`."""
        return None

    def _has_items(
        self,
        items: Items,
        marks: dict[str, bool],
        order: Sequence[Hashable] | None,
    ) -> bool:
        """Returns whether the object has these very values, by identity."""
        if marks != self._info.marks or order != self._order():
            return False
        own_items = self._items()
        if len(own_items) != len(items):
            return False
        for (own_name, own_value), (name, value) in zip(
            own_items, items, strict=True
        ):
            if own_value is not value or own_name != name:
                return False
        return True

    def _set_items(
        self,
        items: Items,
        marks: dict[str, bool],
        order: Sequence[Hashable] | None = None,
    ) -> None:
        """Replaces all attributes and items without checks, and records the change."""
        is_filled = bool(self._items())
        self._info.marks = marks
        if order is not None:
            value_of_name = dict(items)
            items = [(name, value_of_name[name]) for name in order]
        if is_filled:
            self._replace(items)
        else:
            self._fill(items)
        self._info.changed()

    def _is_data(self, name: Hashable, value: PyTree) -> bool:
        marks = self._info.marks
        return marks[name] if name in marks else is_data(value)

    def __setattr__(self, name: str, value: PyTree) -> None:
        info = self._info
        running_trace = current_trace()
        if info.trace is not running_trace and info.trace != running_trace:
            info.check(self)
        value_type = type(value)
        if (
            info.marks
            or self._field_marks
            or value_type in _TRACKED_TYPES
            or (
                isinstance(value, _NUMBERS)
                and value_type is not type(vars(self).get(name))
            )
        ):
            mark, value = self._mark_and_value(name, value)
            object.__setattr__(self, name, value)
            if mark is not None:
                info.marks[name] = mark
            else:
                info.marks.pop(name, None)
        else:  # most writes, which need no mark
            object.__setattr__(self, name, value)
        if info.watched:
            info.changed()

    def _mark_and_value(
        self, name: str, value: PyTree
    ) -> tuple[bool | None, PyTree]:
        """Returns the mark of an attribute's new value, and the value to store."""
        mark = self._info.marks.get(name, self._field_marks.get(name))
        if isinstance(value, MarkedValue):
            mark = value.is_data
            value = value.value
        elif mark is None and isinstance(value, _NUMBERS):
            # A number in place of data remains data, so that the structure does not change.
            replaces_data = isinstance(vars(self).get(name), _VALUES)
            mark = True if replaces_data else None
        if mark is False:
            _check_static(self, name, value)
        if type(value) in _TRACKED_TYPES:
            value = tracked(value)
        return mark, value

    def __delattr__(self, name: str) -> None:
        self._info.check(self)
        object.__delattr__(self, name)
        self._info.marks.pop(name, None)
        self._info.changed()

    def __getstate__(self) -> dict[str, Any]:
        attributes = dict(vars(self))
        del attributes["_info"]
        # Without the marks of a list's items, which are pickled with the items.
        marks = {n: m for n, m in self._info.marks.items() if n in attributes}
        return {"attributes": attributes, "marks": marks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_pytree__nodes" not in state:
            self._info.marks.update(state["marks"])
            vars(self).update(state["attributes"])
            return
        # Pickled by Flax, which marks every attribute.
        marks = state["_pytree__nodes"]
        for name, value in state.items():
            if name.startswith("_pytree__"):
                continue
            if marks.get(name) != is_data(value):
                value = MarkedValue(value, marks[name])
            setattr(self, name, value)

    def _repr_inside(self, inside: Enclosing) -> str:
        items: list[str] = []
        for name, value in vars(self).items():
            if name != "_info":
                items.append(f"{name}={object_repr(value, inside)}")
        return join_lines(f"{type(self).__name__}({_sizes(self)}", items, ")")

    def _repr_parts(self) -> dict[str, PyTree]:
        return {str(name): value for name, value in self._items()}


class Object(Pytree, pytree=False):
    """Base class of objects that are not pytrees to JAX; transformations of NNX accept them."""


# An object with None in place of its data; names other than text are static values.
_Structure = tuple[tuple[Any, StaticValue | None], ...]


def _parts(x: Pytree) -> tuple[list[tuple[Any, PyTree]], _Structure]:
    """Returns the items that are data, and the structure."""
    data_items: list[tuple[Any, PyTree]] = []
    structure: list[tuple[Any, StaticValue | None]] = []
    marks = x._info.marks
    for item in x._items():
        name, value = item
        # The keys of a Dict can be anything, and 1 and True are equal.
        key = name if type(name) is str else versions.static_value(name)
        if type(value) in PLAIN_TYPES and name not in marks:
            structure.append((key, plain_static_value(value)))
        elif x._is_data(name, value):
            data_items.append(item)
            structure.append((key, None))
        else:
            structure.append((key, versions.static_value(value)))
    return data_items, tuple(structure)


def _flatten(x: Pytree) -> tuple[list[PyTree], _Structure]:
    data_items, structure = _parts(x)
    return [value for _, value in data_items], structure


def _flatten_with_keys(
    x: Pytree,
) -> tuple[list[tuple[KeyEntry, PyTree]], _Structure]:
    data_items, structure = _parts(x)
    return [(x._key(name), value) for name, value in data_items], structure


def _unflatten(
    cls: type[Pytree], structure: _Structure, children: Iterable[PyTree]
) -> Pytree:
    remaining_children = iter(children)
    items: list[tuple[Any, PyTree]] = []
    marks: dict[str, bool] = {}
    for key, static_value in structure:
        name = key if type(key) is str else key.value
        if static_value is not None:
            items.append((name, static_value.value))
            continue
        value = next(remaining_children)
        items.append((name, value))
        # Data remains data, whatever JAX replaces it with.
        if not is_data(value):
            marks[name] = True
    return cls._from_items(items, marks)


_CONTAINERS: dict[type, type[Pytree]] = {}


_TRACKED_TYPES: set[type] = {tuple, MarkedValue}


def register_container(
    container_type: type, tracked_type: type[Pytree]
) -> None:
    """Registers a tracked version of a container type, excluding subclasses, for attributes."""
    _CONTAINERS[container_type] = tracked_type
    _TRACKED_TYPES.add(container_type)


def tracked(value: PyTree) -> PyTree:
    """Converts lists and dicts, also nested ones and those in tuples, to tracked versions.

    Raises AttributeMarkError if `data` or `static` is used inside a tuple.
    """
    value_type = type(value)
    if value_type in _CONTAINERS:
        tracked_type = _CONTAINERS[value_type]
        return tracked_type(value)
    if value_type is MarkedValue:
        function = "data" if value.is_data else "static"
        raise AttributeMarkError(
            f"nnx.{function}({value.value!r}) is inside a tuple or another mark; mark an "
            "attribute, or an item of a list or dict."
        )
    if value_type is not tuple:
        return value
    items = tuple(map(tracked, value))
    # The same tuple, if possible: programs compare by identity.
    is_unchanged = all(map(operator.is_, items, value))
    return value if is_unchanged else items


# Traversals.


_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
_FUNCTION_TYPES = (types.FunctionType, types.BuiltinFunctionType)


def is_array(
    x: PyTree,
) -> TypeGuard[jax.Array | np.ndarray | jax.ShapeDtypeStruct]:
    """Returns whether a value is an array or abstract array."""
    return isinstance(x, _ARRAYS)


def is_object(x: PyTree) -> bool:
    """Returns whether `x` is an object or a variable, identified by reference."""
    return isinstance(x, Pytree | Variable)


def objects_in(tree: PyTree) -> list[Pytree | Variable[Any]]:
    """Returns the objects and variables among the leaves of a tree, in order."""
    leaves = jax.tree.leaves(tree, is_leaf=is_object)
    return [leaf for leaf in leaves if is_object(leaf)]


def children(x: PyTree) -> list[tuple[Hashable, PyTree]]:
    """Returns the attributes of an object, or the items of a container, by name or key."""
    if isinstance(x, Pytree):
        return x._items()
    if isinstance(x, Variable) or is_array(x):
        return []
    contents = container_items(x)
    if contents is None:
        return []
    items, _ = contents
    return items


def data_children(x: PyTree) -> list[tuple[Hashable, PyTree]]:
    """Returns the attributes or items that are data, which are an object's pytree children."""
    items = children(x)
    if not isinstance(x, Pytree):
        return items
    return [(name, value) for name, value in items if x._is_data(name, value)]


def container_items(
    x: PyTree,
) -> tuple[list[tuple[Hashable, PyTree]], Structure] | None:
    """Returns a JAX container's items by key and its structure; None for a value."""
    if x is None or isinstance(x, versions.IMMUTABLE_TYPES):
        return None
    if type(x) in _FUNCTION_TYPES:
        return None
    # Only one level: JAX stops at everything but `x` itself.
    keys_and_values, structure = jax.tree_util.tree_flatten_with_path(
        x, is_leaf=lambda y: y is not x
    )
    if jax.tree_util.treedef_is_leaf(structure):
        is_value = not keys_and_values or keys_and_values[0][1] is x
        if is_value:
            return None
    items: list[tuple[Hashable, PyTree]] = []
    for (key,), value in keys_and_values:
        items.append((key_of(key), value))
    return items, structure


def key_of(key: KeyEntry) -> Hashable:
    """Returns the name, key or index of an element of a JAX path."""
    for name in ("key", "idx", "name"):
        if hasattr(key, name):
            return getattr(key, name)
    return key


def with_children(x: T, items: Iterable[PyTree]) -> T:
    """Returns a copy of a container with other items."""
    structure = jax.tree.structure(x, is_leaf=lambda y: y is not x)
    return jax.tree.unflatten(structure, items)


def with_item(x: PyTree, keys: Sequence[Hashable], value: PyTree) -> PyTree:
    """Returns a copy of a container with another value at a path of keys."""
    if not keys:
        return value
    first_key, *further_keys = keys
    new_items: list[PyTree] = []
    for key, item in children(x):
        if key == first_key:
            item = with_item(item, further_keys, value)
        new_items.append(item)
    return with_children(x, new_items)


def iter_graph(
    node: PyTree, /, *, graph: bool | None = None
) -> Iterator[tuple[Path, PyTree]]:
    """Yields each object and value of a graph once with its path, inner ones first.

    For `graph` see `nnx.set_graph_mode`; without graphs, objects without variables are yielded at
    each of their places. Raises SharedObjectError if a variable is at several places of a tree.

    >>> [path for path, _ in iter_graph({"a": nnx.List([1, nnx.Param(2)])})]
    [('a', 0), ('a', 1), ('a',), ()]
    """
    visited_ids: set[int] = set()
    is_graph, _ = settings.resolve_graph_options(graph)
    places = None if is_graph else TreePlaces()

    def walk(x: PyTree, path: Path) -> Iterator[tuple[Path, PyTree]]:
        is_node = is_object(x)
        if is_node and places is not None:
            places.enter(x, path)
        elif is_node:
            if id(x) in visited_ids:
                return
            visited_ids.add(id(x))
        for name, value in children(x):
            yield from walk(value, (*path, name))
        if is_node and places is not None:
            places.leave(x)
        yield path, x

    return walk(node, ())


class TreePlaces:
    """The places of objects in a tree, in which variables are at one place each.

    Call `enter` with each object before its contents, and `leave` after them.

    Args:
        shared_error: returns the error for an object, and the two paths at which it is.
        place_of: returns the place at a path in the user's notation.
    """

    def __init__(
        self,
        shared_error: Callable[[Any, Path, Path], Exception] | None = None,
        place_of: Callable[[Path], str] | None = None,
    ):
        self._shared_error = shared_error or _shared_object_error
        self._place_of = place_of or _place
        self._path_of_variable: dict[int, Path] = {}
        self._path_of_open_object: dict[int, Path] = {}

    def enter(self, x: Pytree | Variable[Any], path: Path) -> None:
        """Notes an object.

        Raises:
            SharedObjectError: for a variable at a second place, or an object inside itself, unless
                another error was given.
            GraphStructureError: for an object of a class with `pytree=False`.
        """
        if isinstance(x, Variable):
            first_path = self._path_of_variable.setdefault(id(x), path)
        elif not x._is_jax_pytree:
            raise GraphStructureError(
                f"the {type(x).__name__} at {self._place_of(path)} is of a class with "
                "pytree=False, and with graph=False objects are plain pytrees; set graph=True, or "
                "define the class without pytree=False."
            )
        else:
            first_path = self._path_of_open_object.setdefault(id(x), path)
        if first_path is not path:
            raise self._shared_error(x, first_path, path)

    def leave(self, x: Pytree | Variable[Any]) -> None:
        """Notes the end of an object's contents."""
        self._path_of_open_object.pop(id(x), None)


def _shared_object_error(
    x: Pytree | Variable[Any], first: Path, second: Path
) -> SharedObjectError:
    return SharedObjectError(
        f"the same {type(x).__name__} is at {_place(first)} and at {_place(second)}; with "
        "graph=False an object is a plain pytree without shared references. Put nnx.clone(...) in "
        "one place, or set graph=True."
    )


def _place(path: Path) -> str:
    return repr(".".join(map(str, path))) if path else "the top"


def iter_children(
    node: PyTree, /, *, graph: bool | None = None
) -> Iterator[tuple[Hashable, Pytree | Variable[Any]]]:
    """Yields the objects and variables in an object's attributes; `graph` is ignored."""
    for name, value in children(node):
        if isinstance(value, Variable | Pytree):
            yield name, value


def iter_module_children(
    node: PyTree, /, *, graph: bool | None = None
) -> Iterator[tuple[Hashable, Pytree]]:
    """Yields the objects, without variables, in an object's attributes; `graph` is ignored."""
    for name, value in children(node):
        if isinstance(value, Pytree):
            yield name, value


def check_pytree(pytree: Pytree) -> None:
    """Checks that static attributes hold no data, in an object and those in it.

    Assignment checks this already; use it after changes in place or through `vars(module)`.

    Raises:
        ObjectArgumentError: if `pytree` is not an object.
        AttributeMarkError: if a static attribute holds an array, a variable or an object.

    >>> check_pytree(nnx.List([nnx.Param(1.0)]))
    """
    if not isinstance(pytree, Pytree):
        raise ObjectArgumentError(
            f"check_pytree was given a {type(pytree).__name__}; give an nnx.Module or nnx.Pytree."
        )
    for path, x in iter_graph(pytree):
        if not isinstance(x, Pytree):
            continue
        for name, value in x._items():
            if not x._is_data(name, value) and holds_data(value):
                raise AttributeMarkError(
                    f"{type(x).__name__} has a {type(value).__name__} with data in it at "
                    f"{path_text((*path, name))!r}, which is marked static; use nnx.data(value), "
                    "or remove arrays, variables and objects from it."
                )


def _sizes(x: Pytree) -> str:
    """Returns the sizes of an object's variables by class, as a comment."""
    values_by_class: dict[str, list[PyTree]] = {}
    for _, node in iter_graph(x):
        if isinstance(node, Variable):
            values = values_by_class.setdefault(type(node).__name__, [])
            values.append(node._value)
    if not values_by_class:
        return ""
    sizes: list[str] = []
    for name, values in sorted(values_by_class.items()):
        sizes.append(f"{name}: {size_text(values)}")
    if len(sizes) > 1:
        sizes.append(f"Total: {size_text(values_by_class)}")
    return " # " + ", ".join(sizes)
