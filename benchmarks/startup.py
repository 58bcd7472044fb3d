"""How long until a run has trained, and does a second start compile again?

Runs `weft train lm-tiny max_step=1` in new processes, alternately with an empty cache of compiled
programs and with the one that the first left: import, build, trace, compile, one step, evaluation,
checkpoint, report and a sample of text. The time is the CPU time of the process.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import Row, counted, row

SECONDS = 6.0
PAIRS = 15
_PROGRAM = """
import os, sys
import jax
seen = []
jax.monitoring.register_event_listener(lambda name, **kwargs: seen.append(name))
from weft.cli import main
assert main(["train", "lm-tiny", "max_step=1", "dir=" + sys.argv[1]]) == 0
names = ("compile_requests_use_cache", "cache_hits")
requests, hits = (seen.count("/jax/compilation_cache/" + name) for name in names)
print()
print(sum(os.times()[:2]), requests - hits)
"""
_UNSET = ("JAX_COMPILATION_CACHE_DIR", "PYTHONDONTWRITEBYTECODE")


def start(directory: Path, run: str) -> tuple[float, int]:
    """Starts a run in a new process.

    Args:
        directory: has the user's cache directory, and the run's.

    Returns:
        The CPU time in seconds, and the number of programs that were compiled.
    """
    env = {k: v for k, v in os.environ.items() if k not in _UNSET}
    env["XDG_CACHE_HOME"] = str(directory / "cache")
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(directory / run)],
        env=env,
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    seconds, compiled = done.stdout.splitlines()[-1].split()
    return float(seconds), int(compiled)


def run() -> list[Row]:
    """Cold starts, and second starts of the same config."""
    firsts, seconds = [], []
    with tempfile.TemporaryDirectory() as name:
        start(Path(name), "warmup")  # the first one compiles missing bytecode
        for i in range(PAIRS):
            directory = Path(name) / str(i)
            directory.mkdir()
            firsts.append(start(directory, "first"))
            seconds.append(start(directory, "second"))
    first, second = ([time for time, _ in starts] for starts in (firsts, seconds))
    return [
        row(
            "a first step of lm-tiny, CPU seconds / 6 s",
            ([t / SECONDS for t in first], first, [SECONDS] * PAIRS),
            at_most=1.0,
            note=f"compiles {firsts[0][1]} programs",
        ),
        row(
            "a second start of lm-tiny / the first",
            ([b / a for a, b in zip(first, second, strict=True)], second, first),
            at_most=0.85,
        ),
        counted(
            "programs compiled by a second start",
            max(compiled for _, compiled in seconds),
            at_most=0,
        ),
    ]
