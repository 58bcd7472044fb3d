"""Config values: structure, copies, equality, traversals and paths.

A value is a tree whose inner nodes are configs, dicts, lists, tuples, named tuples, dataclasses and
attrs instances; all other values are leaves. All traversals (copying, comparing, validating,
visiting, writing as text) use `child_items`. Assigned values are copied, so that a config assigned
twice can be changed independently. Leaves that are immutable, or cannot be copied, are shared.

A path, such as `model.layers[2].dropout.rate` or `rules['bias']`, is a sequence of steps: field
names or dict keys as strings, indices as integers. Setting a value inside a container sets the
field around it, whose type is then checked as a whole.
"""

import copy
import enum
import functools
import operator
import re
import types
from collections.abc import Callable, Sequence
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    NoReturn,
    Self,
    TypeVar,
    Union,
)

from weft.errors import (
    ConfigError,
    RequiredFieldMissingError,
    UnknownFieldError,
    did_you_mean,
)

T = TypeVar("T")

Value = Any
"""What a field may hold: a config, a container, a record, or a leaf of any class."""
Step = Any
"""Step of a path: the name of a field, the key of a dict, an index."""
Path = str | Sequence[Step]


class RequiredFieldValue:
    """Type of `REQUIRED`, its only instance.

    It is false, so that `cfg.x or fallback` treats an unset field as absent.
    """

    _only: "RequiredFieldValue | None" = None

    def __new__(cls) -> "RequiredFieldValue":
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cls._only

    def __bool__(self) -> bool:
        return False

    def __reduce__(self) -> str:
        return "REQUIRED"  # copies and pickles are this instance, too

    def __repr__(self) -> str:
        return "REQUIRED"

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise RequiredFieldMissingError(
            "A config field that is still REQUIRED was called as a function. Set the field "
            "before the config is used."
        )


REQUIRED: Any = RequiredFieldValue()
"""Default of a field without a sensible one; `instantiate` raises an error for it."""

if TYPE_CHECKING:
    # Code reads required fields after they were set, so type checkers see the plain type.
    Required = Annotated[T, REQUIRED]
    """`Required[int]`: an int, or not yet set."""
else:
    Required = Union[T, RequiredFieldValue]  # noqa: UP007 - `T | X` has no subscript before 3.14
"""`Required[int]`: an int, or not yet set."""


class UnreadValue:
    """Value of a field whose text cannot be read, such as data that a program held.

    `from_text(…, keep_unreadable=True)` keeps it, for what needs only other fields. It is written
    as the text that it was read from, and `instantiate` of its config raises `error`.
    """

    def __init__(self, text: str, error: ConfigError):
        self.text = text
        self.error = error

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, UnreadValue):
            return NotImplemented
        return self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __repr__(self) -> str:
        return self.text

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise self.error


class InMemory(Generic[T]):
    """Value that exists in this program only, such as data or a model, as the value of a field.

    Copies of a config share it. Two are equal if they have the same type and description. A text
    shows the description and cannot be read: the config is made by a program.

    Args:
        description: what the value is, on one line; it has all that must be the same for a run to
            continue, and no addresses.

    >>> table = InMemory({"a": 1}, "a table with 1 row")
    >>> table, table == InMemory({}, "a table with 1 row")
    (<a table with 1 row>, True)
    """

    def __init__(self, value: T, description: str):
        self.value = value
        self.description = description

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, InMemory) or type(self) is not type(other):
            return NotImplemented
        return self.description == other.description

    def __hash__(self) -> int:
        return hash(self.description)

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __repr__(self) -> str:
        return f"<{self.description}>"


class ConfigNode:
    """Interface of configs that this module needs."""

    __slots__ = ()

    # Origin of each field's value, of a class that is defined above this module.
    _origins: dict[str, Any]
    # The field with the configured class or function.
    _target: str | None = None

    if TYPE_CHECKING:  # defined by `ConfigBase`

        def _fields(self) -> dict[str, Any]: ...
        def _field_values(self) -> dict[str, Value]: ...
        def _label(self) -> str: ...
        def _copy_to(self, path: str) -> "ConfigNode": ...


def is_named_tuple(x: Value) -> bool:
    """Returns whether `x` is an instance of a named tuple class."""
    return isinstance(x, tuple) and isinstance(
        getattr(type(x), "_fields", None), tuple
    )


def is_attrs(x: Value) -> bool:
    """Returns whether `x` is an instance of an attrs class (configs are not)."""
    return hasattr(type(x), "__attrs_attrs__") and not isinstance(x, ConfigNode)


def is_dataclass(x: Value) -> bool:
    """Returns whether `x` is an instance of a dataclass."""
    return hasattr(type(x), "__dataclass_fields__")


def record_fields(x: Value) -> list[str] | None:
    """Returns the field names of a named tuple, dataclass or attrs instance, else None."""
    if is_named_tuple(x):
        return list(type(x)._fields)
    if is_attrs(x):
        names = [field.name for field in type(x).__attrs_attrs__]
    elif is_dataclass(x):
        names: list[str] = []
        for name, field in type(x).__dataclass_fields__.items():
            # Pseudo-fields (ClassVar, InitVar) have another kind, and no value in instances.
            if field._field_type.name == "_FIELD":
                names.append(name)
    else:
        return None
    return [name for name in names if hasattr(x, name)]


def child_items(x: Value) -> list[tuple[str, Value]] | None:
    """Returns (path suffix, child) pairs (`[2]`, `['a']`, `.rate`), or None for a leaf."""
    if isinstance(x, ConfigNode):
        fields = x._field_values()
        return [(f".{name}", child) for name, child in fields.items()]
    if isinstance(x, dict):
        return [(f"[{key!r}]", child) for key, child in x.items()]
    names = record_fields(x)
    if names is not None:
        return [(f".{name}", getattr(x, name)) for name in names]
    if type(x) in (list, tuple):
        return [(f"[{i}]", child) for i, child in enumerate(x)]
    return None


def join_path(path: str, suffix: str) -> str:
    """Appends a suffix of `child_items` to a path, which may be empty.

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
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
)
# Arrays, dtypes, meshes, specs: immutable, and copies of arrays would use device memory.
_SHARED_PACKAGES = frozenset({"jax", "jaxlib", "ml_dtypes"})


@functools.lru_cache(1024)
def _is_shared(cls: type) -> bool:
    return (
        issubclass(cls, IMMUTABLE)
        or cls.__module__.partition(".")[0] in _SHARED_PACKAGES
    )


def copy_value(x: Value, path: str = "") -> Value:
    """Copies the mutable parts of a value; `path` is that of the copy."""
    if _is_shared(type(x)):
        return x
    if isinstance(x, ConfigNode):
        return x._copy_to(path)
    if type(x) is dict:
        copied_dict: dict[Step, Value] = {}
        for key, child in x.items():
            copied_dict[key] = copy_value(child, f"{path}[{key!r}]")
        return copied_dict
    if type(x) in (list, tuple):
        children: list[Value] = []
        for i, child in enumerate(x):
            children.append(copy_value(child, f"{path}[{i}]"))
        if type(x) is list:
            return children
        is_same = all(map(operator.is_, x, children))
        return x if is_same else tuple(children)
    if record_fields(x) is not None:
        return _copy_record(x, path)
    if _has_identity_equality(x) and not hasattr(x, "__dict__"):
        return x
    try:
        return copy.deepcopy(x)
    except Exception:
        # A lock, a handle or a client cannot be copied.
        return x


def _copy_record(x: T, path: str) -> T:
    changes: dict[str, Value] = {}
    for name in record_fields(x) or ():
        value = getattr(x, name)
        copied_value = copy_value(value, f"{path}.{name}")
        if copied_value is not value:
            changes[name] = copied_value
    if not changes and type(x).__hash__ is not None:
        return x  # a frozen record of immutable values
    try:
        return _replace_fields(x, changes)
    except Exception:
        return x


def _replace_fields(x: T, changes: dict[str, Value]) -> T:
    if is_named_tuple(x):
        return x._replace(**changes)  # type: ignore[attr-defined]
    result = copy.copy(x)
    for name, child in changes.items():
        # Bypasses the __setattr__ of a frozen class, as the copy is not yet shared.
        object.__setattr__(result, name, child)
    return result


def replace_part(x: Value, step: Step, child: Value) -> Value:
    """Returns a copy of a container or record with one child replaced, or added to a dict."""
    if isinstance(x, dict):
        return {**x, step: child}
    if record_fields(x) is not None:
        return _replace_fields(x, {step: child})
    children = list(x)
    children[step] = child
    return type(x)(children)


def values_equal(a: Value, b: Value) -> bool:
    """Compares two values by contents; NaN equals NaN, arrays compare as a whole."""
    if a is b:
        return True
    if isinstance(a, ConfigNode) or isinstance(b, ConfigNode):
        if type(a) is not type(b):
            return False
        return _all_equal(a._field_values(), b._field_values())
    if isinstance(a, functools.partial) and isinstance(b, functools.partial):
        return values_equal(
            (a.func, a.args, dict(a.keywords)),
            (b.func, b.args, dict(b.keywords)),
        )
    if isinstance(a, dict) and isinstance(b, dict):
        return type(a) is type(b) and _all_equal(a, b)
    if type(a) is type(b) and not isinstance(a, IMMUTABLE):
        a_parts, b_parts = child_items(a), child_items(b)
        if a_parts is not None and b_parts is not None:
            return _all_equal(dict(a_parts), dict(b_parts))
        if _has_identity_equality(a) and hasattr(a, "__dict__"):
            # Copies of one plain object are equal.
            return _all_equal(vars(a), vars(b))
    if isinstance(a, float) and isinstance(b, float) and a != a and b != b:
        return True
    if isinstance(a, complex) and isinstance(b, complex):
        return values_equal((a.real, a.imag), (b.real, b.imag))
    return _leaves_equal(a, b)


def _all_equal(a: dict[Step, Value], b: dict[Step, Value]) -> bool:
    if a.keys() != b.keys():
        return False
    return all(values_equal(a[key], b[key]) for key in a)


def _leaves_equal(a: Value, b: Value) -> bool:
    shape = None
    if not isinstance(a, type):
        shape = getattr(a, "shape", None)
    if not isinstance(b, type) and shape != getattr(b, "shape", None):
        return False
    try:
        is_equal: Any = a == b
        if isinstance(shape, tuple) and hasattr(is_equal, "all"):
            is_equal = is_equal.all()  # an array of one truth value per element
        return bool(is_equal)
    except Exception:
        return False


def _has_identity_equality(x: Value) -> bool:
    return type(x).__eq__ is object.__eq__


Pairs = list[tuple[str, Value]]
"""Paths and values of a node's children."""


def visit(
    root: Value,
    *,
    visit_fn: Callable[[str, Value], None],
    enter_fn: Callable[[str, Value, Pairs | None], Pairs | None] | None = None,
    exit_fn: Callable[[str, Value], None] | None = None,
    path: str = "",
) -> None:
    """Traverses a value depth first. See `ConfigBase.visit`."""
    children = child_items(root)
    if children is not None:
        children = [(join_path(path, s), child) for s, child in children]
    if enter_fn is not None:
        children = enter_fn(path, root, children)
    if children is None:
        visit_fn(path, root)
        return
    for child_path, child in children:
        visit(
            child,
            visit_fn=visit_fn,
            enter_fn=enter_fn,
            exit_fn=exit_fn,
            path=child_path,
        )
    if exit_fn is not None:
        exit_fn(path, root)


def to_dict(value: Value) -> Value:
    """Converts nested configs to dicts. See `ConfigBase.to_dict`."""
    if isinstance(value, ConfigNode):
        value = value._field_values()
    if isinstance(value, dict):
        return {key: to_dict(child) for key, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(to_dict, value))
    names = record_fields(value)
    if names is None:
        return value
    fields: dict[str, Value] = {}
    for name in names:
        if _is_shown(value, name):
            fields[name] = to_dict(getattr(value, name))
    return fields


def _is_shown(record: Value, name: str) -> bool:
    """Returns whether a field of a record is in dicts, as its metadata say."""
    if is_attrs(record):
        # The attributes are a named tuple of the class.
        field = getattr(type(record).__attrs_attrs__, name)
    elif is_dataclass(record):
        field = type(record).__dataclass_fields__[name]
    else:
        return True
    return not field.metadata.get("skip_serialization", False)


def to_flat_dict(
    root: ConfigNode, *, omit_default_values: Sequence[Value]
) -> dict[str, Value]:
    """Returns the leaves by path. See `ConfigBase.to_flat_dict`."""
    flat: dict[str, Value] = {}

    def enter(path: str, value: Value, children: Pairs | None) -> Pairs | None:
        if isinstance(value, ConfigNode):
            # Fields are omitted here rather than at leaves, because their defaults matter.
            shown_fields: Pairs = []
            for name, child in value._field_values().items():
                default = value._fields()[name].default()
                if not _is_omitted(default, child, omit_default_values):
                    shown_fields.append((join_path(path, f".{name}"), child))
            return shown_fields
        names = record_fields(value)
        if names is not None:
            # As of the dict that `to_dict` makes of it.
            children = []
            for name in names:
                if _is_shown(value, name):
                    children.append((f"{path}[{name!r}]", getattr(value, name)))
        return children or None  # an empty container is a leaf

    visit(root, visit_fn=flat.__setitem__, enter_fn=enter)
    return flat


def _is_omitted(default: Value, value: Value, values: Sequence[Value]) -> bool:
    if isinstance(value, ConfigNode):
        return False
    if not values_equal(value, default):
        return False
    return any(values_equal(default, other) for other in values)


_STEP = re.compile(
    r"""\.?(?P<name>[A-Za-z_]\w*)        # a field
      | \[(?P<key>-?\d+
               |'(?:[^'\\]|\\.)*'
               |"(?:[^"\\]|\\.)*")\]     # an index, or the key of a dict
    """,
    re.VERBOSE,
)


def parse_path(path: Path) -> list[Step]:
    """Parses a path into its steps; sequences are returned unchanged.

    Raises UnknownFieldError if the text is malformed.

    >>> parse_path("model.layers[2].rules['bias']")
    ['model', 'layers', 2, 'rules', 'bias']
    """
    if not isinstance(path, str):
        return list(path)
    from ast import literal_eval

    steps: list[Step] = []
    position = 0
    while position < len(path):
        match = _STEP.match(path, position)
        has_dot = path[position] == "."
        needs_dot = (
            match is not None and match["name"] is not None and position > 0
        )
        if match is None or has_dot != needs_dot:
            raise UnknownFieldError(
                f"{path!r} is not a path: cannot read {path[position:]!r}. Write names with "
                "dots and indices in brackets, such as model.layers[2].rate."
            )
        steps.append(match["name"] or literal_eval(match["key"]))
        position = match.end()
    return steps


def walk_path(value: Value, path: Path) -> list[tuple[str, Value]]:
    """Returns (path, value) pairs from the start to the end of a path."""
    trail = [("", value)]
    for step in parse_path(path):
        parent, value = trail[-1]
        try:
            suffix, child = _step_into(value, step)
        except UnknownFieldError as error:
            raise UnknownFieldError(
                f"{parent}: {error}" if parent else str(error)
            ) from None
        trail.append((join_path(parent, suffix), child))
    return trail


def _step_into(value: Value, step: Step) -> tuple[str, Value]:
    """Returns the suffix that a step appends to a path, and the value there."""
    if isinstance(value, dict):
        if step in value:
            return f"[{step!r}]", value[step]
        raise UnknownFieldError(
            f"unknown key {step!r}. {did_you_mean(str(step), map(str, value))}"
        )
    if isinstance(value, ConfigNode):
        names = value._fields()
        title = value._label()
    else:
        names = record_fields(value)
        title = type(value).__qualname__
    if names is not None:
        if step in names:
            return f".{step}", getattr(value, step)
        raise UnknownFieldError(
            f"unknown field {step!r} in {title}. {did_you_mean(str(step), names)}"
        )
    if isinstance(value, list | tuple):
        if isinstance(step, int) and -len(value) <= step < len(value):
            return f"[{step % len(value)}]", value[step]
        raise UnknownFieldError(
            f"there is no [{step!r}] in a {type(value).__name__} of length {len(value)}. "
            f"Write an index from 0 to {len(value) - 1} in brackets."
        )
    state = f"it is {value!r:.80}"
    if value is REQUIRED:
        state = "it is still REQUIRED"
    raise UnknownFieldError(f"there is no {step!r} in it, since {state}.")


def get_path(value: Value, path: Path) -> Value:
    """Returns the value at a path. See `ConfigBase.get_recursively`."""
    _, target = walk_path(value, path)[-1]
    return target


def set_path(config: ConfigNode, path: Path, value: Value) -> None:
    """Sets the value at a path. See `ConfigBase.set_recursively`."""
    owner, (name, *inner_steps) = split_path(config, path)
    # A value inside of a field's container: from the inside out, each container gets a new part.
    while inner_steps:
        step = inner_steps.pop()
        container = get_path(owner, [name, *inner_steps])
        value = replace_part(container, step, value)
    setattr(owner, name, value)


def split_path(config: ConfigNode, path: Path) -> tuple[ConfigNode, list[Step]]:
    """Returns the innermost config on a path and the remaining steps; the last may be a new key."""
    steps = parse_path(path)
    if not steps:
        raise UnknownFieldError("The path is empty. Name at least one field.")
    owner = config
    steps_to_owner = 0
    node: Value = config
    for i, (_, node) in enumerate(walk_path(config, steps[:-1])):
        if isinstance(node, ConfigNode):
            owner = node
            steps_to_owner = i
    if not isinstance(node, dict):
        walk_path(config, steps)  # raises an error for an unknown last step
    return owner, steps[steps_to_owner:]
