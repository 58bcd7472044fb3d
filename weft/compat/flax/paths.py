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
    modules = {}
    table = Path(__file__).with_name("paths.txt").read_text(encoding="utf-8")
    for line in table.splitlines():
        module, *places = line.split()
        elsewhere = dict(place.split("=") for place in places if "=" in place)
        others = tuple(place for place in places if "=" not in place)
        modules[module] = FlaxModule(elsewhere, others)
    return modules
