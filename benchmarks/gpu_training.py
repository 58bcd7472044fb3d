"""How much of a GPU's peak does a Llama of 1.1 billion parameters use, through `SpmdTrainer`?

In bfloat16, on sequences of 4,096 tokens. PyTorch, where it finds the GPU, trains a model of the
same sizes, compiled and with its fused attention. The last lines are the layers in which a step
spends most of its time.
"""

import tempfile
import time
from typing import Any

import jax

from benchmarks import _llama
from benchmarks.harness import Row, counted, row
from weft.trainer import RunListener, SpmdTrainer
from weft.trainer.profiling import forward_flops, layer_times, peak_flops_of

# Ten steps compile and warm up; then each ten are a measurement, until the trace.
EVERY, TRACED, LAYERS = 10, 171, 8
_NO_TORCH = "PyTorch does not find the GPU: install its wheel for CUDA in place of that for the CPU"


class _Steps(RunListener):
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
    return measure(_llama.llama_1b(steps=TRACED + EVERY), device="cuda")


def measure(cfg: SpmdTrainer.Config, device: str, peak: float | None = None) -> list[Row]:
    """Returns the lines of a run.

    Args:
        device: PyTorch's name of the device.
        peak: Operations per second; None for the data sheet's.
    """
    steps = _Steps()
    with tempfile.TemporaryDirectory() as directory:
        cfg.set(dir=directory, evalers={}, start_trace_steps=[TRACED])
        trainer = cfg.instantiate(parent=None)
        compiled = trainer.compile_train_step()
        trainer.run(listener=steps, progress=False)
        layers = layer_times(directory, compiled)
        state, batch = trainer.trainer_state, trainer.input.element_spec()
        flops = 3 * forward_flops(trainer.model, state.model, batch)
        del trainer, state  # PyTorch takes the memory
    seconds = steps.seconds()
    peak = peak or peak_flops_of(jax.devices()[0].device_kind)
    tokens = batch["input_ids"].size
    rows = []
    if peak is not None:
        floor = [flops / peak] * len(seconds)
        shares = [0.45 * t / f for t, f in zip(seconds, floor, strict=True)]
        rows.append(
            row(
                "a step of a Llama of 1.1B / one at 45 % of the peak",
                (shares, seconds, [f / 0.45 for f in floor]),
                at_most=1,
                note=f"MFU {flops / peak / sorted(seconds)[len(seconds) // 2]:.2f}, "
                f"{tokens / sorted(seconds)[len(seconds) // 2]:,.0f} tokens/s",
            )
        )
    whole = sum(layers.values())
    rows += [
        counted(f"share of a step in {layer or 'no layer'}", time / whole, at_most=None)
        for layer, time in list(layers.items())[:LAYERS]
    ]
    return rows
