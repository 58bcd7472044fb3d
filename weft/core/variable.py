"""References to variables of a scope, and a check of parameter shapes."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax

from weft.core import meta
from weft.errors import ScopeParamShapeError

if TYPE_CHECKING:
    from weft.core.scope import Scope

T = TypeVar("T")
MISSING: Any = object()


class Variable(Generic[T]):
    """Reference to a variable of a scope.

    Attributes:
        unbox: whether `value` is without axis metadata.
    """

    def __init__(self, scope: "Scope", collection: str, name: str, unbox: bool = True):
        self.scope = scope
        self.collection = collection
        self.name = name
        self.unbox = unbox

    @property
    def value(self) -> T:
        """The value; assignments keep existing axis metadata."""
        value = self.scope.get_variable(self.collection, self.name)
        return meta.unbox(value) if self.unbox else value

    @value.setter
    def value(self, value: T) -> None:
        if self.unbox:
            before = self.scope.get_variable(self.collection, self.name)
            # Without boxes, the new value may have another structure.
            is_box = meta.is_axis_metadata
            if any(map(is_box, jax.tree.leaves(before, is_leaf=is_box))):
                value = meta.replace_boxed(before, value)
        self.scope.put_variable(self.collection, self.name, value)

    def is_mutable(self) -> bool:
        return self.scope.is_mutable_collection(self.collection)

    def __repr__(self) -> str:
        where = f"{self.collection}:{self.scope.path_text.rstrip('/')}/{self.name}"
        value = (
            "ended" if self.scope.invalid else self.scope.get_variable(self.collection, self.name)
        )
        return f"Variable({where} = {value!r})"


def check_shape(
    scope: "Scope",
    name: str,
    value: Any,
    init_fn: Callable[..., Any],
    init_args: tuple[Any, ...],
    init_kwargs: dict[str, Any],
) -> None:
    """Raises ScopeParamShapeError if a parameter's shape differs from its initializer's."""
    # Initializers return the shape that they are given; evaluating one costs half a millisecond.
    if init_args and getattr(meta.unbox(value), "shape", None) == _as_shape(init_args[0]):
        return
    expected = jax.eval_shape(
        lambda key: init_fn(key, *init_args, **init_kwargs), jax.random.key(0)
    )
    for found, wanted in zip(jax.tree.leaves(value), jax.tree.leaves(expected), strict=False):
        if jax.numpy.shape(found) != wanted.shape:
            found = jax.numpy.shape(found)
            raise ScopeParamShapeError(name, scope.path_text, found, wanted.shape)


def _as_shape(x: Any) -> tuple[int, ...] | None:
    is_shape = isinstance(x, tuple | list) and {int}.issuperset(map(type, x))
    return tuple(x) if is_shape else None
