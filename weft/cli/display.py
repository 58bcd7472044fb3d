"""Output of the commands: the progress of a run, and tables that scripts can split by columns.

The displays are listeners of the trainer. They print one-time events (the model, evaluations,
saves) as lines. Per-step values are redrawn in place on a terminal, and printed every few seconds
elsewhere. Reading a loss from a device blocks until its step ends; it is therefore read two steps
later, when the device has further steps queued.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from weft.errors import CheckpointSaveError
from weft.hierarchy.summary import Summary
from weft.trainer.progress import RunListener

_DELAY = 2
_WINDOW = 50
_FEWEST = 5


class Reading(NamedTuple):
    """Measurements of a step.

    Attributes:
        loss: In nats per token for a language model.
        bits_per_byte: None if the model does not report them.
        tokens_per_second: Over the last steps; None for data without tokens, or too early.
        seconds_left: Until the last step; None for an unlimited run, or too early.
    """

    step: int
    loss: float
    bits_per_byte: float | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    examples_per_second: float | None = None


class Meter:
    """Takes readings of a run."""

    def __init__(self, max_step: float, clock: Callable[[], float] = time.perf_counter):
        self._max_step = max_step
        self._clock = clock
        self._waiting: deque[tuple[int, Any, Any]] = deque()
        self._recent: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._first: tuple[int, float] | None = None
        self._tokens_per_step = self._examples_per_step = 0
        self._speed: float | None = None

    def on_step(self, step: int, outputs: Mapping[str, Any], batch: Any) -> Reading | None:
        """Records a started step, and returns the reading of an earlier one, if available."""
        if isinstance(batch, Mapping) and "input_ids" in batch:
            self._tokens_per_step = int(np.prod(np.shape(batch["input_ids"])))
        elif fields := jax.tree.leaves(batch):
            self._examples_per_step = int(np.shape(fields[0])[0]) if np.shape(fields[0]) else 0
        bits = scalar(outputs.get("summaries", {}), "bits_per_byte")
        self._waiting.append((step, outputs["loss"], bits))
        return self._read() if len(self._waiting) > _DELAY else None

    def last(self) -> Reading | None:
        """Waits for the newest step and reads it; returns None if it was read already."""
        reading = None
        while self._waiting:
            # They were ready before, so the clock does not measure their duration.
            reading = self._read(timed=False)
        return reading

    def pause(self) -> None:
        """Excludes the time of other work, such as evaluation, from the speed."""
        self._recent.clear()

    def _read(self, timed: bool = True) -> Reading:
        step, loss, bits = self._waiting.popleft()
        loss, bits = float(loss), None if bits is None else float(bits)
        seconds_left = None
        if timed:
            now = self._clock()
            self._recent.append((step, now))
            self._first = self._first or (step, now)
            (first, start), (last, end) = self._recent[0], self._recent[-1]
            if len(self._recent) >= _FEWEST and end > start:
                self._speed = (last - first) / (end - start)
            # Estimated, including evaluations and saves.
            if step - self._first[0] >= _FEWEST and not math.isinf(self._max_step):
                seconds_per_step = (now - self._first[1]) / (step - self._first[0])
                seconds_left = seconds_per_step * (self._max_step - step)
        tokens, examples = self._tokens_per_step, self._examples_per_step
        per_second = None if self._speed is None else self._speed * (tokens or examples)
        return Reading(
            step,
            loss,
            bits,
            tokens_per_second=per_second if tokens else None,
            examples_per_second=per_second if examples and not tokens else None,
            seconds_left=seconds_left,
        )


def scalar(summaries: Mapping[str, Any], name: str) -> Any:
    """Returns the outermost summary of that name, or None.

    >>> scalar({"decoder": {"loss": 1.0}, "learner": {"x": {"loss": 2.0}}}, "loss")
    1.0
    """
    level = [summaries]
    while level:
        for values in level:
            if name in values:
                value = values[name]
                return value.value() if isinstance(value, Summary) else value
        level = [v for values in level for v in values.values() if isinstance(v, Mapping)]
    return None


_SECONDS_BETWEEN_LINES = 10.0
_METRICS = ("loss", "bits_per_byte", "accuracy")


def make_display(console: Console, dir: str) -> "Display":
    """Returns the display that suits a console; `dir` is the run's, as the user wrote it."""
    live = console.is_terminal and not console.is_dumb_terminal
    return LiveDisplay(console, dir) if live else LineDisplay(console, dir)


class Display(RunListener):
    """Base of both displays. Use it in a `with` block.

    Attributes:
        evals: Per evaler its last step, and its scalars, such as "loss" and "bits_per_byte".
        ended: The last step and the reason, see `RunListener.on_end`.
    """

    def __init__(self, console: Console, dir: str):
        self._console = console
        self._dir = dir
        self.evals: dict[str, tuple[int, dict[str, float]]] = {}
        self.resumed_from: int | None = None
        self.ended: tuple[int, str] | None = None
        self.parameters = 0
        self._has_started = False

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def print_line(self, line: str) -> None:
        """Prints a permanent line."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def on_start(self, trainer: Any, resumed_from: int | None) -> None:
        self.resumed_from = resumed_from
        self._max_step = trainer.config.max_step
        self._meter = Meter(self._max_step)
        self._has_started = True
        specs = jax.tree.leaves(trainer.trainer_state_specs.model)
        values = jax.tree.leaves(trainer.trainer_state.model)
        leaves = [x for x, spec in zip(values, specs, strict=True) if not spec.is_state]
        self.parameters = sum(leaf.size for leaf in leaves)
        size = sum(leaf.nbytes for leaf in leaves)
        self.print_line(f"model      {self.parameters:,} parameters, {bytes_text(size)}")
        mesh = ", ".join(f"{n}={s}" for n, s in jax.sharding.get_abstract_mesh().shape.items())
        devices = jax.devices()
        self.print_line(f"devices    {len(devices)} × {devices[0].device_kind}, mesh {mesh}")
        if resumed_from is None:
            text = f"a new run of {self._max_step:,} steps"
        elif resumed_from >= self._max_step:
            text = f"finished at step {resumed_from:,} already"
        else:
            text = f"resuming from step {resumed_from:,}"
        self.print_line(f"run        {self._dir}: {text}")

    def on_step(self, step: int, outputs: dict[str, Any], batch: Any) -> None:
        reading = self._meter.on_step(step, outputs, batch)
        if reading is not None:
            self._show(reading)

    def on_eval(self, name: str, step: int, summaries: dict[str, Any]) -> None:
        found = {key: scalar(summaries, key) for key in _METRICS}
        values = {key: float(value) for key, value in found.items() if value is not None}
        self.evals[name] = (step, values)
        self.print_line(f"step {step:,}  {name}: {loss_text(values)}")
        self._meter.pause()

    def on_checkpoint(self, step: int) -> None:
        self._meter.pause()

    def on_save_failed(self, step: int, error: CheckpointSaveError) -> None:
        self.print_line(f"step {step:,}  NOT SAVED: {error}")

    def on_end(self, step: int, reason: str) -> None:
        self.ended = (step, reason)
        reading = self._meter.last() if self._has_started else None
        if reading is not None:
            self._show(reading, last=True)

    @property
    def is_saved(self) -> bool:
        """True if the ended run has a checkpoint."""
        return self._has_started or bool(self.ended and self.ended[0])

    def print_stopped(self) -> None:
        """Prints the step after which the run was asked to stop."""
        assert self.ended is not None
        step, reason = self.ended
        when = "before there was anything to save"
        if self.is_saved:
            when = f"after step {step:,}, which is saved in {self._dir}"
        self.print_line(f"\nstopped by {reason} {when}")

    def _show(self, reading: Reading, *, last: bool = False) -> None:
        raise NotImplementedError


class LineDisplay(Display):
    """Display that prints lines: the first step, one every ten seconds, the last step."""

    def __init__(self, console: Console, dir: str, clock: Callable[[], float] = time.monotonic):
        super().__init__(console, dir)
        self._clock = clock
        self._next = -math.inf

    def _show(self, reading: Reading, *, last: bool = False) -> None:
        if last or self._clock() >= self._next:
            self._next = self._clock() + _SECONDS_BETWEEN_LINES
            self.print_line("  ".join(reading_texts(reading)))


class LiveDisplay(Display):
    """Display that redraws a bar and a line of numbers four times a second."""

    def __init__(self, console: Console, dir: str):
        super().__init__(console, dir)
        self._reading: Reading | None = None
        self._doing = "compiling the train step"
        self._saved: int | None = None
        self._live = Live(
            console=console, get_renderable=self._render, refresh_per_second=4, transient=True
        )

    def __exit__(self, *exc_info: object) -> None:
        self._live.stop()

    def on_start(self, trainer: Any, resumed_from: int | None) -> None:
        super().on_start(trainer, resumed_from)
        if resumed_from is not None and resumed_from >= self._max_step:
            self._doing = "evaluating"
        self._live.start()

    def on_checkpoint(self, step: int) -> None:
        super().on_checkpoint(step)
        self._saved = step

    def _show(self, reading: Reading, *, last: bool = False) -> None:
        self._reading = reading
        if last:
            self.print_line("  ".join(reading_texts(reading)))

    def _render(self) -> RenderableType:
        reading = self._reading
        if reading is None:
            return Text(f"{self._doing} …", style="dim")
        total = None if math.isinf(self._max_step) else self._max_step
        bar = ProgressBar(total=total, completed=reading.step, width=30)
        line = Table.grid(padding=(0, 2))
        line.add_row(bar, *(Text(text) for text in reading_texts(reading, self._max_step)))
        notes = [f"{n} {loss_text(values)} (step {s:,})" for n, (s, values) in self.evals.items()]
        if self._saved is not None:
            notes.append(f"saved step {self._saved:,}")
        return Group(line, Text(" · ".join(notes), style="dim"))


def reading_texts(reading: Reading, max_step: float = math.inf) -> list[str]:
    """Returns the parts of a status line.

    >>> reading_texts(Reading(20, 2.5, 3.6, 12_345.6, 75.0), 100)
    ['step 20/100', 'loss 2.500', '3.60 bits per byte', '12,346 tokens/s', '1:15 left']
    """
    of_all = "" if math.isinf(max_step) else f"/{int(max_step):,}"
    texts = [f"step {reading.step:,}{of_all}", f"loss {reading.loss:.3f}"]
    if reading.bits_per_byte is not None:
        texts.append(f"{reading.bits_per_byte:.2f} bits per byte")
    if reading.tokens_per_second is not None:
        texts.append(f"{reading.tokens_per_second:,.0f} tokens/s")
    if reading.examples_per_second is not None:
        texts.append(f"{reading.examples_per_second:,.0f} examples/s")
    if reading.seconds_left is not None:
        texts.append(f"{duration_text(reading.seconds_left)} left")
    return texts


def loss_text(values: Mapping[str, float]) -> str:
    """Formats a loss.

    >>> loss_text({"loss": 1.5, "bits_per_byte": 2.164})
    'loss 1.500, 2.16 bits per byte'
    >>> loss_text({"loss": 0.05, "accuracy": 0.9889})
    'loss 0.050, 98.9% right'
    """
    texts = [f"loss {values['loss']:.3f}"] if "loss" in values else []
    if "bits_per_byte" in values:
        texts.append(f"{values['bits_per_byte']:.2f} bits per byte")
    elif "accuracy" in values:
        texts.append(f"{values['accuracy']:.1%} right")
    return ", ".join(texts) or "done"


def duration_text(seconds: float) -> str:
    """Formats seconds as `m:ss`, or `h:mm:ss`.

    >>> duration_text(75), duration_text(3_675)
    ('1:15', '1:01:15')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def bytes_text(size: float) -> str:
    """Formats a number of bytes.

    >>> bytes_text(999), bytes_text(12_300_000)
    ('999 bytes', '12.3 MB')
    """
    return f"{size} bytes" if size < 1000 else _with_unit(size, (" kB", " MB", " GB", " TB"))


# A pipe has no width; this suffices for the paths of deep models.
_WIDTH_OF_PIPES = 200


class _Console(Console):
    """Console on standard output; `weft.cli` handles broken pipes."""

    def on_broken_pipe(self) -> None:
        """Reraises the error, where the library would end the process."""
        raise


def table_console() -> Console:
    """Returns a console on standard output, without highlighting."""
    return _Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH_OF_PIPES)


def tree_table(title: str, columns: Sequence[str], numbers: Sequence[str]) -> Table:
    """Creates a table with a first column of indented names; `numbers` are right-aligned."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(title, no_wrap=True)
    for column in columns:
        right = column in numbers
        table.add_column(column, justify="right" if right else "left", no_wrap=right)
    return table


def shape_text(shape: Iterable[int]) -> str:
    """Formats a shape.

    >>> shape_text([2, 3])
    '(2, 3)'
    """
    return f"({', '.join(map(str, shape))})"


def layout_text(axes: Iterable[Any] | None) -> str:
    """Formats a layout: the mesh axes per dimension, `-` for none; "" if fully replicated.

    >>> layout_text([None, "model", ("data", "fsdp")]), layout_text([None, None])
    ('(-, model, data×fsdp)', '')
    """
    axes = list(axes or [])
    if not any(axes):
        return ""
    names = [[a] if isinstance(a, str) else a or ["-"] for a in axes]
    return f"({', '.join('×'.join(n) for n in names)})"


def count_text(count: float) -> str:
    """Formats a large number with a unit; "" for 0.

    >>> count_text(950), count_text(12_340_000), count_text(0)
    ('950', '12.3M', '')
    """
    if count < 1000:
        return f"{count:.0f}" if count else ""
    return _with_unit(count, ("k", "M", "G", "T", "P"))


def _with_unit(number: float, units: Sequence[str]) -> str:
    power = 1
    while number >= 1000 ** (power + 1) and power < len(units):
        power += 1
    return f"{number / 1000**power:.1f}{units[power - 1]}"
