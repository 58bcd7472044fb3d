"""Shared code of all fuzzers: lookup, timed runs, and reports of findings.

A fuzzer is a module `tests/fuzz/fuzz_NAME.py` with

- `CASES`: a hypothesis strategy. A case is data with a readable `repr`.
- `check(case)`: returns where Weft does what it promises, and raises where it does not.
- `source(case)`: Python source that repeats the check of this case where it is pasted into a file.
- `SHORT`: how many cases `make test` takes, a few seconds of them.

`make fuzz` and `make test` find it by its file's name. Hypothesis shrinks a case that fails, so a
strategy should have what is simpler first.
"""

import contextlib
import dataclasses
import faulthandler
import importlib
import itertools
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Protocol, cast

import hypothesis
import jax
from hypothesis import HealthCheck, Phase, settings
from hypothesis.strategies import SearchStrategy

CASES_PER_SEED = 200
SECONDS_PER_CASE = 300  # on a busy machine a case of many eager loops takes more than a minute


class Fuzzer(Protocol):
    """A module as above."""

    CASES: SearchStrategy
    SHORT: int

    def check(self, case: object) -> None: ...

    def source(self, case: object) -> str: ...


class Hang(Exception):
    """A case took longer than any should."""


@dataclasses.dataclass
class Finding:
    """A case, made as small as possible, where Weft is wrong."""

    case: object
    error: BaseException

    def text(self, fuzzer: Fuzzer) -> str:
        shown = traceback.TracebackException.from_exception(self.error)
        shown.__notes__ = None  # where Hypothesis shows the case in its own words
        lines = "".join(shown.format()).rstrip().splitlines()
        error = "\n".join("# " + line for line in lines[-12:])
        return f"{error}\n\n{fuzzer.source(self.case).rstrip()}\n"


def names() -> list[str]:
    """Returns the names of all fuzzers."""
    return sorted(p.stem.removeprefix("fuzz_") for p in Path(__file__).parent.glob("fuzz_*.py"))


def fuzzer(name: str) -> Fuzzer:
    module: ModuleType = importlib.import_module(f"tests.fuzz.fuzz_{name}")
    return cast(Fuzzer, module)


def search(
    fuzzer: Fuzzer,
    cases: int,
    seed: int | None = None,
    until: float = float("inf"),
    seconds_per_case: float = SECONDS_PER_CASE,
) -> tuple[int, Finding | None]:
    """Checks random cases.

    Args:
        fuzzer: which.
        cases: how many at most.
        seed: of the random numbers; None for the same ones each time that change with the fuzzer.
        until: the `time.monotonic()` at which to stop.
        seconds_per_case: after how long a case counts as one that hangs.

    Returns:
        How many cases were checked, and the smallest that failed.
    """
    checked = 0
    failed: list[Finding] = []

    def check(case: object) -> None:
        nonlocal checked
        if not failed and time.monotonic() > until:
            return
        checked += not failed
        try:
            with limited(seconds_per_case):
                fuzzer.check(case)
        except hypothesis.errors.UnsatisfiedAssumption:
            raise
        except Exception as error:
            failed.append(Finding(case, error))
            raise

    test = settings(
        max_examples=cases,
        derandomize=seed is None,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        report_multiple_bugs=False,
    )(hypothesis.given(fuzzer.CASES)(check))
    if seed is not None:
        test = hypothesis.seed(seed)(test)
    try:
        test()
    except Exception:
        # Hypothesis runs the smallest case last.
        if not failed:
            raise
        return checked, failed[-1]
    return checked, None


def fuzz(
    name: str, minutes: float, seed: int, say: Callable[[str], object] = print
) -> Finding | None:
    """Runs a fuzzer until the time is over or it finds something, and reports."""
    of_name = fuzzer(name)
    begin, checked, finding = time.monotonic(), 0, None
    until = begin + 60 * minutes
    for last in itertools.count(seed):
        more, finding = search(of_name, CASES_PER_SEED, last, until)
        checked += more
        # Else memory grows with each program that JAX has seen.
        jax.clear_caches()
        if finding is not None:
            say(f"{name}: seed {last}:\n\n{finding.text(of_name)}")
        if finding is not None or time.monotonic() > until:
            break
    spent = (time.monotonic() - begin) / 60
    result = "no finding" if finding is None else "a finding, printed above"
    say(f"{name}: seeds {seed} to {last}, {checked} cases in {spent:.1f} minutes: {result}")
    return finding


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises Hang in what takes longer; what does not return to Python ends the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise Hang(f"no result after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(10 * seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
