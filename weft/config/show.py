"""Printed forms of configs: `repr` on one line, `debug_string` with one line per leaf."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from weft.config.required import REQUIRED
from weft.config.values import ConfigNode, parts, values_equal
from weft.config.visit import to_flat_dict

if TYPE_CHECKING:
    from weft.config.config import ConfigBase

_REPR_LIMIT = 1500


def value_repr(value: Any) -> str:
    """Formats a leaf, with dotted names for classes and functions."""
    name = getattr(value, "__qualname__", None)
    module = getattr(value, "__module__", None)
    if isinstance(name, str) and isinstance(module, str):
        return repr(f"{module}.{name}" if module != "builtins" else name)
    return repr(value)


def debug_string(
    config: "ConfigBase",
    *,
    kv_separator: str,
    field_separator: str,
    omit_default_values: Sequence[Any] | None,
) -> str:
    """Formats one line per leaf. See `ConfigBase.debug_string`."""
    omitted = (None, REQUIRED) if omit_default_values is None else omit_default_values
    flat = to_flat_dict(config, omit_default_values=omitted)
    lines = [f"{path}{kv_separator}{value_repr(value)}" for path, value in flat.items()]
    return field_separator.join(lines)


def short_repr(value: Any) -> str:
    """Formats a config on one line; a long one without fields at their defaults."""
    text = _one_line(value, all_fields=True)
    if len(text) > _REPR_LIMIT:
        text = _one_line(value, all_fields=False)
    return text if len(text) <= _REPR_LIMIT else text[: _REPR_LIMIT - 2] + " …"


def _one_line(value: Any, *, all_fields: bool) -> str:
    def write(child: Any) -> str:
        return _one_line(child, all_fields=all_fields)

    if isinstance(value, ConfigNode):
        shown = [
            f"{name}={write(child)}"
            for name, child in value._field_values().items()
            if name != value._target
            and (all_fields or not values_equal(child, value._fields()[name].default()))
        ]
        return f"{value._title()}({', '.join(shown)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {write(child)}' for key, child in value.items())}}}"
    if type(value) in (list, tuple):
        inner = ", ".join(write(child) for _, child in parts(value) or ())
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return getattr(value, "__qualname__", None) or repr(value)
