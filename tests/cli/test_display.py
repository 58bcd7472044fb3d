"""What a person sees of a run: lines in a log, one redrawn block on a terminal, never both.

Readings of a run: late, without blocking, and with the right arithmetic.
"""

import io
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from weft.cli.display import (
    LineDisplay,
    LiveDisplay,
    Meter,
    count_text,
    layout_text,
    make_display,
    scalar,
    shape_text,
    table_console,
    tree_table,
)
from weft.errors import CheckpointSaveError
from weft.hierarchy.metrics import WeightedScalar
from weft.hierarchy.parameter_spec import ParameterSpec


def trainer(max_step=100):
    return types.SimpleNamespace(
        config=types.SimpleNamespace(max_step=max_step),
        trainer_state=types.SimpleNamespace(
            model={"w": np.zeros((1000, 250), np.float32), "mean": np.zeros(7)}
        ),
        trainer_state_specs=types.SimpleNamespace(
            model={
                "w": ParameterSpec((1000, 250)),
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


def play(display, resumed_from=None, steps=range(1, 8)):
    with display:
        display.on_start(trainer(), resumed_from)
        for step in steps:
            display.on_step(step, {"loss": 3.0 - step / 10}, {"input_ids": np.zeros((2, 5))})
        display.on_eval("held_out", 7, {"loss": WeightedScalar(1.5, 3.0), "bits_per_byte": 2.2})
        display.on_checkpoint(7)
        display.on_end(7, "max_step")
    return text_of(display)


def test_stopped_run_reports_what_was_saved():
    display = LineDisplay(console(), "runs/x")
    display.on_end(0, "SIGTERM")
    display.print_stopped()
    assert text_of(display) == "\nstopped by SIGTERM before there was anything to save\n"
    display = LineDisplay(console(), "runs/x")
    display.on_start(trainer(), None)
    display.on_end(0, "SIGTERM")
    display.print_stopped()
    assert text_of(display).endswith(
        "\nstopped by SIGTERM after step 0, which is saved in runs/x\n"
    )


def test_failed_save_is_emphasized():
    display = LineDisplay(console(), "runs/x")
    display.on_save_failed(7, CheckpointSaveError("the checkpoint of step 6 could not be saved"))
    assert "step 7  NOT SAVED: the checkpoint of step 6 could not be saved" in text_of(display)


def test_log_output_has_no_control_codes():
    text = play(LineDisplay(console(), "runs/x"))
    assert "\x1b" not in text and "\r" not in text
    assert "model      250,000 parameters, 1.0 MB" in text
    assert "mesh data=1, model=1" in text
    assert "runs/x: a new run of 100 steps" in text
    assert "step 7  held_out: loss 1.500, 2.20 bits per byte" in text
    assert "step 7  loss 2.300" in text  # the last step is always shown


def test_log_gets_a_line_every_ten_seconds():
    clock = types.SimpleNamespace(now=0.0)
    display = LineDisplay(console(), "d", clock=lambda: clock.now)
    display.on_start(trainer(), None)
    for step in range(1, 102):
        clock.now += 1
        display.on_step(step, {"loss": 1.0}, None)
    lines = [line for line in text_of(display).splitlines() if line.startswith("step")]
    assert len(lines) == 10


def test_terminal_shows_transient_block_and_lines():
    text = play(LiveDisplay(console(terminal=True), "runs/x"))
    assert "\x1b[" in text
    assert "held_out: loss 1.500" in text


def test_block_shows_step_loss_and_last_event():
    display = LiveDisplay(console(terminal=True), "runs/x")
    with display:
        display.on_start(trainer(), None)
        assert "compiling" in drawn(display)
        for step in range(1, 8):
            display.on_step(step, {"loss": 2.0}, {"input_ids": np.zeros((2, 5))})
        display.on_eval("held_out", 7, {"loss": 1.5})
        display.on_checkpoint(7)
        block = drawn(display)
    assert "step 5/100" in block and "loss 2.000" in block and "tokens/s" in block
    assert "held_out loss 1.500 (step 7)" in block and "saved step 7" in block
    assert block.index("step 5/100") == 32  # after the bar


def test_block_of_a_finished_run_shows_evaluation():
    with LiveDisplay(console(terminal=True), "runs/x") as display:
        display.on_start(trainer(), 100)
        assert drawn(display) == "evaluating …\n"


def drawn(display):
    page = Console(file=io.StringIO(), width=160, highlight=False)
    page.print(display._render())
    return page.file.getvalue()


def test_tree_table_aligns_columns_without_margin():
    table = tree_table("parameter", ["shape", "bytes"], numbers=["bytes"])
    table.add_row("decoder", "", "1,024 B")
    table.add_row("  weight", "(8, 32)", "96 B")
    page = console()
    page.print(table)
    assert page.file.getvalue().splitlines() == [
        "parameter  shape      bytes",
        "decoder             1,024 B",
        "  weight   (8, 32)     96 B",
    ]


def test_display_type_follows_console():
    assert isinstance(make_display(console(terminal=True), "d"), LiveDisplay)
    assert isinstance(make_display(console(), "d"), LineDisplay)


def test_resumed_run_reports_its_step():
    assert "runs/x: resuming from step 40" in play(LineDisplay(console(), "runs/x"), 40)
    assert "finished at step 100 already" in play(LineDisplay(console(), "d"), 100, steps=[])


def test_display_keeps_values_for_the_summary():
    display = LineDisplay(console(), "d")
    play(display, resumed_from=3)
    assert display.evals == {"held_out": (7, {"loss": 1.5, "bits_per_byte": pytest.approx(2.2)})}
    assert display.ended == (7, "max_step")
    assert display.resumed_from == 3 and display.parameters == 250_000


class Clock:
    """Advances a second at each look."""

    now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


class Loss:
    """Notes when it is read."""

    def __init__(self, step, read):
        self._step, self._read = step, read

    def __float__(self):
        self._read.append(self._step)
        return float(self._step)


BATCH = {"input_ids": np.zeros((4, 25))}


def test_loss_is_read_two_steps_late():
    read, meter = [], Meter(10, Clock())
    readings = [meter.on_step(s, {"loss": Loss(s, read)}, BATCH) for s in (1, 2, 3, 4)]
    assert read == [1, 2]
    assert [r and r.step for r in readings] == [None, None, 1, 2]
    assert meter.last().step == 4 and read == [1, 2, 3, 4]
    assert meter.last() is None


def run(meter, steps, batch=BATCH, **outputs):
    """Returns the last reading, and the speed and time left of the one before the steps read at the
    end.
    """
    before = None
    for step in steps:
        before = meter.on_step(step, {"loss": 1.0, **outputs}, batch) or before
    last = meter.last()
    return last._replace(seconds_left=before.seconds_left) if before else last


def test_speed_and_eta_use_the_clock():
    meter = Meter(100, Clock())
    readings = [meter.on_step(step, {"loss": 1.0}, BATCH) for step in range(1, 13)]
    assert readings[-1].step == 10
    assert readings[-1].tokens_per_second == pytest.approx(100.0)  # 4 × 25 tokens, a step a second
    assert readings[-1].seconds_left == pytest.approx(90.0)
    assert readings[2].tokens_per_second is None and readings[2].seconds_left is None  # too early


def test_speed_is_stable_for_steps_read_at_once():
    clock = Clock()
    meter = Meter(100, clock)
    for step in range(1, 11):
        meter.on_step(step, {"loss": 1.0}, BATCH)
    meter.pause()
    now = clock.now
    assert meter.last().tokens_per_second == pytest.approx(100.0) and clock.now == now


def test_pauses_are_excluded_from_speed():
    clock = Clock()
    meter = Meter(100, clock)
    run(meter, range(1, 6))
    clock.now += 1000
    meter.pause()
    assert run(meter, range(6, 16)).tokens_per_second == pytest.approx(100.0)


def test_no_eta_without_max_step_or_speed_without_tokens():
    reading = run(Meter(math.inf, Clock()), range(1, 5), batch={"image": np.zeros((4, 8, 8))})
    assert reading.seconds_left is None and reading.tokens_per_second is None


def test_examples_count_without_tokens():
    reading = run(Meter(100, Clock()), range(1, 13), batch={"image": np.zeros((4, 8, 8))})
    assert reading.tokens_per_second is None
    assert reading.examples_per_second == pytest.approx(4.0)


def test_bits_per_byte_is_read_from_summaries():
    summaries = {"decoder": {"bits_per_byte": WeightedScalar(jnp.float32(2.5), jnp.float32(9.0))}}
    assert run(Meter(9, Clock()), [1], summaries=summaries).bits_per_byte == 2.5
    assert run(Meter(9, Clock()), [1], summaries={}).bits_per_byte is None


def test_shallowest_summary_is_used():
    assert scalar({"a": {"b": {"x": 1}}, "c": {"x": 2}}, "x") == 2
    assert scalar({"a": {"b": 1}}, "x") is None


@pytest.mark.parametrize(
    ("count", "text"), [(0, ""), (999, "999"), (1500, "1.5k"), (3e6, "3.0M"), (2e15, "2.0P")]
)
def test_large_numbers_have_units(count, text):
    assert count_text(count) == text


def test_shapes_and_layouts():
    assert shape_text(()) == "()"
    assert layout_text(None) == ""
    assert layout_text(["data", None]) == "(data, -)"


def test_piped_output_has_tab_columns(capsys):
    table = tree_table("name", ["shape", "bytes"], numbers=["bytes"])
    table.add_row("  weight", "(2, 3)", "24")
    table.add_row("  bias", "(3)", "9000")
    console = table_console()
    console.print(table)
    head, first, second = (line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert head.split() == ["name", "shape", "bytes"]
    assert first.startswith("  weight") and first.endswith("24")
    assert len(first) == len(second) == len(head)
