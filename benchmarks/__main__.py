"""Asks the questions, prints one table, and writes the results and the page about them.

python -m benchmarks                 # all questions
python -m benchmarks nnx_dispatch    # one; a part of its name is enough
python -m benchmarks --gpu           # the questions about GPUs, whose names begin with gpu_
python -m benchmarks --page          # the pages on speed again, from results.json
"""

import difflib
import subprocess
import sys
import time
import traceback
from pathlib import Path

from rich.console import Console

from benchmarks.frame import page, results, table
from benchmarks.frame.comparison import compare
from benchmarks.frame.results import Answer
from benchmarks.frame.runner import ask

QUESTIONS = sorted(
    path.stem
    for path in Path(__file__).parent.glob("*.py")
    if path.stem not in ("__init__", "__main__", "harness") and not path.stem.startswith("_")
)
_GPU = "gpu_"
_WIDTH = 160  # without a terminal to tell the width


def chosen(only: list[str], gpu: bool = False) -> tuple[list[str], list[str]]:
    """Returns the questions selected by name or part of one, and the names that match none.

    Args:
        gpu: selects among the questions about GPUs, and not among the others.
    """
    asked = [q for q in QUESTIONS if q.startswith(_GPU) == gpu]
    fitting = {w: [q for q in asked if q == w] or [q for q in asked if w in q] for w in only}
    names = {name for names in fitting.values() for name in names}
    unknown = [word for word, names in fitting.items() if not names]
    return [q for q in asked if q in names or not only], unknown


def main(arguments: list[str]) -> int:
    """Runs the questions that are named, or all; the exit status is 1 if one of them fails."""
    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = _WIDTH
    if arguments == ["--page"]:
        console.print(*page.write(results.load()), sep="\n", markup=False)
        return 0
    gpu = arguments[:1] == ["--gpu"]
    if gpu and not _has_gpu():
        console.print(
            "JAX finds no GPU here. Run make bench-gpu, which installs jax[cuda12].", markup=False
        )
        return 2
    names, unknown = chosen(arguments[gpu:], gpu)
    if unknown:
        console.print(_no_question(unknown), markup=False)
        return 2
    answers, failures, stopped = {}, {}, ""
    for i, name in enumerate(names, 1):
        console.print(f"[dim]{i}/{len(names)} {name} …[/]", end=" ")
        start = time.perf_counter()
        try:
            answers[name] = ask(name)
        except KeyboardInterrupt:
            stopped = name
            console.print("[red]stopped[/]")
            break
        except Exception:
            failures[name] = traceback.format_exc()
            console.print("[red]failed[/]")
            continue
        console.print(f"[dim]{time.perf_counter() - start:.0f} s[/]")
        kept = {q: answer for q, answer in results.load().items() if q in QUESTIONS}
        results.save({**kept, **answers})
    if answers:
        _show(console, answers)
    for name, text in failures.items():
        console.print(f"\n[red]{name} failed[/]; what was measured of it before is kept:")
        console.print(text, markup=False)
    if stopped:
        console.print(f"[red]Stopped in {stopped}[/]; what was answered before it is kept.")
        return 130
    return 1 if failures else 0


def _has_gpu() -> bool:
    # In a process of its own: this one would keep most of the GPU's memory.
    program = "import jax; raise SystemExit(jax.default_backend() != 'gpu')"
    return subprocess.run([sys.executable, "-c", program]).returncode == 0


def _no_question(unknown: list[str]) -> str:
    lines = []
    for word in unknown:
        close = difflib.get_close_matches(word, QUESTIONS, n=1)
        lines.append(f"There is no question {word}." + (f" Is it {close[0]}?" if close else ""))
    return "\n".join([*lines, "There are, and a part of a name is enough:", *QUESTIONS])


def _show(console: Console, answers: dict[str, Answer]) -> None:
    console.print("", *table.header(next(reversed(answers.values()))), "", sep="\n", markup=False)
    console.print(table.rich_table(answers, console.width))
    for answer in answers.values():
        for curve in answer.curves:
            console.print(f"{curve.title}:", *curve.words, "", sep="\n  ", markup=False)
    after = [
        *table.footnote_lines(answers),
        *compare(results.committed(), answers).lines(),
        *page.write(results.load()),
        "",
        table.summary(answers),
        *table.misses(answers),
    ]
    console.print(*after, sep="\n", markup=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
