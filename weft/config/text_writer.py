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

_WIDTH = 96
_LITERALS = (type(None), bool, int, float, str, bytes)


def to_text(cfg: object, omit_defaults: bool = False, *, origins: bool = False) -> str:
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


def value_text(value: object) -> str:
    """Writes a value on one line, omitting fields with defaults."""
    return _Writer(omit_defaults=True, origins=False, lines=False).write(value)


class _Child(NamedTuple):
    """Child of a value, with the text before it and the line that set it."""

    prefix: str
    value: Any
    origin: Origin | None = None


class _Writer:
    def __init__(self, omit_defaults: bool, origins: bool, lines: bool = True):
        self.omit_defaults = omit_defaults
        self.origins = origins
        self.lines = lines
        self.names_by_id: dict[int, str | None] = {}  # to avoid repeated searches

    def _name(self, obj: object) -> str | None:
        if id(obj) not in self.names_by_id:
            self.names_by_id[id(obj)] = references.reference_to(obj)
        return self.names_by_id[id(obj)]

    def write(self, value: Any, indent: int = 0) -> str:
        if isinstance(value, values.ConfigNode):
            return self._config(value, indent)
        if value is values.REQUIRED:
            return "REQUIRED"
        if type(value) in _LITERALS:
            return repr(value)
        if isinstance(value, enum.Enum):
            name = self._name(type(value))
            if not name or not value.name:  # a combination of flags has none
                return unreadable(value)
            return f"{name}.{value.name}"
        if type(value) is dict:
            pairs = [_Child(f"{self.write(key)}: ", child) for key, child in value.items()]
            return self._block("{", pairs, "}", indent)
        if type(value) is list:
            return self._block("[", [_Child("", child) for child in value], "]", indent)
        if type(value) is tuple:
            return self._block("(", [_Child("", child) for child in value], ")", indent)
        field_names = values.record_fields(value)
        if field_names is None or (callable(value) and self._name(value)):
            return self._leaf(value)
        name = self._name(type(value)) or unreadable(type(value))
        fields = [_Child(f"{name}=", getattr(value, name)) for name in field_names]
        return self._block(f"{name}(", fields, ")", indent)

    def _config(self, config: values.ConfigNode, indent: int) -> str:
        fields = config._fields()
        children: list[_Child] = []
        for name, value in config._field_values().items():
            if name == config._target and _is_target_in_head(config):
                continue
            if self.omit_defaults and values.values_equal(value, fields[name].default()):
                continue
            children.append(_Child(f"{name}=", value, config._origins.get(name)))
        return self._block(f"{self._head(config)}(", children, ")", indent, break_lines=self.lines)

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
        texts = [child.prefix + self.write(child.value, indent + 4) for child in children]
        line = ", ".join(texts)
        if opening == "(" and len(texts) == 1:
            line += ","  # of a tuple
        line = opening + line + closing
        fits = indent + len(line) <= _WIDTH and "\n" not in line
        if not texts or not self.lines or (fits and not break_lines):
            return line
        lines = [opening]
        for child, text in zip(children, texts, strict=True):
            lines.append(" " * (indent + 4) + self._commented(text + ",", child.origin))
        lines.append(" " * indent + closing)
        return "\n".join(lines)

    def _commented(self, text: str, origin: Origin | None) -> str:
        if not self.origins or origin is None:
            return text
        # The comment belongs to the first line of the field.
        first_line, newline, other_lines = text.partition("\n")
        comment = " ".join(str(origin).split())
        return f"{first_line}  # {comment}{newline}{other_lines}"

    def _leaf(self, value: object) -> str:
        if isinstance(value, set | frozenset) and type(value) in (set, frozenset):
            if not value:
                return f"{type(value).__name__}()"
            members = ", ".join(sorted(self.write(child) for child in value))
            return f"{{{members}}}" if type(value) is set else f"frozenset({{{members}}})"
        if type(value) is complex:
            return f"complex({self.write(value.real)}, {self.write(value.imag)})"
        if isinstance(value, functools.partial):
            arguments = [self.write(child) for child in (value.func, *value.args)]
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
    return isinstance(target, type) and getattr(target, "Config", None) is type(config)


def unreadable(value: Any) -> str:
    """Returns the placeholder of a value that has no text."""
    if isinstance(value, values.InMemory):
        return f"unreadable({value.description!r})"
    if hasattr(value, "__qualname__"):
        description = f"{value.__module__}.{value.__qualname__}"
    else:
        description = f"an object of type {type(value).__module__}.{type(value).__qualname__}"
    return f"unreadable({description!r})"


def _numpy_text(value: Any) -> str | None:
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
    if isinstance(value, numpy.generic) and type(value.item()) in (bool, int, float):
        return f"{type(value).__module__}.{type(value).__name__}({value.item()!r})"
    return None


def _partition_spec_text(value: Any) -> str | None:
    jax: Any = sys.modules.get("jax")
    if jax is None or not isinstance(value, jax.sharding.PartitionSpec):
        return None
    axes = tuple(value)
    if value != type(value)(*axes) or any(axis is value.UNCONSTRAINED for axis in axes):
        return None
    return f"jax.sharding.PartitionSpec({', '.join(map(repr, axes))})"


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Any = _Absent()
"""Placeholder for a missing side of a change."""


class Change(NamedTuple):
    """Difference between two configs."""

    path: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.path}: {_format_value(self.before)} → {_format_value(self.after)}"


def _format_value(value: object) -> str:
    if value is ABSENT:
        return "nothing"
    text = value._label() if isinstance(value, values.ConfigNode) else value_text(value)
    if len(text) > 120:
        text = text[:119] + "…"
    return text


class ConfigDiff(tuple[Change, ...]):
    """Changes between two configs, in the order of fields; printed one per line."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self)) if self else "The configs are equal."


def diff(a: object, b: object) -> ConfigDiff:
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


def _compare(path: str, a: Any, b: Any, changes: list[Change]) -> None:
    """Appends the changes from `a` to `b`."""
    if values.values_equal(a, b):
        return
    both_configs = isinstance(a, values.ConfigNode) and isinstance(b, values.ConfigNode)
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
        suffixes.sort(key=lambda suffix: suffix != f".{a._target}")  # the function or class first
    for suffix in suffixes:
        child_path = values.join_path(path, suffix)
        a_child = a_children.get(suffix, ABSENT)
        b_child = b_children.get(suffix, ABSENT)
        _compare(child_path, a_child, b_child, changes)
