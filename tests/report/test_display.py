"""What a person sees of a run: lines in a log, one redrawn block on a terminal or in a cell.

Readings of a run: without waiting for a device, and with the right arithmetic.
"""

import io
import logging
import math
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from weft.hierarchy.attention import PipelinedTransformerLayer
from weft.hierarchy.layers import Linear
from weft.hierarchy.metrics import WeightedScalar
from weft.hierarchy.parameter_spec import ParameterSpec
from weft.report.display import (
    LineDisplay,
    LiveDisplay,
    NotebookDisplay,
    make_display,
)
from weft.trainer import Learner, SpmdTrainer
from weft.trainer.progress import Meter, metrics


def trainer(max_step=100, trained=("w", "b")):
    """Returns a trainer as far as displays look at it; it updates the parameters `trained`."""
    return types.SimpleNamespace(
        config=SpmdTrainer.default_config().set(
            dir="runs/x", max_step=max_step, learner=Learner.default_config()
        ),
        model=Linear.default_config()
        .set(name="model", input_dim=1, output_dim=1)
        .instantiate(parent=None),
        learner=types.SimpleNamespace(
            should_update_with_optimizers=lambda params: {n: n in trained for n in params}
        ),
        trainer_state=types.SimpleNamespace(
            model={
                "w": np.zeros((1000, 250), np.float32),
                "b": np.zeros(250, np.float32),
                "mean": np.zeros(7),
            }
        ),
        trainer_state_specs=types.SimpleNamespace(
            model={
                "w": ParameterSpec((1000, 250)),
                "b": ParameterSpec((250,)),
                "mean": ParameterSpec((7,), is_state=True),
            }
        ),
    )


@pytest.fixture(autouse=True)
def mesh():
    with jax.set_mesh(jax.make_mesh((1, 1), ("data", "model"), devices=jax.devices()[:1])):
        yield


def console(terminal=False):
    return Console(file=io.StringIO(), force_terminal=terminal, width=120, highlight=False)


def text_of(display):
    return display._console.file.getvalue()


MODEL = {
    "accuracy": WeightedScalar(jnp.float32(0.25), jnp.float32(9.0)),
    "bits_per_byte": WeightedScalar(jnp.float32(2.5), jnp.float32(9.0)),
    "cross_entropy": WeightedScalar(jnp.float32(1.7), jnp.float32(9.0)),
    "layer": {"norm": jnp.float32(4.0)},
}
SUMMARIES = {
    "model": MODEL,
    "learner": {"optimizer": {"learning_rate": jnp.float32(4e-3), "accuracy": jnp.float32(7.0)}},
}
BATCH = {"input_ids": np.zeros((4, 25))}


def outputs(loss=1.0, summaries=SUMMARIES):
    return {"loss": jnp.float32(loss), "summaries": summaries}


def play(display, resumed_from=None, steps=range(1, 8)):
    with display:
        display.on_start(trainer(), resumed_from)
        for step in steps:
            display.on_step(step, outputs(3.0), BATCH)
        display.on_eval("held_out", 7, {"loss": WeightedScalar(1.5, 3.0), "bits_per_byte": 2.2})
        display.on_checkpoint(7)
        display.on_end(7, "max_step")
    return text_of(display)


def test_bubble_of_a_pipeline_is_shown_with_the_mesh():
    running = trainer()
    cfg = PipelinedTransformerLayer.default_config().set(name="model", input_dim=4, num_layers=4)
    cfg.layer.self_attention.attention.num_heads = 2
    cfg.layer.feed_forward.hidden_dim = 4
    running.model = cfg.set(num_stages=4, num_microbatches=8).instantiate(parent=None)
    display = LineDisplay(console(), "runs/x")
    display.on_start(running, None)
    assert ", bubble 27 %\n" in text_of(display)


def test_stopped_run_reports_what_was_saved():
    display = LineDisplay(console(), "runs/x")
    display.on_end(0, "SIGTERM")
    assert text_of(display) == "\nstopped by SIGTERM before there was anything to save\n"
    display = LineDisplay(console(), "runs/x")
    display.on_start(trainer(), None)
    display.on_end(0, "SIGTERM")
    assert text_of(display).endswith(
        "\nstopped by SIGTERM after step 0, which is saved in runs/x\n"
    )


def test_log_output_has_no_control_codes():
    text = play(LineDisplay(console(), "runs/x"))
    assert "\x1b" not in text and "\r" not in text
    assert "model      250,250 parameters, 1.0 MB" in text
    assert "devices    1 × cpu\n" in text
    assert "runs/x: a new run of 100 steps" in text
    assert "step 7  held_out: loss 1.500, bits per byte 2.200" in text
    first = "step 1/100  loss 3.000  accuracy 0.250  bits per byte 2.500  learning rate 0.004"
    assert first in text


def test_log_gets_a_line_every_ten_seconds():
    clock = types.SimpleNamespace(now=0.0)
    display = LineDisplay(console(), "d", clock=lambda: clock.now)
    display.on_start(trainer(), None)
    for step in range(1, 102):
        clock.now += 1
        display.on_step(step, outputs(), None)
    lines = [line for line in text_of(display).splitlines() if line.startswith("step")]
    assert len(lines) == 11


def test_terminal_shows_transient_block_and_lines():
    text = play(LiveDisplay(console(terminal=True), "runs/x"))
    assert "\x1b[" in text
    assert "held_out: loss 1.500" in text


def test_log_messages_are_printed_above_the_block(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    handler = logging.StreamHandler(stream)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    display = LiveDisplay(console(terminal=True), "runs/x")
    with display:
        display.on_start(trainer(), None)
        logging.getLogger("weft").warning("the input is slow")
    assert "the input is slow\n" in text_of(display) and stream.getvalue() == ""
    assert handler.stream is stream and sys.stderr is stream


def drawn(display, width):
    page = Console(file=io.StringIO(), width=width, highlight=False)
    page.print(display._render())
    return page.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 50])
def test_block_fits_its_terminal(width):
    display = LiveDisplay(Console(file=io.StringIO(), width=width), "runs/x")
    with display:
        display.on_start(trainer(110_000), None)
        assert drawn(display, width) == ["compiling the train step …"]
        for step in range(1, 8):
            display.on_step(100_000 + step, outputs(2.0), BATCH)
        display.on_eval("held_out", 100_007, {"loss": 1.5, **MODEL})
        display.on_checkpoint(100_007)
        bar, *lines = drawn(display, width)
    assert bar.startswith("━" * 8) and "step 100,007/110,000" in bar
    assert all(len(line) <= width for line in [bar, *lines])
    text = "  ".join([bar, *lines])
    assert "0:00 elapsed" in text and " left" in text
    assert "loss 2.000  accuracy 0.250  bits per byte 2.500" in lines[0] or width < 80
    assert "learning rate 0.004" in text and "tokens/s" in text and "saved step 100,007" in text
    assert "held_out loss 1.500, accuracy 0.250" in text
    assert len(lines) <= (4 if width == 80 else 6)


def test_block_of_a_finished_run_shows_evaluation():
    with LiveDisplay(console(terminal=True), "runs/x") as display:
        display.on_start(trainer(), 100)
        assert drawn(display, 80) == ["evaluating …"]


@pytest.fixture
def cell(monkeypatch):
    """Returns the outputs that IPython would show, by the id of the display."""
    shown = []

    def display(value, display_id):
        shown.append(value._repr_mimebundle_())
        return types.SimpleNamespace(
            update=lambda value: shown.__setitem__(0, value._repr_mimebundle_())
        )

    module = types.SimpleNamespace(display=display)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return shown


def test_notebook_has_one_updating_output(cell):
    display = make_display(Console(force_jupyter=True, width=80), "runs/x")
    assert isinstance(display, NotebookDisplay)
    with display:
        display.on_start(trainer(), None)
        assert "compiling the train step" in cell[0]["text/plain"]
        display.on_step(7, outputs(2.0), BATCH)
        assert "step 7/100" in cell[0]["text/plain"] and "━" in cell[0]["text/html"]
        display.on_end(7, "max_step")
    display.print_line("report     runs/<x>/report.html")
    (bundle,) = cell
    text = bundle["text/plain"]
    assert "━" not in text and "compiling" not in text
    assert "runs/x: a new run of 100 steps" in text and "step 7/100" not in text
    assert bundle["text/html"].startswith("<pre") and "runs/&lt;x&gt;" in bundle["text/html"]


def test_notebook_draws_the_losses_once(cell):
    with make_display(Console(force_jupyter=True, width=80), "runs/x") as display:
        display.on_start(trainer(), None)
        display.on_step(1, outputs(3.0), BATCH)
        display.on_step(2, outputs(2.0), BATCH)
        display.on_eval("<held out>", 2, {"loss": WeightedScalar(2.5, 1)})
        display.on_step(3, outputs(1.0), BATCH)
        display.on_end(3, "max_step")
    (bundle,) = cell
    html = bundle["text/html"]
    assert html.count("<svg") == 1 and html.count("<circle class=") == 1
    assert "<held out>" not in html and "&lt;held out&gt;" in html
    assert "svg" not in bundle["text/plain"]


def test_pipe_with_forced_colors_gets_lines(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    pipe = Console(file=io.StringIO())
    assert pipe.is_terminal
    assert isinstance(make_display(pipe, "d"), LineDisplay)


def test_resumed_run_reports_its_step():
    assert "runs/x: resuming from step 40" in play(LineDisplay(console(), "runs/x"), 40)
    assert "finished at step 100 already" in play(LineDisplay(console(), "d"), 100, steps=[])


class Clock:
    """Advances a second at each look."""

    now, advance = 0.0, 1.0

    def __call__(self):
        self.now += self.advance
        return self.now


class Loss:
    """Loss of a step that is running until `ready` has it."""

    def __init__(self, step, ready):
        self._step, self._ready = step, ready

    def is_ready(self):
        return self._step in self._ready

    def __float__(self):
        self._ready.add(self._step)
        return 2.0


def test_running_steps_are_not_waited_for():
    ready, meter = set(), Meter(10, Clock())
    assert meter.on_step(1, {"loss": Loss(1, ready)}, BATCH) is None
    assert meter.on_step(2, {"loss": Loss(2, ready)}, BATCH) is None
    ready |= {1, 2}
    assert meter.on_step(3, {"loss": Loss(3, ready)}, BATCH).step == 2
    assert ready == {1, 2}
    assert meter.last().step == 3 and ready == {1, 2, 3}
    assert meter.last().step == 3
    assert Meter(10, Clock()).last() is None


def run(meter, steps, batch=BATCH, **fields):
    """Returns the last reading."""
    reading = None
    for step in steps:
        reading = meter.on_step(step, outputs(**fields), batch)
    return reading


def test_speed_and_times_use_the_clock():
    meter = Meter(100, Clock())
    readings = [run(meter, [step]) for step in range(1, 11)]
    assert readings[-1].per_second == pytest.approx(100.0)  # 4 × 25 tokens, a step a second
    assert readings[-1].unit == "tokens"
    assert readings[-1].elapsed == pytest.approx(10.0)
    assert readings[-1].seconds_left == pytest.approx(90.0)
    assert readings[2].per_second is None and readings[2].seconds_left is None  # too early


def test_pauses_are_excluded_from_speed():
    clock = Clock()
    meter = Meter(100, clock)
    run(meter, range(1, 6))
    clock.now += 1000
    meter.pause()
    assert run(meter, range(6, 16)).per_second == pytest.approx(100.0)


def test_loss_is_averaged_over_recent_steps():
    meter = Meter(100, Clock())
    noisy = [run(meter, [step], loss=2.0 + (-1) ** step).loss for step in range(200)]
    assert noisy[0] == 3.0 and noisy[-1] == pytest.approx(2.0, abs=0.1)
    assert math.isnan(run(meter, [200], loss=math.nan).loss)
    assert run(meter, [201], loss=1.0).loss == 1.0


def test_metrics_are_averaged_as_the_loss_is():
    meter = Meter(100, Clock())
    for step in range(200):
        reward = 0.5 + 0.5 * (-1) ** step
        reading = run(meter, [step], loss=reward, summaries={"model": {"reward": reward}})
        assert reading.metrics == {"reward": reading.loss}
    assert reading.loss == pytest.approx(0.5, abs=0.05)


def test_metrics_are_the_outermost_scalars_of_the_model():
    assert metrics(SUMMARIES) == {"accuracy": 0.25, "bits_per_byte": 2.5}
    image = {"image": np.zeros((2, 2)), "text": "words", "loss_lm": 1.0}
    assert metrics({"model": image}) == {}
    assert metrics({"inner": {"f1": jnp.float32(0.5)}}) == {"f1": 0.5}
    assert list(metrics(dict.fromkeys("abcde", 1.0))) == ["a", "b", "c"]
