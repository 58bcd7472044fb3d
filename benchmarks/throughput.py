"""How many tokens per second go through `SpmdTrainer`, against a loop written by hand?

Both train the default recipe's model from the same values on the same data, and must give the same
losses. They run alternately inside of one run of the trainer: after each block of its steps, its
listener runs a block of the loop.
"""

import tempfile
import time

import jax
import numpy as np

from benchmarks import _raw_lm
from benchmarks.harness import Row, row
from weft.config import config_for_function
from weft.recipes import RECIPES
from weft.trainer.checkpointer import every_n_steps_policy
from weft.trainer.hooks import Hook

PAIRS, BLOCK = 16, 8


class _ByHand:
    """The loop, on batches that it reads itself."""

    def __init__(self, trainer):
        cfg = trainer.config
        self.params = _raw_lm.from_weft(
            jax.tree.map(lambda x: x.copy(), trainer.trainer_state.model)
        )
        optimizer, self.step = _raw_lm.make_step(
            cfg.learner.optimizer.inner.learning_rate.peak_lr, cfg.max_step
        )
        self.state = optimizer.init(self.params)
        self.batches = iter(cfg.input.set(name="input").instantiate(parent=None).dataset())

    def run(self, n: int) -> list[float]:
        losses = []
        for _ in range(n):
            batch = next(self.batches)
            self.params, self.state, loss = self.step(self.params, self.state, batch)
            losses.append(loss)
        jax.block_until_ready(losses)
        return losses


class _Alternating(Hook):
    """Measures blocks of the trainer's steps, each followed by a block of the loop."""

    def __init__(self):
        self.times: list[tuple[float, float]] = []
        self.losses: list[float] = []
        self.losses_by_hand: list[float] = []

    def on_start(self, trainer, resumed_from):
        self.by_hand = _ByHand(trainer)
        self.start = time.perf_counter()

    def on_step(self, step, outputs, batch):
        self.losses.append(outputs["loss"])
        if step % BLOCK == 0:
            jax.block_until_ready(outputs)
            middle = time.perf_counter()
            self.losses_by_hand += self.by_hand.run(BLOCK)
            end = time.perf_counter()
            self.times.append((middle - self.start, end - middle))
            self.start = time.perf_counter()


def run() -> list[Row]:
    """Blocks of steps of the trainer against blocks of the loop."""
    with tempfile.TemporaryDirectory() as directory:
        cfg = RECIPES[0]().set(dir=directory, max_step=PAIRS * BLOCK, evalers={})
        never = config_for_function(every_n_steps_policy).set(n=10**9)
        cfg.checkpointer.save_policy = never
        listener = _Alternating()
        cfg.instantiate(parent=None).run(listener=listener)
    np.testing.assert_allclose(
        np.array(listener.losses), np.array(listener.losses_by_hand), rtol=2e-2
    )
    a, b = map(list, zip(*listener.times[1:], strict=True))  # the first block compiles
    measured = ([x / y for x, y in zip(a, b, strict=True)], a, b)
    return [row("a step through SpmdTrainer / by hand", measured, at_most=1 / 0.97)]
