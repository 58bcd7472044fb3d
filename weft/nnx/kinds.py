"""Kinds of variables, and their names: what a variable is for is its class.

Collections of Linen have names where NNX has classes, so each kind can be known by a name, and a
name that no kind has can become one.
"""

from __future__ import annotations

from typing import Any, TypeVar

from weft.errors import VariableTypeError
from weft.nnx.variables import Variable

A = TypeVar("A")
Kind = TypeVar("Kind", bound=type[Variable[Any]])
_TYPES: dict[str, type[Variable[Any]]] = {}
_MISSING: Any = object()


def register_variable_name(name: str, typ: Any = _MISSING, *, overwrite: bool = False) -> Any:
    """Gives a kind of variable a name.

    Args:
        name: the name.
        typ: the class; without one, a decorator of the class.
        overwrite: whether another class may have had the name.

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
            f"{name!r} is the name of {_TYPES[name].__qualname__} already, and was to be that of "
            f"{typ.__qualname__}; take another, or give overwrite=True."
        )
    _TYPES[name] = typ
    return typ


def variable_type_from_name(
    name: str, /, *, base: type[Variable[Any]] = Variable, allow_register: bool = False
) -> type[Variable[Any]]:
    """The kind of variable that has a name.

    Args:
        name: the name.
        base: what a new class is derived from.
        allow_register: whether a new class is made for a name that none has.

    Raises:
        VariableTypeError: if no class has the name.
    """
    if name not in _TYPES:
        if not allow_register:
            raise VariableTypeError(
                f"no kind of variable has the name {name!r}; there are: "
                f"{', '.join(sorted(_TYPES))}. Give allow_register=True to make one."
            )
        return register_variable_name(name, type(name, (base,), {"__slots__": ()}))
    return _TYPES[name]


def variable_name_from_type(typ: type[Variable[Any]], /, *, allow_register: bool = False) -> str:
    """The name of a kind of variable.

    Args:
        typ: the class.
        allow_register: whether a class without a name is given that of the class.

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
    """A parameter: what is learned."""

    __slots__ = ()


@register_variable_name("batch_stats")
class BatchStat(Variable[A]):
    """A statistic of batches, such as a running mean."""

    __slots__ = ()


@register_variable_name("cache")
class Cache(Variable[A]):
    """What is kept from one call to the next, such as keys and values of attention."""

    __slots__ = ()


@register_variable_name("intermediates")
class Intermediate(Variable[A]):
    """A value that was sown."""

    __slots__ = ()


@register_variable_name("perturbations")
class Perturbation(Intermediate[A]):
    """What is added to a value, so that its gradient is the value's."""

    __slots__ = ()
