"""Stored measurements: by question its rows, its curves, and the place of measurement.

`benchmarks/results.json` holds the newest answer to every question, whenever it was asked.
"""

import dataclasses
import datetime
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.harness import Curve, Row

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results.json"
PEERS = {"flax": "Flax", "equinox": "Equinox", "dm-haiku": "Haiku"}


@dataclasses.dataclass(frozen=True)
class Answer:
    """Measurements of one question.

    Attributes:
        asks: the question in words.
        place: versions, machine and date, as `here()` gives them.
        rows: its lines of the table.
        curves: its plots.
    """

    asks: str
    place: dict[str, Any]
    rows: list[Row]
    curves: list[Curve] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, asks: str, place: dict[str, Any], parts: Iterable[Row | Curve]) -> "Answer":
        """Rows and curves in one list, as `run()` returns them, apart."""
        parts = list(parts)
        rows = [part for part in parts if isinstance(part, Row)]
        curves = [part for part in parts if isinstance(part, Curve)]
        if len(rows) + len(curves) < len(parts):
            odd = next(p for p in parts if not isinstance(p, Row | Curve))
            raise TypeError(f"run() returned {odd!r} in its list; only Row and Curve are shown")
        return cls(asks, place, rows, curves)


def here() -> dict[str, Any]:
    """Returns versions, machine and date: what a reader needs to place the numbers."""
    import jax

    import weft

    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "weft": weft.__version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        **{name: _installed(name) for name in PEERS},
        "machine": _processor(),
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory": _memory(),
        "devices": f"{jax.device_count()} × {jax.devices()[0].device_kind}",
    }


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    names = Path("/proc/cpuinfo")
    lines = names.read_text(encoding="utf-8").splitlines() if names.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{platform.machine()}, {models[0]}" if models else platform.machine()


def _memory() -> str:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return "unknown"
    return f"{size / 2**30:.0f} GiB"


def load(path: Path = RESULTS) -> dict[str, Answer]:
    """Returns the answers in a file, by question; none if there is no file."""
    return parse(path.read_text(encoding="utf-8")) if path.exists() else {}


def committed() -> dict[str, Answer]:
    """Returns the answers of the last commit."""
    name = RESULTS.relative_to(ROOT).as_posix()
    shown = subprocess.run(["git", "show", f"HEAD:{name}"], cwd=ROOT, capture_output=True)
    return parse(shown.stdout.decode()) if shown.returncode == 0 else {}


def parse(text: str) -> dict[str, Answer]:
    """Returns the answers in a text of `dumps`."""
    return {
        question: Answer(
            asks=answer["asks"],
            place=answer["place"],
            rows=[Row(**{**r, "quartiles": tuple(r["quartiles"])}) for r in answer["rows"]],
            curves=[
                Curve(**{**c, "lines": _tuples(c["lines"]), "relative": _tuples(c["relative"])})
                for c in answer["curves"]
            ],
        )
        for question, answer in json.loads(text).items()
    }


def _tuples(lines: dict[str, list[list[float]]]) -> dict[str, list[Any]]:
    return {library: [tuple(point) for point in points] for library, points in lines.items()}


def dumps(answers: dict[str, Answer]) -> str:
    """Returns the answers as JSON, questions in order."""
    plain = {question: dataclasses.asdict(answers[question]) for question in sorted(answers)}
    return json.dumps(plain, indent=1, ensure_ascii=False) + "\n"


def save(answers: dict[str, Answer], path: Path = RESULTS) -> None:
    """Writes the answers; who stops it in the middle finds those that there were."""
    new = path.with_suffix(".new")
    new.write_text(dumps(answers), encoding="utf-8")
    new.replace(path)
