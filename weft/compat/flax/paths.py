"""Import paths of Flax that are laid out differently in Weft.

A line of `paths.txt` names a module of Flax, with `weft` for `flax`; the names in it that lead
elsewhere, as `name=module:name`; and the modules that have its other names, searched in order.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class FlaxModule(NamedTuple):
    """Places of the names of a module of Flax.

    Attributes:
        elsewhere: places of single names, each as `module` or `module:name`.
        modules: what has the other names, searched in order, each as `module` or `module:name`.
    """

    elsewhere: Mapping[str, str] = {}
    modules: tuple[str, ...] = ()


@functools.cache
def flax_modules() -> Mapping[str, FlaxModule]:
    """Returns the modules of `paths.txt` by their dotted names."""
    table: dict[str, FlaxModule] = {}
    text = Path(__file__).with_name("paths.txt").read_text(encoding="utf-8")
    for line in text.splitlines():
        module, *places = line.split()
        elsewhere: dict[str, str] = {}
        modules: list[str] = []
        for place in places:
            name, equals, target = place.partition("=")
            if equals:
                elsewhere[name] = target
            else:
                modules.append(place)
        table[module] = FlaxModule(elsewhere, tuple(modules))
    return table
