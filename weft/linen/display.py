"""Text form of a module: its fields and submodules, line by line."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.linen.module import Module


def module_repr(module: "Module", step: str = "    ") -> str:
    """Returns the text of a module, each level indented by `step`."""
    held = vars(module)
    fields = [f.name for f in dataclasses.fields(module) if f.repr and f.name in held]
    children = module._state.children if "_state" in held else {}
    names = {name for name in fields if name not in ("parent", "name")}
    lines = []
    if shown := [(n, held[n]) for n in fields if n in names and n not in children]:
        lines.append("# attributes")
        lines += [f"{name} = {_shown(value, step)}" for name, value in shown]
    if children:
        lines.append("# children")
        lines += [f"{name} = {module_repr(child, step)}" for name, child in children.items()]
    if not lines:
        return f"{type(module).__name__}()"
    return "\n".join([f"{type(module).__name__}(", _moved("\n".join(lines), step), ")"])


def _shown(value: Any, step: str) -> str:
    if callable(value) and hasattr(value, "__name__"):
        return value.__name__
    if dataclasses.is_dataclass(value) and hasattr(value, "_state"):
        return module_repr(value, step)  # pyright: ignore[reportArgumentType]
    if isinstance(value, Mapping) and not isinstance(value, dict):
        return repr(dict(value))
    return repr(value)


def _moved(text: str, step: str) -> str:
    return "\n".join(step + line for line in text.split("\n"))
