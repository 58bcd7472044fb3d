"""`List` and `Dict`, which track changes, and `Sequential`.

A list or dict that is assigned to an attribute is converted to `List` or `Dict`. Both are modules:
they keep references, and `train` and `eval` reach their items.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, SupportsIndex, TypeVar

import jax

from weft.core.display import join_lines
from weft.errors import LayerCallError
from weft.nnx.display import Enclosing, mapping_repr, object_repr
from weft.nnx.module import Module
from weft.nnx.pytree import (
    KeyEntry,
    MarkedValue,
    Pytree,
    is_data,
    register_container,
    tracked,
)
from weft.typing import PyTree

T = TypeVar("T")
Items = Iterable[tuple[Any, PyTree]]


def _changing(name: str, base: type) -> Callable[..., Any]:
    """Returns a method of list or dict, `base`, that records the change and tracks new items."""
    method = getattr(base, name)
    restore = list.extend if base is list else dict.update
    returns_self = name in ("__iadd__", "__imul__", "__ior__")

    def changing_method(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._info.check(self)
        old_items = base(self)
        old_marks = dict(self._info.marks)
        try:
            _unpack_marks(self, base)
            result = method(self, *args, **kwargs)
            _pack_marks(self, base)
        except BaseException:
            self._info.marks = old_marks
            base.clear(self)  # pyright: ignore[reportAttributeAccessIssue]
            restore(self, old_items)
            raise
        finally:
            self._info.changed()
        if isinstance(result, MarkedValue):  # an item that `pop` removed
            return result.value
        return self if returns_self else result

    changing_method.__name__ = name
    return changing_method


def _unpack_marks(x: List[Any] | Dict, base: Any) -> None:
    """Puts the marks into the marked items, so that they change places with these."""
    marks = x._info.marks
    for key in list(marks):
        is_attribute = isinstance(x, list) and isinstance(key, str)
        if not is_attribute:
            item = base.__getitem__(x, key)
            marked_item = MarkedValue(item, marks.pop(key))
            base.__setitem__(x, key, marked_item)


def _pack_marks(x: List[Any] | Dict, base: Any) -> None:
    """Takes the marks out of marked items, and tracks lists and dicts among the items."""
    marks = x._info.marks
    items = x.items() if isinstance(x, dict) else enumerate(x)
    for key, item in items:
        new_item = item
        if isinstance(item, MarkedValue):
            new_item = item.of(x, key)
            marks[key] = item.is_data
        new_item = tracked(new_item)
        if new_item is not item:
            base.__setitem__(x, key, new_item)


class List(Module, list[T]):
    """List module that keeps references; lists in attributes are converted to it.

    >>> layers = nnx.List([nnx.Param(1.0)])
    >>> layers.append(nnx.Param(2.0))
    >>> jax.tree.leaves(layers)
    [1.0, 2.0]
    """

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __init__(self, it: Iterable[T] = ()):
        self.extend(it)

    def _items(self) -> list[tuple[Hashable, PyTree]]:
        return [*enumerate(self), *super()._items()]

    def _snapshot(self) -> list[PyTree]:
        return [*super()._snapshot(), *list.__iter__(self)]

    def _fill(self, items: Items) -> None:
        for name, value in items:
            if isinstance(name, str):
                vars(self)[name] = value
            else:
                # A slice, as the item may be a new one.
                list.__setitem__(self, slice(name, name + 1), [value])

    def _replace(self, items: Items) -> None:
        attributes: list[tuple[Any, PyTree]] = []
        list_items: list[PyTree] = []
        for name, value in items:
            if isinstance(name, str):
                attributes.append((name, value))
            else:
                list_items.append(value)
        super()._replace(attributes)
        list.__setitem__(self, slice(None), list_items)

    @staticmethod
    def _key(name: Hashable) -> KeyEntry:
        if isinstance(name, str):
            return Pytree._key(name)
        return jax.tree_util.SequenceKey(name)

    def remove(self, value: T, /) -> None:
        """Removes the first item equal to a value."""
        del self[self.index(value)]

    def sort(
        self, *, key: Callable[[Any], Any] | None = None, reverse: bool = False
    ) -> None:
        # The items change places with their marks; the keys know nothing of marks.
        sort_keys: list[Any] = (
            list(self) if key is None else list(map(key, self))
        )
        order = sorted(
            range(len(self)), key=sort_keys.__getitem__, reverse=reverse
        )
        marked_items = list(_with_marks(self, enumerate(self)))
        self[:] = [marked_items[index] for index in order]

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_length" not in state:
            super().__setstate__(state)
            return
        # Pickled by Flax, whose items are attributes, all of them marked.
        marks = state["_pytree__nodes"]
        for name in map(str, range(state["_length"])):
            item = state[name]
            if marks[name] != is_data(item):
                item = MarkedValue(item, marks[name])
            self += [item]

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        make, args, state, *_ = super().__reduce_ex__(protocol)
        return make, args, state, _with_marks(self, enumerate(self))

    def __eq__(self, other: object) -> bool:
        return list.__eq__(self, other)

    def _repr_inside(self, inside: Enclosing) -> str:
        items = [object_repr(x, inside) for x in self]
        return join_lines("List([", items, "])")


class Dict(Module, dict[Any, Any]):
    """Dict module that keeps references, with its items as attributes too.

    Dicts in attributes are converted to it; arguments as for `dict`.

    >>> heads = nnx.Dict(policy=nnx.Param(1.0))
    >>> heads["value"] = nnx.Param(2.0)
    >>> heads.value[...]
    2.0
    """

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __init__(self, *args: PyTree, **kwargs: PyTree):
        self.update(*args, **kwargs)

    def _items(self) -> list[tuple[Hashable, PyTree]]:
        # Keys of different types, which Python does not compare, apart.
        return sorted(
            self.items(), key=lambda item: (str(type(item[0])), item[0])
        )

    def _snapshot(self) -> list[PyTree]:
        return [*super()._snapshot(), *dict.keys(self), *dict.values(self)]

    def _fill(self, items: Items) -> None:
        dict.update(self, items)

    def _replace(self, items: Sequence[tuple[Any, PyTree]]) -> None:
        new_keys = [key for key, _ in items]
        # Unchanged items remain visible to other threads, unless the order is another one.
        dict.update(self, items)
        for key in self.keys() - set(new_keys):
            dict.__delitem__(self, key)
        if list(self) != new_keys:
            dict.clear(self)
            dict.update(self, items)

    def _order(self) -> tuple[Hashable, ...] | None:
        keys = tuple(self)
        sorted_keys = tuple(key for key, _ in self._items())
        return None if keys == sorted_keys else keys

    @staticmethod
    def _key(name: Hashable) -> KeyEntry:
        return jax.tree_util.DictKey(name)

    def setdefault(self, key: Any, default: Any = None, /) -> Any:
        """Returns the value of `key`, which becomes `default` if there is none, as it is stored."""
        if key not in self:
            self[key] = default
        return self[key]

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        make, args, *_ = super().__reduce_ex__(protocol)
        items = zip(self, _with_marks(self, self.items()), strict=True)
        return make, args, None, None, items

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        keys = ", ".join(map(repr, self)) or "nothing"
        raise AttributeError(f"the Dict has no {name!r}; there are: {keys}.")

    def __setattr__(self, name: str, value: PyTree) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        if name not in self:
            raise AttributeError(f"the Dict has no {name!r} to delete.")
        del self[name]

    def __eq__(self, other: object) -> bool:
        return dict.__eq__(self, other)

    def _repr_inside(self, inside: Enclosing) -> str:
        return mapping_repr(type(self).__name__, self.items(), inside)


def _with_marks(x: Pytree, items: Items) -> Iterator[PyTree]:
    """Yields the values of items, marked ones as `MarkedValue`."""
    marks = x._info.marks
    for key, value in items:
        yield MarkedValue(value, marks[key]) if key in marks else value


for _name in (
    "append", "extend", "insert", "pop", "clear", "reverse",
    "__setitem__", "__delitem__", "__iadd__", "__imul__",
):  # fmt: skip
    setattr(List, _name, _changing(_name, list))
for _name in (
    "clear", "pop", "popitem", "update", "__setitem__", "__delitem__", "__ior__",
):  # fmt: skip
    setattr(Dict, _name, _changing(_name, dict))
register_container(list, List)
register_container(dict, Dict)


class Sequential(Module):
    """Sequence of layers, each applied to the previous one's output.

    Args:
        *fns: functions and modules. A tuple is passed on as positional arguments, a dict as keyword
            arguments, and anything else as the only argument.

    Raises LayerCallError at the call, if one of them is not callable.

    >>> Sequential(lambda x: (x, x + 1), lambda a, b: a * b)(2)
    6
    """

    def __init__(self, *fns: Callable[..., Any]):
        self.layers = fns

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Calls the layers; the arguments are those of the first."""
        result: PyTree = None  # without layers and arguments
        if args:
            result = args[0] if len(args) == 1 else args
        for i, layer in enumerate(self.layers):
            if not callable(layer):
                raise LayerCallError(
                    f"the layer {i} of a Sequential is {layer!r}, which is not callable; give "
                    "functions and modules."
                )
            if i:
                args, kwargs = _arguments_from(result)
            result = layer(*args, **kwargs)
        return result


def _arguments_from(
    result: PyTree,
) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    """Returns a layer's result as the next one's arguments."""
    if isinstance(result, tuple):
        return result, {}
    if isinstance(result, dict):
        return (), result
    return (result,), {}
