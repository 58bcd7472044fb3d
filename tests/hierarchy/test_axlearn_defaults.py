"""Defaults are those that users of AXLearn know, apart from differences that are listed.

`axlearn_defaults.json` has the defaults of config fields, of `default_config()`, of dataclasses and
of parameters, and the members of enums. `axlearn_differences.txt` lists what differs on purpose.
"""

import ast
import enum
import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
KNOWN = json.loads((HERE / "axlearn_defaults.json").read_text(encoding="utf-8"))
LINES = (HERE / "axlearn_differences.txt").read_text(encoding="utf-8").splitlines()
ALLOWED = dict(line.split(" # ") for line in LINES)
MISSING = object()


def is_known(want: dict[str, Any], have: Any) -> bool:
    if "made" in want:  # by a call, so it has no text to compare
        return have is not MISSING
    if "name" in want:
        last = want["name"].rpartition(".")[2]
        return last in (getattr(have, "__name__", ""), getattr(have, "name", "")) or last in repr(
            have
        )
    if want["value"] in ("inf", "nan"):
        return repr(have) == want["value"]
    value = ast.literal_eval(want["value"])
    is_pair = isinstance(value, tuple | list) and isinstance(have, tuple | list)
    return have == value or (is_pair and [*have] == [*value])


def config_value(cls: Any, path: str) -> Any:
    try:
        value = cls.default_config()
    except TypeError:  # takes arguments
        return MISSING
    for name in path.split("."):
        value = getattr(value, name, MISSING)
    return value


def parameters(target: Any) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return {}


def defaults(cls: Any, facts: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Yields for each fact what it is about, what is known, and what is here."""
    for path, want in {**facts.get("config", {}), **facts.get("default_config", {})}.items():
        yield f".{path}", want, config_value(cls, path)
    for member in facts.get("enum", ()):
        is_member = issubclass(cls, enum.Enum) and member in cls.__members__
        yield f".{member}", {"made": True}, True if is_member else MISSING
    for name, want in facts.get("dataclass", {}).items():
        field = getattr(cls, "__dataclass_fields__", {}).get(name)
        yield f".{name}", want, field.default if field is not None else MISSING
    for method, wants in {"": facts.get("params", {}), **facts.get("methods", {})}.items():
        found = parameters(getattr(cls, method, None) if method else cls)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in found.values())
        for name, want in wants.items():
            if found and not (takes_any and name not in found):
                have = found[name].default if name in found else MISSING
                yield f"{'.' if method else ''}{method}({name})", want, have


@pytest.mark.parametrize("module", KNOWN)
def test_defaults_are_known_or_listed(module):
    differ = set()
    for name, facts in KNOWN[module].items():
        cls = getattr(importlib.import_module(module), name, MISSING)
        key = f"{module}.{name}"
        if cls is MISSING:
            differ.add(key)
        else:
            differ |= {
                key + of for of, want, have in defaults(cls, facts) if not is_known(want, have)
            }
    assert differ == {key for key in ALLOWED if key.startswith(f"{module}.")}
