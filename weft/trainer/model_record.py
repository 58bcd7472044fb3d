"""Record of the class of a model that a program has made, for the directory of its run.

It has the form of a recipe's record, see `weft.recipes.recipe.Recipe.record`, so that commands and
`weft.load` find the class in the same way: they import its module if this user has signed it.
"""

import hashlib
import os
import site
import sys
import sysconfig
from pathlib import Path
from typing import Any

from weft.config import ClassConfigBase, FunctionConfigBase, InMemory


def model_record(layer: object) -> dict[str, Any] | None:
    """Returns the record of a model's class or function; None if a text cannot name it.

    The classes of Weft need none.
    """
    if isinstance(layer, InMemory):
        return None
    function = layer if isinstance(layer, type) else type(layer)
    if isinstance(layer, ClassConfigBase):
        function = layer.klass
    elif isinstance(layer, FunctionConfigBase):
        function = layer.fn
    else:
        function = getattr(layer, "klass", function)
    module, name = function.__module__, function.__qualname__
    if module.partition(".")[0] == "weft" or "<" in name:
        return None
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or module == "__main__" or is_installed(file):
        file = ""
    digest = ""
    if file:
        file = os.path.abspath(file)
        digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return {
        "name": f"weft.fit with {module}.{name}",
        "function": f"{module}:{name.partition('.')[0]}",
        "file": file,
        "sha256": digest,
        "neighbors": {},
        "words": None,
    }


def is_installed(file: str) -> bool:
    """Returns whether a file belongs to Python or to an installed package."""
    paths = sysconfig.get_paths()
    folders = [
        paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")
    ]
    folders.append(site.getusersitepackages())
    real_file = os.path.realpath(file)
    return any(
        real_file.startswith(os.path.realpath(folder) + os.sep)
        for folder in folders
    )
