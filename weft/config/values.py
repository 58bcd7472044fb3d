"""Structure, copies and equality of config values.

A value is a tree whose inner nodes are configs, dicts, lists, tuples, named tuples, dataclasses and
attrs instances; all other values are leaves. All traversals (copying, comparing, validating,
visiting, writing as text) use `parts`.

Assigned values are copied, so that a config assigned twice can be changed independently. Leaves
that are immutable, or cannot be copied, are shared.
"""

import copy
import enum
import functools
import operator
import types
from typing import Any


class ConfigNode:
    """Interface of configs that this module needs."""

    __slots__ = ()

    # Origin of each field's value.
    _origins: dict[str, Any]
    # The field with the configured class or function.
    _target: str | None = None

    def _fields(self) -> dict[str, Any]:
        """Returns the fields by name, each with a `default()`."""
        raise NotImplementedError(type(self))

    def _field_values(self) -> dict[str, Any]:
        """Returns the values by field name, sorted."""
        raise NotImplementedError(type(self))

    def _title(self) -> str:
        """Returns the class name for errors."""
        raise NotImplementedError(type(self))

    def _copy_to(self, place: str) -> "ConfigNode":
        """Returns a copy with the path `place`."""
        raise NotImplementedError(type(self))


def is_named_tuple(x: Any) -> bool:
    """Returns whether `x` is an instance of a named tuple class."""
    return isinstance(x, tuple) and isinstance(getattr(type(x), "_fields", None), tuple)


def is_attrs(x: Any) -> bool:
    """Returns whether `x` is an instance of an attrs class (configs are not)."""
    return hasattr(type(x), "__attrs_attrs__") and not isinstance(x, ConfigNode)


def is_dataclass(x: Any) -> bool:
    """Returns whether `x` is an instance of a dataclass."""
    return hasattr(type(x), "__dataclass_fields__")


def record_fields(x: Any) -> list[str] | None:
    """Returns the field names of a named tuple, dataclass or attrs instance, else None."""
    if is_named_tuple(x):
        return list(type(x)._fields)
    if is_attrs(x):
        return [field.name for field in type(x).__attrs_attrs__ if hasattr(x, field.name)]
    if is_dataclass(x):
        # Pseudo-fields (ClassVar, InitVar) have another kind, and no value in instances.
        return [
            name
            for name, field in type(x).__dataclass_fields__.items()
            if field._field_type.name == "_FIELD" and hasattr(x, name)
        ]
    return None


def parts(x: Any) -> list[tuple[str, Any]] | None:
    """Returns (path suffix, child) pairs (`[2]`, `['a']`, `.rate`), or None for a leaf."""
    if isinstance(x, ConfigNode):
        return [(f".{name}", child) for name, child in x._field_values().items()]
    if isinstance(x, dict):
        return [(f"[{key!r}]", child) for key, child in x.items()]
    names = record_fields(x)
    if names is not None:
        return [(f".{name}", getattr(x, name)) for name in names]
    if type(x) in (list, tuple):
        return [(f"[{i}]", child) for i, child in enumerate(x)]
    return None


def join_path(path: str, suffix: str) -> str:
    """Appends a suffix of `parts` to a path, which may be empty.

    >>> join_path("", ".model"), join_path("model", ".layers"), join_path("layers", "[2]")
    ('model', 'model.layers', 'layers[2]')
    """
    return path + suffix if path else suffix.removeprefix(".")


IMMUTABLE = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    enum.Enum,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
)
# Arrays, dtypes, meshes, specs: immutable, and copies of arrays would use device memory.
_SHARED_PACKAGES = frozenset({"jax", "jaxlib", "ml_dtypes"})


def copy_value(x: Any, place: str = "") -> Any:
    """Copies the mutable parts of a value."""
    if isinstance(x, ConfigNode):
        return x._copy_to(place)
    if isinstance(x, IMMUTABLE) or type(x).__module__.partition(".")[0] in _SHARED_PACKAGES:
        return x
    if type(x) is dict:
        return {key: copy_value(child, f"{place}[{key!r}]") for key, child in x.items()}
    if type(x) in (list, tuple):
        children = [copy_value(child, f"{place}[{i}]") for i, child in enumerate(x)]
        if type(x) is list:
            return children
        return x if all(map(operator.is_, x, children)) else tuple(children)
    if record_fields(x) is not None:
        return _copy_record(x, place)
    if _has_identity(x) and not hasattr(x, "__dict__"):
        return x
    try:
        return copy.deepcopy(x)
    except Exception:
        # A lock, a handle or a client cannot be copied.
        return x


def _copy_record(x: Any, place: str) -> Any:
    old = dict(parts(x) or ())
    new = {suffix[1:]: copy_value(child, place + suffix) for suffix, child in old.items()}
    changed = {name: child for name, child in new.items() if child is not old[f".{name}"]}
    if not changed and type(x).__hash__ is not None:
        return x  # a frozen record of immutable values
    try:
        return _replace_fields(x, changed)
    except Exception:
        return x


def _replace_fields(x: Any, changes: dict[str, Any]) -> Any:
    if is_named_tuple(x):
        return x._replace(**changes)
    result = copy.copy(x)
    for name, child in changes.items():
        # Bypasses the __setattr__ of a frozen class, as the copy is not yet shared.
        object.__setattr__(result, name, child)
    return result


def replace_part(x: Any, step: Any, child: Any) -> Any:
    """Returns a copy of a container or record with one child replaced, or added to a dict.

    Args:
        x: a dict, list, tuple, named tuple, dataclass or attrs instance.
    """
    if isinstance(x, dict):
        return {**x, step: child}
    if record_fields(x) is not None:
        return _replace_fields(x, {step: child})
    children = list(x)
    children[step] = child
    return type(x)(children)


def values_equal(a: Any, b: Any) -> bool:
    """Compares two values by contents; NaN equals NaN, arrays compare as a whole."""
    if a is b:
        return True
    if isinstance(a, ConfigNode) or isinstance(b, ConfigNode):
        if type(a) is not type(b):
            return False
        return _all_equal(a._field_values(), b._field_values())
    if isinstance(a, functools.partial) and isinstance(b, functools.partial):
        return values_equal((a.func, a.args, dict(a.keywords)), (b.func, b.args, dict(b.keywords)))
    if isinstance(a, dict) and isinstance(b, dict):
        return type(a) is type(b) and _all_equal(a, b)
    if type(a) is type(b) and not isinstance(a, IMMUTABLE):
        a_parts, b_parts = parts(a), parts(b)
        if a_parts is not None and b_parts is not None:
            return _all_equal(dict(a_parts), dict(b_parts))
        if _has_identity(a) and hasattr(a, "__dict__"):
            # Copies of one plain object are equal.
            return _all_equal(vars(a), vars(b))
    if isinstance(a, float) and isinstance(b, float) and a != a and b != b:
        return True
    if isinstance(a, complex) and isinstance(b, complex):
        return values_equal((a.real, a.imag), (b.real, b.imag))
    return _leaves_equal(a, b)


def _all_equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(values_equal(a[key], b[key]) for key in a)


def _leaves_equal(a: Any, b: Any) -> bool:
    shape = None if isinstance(a, type) else getattr(a, "shape", None)
    if not isinstance(b, type) and shape != getattr(b, "shape", None):
        return False
    try:
        equal: Any = a == b
        return bool(equal.all() if isinstance(shape, tuple) and hasattr(equal, "all") else equal)
    except Exception:
        return False


def _has_identity(x: Any) -> bool:
    """Returns whether a class inherits equality from `object`."""
    return type(x).__eq__ is object.__eq__
