"""Two things, run alternately in one process, and the ratio of their times.

Machines are noisy, and the noise comes in waves that are longer than one measurement. So A and B
alternate, each pair gives a ratio, and the median of the ratios is quoted with the smallest and the
largest.
"""

import dataclasses
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results.json"


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        question: what was compared.
        target: what it must reach, as text; empty for another library, which is shown beside.
        met: whether it does; None where there is no target.
        median: of the ratios.
        low: the smallest ratio.
        high: the largest ratio.
        pairs: how many there were.
        note: what a reader should know beside it, such as the times behind the ratio.
    """

    question: str
    target: str
    met: bool | None
    median: float
    low: float
    high: float
    pairs: int
    note: str = ""

    def noted(self, note: str) -> "Row":
        """The line with another note."""
        return dataclasses.replace(self, note=note)


def ratios(
    a: Callable[[], Any],
    b: Callable[[], Any],
    *,
    pairs: int = 15,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    collect: bool = False,
) -> tuple[list[float], list[float], list[float]]:
    """Runs `a` and `b` alternately.

    Args:
        a: what is judged. It waits for its own results.
        b: what it is compared with.
        pairs: the number of measured pairs.
        warmup: the number of pairs before them.
        clock: `time.perf_counter` for elapsed time, `time.thread_time` for the CPU time of Python.
        collect: whether garbage is collected before each measurement. Where much is made, the rare
            and long collections would otherwise always meet the same one of the two.

    Returns:
        The ratios a / b, the times of a, and the times of b, in seconds.
    """

    def measure(fn: Callable[[], Any]) -> float:
        if collect:
            gc.collect()
        start = clock()
        fn()
        return clock() - start

    for _ in range(warmup):
        a(), b()
    times = [(measure(a), measure(b)) for _ in range(pairs)]
    return [x / y for x, y in times], [x for x, _ in times], [y for _, y in times]


def row(
    question: str,
    measured: tuple[list[float], list[float], list[float]],
    *,
    at_most: float | None,
    note: str = "",
) -> Row:
    """The line for ratios that must not be larger than `at_most`, if anything is."""
    quotients, a, b = measured
    median = statistics.median(quotients)
    times = f"{_seconds(statistics.median(a))} against {_seconds(statistics.median(b))}"
    return Row(
        question=question,
        target="" if at_most is None else f"≤ {at_most:g}",
        met=None if at_most is None else median <= at_most,
        median=median,
        low=min(quotients),
        high=max(quotients),
        pairs=len(quotients),
        note=f"{times}; {note}" if note else times,
    )


def counted(question: str, value: float, *, at_most: float | None, note: str = "") -> Row:
    """The line for something that is counted, once."""
    return row(question, ([value], [0.0], [0.0]), at_most=at_most).noted(note)


def calls(fn: Callable[[], Any], n: int = 10) -> float:
    """How many Python functions a call enters, which no other program disturbs."""
    entered = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal entered
        entered += event == "call"

    fn()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        for _ in range(n):
            fn()
    finally:
        sys.setprofile(before)
    return entered / n - 1


def _seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-6:.3g} µs" if value >= 1e-6 else f"{value / 1e-9:.0f} ns"


def machine() -> dict[str, Any]:
    """What a reader needs to place the numbers."""
    import os

    import jax

    import weft

    return {
        "weft": weft.__version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "devices": [str(d) for d in jax.devices()],
    }


def save(rows: list[Row]) -> None:
    """Writes the rows as JSON, keeping those of questions that were not asked this time."""
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": {}}
    kept = {**before["rows"], **{r.question: dataclasses.asdict(r) for r in rows}}
    RESULTS.write_text(
        json.dumps({"machine": machine(), "rows": kept}, indent=2, ensure_ascii=False) + "\n"
    )
