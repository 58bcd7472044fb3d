"""`ConfigBase`: a mutable set of named, typed fields.

    cfg = Linear.default_config().set(dim=8)   # fields by name, checked when set
    cfg.init = other_cfg                       # by value: cfg.init is a copy
    wide = cfg.clone(dim=64)                   # also a copy

Configs form a tree, also through lists and dicts. For errors, a config stores its path from the
root and the source line that set each value.

Fields are in the instance's `__dict__`, everything else is in slots. A *view* (`_frozen_view`) is a
config with read-only fields whose values are copied from another config on first access, which
makes `self.config` cheap to read.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

from weft.config.fields import Field, fields_of_class
from weft.config.names import did_you_mean
from weft.config.origins import Origin, calling_line
from weft.config.typecheck import check_type
from weft.config.validation import check_value
from weft.config.values import IMMUTABLE, ConfigNode, copy_value, join_path, values_equal
from weft.errors import FrozenConfigError, UnknownFieldError

_set_slot = object.__setattr__


class ConfigBase(ConfigNode):
    """Base of all config classes.

    Args:
        **values: values of fields; others take their defaults.

    Raises:
        MissingConfigClassDecoratorError: if the class lacks @config_class.
    """

    __slots__ = ("__dict__", "__weakref__", "_frozen", "_origins", "_place", "_source")
    __hash__ = None  # type: ignore[assignment]  # configs are mutable

    __config_fields__: "dict[str, Field]" = {}

    def __init__(self, **values: Any):
        self._start()
        for name, field in self._fields().items():
            self.__dict__[name] = field.default(name)
        self.set(**values)

    def _start(self, *, place: str = "", origins: dict[str, Origin] | None = None) -> None:
        _set_slot(self, "_frozen", False)
        _set_slot(self, "_origins", origins or {})
        _set_slot(self, "_place", place)
        _set_slot(self, "_source", None)

    def _fields(self) -> dict[str, Field]:
        return fields_of_class(type(self))

    def _field_values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in sorted(self._fields())}

    # Field access.

    def __setattr__(self, name: str, value: Any) -> None:
        field = self._field(name)
        path = join_path(self._place, f".{name}")
        if self._frozen:
            raise FrozenConfigError(
                f"{self._title()} is frozen, because an object was created from it: cannot set "
                f"{path!r} to {value!r:.80}. Change a copy: cfg = self.config.clone({name}=…)."
            )
        check_value(value, path)
        check_type(value, field, path, title=self._title())
        self.__dict__[name] = copy_value(value, path)
        self._remember_line(name)

    def _remember_line(self, name: str) -> None:
        origin = calling_line()
        if origin is not None:
            self._origins[name] = origin

    def __getattr__(self, name: str) -> Any:
        # Only called if the instance lacks the value: a view's unread field, or an error.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__qualname__!r} object has no attribute {name!r}")
        field = self._field(name)
        value = copy_value(getattr(self._source, field.name), join_path(self._place, f".{name}"))
        self.__dict__[name] = value
        return value

    def __delattr__(self, name: str) -> None:
        raise UnknownFieldError(
            f"{self._title()} needs {name!r}: fields can be set, but not deleted. Set it to "
            "None or REQUIRED."
        )

    def _field(self, name: str) -> Field:
        fields = self._fields()
        if name not in fields:
            where = f" (at {self._place})" if self._place else ""
            raise UnknownFieldError(
                f"unknown field {name!r} in {self._title()}{where}. {did_you_mean(name, fields)}"
            )
        return fields[name]

    def _title(self) -> str:
        made = self.__dict__.get(self._target or "")
        name = f"{made.__qualname__}.Config" if isinstance(made, type) else type(self).__qualname__
        return name.rpartition("<locals>.")[2]

    def set(self, **kwargs: Any) -> Self:
        """Sets fields by name and returns the config itself.

        Raises:
            UnknownFieldError: for an unknown name; no field is set then.
            InvalidConfigValueError: for a value that a config, or this field, cannot hold.
        """
        for name in kwargs:
            self._field(name)
        for name, value in kwargs.items():
            setattr(self, name, value)
        return self

    def clone(self, **kwargs: Any) -> Self:
        """Returns an independent copy with the fields `kwargs` set."""
        return self._copy_to(self._place).set(**kwargs)

    def keys(self) -> list[str]:
        """Returns the names of the fields, sorted."""
        return sorted(self._fields())

    def items(self) -> list[tuple[str, Any]]:
        """Returns (name, value) pairs of the fields, sorted by name."""
        return list(self._field_values().items())

    # Copies.

    def _copy_to(self, place: str) -> Self:
        copy = object.__new__(type(self))
        copy._start(place=place, origins=dict(self._origins))
        for name in self._fields():
            copy.__dict__[name] = copy_value(getattr(self, name), join_path(place, f".{name}"))
        return copy

    def _frozen_view(self) -> Self:
        view = object.__new__(type(self))
        view._start(place=self._place, origins=self._origins)
        for name, value in self.__dict__.items():
            if isinstance(value, IMMUTABLE):
                view.__dict__[name] = value
        _set_slot(view, "_source", self)
        _set_slot(view, "_frozen", True)
        return view

    def __copy__(self) -> Self:
        return self._copy_to(self._place)

    def __deepcopy__(self, memo: dict) -> Self:
        return self._copy_to(self._place)

    def __getstate__(self) -> tuple:
        values = {name: getattr(self, name) for name in self._fields()}
        return values, dict(self._origins), self._place, self._frozen

    def __setstate__(self, state: tuple) -> None:
        values, origins, place, frozen = state
        self._start(place=place, origins=origins)
        self.__dict__.update(values)
        _set_slot(self, "_frozen", frozen)

    # Comparing and showing.

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ConfigBase):
            return NotImplemented
        return values_equal(self, other)

    def __repr__(self) -> str:
        from weft.config.show import short_repr

        return short_repr(self)

    def debug_string(
        self,
        *,
        kv_separator: str = ": ",
        field_separator: str = "\n",
        omit_default_values: Sequence[Any] | None = None,
    ) -> str:
        """Returns one `path: value` per leaf of the config, sorted by field name.

        Args:
            omit_default_values: as in `to_flat_dict`; defaults to None and REQUIRED.
        """
        from weft.config.show import debug_string

        return debug_string(
            self,
            kv_separator=kv_separator,
            field_separator=field_separator,
            omit_default_values=omit_default_values,
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as a dict, with nested configs as dicts."""
        from weft.config.visit import to_dict

        return to_dict(self)

    def to_flat_dict(self, *, omit_default_values: Sequence[Any]) -> dict[str, Any]:
        """Returns the leaves of the config by path, such as `model.layers[2].rate`.

        Args:
            omit_default_values: omits fields whose value is both their default and one of these.
        """
        from weft.config.visit import to_flat_dict

        return to_flat_dict(self, omit_default_values=omit_default_values)

    def visit(
        self,
        visit_fn: Callable[[str, Any], None],
        enter_fn: Callable[[str, Any, list | None], list | None] | None = None,
        exit_fn: Callable[[str, Any], None] | None = None,
    ) -> None:
        """Traverses the config depth first, with fields sorted by name.

        Args:
            visit_fn: called with path and value of each leaf.
            enter_fn: called with path and value of every node and the (path, value) pairs of its
                children, None for a leaf. Returns the pairs to traverse instead; None makes the
                node a leaf.
            exit_fn: called with path and value of each inner node after its children.
        """
        from weft.config.visit import visit

        visit(self, visit_fn=visit_fn, enter_fn=enter_fn, exit_fn=exit_fn)

    # Paths.

    def get_recursively(self, path: str | Sequence[str]) -> Any:
        """Returns the value at a path.

        Args:
            path: field names, as a sequence or dotted (`model.layers[2].rate`).

        Raises:
            UnknownFieldError: if the path does not exist; names the part that does.
        """
        from weft.config.paths import get_path

        return get_path(self, path)

    def set_recursively(self, path: str | Sequence[str], *, value: Any) -> None:
        """Sets the value at a nonempty path. See `get_recursively`."""
        from weft.config.paths import set_path

        set_path(self, path, value)
