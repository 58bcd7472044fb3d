"""Import paths of AXLearn that are laid out differently in Weft.

A line of `paths.txt` has the dotted name of a module or an object by AXLearn's layout, with `weft`,
`weft.hierarchy` or `weft.trainer` for its packages, and the name in this version.
"""

import functools
from collections.abc import Mapping
from pathlib import Path


@functools.cache
def axlearn_paths() -> Mapping[str, str]:
    """Returns the dotted names in this version, by those of AXLearn's layout."""
    table = Path(__file__).with_name("paths.txt").read_text(encoding="utf-8")
    return dict(line.split() for line in table.splitlines())
