"""Names of earlier versions: `moved_names.txt` has for each the name in this version."""

import functools
from collections.abc import Mapping
from pathlib import Path


@functools.cache
def moved_names() -> Mapping[str, str]:
    """Returns the present dotted names of modules and objects, by those of earlier versions."""
    table = Path(__file__).with_name("moved_names.txt").read_text(encoding="utf-8")
    return dict(line.split() for line in table.splitlines())


def current_name(name: str) -> str:
    """Returns the dotted name, in this version, of a module or an object of an earlier version.

    The longest entry of `moved_names.txt` that `name` begins with applies.
    """
    parts = name.split(".")
    if parts[0] == "weft":
        for end in range(len(parts), 1, -1):
            moved = moved_names().get(".".join(parts[:end]))
            if moved is not None:
                return ".".join([moved, *parts[end:]])
    return name
