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


class _Writer:
    def __init__(self, omit_defaults: bool, origins: bool, lines: bool = True):
        self.omit_defaults = omit_defaults
        self.origins = origins
        self.lines = lines
        self.names: dict[int, str | None] = {}  # by id, to avoid repeated searches

    def _name(self, obj: object) -> str | None:
        if id(obj) not in self.names:
            self.names[id(obj)] = references.reference_to(obj)
        return self.names[id(obj)]

    def write(self, value: Any, indent: int = 0) -> str:
        if isinstance(value, values.ConfigNode):
            return self._config(value, indent)
        if value is values.REQUIRED:
            return "REQUIRED"
        if type(value) in _LITERALS:
            return repr(value)
        if isinstance(value, enum.Enum):
            name = self._name(type(value))
            return f"{name}.{value.name}" if name and value.name else unreadable(value)
        if type(value) is dict:
            pairs = [(f"{self.write(k)}: ", child, None) for k, child in value.items()]
            return self._block("{", pairs, "}", indent)
        if type(value) in (list, tuple):
            opening, closing = "[]" if type(value) is list else "()"
            items = [("", child, None) for child in value]
            return self._block(opening, items, closing, indent)
        if values.record_fields(value) is not None and not (callable(value) and self._name(value)):
            name = self._name(type(value)) or unreadable(type(value))
            fields = [
                (f"{suffix[1:]}=", child, None) for suffix, child in values.child_items(value) or ()
            ]
            return self._block(f"{name}(", fields, ")", indent)
        return self._leaf(value)

    def _config(self, config: values.ConfigNode, indent: int) -> str:
        fields = config._fields()
        shown = []
        for name, value in config._field_values().items():
            omitted = self.omit_defaults and values.values_equal(value, fields[name].default())
            if not omitted and (name != config._target or not _is_target_in_head(config)):
                shown.append((f"{name}=", value, config._origins.get(name)))
        return self._block(f"{self._head(config)}(", shown, ")", indent, break_lines=self.lines)

    def _block(
        self,
        opening: str,
        items: Sequence[tuple[str, Any, Origin | None]],
        closing: str,
        indent: int,
        *,
        break_lines: bool = False,
    ) -> str:
        """Writes children between brackets, on one line if they fit and include no config."""
        inner = [prefix + self.write(child, indent + 4) for prefix, child, _ in items]
        short = ", ".join(inner)
        if opening == "(" and len(inner) == 1:
            short += ","
        fits = indent + len(opening + short + closing) <= _WIDTH and "\n" not in short
        if not inner or not self.lines or (fits and not break_lines):
            return opening + short + closing
        pad = " " * (indent + 4)
        lines = [
            pad + self._commented(text + ",", origin)
            for text, (_, _, origin) in zip(inner, items, strict=True)
        ]
        return "\n".join([opening, *lines, " " * indent + closing])

    def _commented(self, text: str, origin: Origin | None) -> str:
        if not self.origins or origin is None:
            return text
        # The comment belongs to the first line of the field.
        first, *rest = text.split("\n", 1)
        return "\n".join([f"{first}  # {' '.join(str(origin).split())}", *rest])

    def _leaf(self, value: object) -> str:
        if isinstance(value, set | frozenset) and type(value) in (set, frozenset):
            inner = ", ".join(sorted(self.write(child) for child in value))
            if type(value) is set:
                return f"{{{inner}}}" if inner else "set()"
            return f"frozenset({{{inner}}})" if inner else "frozenset()"
        if type(value) is complex:
            return f"complex({self.write(value.real)}, {self.write(value.imag)})"
        if isinstance(value, functools.partial):
            args = [*map(self.write, (value.func, *value.args))]
            named = [f"{name}={self.write(child)}" for name, child in value.keywords.items()]
            return f"functools.partial({', '.join(args + named)})"
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
        maker = getattr(config, "_factory_name", "")
        if maker:
            return f"{maker}({name or unreadable(target)})"
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
    named = value if hasattr(value, "__qualname__") else type(value)
    name = f"{named.__module__}.{named.__qualname__}"
    return f"unreadable({name if named is value else f'an object of type {name}'!r})"


def _numpy_text(value: Any) -> str | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.dtype):
        for name in (value.name, value.str):
            try:
                if numpy.dtype(name) == value:
                    return f"numpy.dtype({name!r})"
            except TypeError:
                continue
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
    return text if len(text) <= 120 else text[:119] + "…"


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
    if values.values_equal(a, b):
        return
    both_configs = isinstance(a, values.ConfigNode) and isinstance(b, values.ConfigNode)
    a_parts, b_parts = _children(a), _children(b)
    comparable = both_configs or (type(a) is type(b) and a_parts is not None)
    if not comparable or a_parts is None or b_parts is None:
        changes.append(Change(path, a, b))
        return
    if both_configs and type(a) is not type(b):
        changes.append(Change(path, a, b))
        # The change already covers the class.
        for parts, config in ((a_parts, a), (b_parts, b)):
            parts.pop(f".{config._target}", None)
    suffixes = [*a_parts, *(s for s in b_parts if s not in a_parts)]
    if both_configs:
        suffixes.sort(key=lambda suffix: suffix != f".{a._target}")  # the function or class first
    for suffix in suffixes:
        before, after = a_parts.get(suffix, ABSENT), b_parts.get(suffix, ABSENT)
        _compare(values.join_path(path, suffix), before, after, changes)


def _children(value: object) -> dict[str, Any] | None:
    children = values.child_items(value)
    return None if children is None else dict(children)
