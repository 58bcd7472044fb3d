"""Differences between two configs, by path."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from weft.config.text_write import value_text
from weft.config.values import ConfigNode, join_path, parts, values_equal


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
        if self.after is ABSENT:
            return f"{self.path}: {_shown(self.before)} → nothing"
        if self.before is ABSENT:
            return f"{self.path}: nothing → {_shown(self.after)}"
        return f"{self.path}: {_shown(self.before)} → {_shown(self.after)}"


def _shown(value: Any) -> str:
    text = value._title() if isinstance(value, ConfigNode) else value_text(value)
    return text if len(text) <= 120 else text[:119] + "…"


class ConfigDiff(tuple[Change, ...]):
    """Changes between two configs, in the order of fields; printed one per line."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self)) if self else "The configs are equal."


def diff(a: Any, b: Any) -> ConfigDiff:
    """Compares two configs.

    Returns:
        The changes; empty (and false) if the configs are equal. Configs of different classes yield
        a change for the class, and one for each different field.

    >>> from weft.config import config_for_class
    >>> cfg = config_for_class(complex).set(real=1.0)
    >>> print(diff(cfg, cfg.clone(imag=2.0)))
    imag: 0 → 2.0
    """
    changes: list[Change] = []
    _compare("", a, b, changes)
    return ConfigDiff(changes)


def _compare(path: str, a: Any, b: Any, changes: list[Change]) -> None:
    if values_equal(a, b):
        return
    both_configs = isinstance(a, ConfigNode) and isinstance(b, ConfigNode)
    a_parts, b_parts = _open(a), _open(b)
    comparable = both_configs or (type(a) is type(b) and a_parts is not None)
    if not comparable or a_parts is None or b_parts is None:
        changes.append(Change(path, a, b))
        return
    if both_configs and type(a) is not type(b):
        changes.append(Change(path, a, b))
        # The change already covers the class.
        for opened, config in ((a_parts, a), (b_parts, b)):
            opened.pop(f".{config._target}", None)
    suffixes = [*a_parts, *(s for s in b_parts if s not in a_parts)]
    if both_configs:
        suffixes.sort(key=lambda suffix: suffix != f".{a._target}")  # the function or class first
    for suffix in suffixes:
        before, after = a_parts.get(suffix, ABSENT), b_parts.get(suffix, ABSENT)
        _compare(join_path(path, suffix), before, after, changes)


def _open(value: Any) -> dict[str, Any] | None:
    opened: Sequence[tuple[str, Any]] | None = parts(value)
    return None if opened is None else dict(opened)
