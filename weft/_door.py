"""The door to what a package does not know itself: names and layers from elsewhere.

Packages and errors ask the door about a name that they do not have, of an earlier version, of Flax
or of AXLearn, and modules of the hierarchy about a layer of another library. The package `compat`,
which nothing in Weft imports, knows the answers; it sets the door when `weft` is imported.
"""

import enum
from typing import Any


class Door:
    """Answers questions; this one, which is replaced, knows no names and no layers."""

    def find_attribute(self, module: str, name: str) -> object:
        """Returns what a module neither defines nor offers, or raises an AttributeError."""
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    def current_name(self, name: str) -> str:
        """Returns the dotted name, in this version, of a module or an object."""
        return name

    def public_path(self, module: str) -> str:
        """Returns the path by which programs import a module."""
        return module

    def hint_for_name(self, owner: str, name: str) -> str | None:
        """Returns a sentence on what to write instead of a name that a class lacks, or None."""
        return None

    def hint_for_error(self, error: Exception) -> str | None:
        """Returns a sentence on what to write instead of the call that raised it, or None."""
        return None

    def config_of_layer(self, layer: object) -> Any:
        """Returns the config of a hierarchy layer for one of another library, or for its config."""
        return layer


_door = Door()


def set_door(door: Door) -> None:
    """Sets the door; called once, when `weft` is imported."""
    global _door
    _door = door


def current_door() -> Door:
    """Returns the door that was set last."""
    return _door


class EnumTypeWithHints(enum.EnumType):
    """Type of enums that say what to write instead of members that programs may know."""

    def __getattr__(cls, name: str) -> Any:
        hint = (
            None
            if name.startswith("_")
            else _door.hint_for_name(cls.__name__, name)
        )
        if hint is not None:
            raise AttributeError(
                f"type object {cls.__name__!r} has no attribute {name!r}. {hint}"
            )
        find_member = getattr(super(), "__getattr__", None)  # of Python 3.11
        if find_member is not None:
            return find_member(name)
        raise AttributeError(
            f"type object {cls.__name__!r} has no attribute {name!r}"
        )
