"""Progress of a run: a live display on a terminal, lines of text elsewhere.

Both are listeners of the trainer. They print one-time events (the model, evaluations, saves) as
lines. Per-step values are redrawn in place on a terminal, and printed every few seconds elsewhere.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from weft.cli.meter import Meter, Reading, scalar
from weft.errors import CheckpointSaveError
from weft.hierarchy.parameter_spec import ParameterSpec
from weft.trainer.progress import RunListener

_SECONDS_BETWEEN_LINES = 10.0
_METRICS = ("loss", "bits_per_byte", "accuracy")


def make_display(console: Console, dir: str) -> "Display":
    """Returns the display that suits a console.

    Args:
        dir: The directory of the run, as the user wrote it.
    """
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

    def say(self, line: str) -> None:
        """Prints a permanent line."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def on_start(self, trainer: Any, resumed_from: int | None) -> None:
        self.resumed_from = resumed_from
        self._max_step = trainer.config.max_step
        self._meter = Meter(self._max_step)
        self._has_started = True
        specs = jax.tree.leaves(trainer.trainer_state_specs.model, is_leaf=_is_spec)
        values = jax.tree.leaves(trainer.trainer_state.model)
        leaves = [x for x, spec in zip(values, specs, strict=True) if not spec.is_state]
        self.parameters = sum(leaf.size for leaf in leaves)
        size = sum(leaf.nbytes for leaf in leaves)
        self.say(f"model      {self.parameters:,} parameters, {bytes_text(size)}")
        mesh = ", ".join(f"{n}={s}" for n, s in jax.sharding.get_abstract_mesh().shape.items())
        devices = jax.devices()
        self.say(f"devices    {len(devices)} × {devices[0].device_kind}, mesh {mesh}")
        if resumed_from is None:
            self.say(f"run        {self._dir}: a new run of {self._max_step:,} steps")
        elif resumed_from >= self._max_step:
            self.say(f"run        {self._dir}: finished at step {resumed_from:,} already")
        else:
            self.say(f"run        {self._dir}: resuming from step {resumed_from:,}")

    def on_step(self, step: int, outputs: dict[str, Any], batch: Any) -> None:
        reading = self._meter.on_step(step, outputs, batch)
        if reading is not None:
            self._show(reading)

    def on_eval(self, name: str, step: int, summaries: dict[str, Any]) -> None:
        found = {key: scalar(summaries, key) for key in _METRICS}
        values = {key: float(value) for key, value in found.items() if value is not None}
        self.evals[name] = (step, values)
        self.say(f"step {step:,}  {name}: {loss_text(values)}")
        self._meter.pause()

    def on_checkpoint(self, step: int) -> None:
        self._meter.pause()

    def on_save_failed(self, step: int, error: CheckpointSaveError) -> None:
        self.say(f"step {step:,}  NOT SAVED: {error}")

    def on_end(self, step: int, reason: str) -> None:
        self.ended = (step, reason)
        reading = self._meter.last() if self._has_started else None
        if reading is not None:
            self._show(reading, last=True)

    @property
    def is_saved(self) -> bool:
        """True if the ended run has a checkpoint."""
        return self._has_started or bool(self.ended and self.ended[0])

    def say_stopped(self) -> None:
        """Prints the step after which the run was asked to stop."""
        assert self.ended is not None
        step, reason = self.ended
        if self.is_saved:
            self.say(f"\nstopped by {reason} after step {step:,}, which is saved in {self._dir}")
        else:
            self.say(f"\nstopped by {reason} before there was anything to save")

    def _show(self, reading: Reading, *, last: bool = False) -> None:
        """Shows a reading."""
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
            self.say("  ".join(reading_texts(reading)))


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
            self.say("  ".join(reading_texts(reading)))

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


def _is_spec(x: Any) -> bool:
    return isinstance(x, ParameterSpec)


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
    if size < 1000:
        return f"{size} bytes"
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 1000:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} TB"
