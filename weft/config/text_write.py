"""Writer of configs as text, in the form of a Python expression.

    weft.trainer.learner.Learner.Config(
        optimizer=config_for_function(optax.sgd)(
            learning_rate=0.1,
            momentum=None,
        ),
    )

Fields are sorted by name, one per line, so that texts can be compared line by line.
`weft.config.text_read` reads an equal config from the text, without evaluating it. Values without a
name, such as lambdas or objects of other libraries, are written as `unreadable('…')`.
"""

import enum
import functools
import math
import sys
from collections.abc import Sequence
from typing import Any

from weft.config.origins import Origin
from weft.config.references import reference_to
from weft.config.required import REQUIRED
from weft.config.values import ConfigNode, parts, record_fields, values_equal

_WIDTH = 96
_LITERALS = (type(None), bool, int, str, bytes)


def to_text(cfg: Any, omit_defaults: bool = False, *, origins: bool = False) -> str:
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


def value_text(value: Any) -> str:
    """Writes a value on one line, omitting fields with defaults."""
    return _Writer(omit_defaults=True, origins=False, lines=False).write(value)


class _Writer:
    def __init__(self, omit_defaults: bool, origins: bool, lines: bool = True):
        self.omit_defaults = omit_defaults
        self.origins = origins
        self.lines = lines
        self.names: dict[int, str | None] = {}  # by id, to avoid repeated searches

    def _name(self, obj: Any) -> str | None:
        if id(obj) not in self.names:
            self.names[id(obj)] = reference_to(obj)
        return self.names[id(obj)]

    def write(self, value: Any, indent: int = 0) -> str:
        if isinstance(value, ConfigNode):
            return self._config(value, indent)
        if value is REQUIRED:
            return "REQUIRED"
        if type(value) in _LITERALS:
            return repr(value)
        if type(value) is float:
            return repr(value) if math.isfinite(value) else str(value)
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
        if record_fields(value) is not None and not (callable(value) and self._name(value)):
            name = self._name(type(value)) or unreadable(type(value))
            fields = [(f"{suffix[1:]}=", child, None) for suffix, child in parts(value) or ()]
            return self._block(f"{name}(", fields, ")", indent)
        return self._leaf(value)

    def _config(self, config: ConfigNode, indent: int) -> str:
        fields = config._fields()
        shown = []
        for name, value in config._field_values().items():
            omitted = self.omit_defaults and values_equal(value, fields[name].default())
            if not omitted and (name != config._target or not _named_by_head(config)):
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

    def _leaf(self, value: Any) -> str:
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

    def _head(self, config: ConfigNode) -> str:
        """Returns the text before the brackets of a config."""
        if not _named_by_head(config):
            return self._name(type(config)) or unreadable(type(config))
        made = config._field_values()[config._target or ""]
        name = self._name(made)
        maker = getattr(config, "_maker", "")
        if maker:
            return f"{maker}({name or unreadable(made)})"
        return f"{name}.Config" if name else unreadable(made)


def _named_by_head(config: ConfigNode) -> bool:
    if getattr(config, "_maker", ""):
        return True
    made = config._field_values().get(config._target or "")
    return isinstance(made, type) and getattr(made, "Config", None) is type(config)


def unreadable(value: Any) -> str:
    """Returns the placeholder of a value that has no text."""
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
        item = value.item()
        number = repr(item) if math.isfinite(item) else str(item)
        return f"{type(value).__module__}.{type(value).__name__}({number})"
    return None


def _partition_spec_text(value: Any) -> str | None:
    jax: Any = sys.modules.get("jax")
    if jax is None or not isinstance(value, jax.sharding.PartitionSpec):
        return None
    axes = tuple(value)
    if value != type(value)(*axes) or any(axis is value.UNCONSTRAINED for axis in axes):
        return None
    return f"jax.sharding.PartitionSpec({', '.join(map(repr, axes))})"
