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
from weft.nnx.pytree import MarkedValue, Pytree, is_data, register_container, tracked

T = TypeVar("T")


def _changing(name: str, of: type) -> Callable[..., Any]:
    """Returns a method of a list or dict that records the change and tracks new items."""
    method = getattr(of, name)
    restore = list.extend if of is list else dict.update

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._info.check(self)
        before, marks = of(self), dict(self._info.marks)
        try:
            _unpack_marks(self, of)
            result = method(self, *args, **kwargs)
            _pack_marks(self, of)
        except BaseException:
            of.clear(self)  # pyright: ignore[reportAttributeAccessIssue]
            restore(self, before)
            self._info.marks = marks
            raise
        finally:
            self._info.changed()
        if isinstance(result, MarkedValue):
            return result.value
        return self if name in ("__iadd__", "__imul__", "__ior__") else result

    changed.__name__ = name
    return changed


def _unpack_marks(x: Any, of: Any) -> None:
    """Puts the marks into the marked items, so that they change places with these."""
    marks = x._info.marks
    for key in [key for key in marks if of is dict or not isinstance(key, str)]:
        of.__setitem__(x, key, MarkedValue(x[key], marks.pop(key)))


def _pack_marks(x: Any, of: Any) -> None:
    for key, item in x.items() if of is dict else enumerate(x):
        new = item
        if isinstance(item, MarkedValue):
            new, x._info.marks[key] = item.of(x, key), item.is_data
        if (new := tracked(new)) is not item:
            of.__setitem__(x, key, new)


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

    def _items(self) -> list[tuple[Hashable, Any]]:
        return [*enumerate(self), *super()._items()]

    def _snapshot(self) -> list[Any]:
        return [*super()._snapshot(), *list.__iter__(self)]

    def _fill(self, items: Iterable[tuple[Any, Any]]) -> None:
        for name, value in items:
            if isinstance(name, str):
                vars(self)[name] = value
            else:
                list.__setitem__(self, slice(name, name + 1), [value])

    def _replace(self, items: Sequence[tuple[Any, Any]]) -> None:
        super()._replace([item for item in items if isinstance(item[0], str)])
        list.__setitem__(self, slice(None), [v for name, v in items if not isinstance(name, str)])

    @staticmethod
    def _key(name: object) -> Any:
        return Pytree._key(name) if isinstance(name, str) else jax.tree_util.SequenceKey(name)

    def remove(self, value: T, /) -> None:
        """Removes the first item equal to a value."""
        del self[self.index(value)]

    def sort(self, *, key: Callable[[Any], Any] | None = None, reverse: bool = False) -> None:
        items = list(_with_marks(self, enumerate(self)))
        values: list[Any] = [item if key is None else key(item) for item in self]
        order = sorted(range(len(self)), key=values.__getitem__, reverse=reverse)
        self[:] = [items[i] for i in order]

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_length" in state:  # pickled by Flax, whose items are attributes
            for name in map(str, range(state["_length"])):
                value, mark = state[name], state["_pytree__nodes"][name]
                self += [value if mark == is_data(value) else MarkedValue(value, mark)]
        else:
            super().__setstate__(state)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        make, args, state, *_ = super().__reduce_ex__(protocol)
        return make, args, state, iter(_with_marks(self, enumerate(self)))

    def __eq__(self, other: object) -> bool:
        return list.__eq__(self, other)

    def _repr_inside(self, inside: Enclosing) -> str:
        return join_lines("List([", [object_repr(x, inside) for x in self], "])")


class Dict(Module, dict[Any, Any]):
    """Dict module that keeps references, with its items as attributes too.

    Dicts in attributes are converted to it; arguments as for `dict`.

    >>> heads = nnx.Dict(policy=nnx.Param(1.0))
    >>> heads["value"] = nnx.Param(2.0)
    >>> heads.value[...]
    2.0
    """

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __init__(self, *args: object, **kwargs: object):
        self.update(*args, **kwargs)

    def _items(self) -> list[tuple[Hashable, Any]]:
        return sorted(self.items(), key=lambda item: (str(type(item[0])), item[0]))

    def _snapshot(self) -> list[Any]:
        return [*super()._snapshot(), *dict.keys(self), *dict.values(self)]

    def _fill(self, items: Iterable[tuple[Any, Any]]) -> None:
        dict.update(self, items)

    def _replace(self, items: Sequence[tuple[Any, Any]]) -> None:
        dict.update(self, items)
        for key in self.keys() - {key for key, _ in items}:
            dict.__delitem__(self, key)
        if list(self) != [key for key, _ in items]:
            dict.clear(self)
            dict.update(self, items)

    def _order(self) -> tuple[Hashable, ...] | None:
        keys = tuple(self)
        return None if keys == tuple(key for key, _ in self._items()) else keys

    @staticmethod
    def _key(name: object) -> Any:
        return jax.tree_util.DictKey(name)

    def setdefault(self, key: Any, default: object = None, /) -> Any:
        """Returns the value of `key`, which becomes `default` if there is none, as it is stored."""
        if key not in self:
            self[key] = default
        return self[key]

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        make, args, *_ = super().__reduce_ex__(protocol)
        items = zip(self, _with_marks(self, self.items()), strict=True)
        return make, args, None, None, iter(items)

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        there = ", ".join(map(repr, self)) or "nothing"
        raise AttributeError(f"the Dict has no {name!r}; there are: {there}.")

    def __setattr__(self, name: str, value: object) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        if name not in self:
            raise AttributeError(f"the Dict has no {name!r} to delete.")
        del self[name]

    def __eq__(self, other: object) -> bool:
        return dict.__eq__(self, other)

    def _repr_inside(self, inside: Enclosing) -> str:
        return mapping_repr(type(self).__name__, self.items(), inside)


def _with_marks(x: Pytree, items: Iterable[tuple[Any, Any]]) -> Iterator[Any]:
    marks = x._info.marks
    return (MarkedValue(value, marks[key]) if key in marks else value for key, value in items)


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

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Calls the layers; the arguments are those of the first."""
        result: Any = (args[0] if len(args) == 1 else args) if args else None
        for i, layer in enumerate(self.layers):
            if not callable(layer):
                raise LayerCallError(
                    f"the layer {i} of a Sequential is {layer!r}, which is not callable; give "
                    "functions and modules."
                )
            if i:
                args, kwargs = _arguments(result)
            result = layer(*args, **kwargs)
        return result


def _arguments(result: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(result, tuple):
        return result, {}
    if isinstance(result, dict):
        return (), result
    return (result,), {}
