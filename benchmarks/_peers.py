"""The libraries that are measured: Weft's, and Flax's where it is installed."""

import contextlib
import importlib
from typing import Any

from weft import nnx


def libraries() -> dict[str, Any]:
    """The modules to which the same program is given, by name; Weft's comes first."""
    found = {"Weft NNX": nnx}
    with contextlib.suppress(ImportError):
        found["Flax NNX"] = importlib.import_module("flax.nnx")
    return found
