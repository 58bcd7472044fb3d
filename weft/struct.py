"""Immutable dataclasses that are pytrees.

A field is a child of the pytree unless declared with `field(pytree_node=False)`; such a field is
static: it must be hashable, and `jax.jit` retraces when it changes. A field with `init=False` is
neither: each copy, even one by `jax.tree.map`, recomputes it.

`VDict` is a dict of stacked parameters, whose arrays have a leading axis over equal layers.
Statistics of a single parameter, such as its root mean square, must be computed per layer:
`map_blocks` maps a function over each layer's parameters.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, dataclass_transform

import jax

from weft.errors import AbstractPyTreeNodeError, StructDefinitionError

T = TypeVar("T")


def field(
    pytree_node: bool = True,
    *,
    metadata: dict[str, Any] | None = None,
    **kwargs: Any,
):
    """Returns a dataclass field; `pytree_node=False` makes it static instead of a pytree child.

    Further arguments are those of `dataclasses.field`.
    """
    return dataclasses.field(
        metadata={**(metadata or {}), "pytree_node": pytree_node}, **kwargs
    )


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def dataclass(clz: type[T] | None = None, **kwargs: Any):
    """Makes a class a frozen dataclass and a pytree node, with a method `replace`.

    Keyword arguments are those of `dataclasses.dataclass`; `frozen` is True by default.

    Raises StructDefinitionError if `clz` is not a class.

    >>> @dataclass
    ... class Point:
    ...     x: float
    ...     name: str = field(pytree_node=False, default="p")
    >>> jax.tree.map(lambda v: v + 1, Point(1.0)).replace(name="q")
    Point(x=2.0, name='q')
    """
    if clz is None:
        return lambda clz: dataclass(clz, **kwargs)
    if not isinstance(clz, type):
        raise StructDefinitionError(
            f"struct.dataclass was given {clz!r}, which is not a class; write it above a class, as "
            "`@struct.dataclass` or with options by name, as `@struct.dataclass(kw_only=True)`."
        )
    # A subclass of a struct inherits `_weft_struct`; only a class's own mark means "already done".
    if "_weft_struct" in vars(clz):
        return clz
    kwargs.setdefault("frozen", True)
    if kwargs.get("eq", True) and "__eq__" not in vars(clz):
        clz.__eq__ = _equal_fields
    struct: Any = dataclasses.dataclass(**kwargs)(clz)
    if not hasattr(struct, "replace"):
        struct.replace = dataclasses.replace
    struct._weft_struct = True
    _register(struct)
    return struct


def _equal_fields(self: Any, other: Any) -> bool:
    """Compares as tuples do, in which the same array is equal to itself."""
    if type(self) is not type(other):
        return NotImplemented
    names = [field.name for field in dataclasses.fields(self) if field.compare]
    values = [getattr(self, name) for name in names]
    return values == [getattr(other, name) for name in names]


def child_names(cls: type) -> tuple[str, ...]:
    """Returns the fields that are children of the pytree; none if `cls` is not a struct."""
    if "_weft_struct" not in vars(cls):
        return ()
    names: list[str] = []
    for field in dataclasses.fields(cls):  # pyright: ignore[reportArgumentType]
        if field.init and field.metadata.get("pytree_node", True):
            names.append(field.name)
    return tuple(names)


def _register(cls: type[Any]) -> None:
    # Not `jax.tree_util.register_dataclass`: there JAX 0.10.2 takes the structures of two classes
    # with equal fields for equal, and now and then a function under `jit` returns the wrong class.
    children_fields = child_names(cls)
    static_fields: list[str] = []
    for field in dataclasses.fields(cls):
        if field.init and field.name not in children_fields:
            static_fields.append(field.name)
    keys = [jax.tree_util.GetAttrKey(name) for name in children_fields]

    def flatten(x: Any) -> tuple[list[Any], tuple[Any, ...]]:
        children = [getattr(x, name) for name in children_fields]
        return children, tuple([getattr(x, name) for name in static_fields])

    def flatten_with_keys(
        x: Any,
    ) -> tuple[Iterable[tuple[Any, Any]], tuple[Any, ...]]:
        children, static_values = flatten(x)
        return zip(keys, children, strict=True), static_values

    def unflatten(
        static_values: tuple[Any, ...], children: Iterable[Any]
    ) -> Any:
        fields = dict(zip(children_fields, children, strict=True))
        fields.update(zip(static_fields, static_values, strict=True))
        return cls(**fields)

    jax.tree_util.register_pytree_with_keys(
        cls, flatten_with_keys, unflatten, flatten
    )


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class PyTreeNode:
    """Base class that makes every subclass a `struct.dataclass`.

    >>> class Scaled(PyTreeNode):
    ...     value: float
    ...     unit: str = field(pytree_node=False, default="m")
    >>> jax.tree.leaves(Scaled(2.0))
    [2.0]
    """

    def __init_subclass__(cls, **kwargs: object):
        super().__init_subclass__()
        dataclass(cls, **kwargs)

    def __init__(self, *args: object, **kwargs: object):
        raise AbstractPyTreeNodeError(
            f"{type(self).__name__} has no fields to be made from; derive a class from PyTreeNode "
            "and annotate its fields, or give a class with `init=False` its own `__init__`."
        )

    def replace(self: T, **updates: object) -> T:
        """Returns a copy with some fields changed."""
        return dataclasses.replace(self, **updates)  # pyright: ignore[reportArgumentType]


@jax.tree_util.register_pytree_with_keys_class
class VDict(dict[str, Any]):
    """A dict whose arrays have a leading axis of equal size, one entry per layer.

    It is a pytree like a dict, with the same key paths.

    >>> jax.tree.map(lambda x: x + 1, VDict(w=1.0))
    VDict({'w': 2.0})
    """

    def __repr__(self) -> str:
        return f"VDict({super().__repr__()})"

    def tree_flatten_with_keys(self):
        keys = tuple(sorted(self))
        return [(jax.tree_util.DictKey(key), self[key]) for key in keys], keys

    @classmethod
    def tree_unflatten(
        cls, keys: tuple[str, ...], children: Iterable[Any]
    ) -> "VDict":
        return cls(zip(keys, children, strict=True))


def map_blocks(
    fn: Callable[..., Any],
    tree: object,
    *rest: Any,
    is_leaf: Callable[[Any], bool] = lambda _: False,
) -> Any:
    """Maps `fn` over trees like `jax.tree.map`, one layer at a time inside of a `VDict`.

    `tree` is a prefix of `rest`. Results of stacked layers are stacked again.

    >>> tree = {"a": jnp.array([3.0, 1.0]), "layers": VDict(b=jnp.array([[3.0, 1.0], [5.0, 7.0]]))}
    >>> map_blocks(jnp.max, tree)["layers"]["b"].tolist()
    [3.0, 7.0]
    """

    def map_layer(
        layer: Mapping[str, Any], *other_layers: Mapping[str, Any]
    ) -> dict[str, Any]:
        results: dict[str, Any] = {}
        for name, entry in layer.items():
            other_entries = [other[name] for other in other_layers]
            results[name] = map_blocks(
                fn, entry, *other_entries, is_leaf=is_leaf
            )
        return results

    def map_block(block: Any, *others: Any) -> Any:
        if not isinstance(block, VDict):
            return fn(block, *others)
        if not jax.tree.leaves(block):
            return block
        return VDict(jax.vmap(map_layer)(dict(block), *map(dict, others)))

    def is_block(x: Any) -> bool:
        return isinstance(x, VDict) or is_leaf(x)

    return jax.tree.map(map_block, tree, *rest, is_leaf=is_block)
