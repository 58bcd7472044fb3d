"""YAML text of plain values, for manifests.

Supports mappings, lists, strings, numbers, booleans and None. Ambiguous strings are quoted as in
JSON, which is valid YAML.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
# JSON leaves these unescaped, but YAML requires escapes.
_NOT_PRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
# Includes those of YAML 1.1, which many tools read.
_WORDS_WITH_MEANING = frozenset(["true", "false", "yes", "no", "on", "off", "y", "n", "null"])


def to_yaml(value: Any, indent: int = 0) -> str:
    """Formats nested plain values as YAML.

    >>> print(to_yaml({"kind": "Job", "spec": {"args": ["train", "seed=1"], "on": 3, "env": {}}}))
    kind: Job
    spec:
      args:
      - train
      - "seed=1"
      "on": 3
      env: {}
    """
    pad = " " * indent
    lines = []
    if isinstance(value, Mapping):
        for name, inner in value.items():
            lines.append(f"{pad}{_scalar(name)}:{_below(inner, indent)}")
    else:
        for inner in value:
            if isinstance(inner, Mapping) and inner:
                lines.append(f"{pad}- {to_yaml(inner, indent + 2).lstrip()}")
            else:
                lines.append(f"{pad}- {_scalar(inner)}")
    return "\n".join(lines)


def _below(inner: Any, indent: int) -> str:
    nested = isinstance(inner, Mapping | Sequence) and not isinstance(inner, str)
    if not nested or not inner:
        return f" {_scalar(inner)}"
    return f"\n{to_yaml(inner, indent + 2 if isinstance(inner, Mapping) else indent)}"


def _scalar(value: Any) -> str:
    plain = isinstance(value, str) and _PLAIN.fullmatch(value)
    if plain and value.lower() not in _WORDS_WITH_MEANING:
        return value
    # JSON is YAML: numbers, quoted strings, empty lists and mappings.
    text = json.dumps(value, ensure_ascii=False)
    return _NOT_PRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
