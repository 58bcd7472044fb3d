"""Nested dicts as flat dicts of paths, and traversals that update parts of containers.

`flatten_dict` and `unflatten_dict` are those of `weft.core.flat_dict`.

A traversal selects parts of a value, to read or replace them: `t_identity` the value itself,
`t_identity["a"].each()` the entries of its item "a". `iterate` yields the parts; `update` and `set`
return a copy of the value with other parts.
"""

import abc
import copy
import dataclasses
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
)
from typing import Any, Self

import jax

from weft.core.flat_dict import Path as Path
from weft.core.flat_dict import (
    _EmptyNode as _EmptyNode,
)  # by this path in pickles
from weft.core.flat_dict import check_mapping as check_mapping
from weft.core.flat_dict import empty_node as empty_node
from weft.core.flat_dict import flatten_dict as flatten_dict
from weft.core.flat_dict import path_aware_map as path_aware_map
from weft.core.flat_dict import unflatten_dict as unflatten_dict
from weft.errors import NestedDictError, TraversalError, warn_deprecated
from weft.typing import PyTree


def flatten_mapping(
    xs: Mapping[Any, Any],
    /,
    *,
    keep_empty_nodes: bool = False,
    is_leaf: Callable[[Path, Any], bool] | None = None,
    sep: str | None = None,
) -> dict[Any, Any]:
    """Flattens a nested mapping to leaves by path; see `flatten_dict`."""
    return flatten_dict(xs, keep_empty_nodes, is_leaf, sep)


def flatten_to_sequence(
    xs: Mapping[Any, Any],
    /,
    *,
    is_leaf: Callable[[Path, Any], bool] | None = None,
) -> list[tuple[Path, Any]]:
    """Flattens a nested mapping to pairs of path and leaf.

    Raises NestedDictError if `xs` is not a mapping.

    >>> flatten_to_sequence({"a": {"b": 1}, "c": 2})
    [(('a', 'b'), 1), (('c',), 2)]
    """
    return list(flatten_dict(xs, is_leaf=is_leaf).items())


def unflatten_mapping(
    xs: Mapping[Any, Any] | Iterable[tuple[Any, Any]],
    /,
    *,
    sep: str | None = None,
) -> Any:
    """Returns the nested dict of a flat mapping or of pairs; `sep` separates joined paths.

    Raises NestedDictError if `xs` is neither a mapping nor pairs, and as `unflatten_dict`.

    >>> unflatten_mapping([(("a", "b"), 1), (("c",), 2)])
    {'a': {'b': 1}, 'c': 2}
    """
    if not isinstance(xs, Mapping | Iterable):
        raise NestedDictError(
            f"unflatten_mapping was given a {type(xs).__name__}; expected a mapping from paths "
            "to leaves, or pairs of them."
        )
    return unflatten_dict(dict(xs), sep)


class Traversal(abc.ABC):
    """Selector of parts of a value; `traversal[key]` and `traversal.attribute` go further in.

    Deprecated: use `path_aware_map`, or the functions of `jax.tree`.
    """

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        warn_deprecated(
            "Traversal", "use path_aware_map, or functions of jax.tree"
        )
        return super().__new__(cls)

    @abc.abstractmethod
    def iterate(self, inputs: PyTree) -> Iterator[PyTree]:
        """Yields the selected parts of `inputs`."""

    @abc.abstractmethod
    def update(self, fn: Callable[[PyTree], PyTree], inputs: PyTree) -> PyTree:
        """Returns a copy of `inputs` with each part replaced by `fn(part)`."""

    def set(self, values: Iterable[Any], inputs: PyTree) -> PyTree:
        """Returns a copy of `inputs` with the parts replaced by `values`, in order.

        Raises TraversalError if the numbers of parts and values differ.
        """
        values = list(values)
        num_parts = 0

        def next_value(_: PyTree) -> PyTree:
            nonlocal num_parts
            if num_parts == len(values):
                raise TraversalError(
                    f"set was given {len(values)} values, fewer than the traversal has parts here."
                )
            num_parts += 1
            return values[num_parts - 1]

        outputs = self.update(next_value, inputs)
        num_unused = len(values) - num_parts
        if num_unused:
            raise TraversalError(
                f"set was given {len(values)} values, {num_unused} more than the traversal has "
                "parts here."
            )
        return outputs

    def compose(self, other: "Traversal") -> "Traversal":
        """Selects the parts that `other` selects in the parts of this one."""
        return TraverseCompose(self, other)

    def merge(self, *traversals: "Traversal") -> "Traversal":
        """Selects the parts that any of `traversals` selects in the parts of this one."""
        return self.compose(TraverseMerge(*traversals))

    def each(self) -> "Traversal":
        """Selects the entries of the parts, which are lists, tuples or mappings."""
        return self.compose(TraverseEach())

    def tree(self) -> "Traversal":
        """Selects the leaves of the parts, which are pytrees."""
        return self.compose(TraverseTree())

    def filter(self, fn: Callable[[Any], bool]) -> "Traversal":
        """Selects the parts for which `fn` is true."""
        return self.compose(TraverseFilter(fn))

    def __getitem__(self, key: object) -> "Traversal":
        return self.compose(TraverseItem(key))

    def __getattr__(self, attr: str) -> "Traversal":
        if attr.startswith(
            "__"
        ):  # Python asks for these, as `copy` and `pickle` do
            raise AttributeError(attr)
        return self.compose(TraverseAttr(attr))


class TraverseId(Traversal):
    """Traversal of the value itself.

    >>> t_identity["a"].each().update(lambda x: x + 1, {"a": [1, 2], "b": 3})
    {'a': [2, 3], 'b': 3}
    """

    def iterate(self, inputs: PyTree) -> Iterator[PyTree]:
        yield inputs

    def update(self, fn: Callable[[PyTree], PyTree], inputs: PyTree) -> PyTree:
        return fn(inputs)


t_identity = object.__new__(TraverseId)  # without a warning


# The attributes of traversals have an underscore, as any other name is an attribute to traverse.


class TraverseCompose(Traversal):
    """Traversal of the parts that `y` selects in the parts of `x`."""

    def __init__(self, x: Traversal, y: Traversal):
        self._x, self._y = x, y

    def iterate(self, inputs: PyTree) -> Iterator[PyTree]:
        for part in self._x.iterate(inputs):
            yield from self._y.iterate(part)

    def update(self, fn: Callable[[PyTree], PyTree], inputs: PyTree) -> PyTree:
        return self._x.update(lambda part: self._y.update(fn, part), inputs)


class TraverseMerge(Traversal):
    """Traversal of the parts of several traversals; shared parts are updated repeatedly."""

    def __init__(self, *traversals: Traversal):
        self._traversals = traversals

    def iterate(self, inputs: PyTree) -> Iterator[PyTree]:
        for traversal in self._traversals:
            yield from traversal.iterate(inputs)

    def update(self, fn: Callable[[PyTree], PyTree], inputs: PyTree) -> PyTree:
        for traversal in self._traversals:
            inputs = traversal.update(fn, inputs)
        return inputs


class TraverseEach(Traversal):
    """Traversal of the entries of a list, tuple or mapping."""

    def iterate(self, inputs: PyTree) -> Iterator[PyTree]:
        yield from _checked_entries(inputs).values()

    def update(self, fn: Callable[[PyTree], PyTree], inputs: PyTree) -> PyTree:
        entries = {
            key: fn(part) for key, part in _checked_entries(inputs).items()
        }
        return _rebuild(inputs, entries)


def _checked_entries(inputs: PyTree) -> Mapping[Any, Any]:
    if isinstance(inputs, Mapping):
        return inputs
    if isinstance(inputs, list | tuple):
        return dict(enumerate(inputs))
    raise TraversalError(
        f"each() goes into lists, tuples and mappings, not into a {type(inputs).__name__}; use "
        "tree() for the leaves of other pytrees."
    )


def _rebuild(inputs: PyTree, entries: Mapping[Any, Any]) -> Any:
    if isinstance(inputs, tuple) and hasattr(inputs, "_fields"):
        return type(inputs)(*entries.values())
    if isinstance(inputs, list | tuple):
        return type(inputs)(entries.values())
    if not isinstance(inputs, MutableMapping):
        return type(inputs)(entries)  # pyright: ignore[reportCallIssue] - a FrozenDict, say
    outputs = copy.copy(inputs)
    outputs.update(entries)
    return outputs


class TraverseItem(Traversal):
    """Traversal of `value[key]`; of each selected item if the key is a slice."""

    def __init__(self, key: Any):
        self._key = key

    def iterate(self, inputs: PyTree) -> Iterator[PyTree]:
        part = inputs[self._key]
        if isinstance(self._key, slice):
            yield from part
        else:
            yield part

    def update(self, fn: Callable[[PyTree], PyTree], inputs: PyTree) -> PyTree:
        if isinstance(inputs, Mapping):
            return _rebuild(
                inputs, {**inputs, self._key: fn(inputs[self._key])}
            )
        outputs = (
            list(inputs) if isinstance(inputs, tuple) else copy.copy(inputs)
        )
        keys = [self._key]
        if isinstance(self._key, slice):
            keys = range(*self._key.indices(len(outputs)))
        for key in keys:
            outputs[key] = fn(outputs[key])
        if isinstance(inputs, tuple):
            return _rebuild(inputs, dict(enumerate(outputs)))
        return outputs


class TraverseAttr(Traversal):
    """Traversal of `value.attr`."""

    def __init__(self, attr: str):
        self._attr = attr

    def iterate(self, inputs: PyTree) -> Iterator[PyTree]:
        yield getattr(inputs, self._attr)

    def update(self, fn: Callable[[PyTree], PyTree], inputs: PyTree) -> PyTree:
        part = fn(getattr(inputs, self._attr))
        if isinstance(inputs, tuple) and hasattr(inputs, "_fields"):
            return inputs._replace(**{self._attr: part})  # pyright: ignore[reportAttributeAccessIssue]
        if dataclasses.is_dataclass(inputs) and not isinstance(inputs, type):
            return dataclasses.replace(inputs, **{self._attr: part})
        outputs = copy.copy(inputs)
        setattr(outputs, self._attr, part)
        return outputs


class TraverseFilter(Traversal):
    """Traversal of the value if `fn` is true of it."""

    def __init__(self, fn: Callable[[Any], bool]):
        self._fn = fn

    def iterate(self, inputs: PyTree) -> Iterator[PyTree]:
        if self._fn(inputs):
            yield inputs

    def update(self, fn: Callable[[PyTree], PyTree], inputs: PyTree) -> PyTree:
        return fn(inputs) if self._fn(inputs) else inputs


class TraverseTree(Traversal):
    """Traversal of the leaves of a pytree."""

    def iterate(self, inputs: PyTree) -> Iterator[PyTree]:
        yield from jax.tree.leaves(inputs)

    def update(self, fn: Callable[[PyTree], PyTree], inputs: PyTree) -> PyTree:
        return jax.tree.map(fn, inputs)


class ModelParamTraversal(Traversal):
    """Traversal of a nested dict's leaves that `filter_fn(path, leaf)` selects.

    Paths are as "/dense/kernel". `iterate` and `update` raise NestedDictError except on mappings.

    >>> kernels = ModelParamTraversal(lambda path, _: path.endswith("kernel"))
    >>> kernels.update(lambda x: 2 * x, {"dense": {"bias": 1, "kernel": 2}})
    {'dense': {'bias': 1, 'kernel': 4}}
    """

    def __init__(self, filter_fn: Callable[[str, Any], bool]):
        self._filter_fn = filter_fn

    def _selected(self, inputs: PyTree) -> tuple[dict[Path, Any], list[Path]]:
        """Returns all leaves by path, sorted, and the paths of those that are selected."""
        check_mapping(inputs, "ModelParamTraversal")
        leaves = flatten_dict(inputs, keep_empty_nodes=True)
        sorted_leaves: dict[Path, Any] = {}
        selected: list[Path] = []
        for path in sorted(leaves, key=lambda path: list(map(str, path))):
            leaf = sorted_leaves[path] = leaves[path]
            text = "/" + "/".join(map(str, path))
            if leaf is not empty_node and self._filter_fn(text, leaf):
                selected.append(path)
        return sorted_leaves, selected

    def iterate(self, inputs: PyTree) -> Iterator[PyTree]:
        leaves, selected = self._selected(inputs)
        for path in selected:
            yield leaves[path]

    def update(self, fn: Callable[[PyTree], PyTree], inputs: PyTree) -> PyTree:
        leaves, selected = self._selected(inputs)
        for path in selected:
            leaves[path] = fn(leaves[path])
        outputs = unflatten_dict(leaves)
        return outputs if isinstance(inputs, dict) else type(inputs)(outputs)
