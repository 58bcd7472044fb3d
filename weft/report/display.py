"""Progress of a run for people: a block that is redrawn on a terminal or in a cell, or plain lines.

The displays are hooks of the trainer. They print one-time events (the model, evaluations, the
end) as lines. Per-step values are redrawn in place on a terminal and in a notebook, and printed
every few seconds elsewhere. They read only values of finished steps, and never wait for a device.
"""

import io
import logging
import math
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TextIO, cast

import jax
from jax.sharding import PartitionSpec
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from weft.errors import CheckpointSaveError
from weft.hierarchy.module import Module
from weft.hierarchy.pipeline import pipelines_of
from weft.report import charts
from weft.report.readings import Meter, Reading, metrics, scalar
from weft.report.rendering import render
from weft.serialization.untrusted import printable
from weft.trainer import run_dir, train_step
from weft.trainer.hooks import Hook, RunningTrainer, has_ended
from weft.trainer.learner import BaseLearner
from weft.typing import MeshAxes, NestedTensor, T

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_DRAWINGS = 0.25
# Columns that a bar takes at least, with the space after it.
_LEAST_BAR_WIDTH = 12


class TextConsole(Console):
    r"""Console that prints texts which others wrote: a terminal obeys none of their characters.

    >>> TextConsole(file=sys.stdout).print("a \x1b]2J \u202e", highlight=False)
    a \x1b]2J \u202e
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # Those that move the cursor and the like are Rich's own.
            if segment.control:
                yield segment
            else:
                yield segment._replace(text=printable(segment.text))


def make_display(console: Console, dir: str | None) -> "Display":
    """Returns the display that suits a console.

    `dir` is the run's directory, as the user wrote it; None if nothing in it is kept.
    """
    if console.is_jupyter:
        return NotebookDisplay(console, dir)
    # With FORCE_COLOR, which notebooks and CI set for commands, rich takes a pipe for a terminal;
    # what is drawn again and again would be appended there.
    if console.is_interactive and console.file.isatty():
        return LiveDisplay(console, dir)
    return LineDisplay(console, dir)


class Display(Hook):
    """Base of the displays. Use it in a `with` block.

    Attributes:
        evals: Per evaler its last step, and its loss and metrics.
        ended: The last step and the reason, see `Hook.on_end`.
        parameters: Number of parameters of the model.
        trained: Number of those that the learner updates.
    """

    def __init__(
        self,
        console: Console,
        dir: str | None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._console, self._dir = console, dir
        self._clock = clock
        self._next_time = -math.inf
        self.evals: dict[str, tuple[int, dict[str, float]]] = {}
        self.resumed_from: int | None = None
        self.ended: tuple[int, str] | None = None
        self.parameters = self.trained = 0
        self._has_started = False

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def print_line(self, line: str) -> None:
        """Prints a permanent line."""
        print_words(self._console, line)

    def print_command(self, words: Sequence[str]) -> None:
        """Prints a command to copy, given as the words of a shell's line."""
        if not self._console.is_terminal:
            self.print_line(" ".join(words))
            return
        text = "\n".join(command_lines(words, self._console.width))
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def on_start(
        self, trainer: RunningTrainer, resumed_from: int | None
    ) -> None:
        self.resumed_from = resumed_from
        self._max_step = trainer.config.max_step
        self._meter = Meter(self._max_step)
        self._has_started = True
        sizes = parameter_sizes(trainer)
        self.parameters, self.trained = sizes.count, sizes.trained
        self.print_line(f"model      {_size_text(sizes)}")
        self.print_line(f"devices    {_devices_text(trainer)}")
        if resumed_from is None:
            start = "a new run"
            if self._is_limited:
                start += f" of {self._max_step:,} steps"
        elif resumed_from >= self._max_step:
            start = (
                f"finished at step {resumed_from:,} already, nothing to train"
            )
        else:
            start = f"resuming from step {resumed_from:,}"
        directory = f"{self._dir}: " if self._dir else ""
        self.print_line(f"run        {directory}{start}")
        changes: list[str] = []
        if resumed_from is not None:
            changes = run_dir.layout_notes(trainer.config.dir)
        if changes:
            self.print_line(f"changed    {', '.join(changes)}")
            self.print_line(
                "           The batch, the learning rate and the order of the data stay."
            )
        for note in run_dir.schedule_notes(trainer.config):
            self.print_line(f"schedule   {note}")

    def on_step(
        self, step: int, outputs: dict[str, Any], batch: NestedTensor
    ) -> None:
        reading = self._meter.on_step(step, outputs, batch)
        if reading is not None:
            self._show(reading)

    def on_eval(self, name: str, step: int, summaries: dict[str, Any]) -> None:
        values: dict[str, float] = {}
        loss = scalar(summaries, "loss")
        if loss is not None:
            values["loss"] = float(loss)
        values |= metrics(summaries)
        self.evals[name] = (step, values)
        text = ", ".join(metric_texts(values)) or "done"
        self.print_line(f"step {step:,}  {name}: {text}")
        self._meter.pause()

    def on_checkpoint(self, step: int) -> None:
        self._meter.pause()

    def on_save_failed(self, step: int, error: CheckpointSaveError) -> None:
        self.print_line(f"step {step:,}  NOT SAVED: {error}")

    def on_end(self, step: int, reason: str) -> None:
        self.ended = (step, reason)
        if self._has_started:
            reading = self._meter.last()
            if reading is not None:
                self._show(reading, last=True)
        if has_ended(reason):
            return
        if not self.is_saved:
            progress = "before there was anything to save"
        elif self._dir:
            progress = f"after step {step:,}, which is saved in {self._dir}"
        else:
            progress = f"after step {step:,}"
        self.print_line(f"\nstopped by {reason} {progress}")

    def on_report(self, path: str) -> None:
        """Handles the report that was written after the run."""
        if self._dir:
            self.print_line(f"\nreport     {path}")

    @property
    def is_saved(self) -> bool:
        """True if the ended run has a checkpoint."""
        return self._has_started or bool(self.ended and self.ended[0])

    @property
    def _is_limited(self) -> bool:
        return not math.isinf(self._max_step)

    def _is_due(self, interval: float) -> bool:
        """Returns whether this many seconds have passed since it last did."""
        if self._clock() < self._next_time:
            return False
        self._next_time = self._clock() + interval
        return True

    def _show(self, reading: Reading, *, last: bool = False) -> None:
        raise NotImplementedError


class Sizes(NamedTuple):
    """Size of a model.

    Attributes:
        count: Number of its parameters, without state such as running averages.
        trained: Number of those that the learner updates.
        bytes: Of the parameters.
    """

    count: int
    trained: int
    bytes: int


def parameter_sizes(trainer: RunningTrainer) -> Sizes:
    """Returns the size of a trainer's model."""
    params = train_step.opt_params(
        trainer.trainer_state.model, trainer.trainer_state_specs.model
    )
    learner: BaseLearner = cast(
        Any, trainer
    ).learner  # a child module, which no type declares
    is_trained = learner.should_update_with_optimizers(params)
    count = num_trained = num_bytes = 0
    for param, is_param_trained in zip(
        jax.tree.leaves(params), jax.tree.leaves(is_trained), strict=True
    ):
        if param.is_state:
            continue
        count += param.value.size
        num_bytes += param.value.nbytes
        if is_param_trained:
            num_trained += param.value.size
    return Sizes(count, num_trained, num_bytes)


def _size_text(sizes: Sizes) -> str:
    trained = ""
    if sizes.trained < sizes.count:
        trained = f", {sizes.trained:,} of them trained"
    return f"{sizes.count:,} parameters{trained}, {bytes_text(sizes.bytes)}"


def _devices_text(trainer: RunningTrainer) -> str:
    mesh = jax.sharding.get_abstract_mesh()
    axes = [f"{name}={size}" for name, size in mesh.shape.items() if size > 1]
    text = f"{mesh.size} × {jax.devices()[0].device_kind}"
    if axes:
        text += f", mesh {', '.join(axes)}"
    model: Module = cast(Any, trainer).model
    shares = [pipe.schedule.bubble_share for pipe in pipelines_of(model)]
    if shares:
        text += f", bubble {100 * max(shares):.0f} %"
    return text


class LineDisplay(Display):
    """Display that prints lines: the first step, one every ten seconds, the last step."""

    def _show(self, reading: Reading, *, last: bool = False) -> None:
        if self._is_due(_SECONDS_BETWEEN_LINES) or last:
            step_text, *time_texts = progress_texts(reading, self._max_step)
            self.print_line(
                "  ".join([step_text, *value_texts(reading), *time_texts])
            )


class _BlockDisplay(Display):
    """Display with a block that is redrawn: a bar, and the values of the last reading."""

    _reading: Reading | None = None
    _doing = "compiling the train step"
    _saved_step: int | None = None

    def on_start(
        self, trainer: RunningTrainer, resumed_from: int | None
    ) -> None:
        super().on_start(trainer, resumed_from)
        if resumed_from is not None and resumed_from >= self._max_step:
            self._doing = "evaluating"

    def on_checkpoint(self, step: int) -> None:
        super().on_checkpoint(step)
        self._saved_step = step

    def _show(self, reading: Reading, *, last: bool = False) -> None:
        self._reading = reading
        if last:
            texts = [f"step {reading.step:,}", *value_texts(reading)]
            self.print_line(
                "\n  ".join(in_lines(texts, self._console.width - 2))
            )

    def _render(self) -> RenderableType:
        reading = self._reading
        if reading is None:
            return Text(f"{self._doing} …", style="dim")
        width = self._console.width
        # The bar takes what its neighbor leaves of the first line.
        total = self._max_step if self._is_limited else None
        bar = ProgressBar(total=total, completed=reading.step)
        progress = progress_texts(reading, self._max_step)
        beside_bar, *more_progress = in_lines(
            progress, width - _LEAST_BAR_WIDTH
        )
        first_line = Table.grid(expand=True, padding=(0, 2, 0, 0))
        first_line.add_column(ratio=1)
        first_line.add_column(no_wrap=True)
        first_line.add_row(bar, beside_bar)

        notes: list[str] = []
        for name, (step, values) in self.evals.items():
            notes.append(
                f"{name} {', '.join(metric_texts(values))} (step {step:,})"
            )
        if self._saved_step is not None:
            notes.append(f"saved step {self._saved_step:,}")
        lines = [
            Text(line)
            for line in in_lines([*more_progress, *value_texts(reading)], width)
        ]
        lines += [Text(line, style="dim") for line in in_lines(notes, width)]
        for line in lines:
            line.no_wrap = True
            line.overflow = "ellipsis"
        return Group(first_line, *lines)


class LiveDisplay(_BlockDisplay):
    """Display for terminals, which redraws its block four times a second."""

    def __init__(self, console: Console, dir: str | None):
        super().__init__(console, dir)
        self._live = Live(
            console=console,
            get_renderable=self._render,
            refresh_per_second=1 / _SECONDS_BETWEEN_DRAWINGS,
            transient=True,
        )
        self._streams: dict[logging.StreamHandler[TextIO], TextIO] = {}

    def __exit__(self, *exc_info: object) -> None:
        self._live.stop()
        for handler, stream in self._streams.items():
            handler.setStream(stream)
        self._streams.clear()

    def on_start(
        self, trainer: RunningTrainer, resumed_from: int | None
    ) -> None:
        super().on_start(trainer, resumed_from)
        stdout, stderr = sys.stdout, sys.stderr
        self._live.start()
        # The block is drawn below what is written to `sys.stdout` and `sys.stderr` from now on;
        # handlers of logs hold the streams that these names had.
        for handler in logging.getLogger().handlers:
            if not isinstance(handler, logging.StreamHandler):
                continue
            if handler.stream in (stdout, stderr):
                self._streams[handler] = handler.stream
                replacement = (
                    sys.stderr if handler.stream is stderr else sys.stdout
                )
                handler.setStream(replacement)


class NotebookDisplay(_BlockDisplay):
    """Display for notebooks, which updates one output of the running cell.

    Below the lines it has a chart of the losses, once there are two of the training.
    """

    def __init__(self, console: Console, dir: str | None):
        super().__init__(console, dir)
        self._lines: list[str] = []
        self._handle: Any = None
        self._losses: dict[str, list[charts.Point]] = {"train": []}

    def __exit__(self, *exc_info: object) -> None:
        # The last drawing has no block: what it showed has been printed.
        self._reading, self._doing = None, ""
        if self._handle is not None:
            self._draw()

    def print_line(self, line: str) -> None:
        self._lines.append(line)
        self._draw()

    def on_eval(self, name: str, step: int, summaries: dict[str, Any]) -> None:
        loss = scalar(summaries, "loss")
        if loss is not None:
            self._losses.setdefault(name, []).append((step, float(loss)))
        super().on_eval(name, step, summaries)

    def _show(self, reading: Reading, *, last: bool = False) -> None:
        super()._show(reading, last=last)
        if not last:
            self._losses["train"].append((reading.step, reading.loss))
        if self._is_due(_SECONDS_BETWEEN_DRAWINGS):
            self._draw()

    def _draw(self) -> None:
        from IPython.display import display  # pyright: ignore[reportMissingImports]

        if self._handle is None:
            self._handle = display(self, display_id=True)
        else:
            self._handle.update(self)

    def _repr_mimebundle_(self, **kwargs: object) -> dict[str, str]:
        page = TextConsole(
            file=io.StringIO(),
            record=True,
            width=self._console.width,
            force_jupyter=False,
        )
        for line in self._lines:
            page.print(line, markup=False, highlight=False, soft_wrap=True)
        if self._reading or self._doing:
            page.print(self._render())
        html = page.export_html(
            inline_styles=True, code_format=_CELL, clear=False
        )
        if len(self._losses["train"]) > 1:
            html += self._chart()
        return {"text/html": html, "text/plain": page.export_text()}

    def _chart(self) -> str:
        lines: list[charts.Series] = []
        for style, (name, points) in enumerate(self._losses.items()):
            is_evaluation = style > 0
            lines.append(
                charts.Series(
                    name, points, style % charts.NUM_STYLES, dots=is_evaluation
                )
            )
        chart = charts.line_chart(lines, y_title="loss", height=260)
        return render(
            "notebook.html",
            chart=chart,
            names=list(self._losses),
            colors=_CHART_COLORS,
        )


# Of the series of a chart; readable on a white and on a dark page.
_CHART_COLORS = (
    "#3d8fc4",
    "#d9752f",
    "#6a9f50",
    "#a074c4",
    "#cc5a74",
    "#2f9e96",
    "#a98a2b",
    "#7d8ea0",
)
_STYLE = "font-family:monospace;white-space:pre;overflow-x:auto;line-height:1.3"
_CELL = f'<pre style="{_STYLE}">{{code}}</pre>'


def progress_texts(reading: Reading, max_step: float = math.inf) -> list[str]:
    """Returns how far a run is.

    >>> progress_texts(Reading(20, 2.5, elapsed=19.6, seconds_left=75.0), 100)
    ['step 20/100', '0:20 elapsed', '1:15 left']
    """
    step_text = f"step {reading.step:,}"
    if not math.isinf(max_step):
        step_text += f"/{max_step:,}"
    texts = [step_text, f"{duration_text(reading.elapsed)} elapsed"]
    if reading.seconds_left is not None:
        texts.append(f"{duration_text(reading.seconds_left)} left")
    return texts


def value_texts(reading: Reading) -> list[str]:
    """Returns the loss, the model's metrics, the learning rate and the speed."""
    texts = metric_texts({"loss": reading.loss, **reading.metrics})
    rate = scalar(reading.summaries.get("learner", {}), "learning_rate")
    if rate is not None:
        texts.append(f"learning rate {float(rate):.3g}")
    if reading.per_second is not None:
        texts.append(f"{reading.per_second:,.0f} {reading.unit}/s")
    return texts


def metric_texts(values: Mapping[str, float]) -> list[str]:
    """Formats metrics.

    >>> metric_texts({"loss": 1.5, "bits_per_byte": 2.1642, "error": 0.00123, "count": 12_345.6})
    ['loss 1.500', 'bits per byte 2.164', 'error 0.00123', 'count 12,346']
    """
    return [
        f"{name.replace('_', ' ')} {metric_text(value)}"
        for name, value in values.items()
    ]


def metric_text(value: float) -> str:
    """Formats the value of a metric, with three digits, as in `metric_texts`."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 0.1 or value == 0:
        return f"{value:.3f}"
    return f"{value:.3g}"


def in_lines(texts: Iterable[str], width: int) -> list[str]:
    """Distributes texts over lines of at most `width` columns, if each fits by itself.

    >>> in_lines(["loss 2.500", "accuracy 0.500", "12,346 tokens/s"], width=30)
    ['loss 2.500  accuracy 0.500', '12,346 tokens/s']
    """
    lines: list[str] = []
    for text in texts:
        if lines and len(lines[-1]) + 2 + len(text) <= width:
            lines[-1] += f"  {text}"
        else:
            lines.append(text)
    return lines


def duration_text(seconds: float) -> str:
    """Formats seconds as `m:ss`, or `h:mm:ss`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes}:{seconds:02}"


def bytes_text(size: float) -> str:
    """Formats a number of bytes, as "12.3 MB"."""
    if size < 1000:
        return f"{size} bytes"
    return with_unit(size, (" kB", " MB", " GB", " TB"))


def with_unit(number: float, units: Sequence[str]) -> str:
    """Formats a number of at least 1,000 with the unit of its power of 1,000, as "12.3M"."""
    power = 1
    while number >= 1000 ** (power + 1) and power < len(units):
        power += 1
    return f"{number / 1000**power:.1f}{units[power - 1]}"


# Tables on standard output, which scripts can split by columns.

# A pipe has no width; this suffices for the paths of deep models.
_WIDTH_OF_PIPES = 200


class _TableConsole(TextConsole):
    """Console on standard output; `weft.cli` handles broken pipes."""

    def on_broken_pipe(self) -> None:
        """Reraises the error, where the library would end the process."""
        raise


def table_console() -> Console:
    """Returns a console on standard output, without highlighting."""
    width = None if sys.stdout.isatty() else _WIDTH_OF_PIPES
    return _TableConsole(highlight=False, width=width)


def print_words(console: Console, text: str) -> None:
    """Prints a text; the lines of a terminal end between words, so that it splits no number."""
    if console.is_terminal:
        lines: list[str] = []
        for line in text.split("\n"):
            lines += textwrap.wrap(
                line,
                console.width,
                subsequent_indent="  ",
                break_long_words=False,
                break_on_hyphens=False,
            ) or [""]
        text = "\n".join(lines)
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def command_lines(words: Sequence[str], width: int) -> list[str]:
    r"""Breaks a command between its words, so that a shell reads the lines as one.

    >>> for line in command_lines(["weft", "train", "lm", "max_step=1200"], 16):
    ...     print(line)
    weft train lm \
        max_step=1200
    """
    lines = [words[0]]
    for word in words[1:]:
        # Each line but the last ends in a space and a backslash.
        if len(lines[-1]) + 1 + len(word) <= width - 2:
            lines[-1] += f" {word}"
        else:
            lines[-1] += " \\"
            lines.append(f"    {word}")
    return lines


def print_table(
    console: Console, table: Table, less_important: Sequence[str] = ()
) -> None:
    """Prints a `tree_table`, without less important columns that a terminal has no room for."""
    options = console.options.update(max_width=_WIDTH_OF_PIPES)
    for header in less_important:
        width = Measurement.get(console, options, table).maximum
        if not console.is_terminal or width <= console.width:
            break
        table = _without_column(table, header)
    console.print(table)


def _without_column(table: Table, header: str) -> Table:
    columns = [column for column in table.columns if column.header != header]
    narrower = _columns_table()
    for column in columns:
        narrower.add_column(
            column.header, justify=column.justify, no_wrap=column.no_wrap
        )
    for cells in zip(*(column.cells for column in columns), strict=True):
        narrower.add_row(*cells)
    return narrower


def _columns_table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))


def tree_table(
    title: str, columns: Sequence[str], numbers: Sequence[str]
) -> Table:
    """Creates a table with a first column of indented names; `numbers` are right-aligned."""
    table = _columns_table()
    table.add_column(title, no_wrap=True)
    for column in columns:
        if column in numbers:
            table.add_column(column, justify="right", no_wrap=True)
        else:
            table.add_column(column)
    return table


def tree_lines(
    leaves: Iterable[tuple[str, T]],
) -> Iterator[tuple[str, str, T | None]]:
    """Yields the path, the indented name and the leaf of each line of a tree.

    The leaf of a name above others is None.

    >>> for line in tree_lines([("model/w", 1), ("model/b", 2), ("step", 3)]):
    ...     print(line)
    ('model', 'model', None)
    ('model/w', '  w', 1)
    ('model/b', '  b', 2)
    ('step', 'step', 3)
    """
    previous_prefixes: list[str] = []
    for path, leaf in leaves:
        names = path.split("/")
        prefixes = ["/".join(names[: depth + 1]) for depth in range(len(names))]
        for depth, prefix in enumerate(prefixes):
            if prefix not in previous_prefixes:
                yield (
                    prefix,
                    "  " * depth + names[depth],
                    leaf if prefix == path else None,
                )
        previous_prefixes = prefixes


def shape_text(shape: Iterable[int]) -> str:
    """Formats a shape.

    >>> shape_text([2, 3])
    '(2, 3)'
    """
    return f"({', '.join(map(str, shape))})"


def layout_text(axes: MeshAxes | PartitionSpec | None) -> str:
    """Formats a layout: the mesh axes per dimension, `-` for none; "" if fully replicated.

    >>> layout_text([None, "model", ("data", "fsdp")]), layout_text([None, None])
    ('(-, model, data×fsdp)', '')
    """
    if axes is None or not any(axes):
        return ""
    dimensions: list[str] = []
    for dimension_axes in axes:
        if not dimension_axes:
            dimensions.append("-")
        elif isinstance(dimension_axes, str):
            dimensions.append(dimension_axes)
        else:
            dimensions.append("×".join(dimension_axes))
    return f"({', '.join(dimensions)})"


def count_text(count: float) -> str:
    """Formats a large number with a unit; "" for 0.

    >>> count_text(950), count_text(12_340_000), count_text(0)
    ('950', '12.3M', '')
    """
    if count == 0:
        return ""
    if count < 1000:
        return f"{count:.0f}"
    return with_unit(count, ("k", "M", "G", "T", "P"))
