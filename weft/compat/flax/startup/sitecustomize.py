"""Makes `import flax` find Weft in each Python that starts with this folder in PYTHONPATH.

Python imports `sitecustomize` when it starts. `weft.as_flax` puts this folder in PYTHONPATH, so
that the processes which a program starts follow it; a Python without Weft does nothing here. The
`sitecustomize` that this one hides runs as well.
"""

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

if importlib.util.find_spec("weft") is not None:
    import weft.as_flax  # noqa: F401

_other_paths = [
    path for path in sys.path if Path(path) != Path(__file__).parent
]
_hidden = PathFinder.find_spec("sitecustomize", _other_paths)
if _hidden is not None and _hidden.loader is not None:
    sys.modules["sitecustomize"] = importlib.util.module_from_spec(_hidden)
    _hidden.loader.exec_module(sys.modules["sitecustomize"])
