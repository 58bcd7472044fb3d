"""Writer of configs as text, in the form of a Python expression.

    weft.trainer.learner.Learner.Config(
        optimizer=config_for_function(optax.sgd)(
            learning_rate=0.1,
            momentum=None,
        ),
    )

Fields are sorted by name, one per line, so that texts can be compared line by line.
`weft.config.text_parser` reads an equal config from the text, without evaluating it. Values without
a name, such as lambdas or objects of other libraries, are written as `unreadable('…')`.

`diff` compares two configs by path.
"""

import contextlib
import enum
import functools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from weft.config import references, values
from weft.config.config import Origin
from weft.config.values import Value

_WIDTH = 96
_LITERALS = (type(None), bool, int, float, str, bytes)


def to_text(
    cfg: Value, omit_defaults: bool = False, *, origins: bool = False
) -> str:
    """Writes a config as text that `from_text` reads back to an equal config.

    Args:
        omit_defaults: whether to omit fields with the default of their class.
        origins: whether to append the line that set each field as a comment.

    >>> from weft.config import config_for_class
    >>> print(to_text(config_for_class(complex).set(imag=1.5)))
    config_for_class(complex)(
        imag=1.5,
        real=0,
    )
    """
    return _Writer(omit_defaults, origins).write(cfg)


def value_text(value: Value) -> str:
    """Writes a value on one line, omitting fields with defaults."""
    return _Writer(omit_defaults=True, origins=False, lines=False).write(value)


class _Child(NamedTuple):
    """Child of a value, with the text before it and the line that set it."""

    prefix: str
    value: Value
    origin: Origin | None = None


class _Writer:
    def __init__(self, omit_defaults: bool, origins: bool, lines: bool = True):
        self.omit_defaults = omit_defaults
        self.origins = origins
        self.lines = lines
        # Of classes and functions, to avoid repeated searches.
        self.names_by_id: dict[int, str | None] = {}

    def _name(self, obj: Value) -> str | None:
        if id(obj) not in self.names_by_id:
            self.names_by_id[id(obj)] = references.reference_to(obj)
        return self.names_by_id[id(obj)]

    def write(self, value: Value, indent: int = 0) -> str:
        if isinstance(value, values.ConfigNode):
            return self._config(value, indent)
        if value is values.REQUIRED:
            return "REQUIRED"
        if isinstance(value, values.UnreadValue):
            return value.text
        if type(value) in _LITERALS:
            return repr(value)
        if isinstance(value, enum.Enum):
            name = self._name(type(value))
            if not name or not value.name:  # a combination of flags has none
                return unreadable(value)
            return f"{name}.{value.name}"
        if type(value) is dict:
            children: list[_Child] = []
            for key, child in value.items():
                children.append(_Child(f"{self.write(key)}: ", child))
            return self._block("{", children, "}", indent)
        if type(value) in (list, tuple):
            opening, closing = "[]" if type(value) is list else "()"
            items = [_Child("", child) for child in value]
            return self._block(opening, items, closing, indent)
        field_names = values.record_fields(value)
        # A variable of a program's main module has another value in the next program.
        own_name = self._name(value) if callable(value) else None
        has_own_name = own_name and not own_name.startswith("__main__.")
        if field_names is None or has_own_name:
            return self._leaf(value)
        class_name = self._name(type(value)) or unreadable(type(value))
        fields = [_Child(f"{x}=", getattr(value, x)) for x in field_names]
        return self._block(f"{class_name}(", fields, ")", indent)

    def _config(self, config: values.ConfigNode, indent: int) -> str:
        fields = config._fields()
        children: list[_Child] = []
        for name, value in config._field_values().items():
            if name == config._target and _is_target_in_head(config):
                continue
            if self.omit_defaults:
                default = fields[name].default()
                if values.values_equal(value, default):
                    continue
            origin = config._origins.get(name)
            children.append(_Child(f"{name}=", value, origin))
        opening = f"{self._head(config)}("
        return self._block(
            opening, children, ")", indent, break_lines=self.lines
        )

    def _block(
        self,
        opening: str,
        children: Sequence[_Child],
        closing: str,
        indent: int,
        *,
        break_lines: bool = False,
    ) -> str:
        """Writes children between brackets, on one line if they fit and include no config."""
        texts: list[str] = []
        for child in children:
            texts.append(child.prefix + self.write(child.value, indent + 4))
        inner_text = ", ".join(texts)
        if opening == "(" and len(texts) == 1:
            inner_text += ","  # of a tuple
        line = opening + inner_text + closing
        fits = indent + len(line) <= _WIDTH and "\n" not in line
        if not texts or not self.lines or (fits and not break_lines):
            return line
        lines = [opening]
        margin = " " * indent
        for child, text in zip(children, texts, strict=True):
            commented_text = self._commented(text + ",", child.origin)
            lines.append(f"{margin}    {commented_text}")
        lines.append(margin + closing)
        return "\n".join(lines)

    def _commented(self, text: str, origin: Origin | None) -> str:
        if not self.origins or origin is None:
            return text
        # The comment belongs to the first line of the field.
        first_line, newline, other_lines = text.partition("\n")
        comment = " ".join(str(origin).split())
        return f"{first_line}  # {comment}{newline}{other_lines}"

    def _leaf(self, value: Value) -> str:
        if type(value) in (set, frozenset):
            if not value:
                return f"{type(value).__name__}()"
            members = sorted(map(self.write, value))
            set_text = f"{{{', '.join(members)}}}"
            return set_text if type(value) is set else f"frozenset({set_text})"
        if type(value) is complex:
            parts = map(self.write, (value.real, value.imag))
            return f"complex({', '.join(parts)})"
        if isinstance(value, functools.partial):
            arguments = [self.write(value.func), *map(self.write, value.args)]
            for name, child in value.keywords.items():
                arguments.append(f"{name}={self.write(child)}")
            return f"functools.partial({', '.join(arguments)})"
        for write in (_numpy_text, _partition_spec_text, self._name):
            text = write(value)
            if text is not None:
                return text
        return unreadable(value)

    def _head(self, config: values.ConfigNode) -> str:
        if not _is_target_in_head(config):
            return self._name(type(config)) or unreadable(type(config))
        target = config._field_values()[config._target or ""]
        name = self._name(target)
        factory_name = getattr(config, "_factory_name", "")
        if factory_name:
            return f"{factory_name}({name or unreadable(target)})"
        return f"{name}.Config" if name else unreadable(target)


def _is_target_in_head(config: values.ConfigNode) -> bool:
    if getattr(config, "_factory_name", ""):
        return True
    target = config._field_values().get(config._target or "")
    if not isinstance(target, type):
        return False
    return getattr(target, "Config", None) is type(config)


def unreadable(value: Value) -> str:
    """Returns the placeholder of a value that has no text."""
    if isinstance(value, values.InMemory):
        return f"unreadable({value.description!r})"
    if hasattr(value, "__qualname__"):
        description = f"{value.__module__}.{value.__qualname__}"
    else:
        cls = type(value)
        description = f"an object of type {cls.__module__}.{cls.__qualname__}"
    return f"unreadable({description!r})"


def _numpy_text(value: Value) -> str | None:
    # A value of NumPy means that it is loaded; this package does not load it.
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.dtype):
        for name in (value.name, value.str):
            with contextlib.suppress(TypeError):
                if numpy.dtype(name) == value:
                    return f"numpy.dtype({name!r})"
        return None
    if isinstance(value, numpy.generic):
        number = value.item()
        if type(number) in (bool, int, float):
            cls = type(value)
            return f"{cls.__module__}.{cls.__name__}({number!r})"
    return None


def _partition_spec_text(value: Value) -> str | None:
    jax: Any = sys.modules.get("jax")
    if jax is None or not isinstance(value, jax.sharding.PartitionSpec):
        return None
    axes = tuple(value)
    if any(axis is value.UNCONSTRAINED for axis in axes):
        return None
    if value != type(value)(*axes):  # it has more than axes
        return None
    return f"jax.sharding.PartitionSpec({', '.join(map(repr, axes))})"


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Value = _Absent()
"""Placeholder for a missing side of a change."""


class Change(NamedTuple):
    """Difference between two configs."""

    path: str
    before: Value
    after: Value

    def __str__(self) -> str:
        text_before = _format_value(self.before)
        text_after = _format_value(self.after)
        return f"{self.path}: {text_before} → {text_after}"


def _format_value(value: Value) -> str:
    if value is ABSENT:
        return "nothing"
    if isinstance(value, values.ConfigNode):
        text = value._label()
    else:
        text = value_text(value)
    if len(text) > 120:
        text = text[:119] + "…"
    return text


class ConfigDiff(tuple[Change, ...]):
    """Changes between two configs, in the order of fields; printed one per line."""

    __slots__ = ()

    def __str__(self) -> str:
        if not self:
            return "The configs are equal."
        return "\n".join(map(str, self))


def diff(a: Value, b: Value) -> ConfigDiff:
    """Compares two configs.

    The changes are empty (and false) if the configs are equal. Configs of different classes yield a
    change for the class, and one for each different field.

    >>> from weft.config import config_for_class
    >>> cfg = config_for_class(complex).set(real=1.0)
    >>> print(diff(cfg, cfg.clone(imag=2.0)))
    imag: 0 → 2.0
    """
    changes: list[Change] = []
    _compare("", a, b, changes)
    return ConfigDiff(changes)


def _compare(path: str, a: Value, b: Value, changes: list[Change]) -> None:
    """Appends the changes from `a` to `b`."""
    if values.values_equal(a, b):
        return
    both_configs = isinstance(a, values.ConfigNode) and isinstance(
        b, values.ConfigNode
    )
    if not both_configs and type(a) is not type(b):
        changes.append(Change(path, a, b))
        return
    a_items, b_items = values.child_items(a), values.child_items(b)
    if a_items is None or b_items is None:
        changes.append(Change(path, a, b))
        return
    a_children, b_children = dict(a_items), dict(b_items)
    if both_configs and type(a) is not type(b):
        changes.append(Change(path, a, b))
        # The change already covers the class.
        a_children.pop(f".{a._target}", None)
        b_children.pop(f".{b._target}", None)
    suffixes = list(a_children | b_children)
    if both_configs:
        # The function or class first.
        suffixes.sort(key=lambda suffix: suffix != f".{a._target}")
    for suffix in suffixes:
        child_path = values.join_path(path, suffix)
        a_child = a_children.get(suffix, ABSENT)
        b_child = b_children.get(suffix, ABSENT)
        _compare(child_path, a_child, b_child, changes)
