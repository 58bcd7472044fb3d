"""The picture of a run in a terminal: `python -m docs.images.run` writes it, also for phones.

The values are those of a run of the default recipe on two cores; the display lays them out.
"""

import html
import io
import textwrap
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.segment import Segment

from weft.report.display import LiveDisplay, metric_texts
from weft.report.readings import Reading

FOLDER = Path(__file__).parent
COLUMNS = {"run.svg": 86, "run-narrow.svg": 44}
LINES = (
    "$ weft train lm",
    "weft 0.2.0, jax 0.10.2: training lm",
    "corpus     stdlib-3.11: 512 files, 9,835,483 bytes to train on, 154,584 held out",
    "unigram    loss 3.197, bits per byte 4.613",
    "bigram     loss 2.380, bits per byte 3.434",
    "trigram    loss 1.725, bits per byte 2.489",
    "model      357,792 parameters, 1.4 MB",
    "devices    1 × cpu",
    "run        runs/lm: a new run of 600 steps",
)
EVALUATIONS = {
    200: {
        "loss": 1.736,
        "accuracy": 0.542,
        "bits_per_byte": 2.505,
        "perplexity": 5.677,
    },
    400: {
        "loss": 1.450,
        "accuracy": 0.612,
        "bits_per_byte": 2.092,
        "perplexity": 4.264,
    },
}
STEP = Reading(
    step=440,
    loss=1.492,
    metrics={
        "accuracy": 0.585,
        "bits_per_byte": 2.313,
        "perplexity": 4.970,
    },
    summaries={"learner": {"learning_rate": 0.00158}},
    unit="tokens",
    per_second=21_298,
    elapsed=56,
    seconds_left=20,
)
_ADVANCE, _LINE, _SIZE, _LEFT, _TOP = 7.8, 20, 13, 24, 44
_STYLE = (
    f"text{{font:{_SIZE}px ui-monospace,'SF Mono',Menlo,Consolas,'DejaVu Sans Mono',monospace;"
    "fill:#d5dae0;white-space:pre}"
    ".bold{font-weight:700;fill:#fff}.dim{fill:#98a1ab}"
    ".window{fill:#1c2128;stroke:#444c56}.done{fill:#57b97a}.rest{fill:#3a424c}"
)


def rows(columns: int) -> Iterator[list[Segment]]:
    """Yields the rows of the terminal, as the display draws them."""
    console = Console(
        file=io.StringIO(),
        width=columns,
        force_terminal=True,
        color_system="truecolor",
    )
    display = LiveDisplay(console, "runs/lm")
    display._max_step = 600  # that of `on_start`, which needs a trainer
    for line in LINES:
        yield from _wrapped(line, columns)
    for step, values in EVALUATIONS.items():
        display.evals["held_out"] = (step, values)
        yield from _wrapped(
            f"step {step}  held_out: {', '.join(metric_texts(values))}", columns
        )
    display._reading, display._saved_step = STEP, 400
    yield from console.render_lines(display._render(), pad=False)


def _wrapped(line: str, columns: int) -> Iterator[list[Segment]]:
    """Yields the rows of a line, which `weft` breaks between words."""
    if len(line) <= columns:
        yield [Segment(line)]
        return
    for row in textwrap.wrap(line, columns, subsequent_indent="  "):
        yield [Segment(row)]


def svg(columns: int) -> str:
    """Returns the picture of a terminal with that many columns."""
    parts: list[str] = []
    y = _TOP
    for row in rows(columns):
        parts += _row(row, y)
        y += _LINE
    width, height = round(2 * _LEFT + columns * _ADVANCE), y + 4
    dots = "".join(
        f'<circle cx="{x}" cy="16" r="5.5" fill="{color}"/>'
        for x, color in ((20, "#ff5f57"), (38, "#febc2e"), (56, "#28c840"))
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}">',
            f"<style>{_STYLE}</style>",
            f'<rect class="window" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" '
            'rx="8"/>',
            dots,
            *parts,
            "</svg>\n",
        ]
    )


def _row(row: list[Segment], y: float) -> Iterator[str]:
    x = float(_LEFT)
    for text, style, _ in row:
        width = len(text) * _ADVANCE
        if set(text) & set("━╸╺"):
            color = (
                style.color.get_truecolor() if style and style.color else None
            )
            is_done = color is not None and color.red > 200
            role = "done" if is_done else "rest"
            size = f'width="{width:g}" height="5"'
            yield f'<rect class="{role}" x="{x:g}" y="{y - 7:g}" {size}/>'
        elif text.strip():
            shown = text.rstrip()
            role = (
                "bold"
                if shown.startswith("$")
                else "dim"
                if style and style.dim
                else ""
            )
            of_role = f' class="{role}"' if role else ""
            yield (
                f'<text x="{x:g}" y="{y:g}"{of_role} textLength="{len(shown) * _ADVANCE:g}" '
                f'xml:space="preserve">{html.escape(shown, quote=False)}</text>'
            )
        x += width


if __name__ == "__main__":
    for name, columns in COLUMNS.items():
        (FOLDER / name).write_text(svg(columns), encoding="utf-8")
