"""`ConfigBase`: a mutable set of named, typed fields.

    cfg = Linear.default_config().set(dim=8)   # fields by name, checked when set
    cfg.init = other_cfg                       # by value: cfg.init is a copy
    wide = cfg.clone(dim=64)                   # also a copy

Configs form a tree, also through lists and dicts. For errors, a config stores its path from the
root and the origin of each value: the source line that set it, which takes a microsecond to find.

Fields are in the instance's `__dict__`, everything else is in slots. A *view* (`_frozen_view`) is a
config with read-only fields whose values are copied from another config on first access, which
makes `self.config` cheap to read.
"""

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    NamedTuple,
    ParamSpec,
    Self,
    TypeVar,
    dataclass_transform,
)

from weft._door import current_door
from weft.config import validation, values
from weft.config.fields import Field, check_type, define_fields
from weft.config.values import Value
from weft.errors import FrozenConfigError, UnknownFieldError, did_you_mean


class Origin(NamedTuple):
    """Place where a value was set.

    Attributes:
        file: path of the file, or a description such as "command line".
        line: line number; 0 if there are no lines.

    Its text names a cell of a notebook as IPython does, `In[3]:1`.
    """

    file: str
    line: int = 0

    def __str__(self) -> str:
        file = _cell_of_notebook(self.file) or self.file
        if os.path.isabs(file):
            relative = os.path.relpath(file)
            if not relative.startswith(".."):
                file = relative
        if self.line:
            return f"{file}:{self.line}"
        return file


def _cell_of_notebook(file: str) -> str | None:
    """Returns IPython's name of the cell whose code has this file name."""
    if "IPython" not in sys.modules:
        return None
    shell = sys.modules["IPython"].get_ipython()
    if shell is None:
        return None
    kind_and_name = shell.compile.format_code_name(file)
    if kind_and_name is None:
        return None
    _, name = kind_and_name
    return name


def caller_origin() -> Origin | None:
    """Returns the innermost line outside of this package, or None."""
    frame = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith("weft.config"):
            return Origin(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def origin(config: values.ConfigNode, path: values.Path) -> Origin | None:
    """Returns where the value at a path was last set; None for a default.

    Args:
        path: a path, as in `ConfigBase.get_recursively`. Inside of a list, a dict or a record it
            refers to the enclosing field.

    Raises UnknownFieldError if the path does not exist.
    """
    values.get_path(config, path)
    owner, steps = values.split_path(config, path)
    return owner._origins.get(steps[0])  # type: ignore[attr-defined]


_REPR_LIMIT = 1500


def value_repr(value: Value) -> str:
    """Formats a leaf, with dotted names for classes and functions."""
    name = getattr(value, "__qualname__", None)
    module = getattr(value, "__module__", None)
    if not isinstance(name, str) or not isinstance(module, str):
        return repr(value)
    if module == "builtins":
        return repr(name)
    return repr(f"{module}.{name}")


def _one_line(value: Value, *, all_fields: bool) -> str:
    write = functools.partial(_one_line, all_fields=all_fields)
    if isinstance(value, values.ConfigNode):
        arguments: list[str] = []
        for name, child in value._field_values().items():
            if name == value._target:
                continue
            default = value._fields()[name].default()
            if all_fields or not values.values_equal(child, default):
                arguments.append(f"{name}={write(child)}")
        return f"{value._label()}({', '.join(arguments)})"
    if isinstance(value, dict):
        pairs = [f"{key!r}: {write(child)}" for key, child in value.items()]
        return f"{{{', '.join(pairs)}}}"
    if type(value) in (list, tuple):
        items = ", ".join(map(write, value))
        if type(value) is list:
            return f"[{items}]"
        if len(value) == 1:
            items += ","
        return f"({items})"
    return getattr(value, "__qualname__", None) or repr(value)


_set_slot = object.__setattr__

P = ParamSpec("P")
C = TypeVar("C")

if TYPE_CHECKING:

    class _takes_fields:
        """Type of a method whose keyword arguments are the fields of its config, and its result it.

        `dataclass_transform` gives each config class a constructor with its fields, and a class is
        a `Callable` with the parameters of its constructor: thus `P` are the fields.
        """

        def __init__(self, method: Callable[..., object]): ...
        def __get__(
            self, config: C, config_type: Callable[P, C]
        ) -> Callable[P, C]: ...

else:

    def _takes_fields(method):
        return method


@dataclass_transform(kw_only_default=True)
class ConfigBase(values.ConfigNode):
    """Base of all config classes. The annotated names in the body of a subclass are its fields."""

    __slots__ = (
        "__dict__",
        "__weakref__",
        "_frozen",
        "_origins",
        "_path",
        "_source",
    )
    __hash__ = None  # type: ignore[assignment]  # configs are mutable

    __config_fields__: "dict[str, Field]" = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.__config_fields__ = define_fields(cls)
        if "__getattr__" in vars(cls):
            # A view reads its fields in `__getattr__`, which an override need not do.
            cls._frozen_view = cls._frozen_copy

    def __init__(self, **kwargs: Value):
        self._init_slots()
        for name, field in self._fields().items():
            self.__dict__[name] = field.default(name)
        self.set(**kwargs)

    def _init_slots(
        self, *, path: str = "", origins: dict[str, Origin] | None = None
    ) -> None:
        _set_slot(self, "_frozen", False)
        _set_slot(self, "_origins", origins or {})
        _set_slot(self, "_path", path)
        _set_slot(self, "_source", None)

    def _fields(self) -> dict[str, Field]:
        return type(self).__config_fields__

    def _field_values(self) -> dict[str, Value]:
        return {name: getattr(self, name) for name in sorted(self._fields())}

    # Field access.

    if not TYPE_CHECKING:
        # Type checkers know the fields, and mark the assignment of others.

        def __setattr__(self, name: str, value: Value) -> None:
            field = self._field(name)
            path = values.join_path(self._path, f".{name}")
            if self._frozen:
                raise FrozenConfigError(
                    f"{self._label()} is frozen, because an object was created from it: cannot set "
                    f"{path!r} to {value!r:.80}. Change a copy: cfg = self.config.clone({name}=…)."
                )
            validation.check_value(value, path)
            check_type(value, field, path, label=self._label())
            self.__dict__[name] = values.copy_value(value, path)
            self._record_origin(name)

    def _record_origin(self, name: str) -> None:
        origin = caller_origin()
        if origin is not None:
            self._origins[name] = origin

    def __getattr__(self, name: str) -> Value:
        # Only called if the instance lacks the value: a view's unread field, or an error.
        if name.startswith("_"):
            raise AttributeError(
                f"{type(self).__qualname__!r} object has no attribute {name!r}"
            )
        field = self._field(name)
        path = values.join_path(self._path, f".{name}")
        value = values.copy_value(getattr(self._source, field.name), path)
        self.__dict__[name] = value
        return value

    def __delattr__(self, name: str) -> None:
        raise UnknownFieldError(
            f"{self._label()} needs {name!r}: fields can be set, but not deleted. Set it to "
            "None or REQUIRED."
        )

    def _field(self, name: str) -> Field:
        fields = self._fields()
        if name not in fields:
            place = f" (at {self._path})" if self._path else ""
            advice = self._hint_for_field(name) or did_you_mean(name, fields)
            raise UnknownFieldError(
                f"unknown field {name!r} in {self._label()}{place}. {advice}"
            )
        return fields[name]

    def _hint_for_field(self, name: str) -> str | None:
        """Returns a sentence on what to write instead of a field that programs may know."""
        for cls in type(self).__mro__:
            class_name = cls.__qualname__.removesuffix(".Config")
            hint = current_door().hint_for_name(class_name, name)
            if hint is not None:
                return hint
        return None

    def _label(self) -> str:
        name = type(self).__qualname__
        cls = self.__dict__.get(self._target or "")
        if isinstance(cls, type):
            name = f"{cls.__qualname__}.Config"
        return name.rpartition("<locals>.")[2]

    @_takes_fields
    def set(self, **kwargs: Value) -> Self:
        """Sets fields by name and returns the config itself.

        The `config` of an object is a copy, which this changes, and not the object.

        Raises:
            UnknownFieldError: for an unknown name; no field is set then.
            InvalidConfigValueError: for a value that a config, or this field, cannot hold.
        """
        for name in kwargs:
            self._field(name)
        if self._frozen:
            _set_slot(self, "_origins", dict(self._origins))
            _set_slot(self, "_frozen", False)
        for name, value in kwargs.items():
            setattr(self, name, value)
        return self

    @_takes_fields
    def clone(self, **kwargs: Value) -> Self:
        """Returns an independent copy with the fields `kwargs` set."""
        return self._copy_to(self._path).set(**kwargs)

    def __contains__(self, name: object) -> bool:
        return name in self._fields()

    def __len__(self) -> int:
        return len(self._fields())

    def __bool__(self) -> bool:
        return True

    def keys(self) -> list[str]:
        """Returns the names of the fields, sorted."""
        return sorted(self._fields())

    def items(self) -> list[tuple[str, Value]]:
        """Returns (name, value) pairs of the fields, sorted by name."""
        return list(self._field_values().items())

    # Copies.

    def _copy_to(self, path: str) -> Self:
        copy = object.__new__(type(self))
        copy._init_slots(path=path, origins=dict(self._origins))
        for name in self._fields():
            child_path = values.join_path(path, f".{name}")
            value = getattr(self, name)
            copy.__dict__[name] = values.copy_value(value, child_path)
        return copy

    def _frozen_view(self) -> Self:
        view = object.__new__(type(self))
        view._init_slots(path=self._path, origins=self._origins)
        for name, value in self.__dict__.items():
            if isinstance(value, values.IMMUTABLE):
                view.__dict__[name] = value
        _set_slot(view, "_source", self)
        _set_slot(view, "_frozen", True)
        return view

    def _frozen_copy(self) -> Self:
        copy = self._copy_to(self._path)
        _set_slot(copy, "_frozen", True)
        return copy

    def __copy__(self) -> Self:
        return self._copy_to(self._path)

    def __deepcopy__(self, memo: dict) -> Self:
        return self._copy_to(self._path)

    def __getstate__(self) -> tuple:
        fields = {name: getattr(self, name) for name in self._fields()}
        return fields, dict(self._origins), self._path, self._frozen

    def __setstate__(self, state: tuple) -> None:
        fields, origins, path, frozen = state
        self._init_slots(path=path, origins=origins)
        self.__dict__.update(fields)
        _set_slot(self, "_frozen", frozen)

    # Comparing and showing.

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ConfigBase):
            return NotImplemented
        return values.values_equal(self, other)

    def __repr__(self) -> str:
        """Formats the config on one line; a long one without fields at their defaults."""
        text = _one_line(self, all_fields=True)
        if len(text) > _REPR_LIMIT:
            text = _one_line(self, all_fields=False)
        if len(text) > _REPR_LIMIT:
            text = text[: _REPR_LIMIT - 2] + " …"
        return text

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Shows the config in IPython as its text form, over lines, without defaults."""
        from weft.config import to_text  # its module imports this one

        del cycle
        printer.text(to_text(self, omit_defaults=True))

    def __treescope_repr__(
        self, path: str | None, subtree_renderer: Any
    ) -> Any:
        """Shows the fields in Treescope's trees."""
        from treescope.repr_lib import render_object_constructor

        return render_object_constructor(
            type(self), dict(self.items()), path, subtree_renderer
        )

    def debug_string(
        self,
        *,
        kv_separator: str = ": ",
        field_separator: str = "\n",
        omit_default_values: Sequence[Value] | None = None,
    ) -> str:
        """Returns one `path: value` per leaf of the config, sorted by field name.

        `omit_default_values` is as in `to_flat_dict`, and defaults to None and REQUIRED.
        """
        if omit_default_values is None:
            omit_default_values = (None, values.REQUIRED)
        leaves = values.to_flat_dict(
            self, omit_default_values=omit_default_values
        )
        lines: list[str] = []
        for path, value in leaves.items():
            lines.append(f"{path}{kv_separator}{value_repr(value)}")
        return field_separator.join(lines)

    def to_dict(self) -> dict[str, Value]:
        """Returns the fields as a dict, with nested configs, named tuples and dataclasses as dicts.

        Fields of a dataclass whose metadata have `skip_serialization=True` are left out.
        """
        return values.to_dict(self)

    def to_flat_dict(
        self, *, omit_default_values: Sequence[Value]
    ) -> dict[str, Value]:
        """Returns the leaves of the config by path, such as `model.layers[2].rate`.

        Named tuples and dataclasses are as dicts: `shape['width']`; see `to_dict`.
        Fields whose value is both their default and one of `omit_default_values` are omitted.
        """
        return values.to_flat_dict(
            self, omit_default_values=omit_default_values
        )

    def visit(
        self,
        visit_fn: Callable[[str, Value], None],
        enter_fn: Callable[[str, Value, list | None], list | None]
        | None = None,
        exit_fn: Callable[[str, Value], None] | None = None,
    ) -> None:
        """Traverses the config depth first, with fields sorted by name.

        Args:
            visit_fn: called with path and value of each leaf.
            enter_fn: called with path and value of every node and the (path, value) pairs of its
                children, None for a leaf. Returns the pairs to traverse instead, or None for none.
            exit_fn: called with path and value of each inner node after its children.
        """
        values.visit(
            self, visit_fn=visit_fn, enter_fn=enter_fn, exit_fn=exit_fn
        )

    # Paths.

    def get_recursively(self, path: str | Sequence[str]) -> Value:
        """Returns the value at a path, a sequence of names or dotted (`model.layers[2].rate`).

        Raises UnknownFieldError if the path does not exist; names the part that does.
        """
        return values.get_path(self, path)

    def set_recursively(
        self, path: str | Sequence[str], *, value: Value
    ) -> None:
        """Sets the value at a nonempty path. See `get_recursively`."""
        values.set_path(self, path, value)
