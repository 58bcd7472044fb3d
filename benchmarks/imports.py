"""What does importing cost? Each import in a new process, its CPU time against that of another."""

import subprocess
import sys

from benchmarks.harness import Row, row

_PROGRAM = "import time; t = time.process_time(); {}; print(time.process_time() - t)"


def _seconds(statement: str) -> float:
    program = _PROGRAM.format(statement)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def run() -> list[Row]:
    """`weft.config` against a tenth of a second, Linen and the hierarchy against JAX alone."""
    config = [_seconds("import weft.config") for _ in range(15)]
    fixed = ([t / 0.1 for t in config], config, [0.1] * len(config))
    rows = [row("import weft.config / 0.1 s", fixed, at_most=1.0)]
    for name in ("weft.linen", "weft.hierarchy.layers"):
        times = [(_seconds(f"import {name}"), _seconds("import jax")) for _ in range(15)]
        against_jax = ([a / b for a, b in times], *map(list, zip(*times, strict=True)))
        rows.append(row(f"import {name} / import jax", against_jax, at_most=1.2))
    return rows
