"""What does it cost to make a model abstractly: the shapes of a decoder's parameters?"""

import gc
import time
from typing import Any

import jax

from benchmarks.harness import Row, ratios, row
from benchmarks.libraries import libraries
from benchmarks.libraries.raw import RAW

FEW, MANY = 6, 96


def sizes(shapes: Any) -> list[int]:
    """Returns the sorted sizes of all arrays, to compare libraries with different names."""
    return sorted(x.size for x in jax.tree.leaves(shapes))


def run() -> list[Row]:
    """Measures six layers in every library, and 96 in Weft: the ratio must be the same."""
    rows = []
    gc.freeze()  # existing objects are skipped by each collection
    for library in libraries():
        if (found := sizes(library.shapes(FEW)())) != (expected := sizes(RAW.shapes(FEW)())):
            raise AssertionError(f"{library.name} makes arrays of {found}, not of {expected}")
        for n in (FEW, MANY) if library.is_weft else (FEW,):
            of_library, of_raw = library.shapes(n), RAW.shapes(n)
            measured = ratios(of_library, of_raw, clock=time.thread_time, collect=True)
            question = f"abstract init of {n} layers, {library.name} / raw"
            rows.append(row(question, measured, at_most=3.0 if library.is_weft else None))
    return rows
