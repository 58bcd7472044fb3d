"""How much of a GPU's peak does a Llama of 1.1 billion parameters use, through `SpmdTrainer`?

In bfloat16, on sequences of 4,096 tokens. PyTorch, where it finds the GPU, trains a model of the
same sizes, compiled and with its fused attention. The last lines are the layers in which a step
spends most of its time.
"""

import statistics
import tempfile
import time
from typing import Any

import jax

from benchmarks import _llama, _torch_llama
from benchmarks.harness import Row, counted, row
from weft.trainer import Hook, SpmdTrainer
from weft.trainer.flops import forward_flops, peak_flops_of
from weft.trainer.profiling import layer_times

# Ten steps compile and warm up; then each ten are a measurement, until the trace.
EVERY, TRACED, LAYERS = 10, 171, 8


class _Steps(Hook):
    """Waits for every tenth step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step(self, step: int, outputs: dict[str, Any], batch: Any) -> None:
        if step % EVERY == 0 and step < TRACED:
            jax.block_until_ready(outputs["loss"])
            self.ends.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Returns the time of a step, for each ten."""
        pairs = zip(self.ends[1:], self.ends, strict=False)
        return [(after - before) / EVERY for after, before in pairs]


def run() -> list[Row]:
    """A run of Weft, and then one of PyTorch."""
    cfg = _llama.llama_1b(steps=TRACED + EVERY)
    peak = peak_flops_of(jax.devices()[0].device_kind)
    rows, seconds = measure(cfg, peak)
    return rows[:1] + against_torch(_llama.LLAMA_1B, cfg, seconds, device="cuda") + rows[1:]


def measure(cfg: SpmdTrainer.Config, peak: float | None) -> tuple[list[Row], list[float]]:
    """Returns the lines of a run, and the seconds of its steps.

    Args:
        peak: Operations per second of the device; None if unknown.
    """
    steps = _Steps()
    with tempfile.TemporaryDirectory() as directory:
        cfg.set(dir=directory, evalers={}, start_trace_steps=[TRACED])
        trainer = cfg.instantiate(parent=None)
        compiled = trainer.compile_train_step()
        trainer.run(listener=steps, progress=False)
        layers = layer_times(directory, compiled)
        batch = trainer.input.element_spec()
        flops = 3 * forward_flops(trainer.model, trainer.trainer_state.model, batch)
    seconds = steps.seconds()
    middle, rows = statistics.median(seconds), []
    if peak is not None:
        at_45 = flops / peak / 0.45
        note = f"MFU {flops / peak / middle:.2f}, {batch['input_ids'].size / middle:,.0f} tokens/s"
        measured = [x / at_45 for x in seconds], seconds, [at_45] * len(seconds)
        question = "a step of a Llama of 1.1B / one at 45 % of the peak"
        rows.append(row(question, measured, at_most=1, note=note))
    whole = sum(layers.values())
    rows += [
        counted(f"share of a step in {layer or 'no layer'}", time / whole, at_most=None)
        for layer, time in list(layers.items())[:LAYERS]
    ]
    return rows, seconds


def against_torch(
    settings: dict[str, Any], cfg: Any, seconds: list[float], device: str
) -> list[Row]:
    """Returns the line that compares steps with those of PyTorch; none if it lacks the device."""
    try:
        by_torch = _torch_llama.step_seconds(
            settings,
            batch=cfg.input.source.global_batch_size,
            length=cfg.input.source.sequence_length,
            device=device,
            steps=EVERY,
            blocks=len(seconds),
        )
    except (ImportError, AssertionError, RuntimeError) as error:
        print(f"PyTorch is left out: {error}. Install its wheel for CUDA.")
        return []
    measured = [x / y for x, y in zip(seconds, by_torch, strict=True)], seconds, by_torch
    return [row("a step of a Llama of 1.1B / PyTorch, compiled", measured, at_most=1)]
