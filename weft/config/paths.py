"""Paths into a config: `model.layers[2].dropout.rate`, `rules['bias']`.

A path is a sequence of steps: field names or dict keys as strings, indices as integers. Setting a
value inside a container sets the field around it, whose type is then checked as a whole.
"""

import re
from collections.abc import Sequence
from typing import Any

from weft.config.names import did_you_mean
from weft.config.required import REQUIRED
from weft.config.values import ConfigNode, join_path, record_fields, replace_part
from weft.errors import UnknownFieldError

_STEP = re.compile(
    r"""\.?(?P<name>[A-Za-z_]\w*)        # a field
      | \[(?P<key>-?\d+
               |'(?:[^'\\]|\\.)*'
               |"(?:[^"\\]|\\.)*")\]     # an index, or the key of a dict
    """,
    re.VERBOSE,
)


def parse_path(path: str | Sequence[Any]) -> list[Any]:
    """Parses a path into its steps; sequences are returned unchanged.

    Raises:
        UnknownFieldError: if the text is malformed.

    >>> parse_path("model.layers[2].rules['bias']")
    ['model', 'layers', 2, 'rules', 'bias']
    """
    if not isinstance(path, str):
        return list(path)
    from ast import literal_eval

    steps: list[Any] = []
    position = 0
    while position < len(path):
        match = _STEP.match(path, position)
        dot = path[position] == "."
        if match is None or dot != (match["name"] is not None and position > 0):
            raise UnknownFieldError(
                f"{path!r} is not a path: cannot read {path[position:]!r}. Write names with "
                "dots and indices in brackets, such as model.layers[2].rate."
            )
        steps.append(match["name"] or literal_eval(match["key"]))
        position = match.end()
    return steps


def walk_path(value: Any, path: str | Sequence[Any]) -> list[tuple[str, Any]]:
    """Returns (path, value) pairs from the start to the end of a path."""
    trail = [("", value)]
    for step in parse_path(path):
        here, value = trail[-1]
        try:
            suffix, child = _step_into(value, step)
        except UnknownFieldError as error:
            raise UnknownFieldError(f"{here}: {error}" if here else str(error)) from None
        trail.append((join_path(here, suffix), child))
    return trail


def _step_into(value: Any, step: Any) -> tuple[str, Any]:
    """Returns the suffix that a step appends to a path, and the value there."""
    if isinstance(value, dict):
        if step in value:
            return f"[{step!r}]", value[step]
        raise UnknownFieldError(f"unknown key {step!r}. {did_you_mean(str(step), map(str, value))}")
    if isinstance(value, ConfigNode):
        fields = value._field_values()
        if step in fields:
            return f".{step}", fields[step]
        title = value._title()
        raise UnknownFieldError(
            f"unknown field {step!r} in {title}. {did_you_mean(str(step), fields)}"
        )
    names = record_fields(value)
    if names is not None:
        if step in names:
            return f".{step}", getattr(value, step)
        title = type(value).__qualname__
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
    state = "it is still REQUIRED" if value is REQUIRED else f"it is {value!r:.80}"
    raise UnknownFieldError(f"there is no {step!r} in it, since {state}.")


def get_path(value: Any, path: str | Sequence[Any]) -> Any:
    """Returns the value at a path. See `ConfigBase.get_recursively`."""
    return walk_path(value, path)[-1][1]


def set_path(config: ConfigNode, path: str | Sequence[Any], value: Any) -> None:
    """Sets the value at a path. See `ConfigBase.set_recursively`."""
    owner, (name, *inside) = split_path(config, path)
    around = [node for _, node in walk_path(owner, [name, *inside[:-1]])[1:]] if inside else []
    for node, step in reversed(list(zip(around, inside, strict=True))):
        value = replace_part(node, step, value)
    setattr(owner, name, value)


def split_path(config: ConfigNode, path: str | Sequence[Any]) -> tuple[ConfigNode, list[Any]]:
    """Returns the innermost config on a path and the remaining steps; the last may be a new key."""
    steps = parse_path(path)
    if not steps:
        raise UnknownFieldError("The path is empty. Name at least one field.")
    nodes = [node for _, node in walk_path(config, steps[:-1])]
    if not isinstance(nodes[-1], dict):
        walk_path(config, steps)
    owner = max(i for i, node in enumerate(nodes) if isinstance(node, ConfigNode))
    return nodes[owner], steps[owner:]
