"""Account of the time of a run over all its starts, in the entry `times` of `run.json`.

    steps          of training that count: they were not lost
    input          waiting for batches
    compilation    of the step, with the first step of each start
    evaluation
    checkpoints    as far as training waited for them
    restarts       from a start to its first step, and from the end of a start to the next one
    lost           steps that were trained again, as their start ended before it saved them

Goodput is the share of the steps in the time since the first start. A start that was killed is
taken to have ended with the last sign of life in the lock of the run's directory.
"""

import contextlib
import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from weft.errors import RunDirError
from weft.trainer.run_dir import read_record, update_record

KINDS = (
    "steps",
    "input",
    "compilation",
    "evaluation",
    "checkpoints",
    "restarts",
    "lost",
)
_MARKS = "goodput"
_TIMES = "times"
_MAX_MARKS = 200


class Goodput(NamedTuple):
    """Seconds since the first start of a run, and those of each kind."""

    elapsed: float
    seconds: Mapping[str, float]

    @property
    def share(self) -> float:
        """The share of the time that went into steps that count."""
        return min(
            1.0, self.seconds.get("steps", 0.0) / max(self.elapsed, 1e-9)
        )


def goodput_of(record: Mapping[str, Any]) -> Goodput | None:
    """Returns the goodput up to the last save or the end of a run, None if it is unknown."""
    times = record.get(_TIMES)
    first_start = _first_start(record.get("starts", ()))
    if times is None or first_start is None:
        return None
    return Goodput(times["until"] - first_start, times["seconds"])


class TimeAccount:
    """Seconds of a run by kind, up to now.

    Args:
        now: returns the time of day, in seconds.
    """

    def __init__(self, now: Callable[[], float]):
        self._now = now
        self._first_start = now()
        self.seconds: dict[str, float] = dict.fromkeys(KINDS, 0.0)

    @property
    def goodput(self) -> float:
        """The share of the time since the first start that went into steps that count."""
        elapsed = self._now() - self._first_start
        return Goodput(elapsed, self.seconds).share

    def add(self, kind: str, seconds: float) -> None:
        """Counts seconds; less than none, as of clocks that are set, are none."""
        self.seconds[kind] += max(0.0, seconds)

    def start(
        self,
        record: Mapping[str, Any],
        step: int,
        last_sign_of_life: float | None,
    ) -> None:
        """Continues the account of the earlier starts in `run.json`, after a step.

        `last_sign_of_life` is the time of that of the start before, if it was killed.
        """
        now = self._now()
        starts = record.get("starts", ())
        self._first_start = _first_start(starts) or now
        times = record.get(_TIMES, {})
        self.seconds = dict.fromkeys(KINDS, 0.0) | times.get("seconds", {})
        self.rewind(record, step)
        until = times.get("until", self._first_start)
        last_sign = until
        if len(starts) > 1 and last_sign_of_life is not None:
            last_sign = min(max(until, last_sign_of_life), now)
        self.add("lost", last_sign - until)
        self.add("restarts", now - last_sign)

    def rewind(self, record: Mapping[str, Any], step: int) -> None:
        """Counts the steps after a saved one as lost."""
        productive_seconds = 0.0
        for mark in record.get(_MARKS, []):
            if mark["step"] <= step:
                productive_seconds = mark["productive_seconds"]
        self.add("lost", self.seconds["steps"] - productive_seconds)
        self.seconds["steps"] = productive_seconds

    def write(self, directory: str, saved_step: int | None = None) -> None:
        """Writes the account into the record of a run, and the seconds of steps up to a save.

        Neither a full disk nor a damaged record ends training.
        """
        rounded = {kind: round(x, 3) for kind, x in self.seconds.items()}
        values: dict[str, Any] = {
            _TIMES: {"until": round(self._now(), 3), "seconds": rounded}
        }
        with contextlib.suppress(OSError, RunDirError):
            if saved_step is not None:
                marks = read_record(directory).get(_MARKS, [])
                marks = [mark for mark in marks if mark["step"] < saved_step]
                mark = {
                    "step": saved_step,
                    "productive_seconds": rounded["steps"],
                }
                values[_MARKS] = [*marks, mark][-_MAX_MARKS - 1 :]
            update_record(directory, **values)


def _first_start(starts: Sequence[Mapping[str, Any]]) -> float | None:
    if not starts:
        return None
    return datetime.datetime.fromisoformat(starts[0]["time"]).timestamp()
