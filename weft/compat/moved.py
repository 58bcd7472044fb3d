"""Names of released versions: `moved_names.txt` has for each the name in this version."""

import functools
from collections.abc import Mapping
from pathlib import Path


@functools.cache
def moved_names() -> Mapping[str, str]:
    """Returns the present dotted names of modules and objects, by those of earlier versions."""
    table = (
        Path(__file__).with_name("moved_names.txt").read_text(encoding="utf-8")
    )
    return dict(line.split() for line in table.splitlines())
