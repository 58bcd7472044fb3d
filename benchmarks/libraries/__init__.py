"""The libraries that are measured: the same decoder and the same chain of layers in each.

All take the same values, laid out as `raw` makes them: {layer: {part: {leaf: array}}} for the
decoder, with a leading axis over layers where they are scanned, and {layer: {leaf: array}} for the
chain. What a library cannot do without inventing it is None.
"""

import contextlib
import importlib
from collections.abc import Iterator

from benchmarks.libraries.library import Library

_FILES = ("scope", "linen", "nnx", "hierarchy", "equinox", "haiku")


def libraries() -> Iterator[Library]:
    """Returns Weft's APIs and the other installed libraries."""
    for name in _FILES:
        with contextlib.suppress(ImportError):
            yield from importlib.import_module(f"benchmarks.libraries.{name}").libraries()


def nnx_modules() -> dict[str, object]:
    """Returns the modules `nnx` to which the same program is given, by the name of the library."""
    return {library.name: library.nnx for library in libraries() if hasattr(library, "nnx")}
