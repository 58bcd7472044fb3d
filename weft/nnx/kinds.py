"""Kinds of variables, which are classes, and their names, which are Linen's collections."""

from __future__ import annotations

from typing import Any, TypeVar

from weft.errors import VariableTypeError
from weft.nnx.variables import Variable

A = TypeVar("A")
Kind = TypeVar("Kind", bound=type[Variable[Any]])
_TYPES: dict[str, type[Variable[Any]]] = {}
_MISSING: Any = object()


def register_variable_name(name: str, typ: Any = _MISSING, *, overwrite: bool = False) -> Any:
    """Registers a name for a kind of variable.

    Args:
        typ: the class; if omitted, returns a class decorator.
        overwrite: whether to replace another class of that name.

    Raises:
        VariableTypeError: if the name is taken.

    Example:
        >>> @register_variable_name("moving_averages")
        ... class MovingAverage(Variable): pass
        >>> variable_type_from_name("moving_averages") is MovingAverage
        True
    """
    if typ is _MISSING:

        def decorator(typ: Kind) -> Kind:
            return register_variable_name(name, typ, overwrite=overwrite)

        return decorator
    if name in _TYPES and not overwrite:
        raise VariableTypeError(
            f"{name!r} is already the name of {_TYPES[name].__qualname__}, and was given for "
            f"{typ.__qualname__}; use another, or give overwrite=True."
        )
    _TYPES[name] = typ
    return typ


def variable_type_from_name(
    name: str, /, *, base: type[Variable[Any]] = Variable, allow_register: bool = False
) -> type[Variable[Any]]:
    """Returns the kind of variable with a name.

    With `allow_register`, creates a class, derived from `base`, for an unknown name.

    Raises:
        VariableTypeError: if the name is unknown.
    """
    if name not in _TYPES:
        if not allow_register:
            raise VariableTypeError(
                f"no kind of variable has the name {name!r}; known names: "
                f"{', '.join(sorted(_TYPES))}. Give allow_register=True to make one."
            )
        return register_variable_name(name, type(name, (base,), {"__slots__": ()}))
    return _TYPES[name]


def variable_name_from_type(typ: type[Variable[Any]], /, *, allow_register: bool = False) -> str:
    """Returns the name of a kind of variable; with `allow_register`, registers the class name.

    Raises:
        VariableTypeError: if it has no name.
    """
    for name, known in _TYPES.items():
        if known is typ:
            return name
    if not allow_register:
        raise VariableTypeError(
            f"the kind of variable {typ.__qualname__} has no name; give it one with "
            f"nnx.register_variable_name({typ.__name__!r}, {typ.__name__}), or give "
            "allow_register=True."
        )
    register_variable_name(typ.__name__, typ)
    return typ.__name__


@register_variable_name("params")
class Param(Variable[A]):
    """Trainable parameter."""

    __slots__ = ()


@register_variable_name("batch_stats")
class BatchStat(Variable[A]):
    """Statistic of batches, such as a running mean."""

    __slots__ = ()


@register_variable_name("cache")
class Cache(Variable[A]):
    """Value cached between calls, such as keys and values of attention."""

    __slots__ = ()


@register_variable_name("intermediates")
class Intermediate(Variable[A]):
    """Sown value."""

    __slots__ = ()


@register_variable_name("perturbations")
class Perturbation(Intermediate[A]):
    """Zeros added to a value, whose gradient is the value's."""

    __slots__ = ()
