"""What does a model cost that is called eagerly: an MLP of 8 layers of width 8?"""

import functools
import time

import jax
import numpy as np

from benchmarks.harness import Row, calls, ratios, row
from benchmarks.libraries import libraries
from benchmarks.libraries.library import Program, chain_input
from benchmarks.libraries.raw import RAW, chain_values

_AT_MOST = {"Weft Linen": 12.0, "Weft NNX": 4.0}
_TIMES = 5


def _many(program: Program, x: jax.Array) -> None:
    fn = program.make()
    for _ in range(_TIMES):
        fn(program.params, x).block_until_ready()


def run() -> list[Row]:
    """Measures forward passes relative to raw JAX."""
    values, rows = chain_values(8, 8), []
    x, raw = chain_input(values), RAW.chain(values)
    for library in libraries():
        program = library.chain(values)
        if program is None:
            continue
        question = f"eager forward of an MLP of 8 layers of width 8, {library.name} / raw"
        np.testing.assert_allclose(
            program(x), raw(x), rtol=1e-5, atol=1e-7, err_msg=f"results differ: {question}"
        )
        of_library, of_raw = (functools.partial(_many, p, x) for p in (program, raw))
        rows.append(
            row(
                question,
                ratios(of_library, of_raw, pairs=25, warmup=2, clock=time.thread_time),
                at_most=_AT_MOST.get(library.name),
                note=f"of {_TIMES}; {calls(of_library, 1) / _TIMES:.0f} against "
                f"{calls(of_raw, 1) / _TIMES:.0f} Python calls each",
            )
        )
    return rows
