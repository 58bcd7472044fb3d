"""How long do the devices wait for the host between two steps?

Runs the default recipe with a summary of every step and an anomaly policy, whose verdict on each
step the host reads while the next one runs. `throughput/device_idle` is the share of the time
between the end of a step and the dispatch of the next. The comparison is a host that waits for each
step before it dispatches the next one.
"""

import statistics
import tempfile

import jax

from benchmarks.harness import Row, counted
from weft.debug.anomalies import AnomalyPolicy
from weft.recipes import RECIPES
from weft.report.results import TRAIN_SUMMARIES, read_results
from weft.trainer.hooks import Hook
from weft.trainer.throughput import Throughput

READINGS, EVERY = 15, 20
TARGET = 0.02


class _Waiting(Hook):
    def on_step(self, step, outputs, batch):
        jax.block_until_ready(outputs)


def idle(policy: AnomalyPolicy.Config | None, listener: Hook | None = None) -> list[float]:
    """Returns the shares of idle time that a run reports."""
    with tempfile.TemporaryDirectory() as directory:
        cfg = RECIPES[0]().set(dir=directory, max_step=(READINGS + 1) * EVERY, evalers={})
        cfg.set(anomaly_policy=policy, throughput=Throughput.default_config())
        cfg.throughput.every_n_steps = EVERY
        for writer in cfg.summary_writer.writers.values():
            writer.write_every_n_steps = 1
        cfg.instantiate(parent=None).run(listener=listener, progress=False)
        curves = read_results(directory).curves[TRAIN_SUMMARIES]
        return [share for _, share in curves["throughput/device_idle"]]


def run() -> list[Row]:
    """Shares of a run without and with a policy, and of a host that waits."""
    policy = AnomalyPolicy.default_config().set(on_undefined="skip")
    runs = {
        "": (idle(None), TARGET),
        " with an anomaly policy": (idle(policy), TARGET),
        " with a host that waits for each step": (idle(None, _Waiting()), None),
    }
    return [
        counted(
            f"time that devices wait between steps of lm{text}",
            statistics.median(shares),
            at_most=target,
            note=f"{min(shares):.2g} to {max(shares):.2g} in {len(shares)} samples of ten steps",
        )
        for text, (shares, target) in runs.items()
    ]
