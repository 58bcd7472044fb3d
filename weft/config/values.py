"""What a config field's value consists of, how it is copied and when two are equal.

A value is a tree. Its inner nodes are configs, dicts, lists, tuples, named tuples, dataclasses and
attrs instances; everything else is a leaf. `parts` opens a node, and every walk over configs
(copying, comparing, validating, visiting, writing as text) goes through it.

Configs hold values, not references: what is assigned is copied, so that a config that was put in
two places can be changed in one of them. A leaf that cannot change, or cannot be copied, is shared.
"""

import copy
import enum
import functools
import operator
import types
from typing import Any


class ConfigNode:
    """What these walks need to know of a config, whose class is defined on top of them."""

    __slots__ = ()

    # Where each field was set last.
    _origins: dict[str, Any]
    # The field that names what is made from the config: its class or function.
    _target: str | None = None

    def _fields(self) -> dict[str, Any]:
        """The fields by name, each with a `default()`."""
        raise NotImplementedError(type(self))

    def _field_values(self) -> dict[str, Any]:
        """The values by field name, sorted by name."""
        raise NotImplementedError(type(self))

    def _title(self) -> str:
        """Its class as errors name it."""
        raise NotImplementedError(type(self))

    def _copy_to(self, place: str) -> "ConfigNode":
        """A copy that knows `place`, its path from the outermost config around it."""
        raise NotImplementedError(type(self))


def is_named_tuple(x: Any) -> bool:
    """Returns whether `x` is an instance of a named tuple class."""
    return isinstance(x, tuple) and isinstance(getattr(type(x), "_fields", None), tuple)


def is_attrs(x: Any) -> bool:
    """Returns whether `x` is an instance of an attrs class (a config is none)."""
    return hasattr(type(x), "__attrs_attrs__") and not isinstance(x, ConfigNode)


def is_dataclass(x: Any) -> bool:
    """Returns whether `x` is an instance of a dataclass."""
    return hasattr(type(x), "__dataclass_fields__")


def record_fields(x: Any) -> list[str] | None:
    """Returns the field names of a named tuple, dataclass or attrs instance, None of others."""
    if is_named_tuple(x):
        return list(type(x)._fields)
    if is_attrs(x):
        return [field.name for field in type(x).__attrs_attrs__ if hasattr(x, field.name)]
    if is_dataclass(x):
        # Pseudo-fields (ClassVar, InitVar) carry another kind; their instances hold no value.
        return [
            name
            for name, field in type(x).__dataclass_fields__.items()
            if field._field_type.name == "_FIELD" and hasattr(x, name)
        ]
    return None


def parts(x: Any) -> list[tuple[str, Any]] | None:
    """Opens a value.

    Returns:
        Pairs of a path suffix and a child (`[2]`, `['a']`, `.rate`), or None where `x` is a leaf.
    """
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
# Arrays, dtypes, meshes, specs: immutable, and a deep copy of an array would cost device memory.
_SHARED_PACKAGES = frozenset({"jax", "jaxlib", "ml_dtypes"})


def copy_value(x: Any, place: str = "") -> Any:
    """Copies a value as deep as it can be changed.

    Args:
        x: the value.
        place: its path, which the configs in the copy remember for errors.
    """
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
        # A lock, a handle, a client of some service: it can only be shared.
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
        # Past the __setattr__ of a frozen class: nobody else has seen this copy yet.
        object.__setattr__(result, name, child)
    return result


def replace_part(x: Any, step: Any, child: Any) -> Any:
    """Returns a copy of a container or record with one child replaced, or added to a dict.

    Args:
        x: a dict, list, tuple, named tuple, dataclass or attrs instance.
        step: the key, index or field name of the child.
        child: the new child.
    """
    if isinstance(x, dict):
        return {**x, step: child}
    if record_fields(x) is not None:
        return _replace_fields(x, {step: child})
    children = list(x)
    children[step] = child
    return type(x)(children)


def values_equal(a: Any, b: Any) -> bool:
    """Compares two values by what they hold; NaN equals NaN, arrays compare as wholes."""
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
            # Two copies of one plain object are the same value.
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
    """Whether equality of this class is that of `object`: the same object and nothing else."""
    return type(x).__eq__ is object.__eq__
