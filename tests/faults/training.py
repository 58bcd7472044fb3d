"""A real training that a test disturbs: `python training.py DIR FAULT...`; one process of several.

It says "here FAULT" where the fault may come, and "done {…}" as JSON after each run.
"""

import contextlib
import functools
import json
import os
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

from weft.config import config_class, config_for_function
from weft.distributed import peers
from weft.distributed.preemption import still_compiling
from weft.errors import InputReadError
from weft.hierarchy.base_layer import BaseModel, ParameterSpec
from weft.input import prefetch
from weft.input.fake import EmptyInput, FakeDataset, FakeIterator
from weft.launch.distributed import joined_processes
from weft.trainer.checkpointer import Checkpointer, OrbaxStateStorage
from weft.trainer.evaler import SpmdEvaler
from weft.trainer.evaler import every_n_steps_policy as evaluate_every_n_steps
from weft.trainer.hooks import Hook
from weft.trainer.learner import Learner
from weft.trainer.optimizers import sgd_optimizer
from weft.trainer.trainer import SpmdTrainer

fault = ""
told = set()
state_is_there = threading.Event()


def report_phase(name):
    """Says once that the run is where a fault is to come."""
    if name == fault and name not in told:
        told.add(name)
        print("here", name, flush=True)


def report_compilation():
    state_is_there.wait()  # its own compilation does not count
    while not still_compiling():
        time.sleep(0.02)
    report_phase("compiling")


class Fitted(BaseModel):
    """A linear function of four features; the more it is unrolled, the longer it compiles."""

    @config_class
    class Config(BaseModel.Config):
        unrolled: int = 0

    def _create_layer_parameter_specs(self):
        return {"weight": ParameterSpec(shape=(4, 4), mesh_axes=(None, None))}

    def forward(self, input_batch):
        weight, x = self.state["weight"], input_batch["x"]
        for i in range(self.config.unrolled):
            x = jnp.sin(x @ weight + i)
        return jnp.mean((x @ weight - 1.0) ** 2), {}


class Disturbed(EmptyInput):
    """Four features per row; where a fault says so it is slow, fails or ends."""

    @config_class
    class Config(EmptyInput.Config):
        is_eval: bool = False

    def dataset(self):
        whole = super().dataset()
        return DisturbedDataset(self, whole._rows)

    def _global_batch(self, rng):
        return {"x": rng.normal(size=(self.config.global_batch_size, 4)).astype(np.float32)}


class DisturbedDataset(FakeDataset):
    def __iter__(self):
        return DisturbedIterator(self._source, self._rows)


class DisturbedIterator(FakeIterator):
    given = 0

    def __next__(self):
        if threading.current_thread().name == "weft-input-prefetch":
            self.given += 1
            self._disturb(self._source.config.is_eval, last=jax.process_count() - 1)
        return super().__next__()

    def _disturb(self, is_eval, last):
        if is_eval:
            if fault == "evaluating":
                time.sleep(0.05)
                if self.given == 5:
                    report_phase("evaluating")
            elif self.given == 3:
                raise StopIteration
        elif self.given == (1 if fault == "absent" else 5) and jax.process_index() == last:
            if fault in ("waiting", "hanging", "absent"):
                report_phase(fault)
                time.sleep(120)
            elif fault == "failing":
                raise InputReadError("data/part-3.txt, record 17: not UTF-8")
            elif fault == "ending":
                raise StopIteration


class SlowStorage(OrbaxStateStorage):
    """Takes a while to commit when a fault is to come, or hangs in one process when it reads."""

    def restore_from_dir(self, *args, **kwargs):
        if fault == "restoring" and jax.process_index() == jax.process_count() - 1:
            report_phase("restoring")
            time.sleep(120)
        return super().restore_from_dir(*args, **kwargs)

    def save_to_dir(self, *, on_commit_callback, **kwargs):
        def slow(**committed):
            if fault == "saving":
                report_phase("saving")
                time.sleep(0.6)
            on_commit_callback(**committed)

        super().save_to_dir(on_commit_callback=slow, **kwargs)


class Listener(Hook):
    saved = ()
    ended = None
    resumed_from = None

    def on_start(self, trainer, resumed_from):
        self.resumed_from = resumed_from
        if fault == "compiling":
            state_is_there.set()

    def on_step(self, step, outputs, batch):
        time.sleep(0.02)
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 3:
            report_phase("stepping")

    def on_checkpoint(self, step):
        self.saved = (*self.saved, step)

    def on_end(self, step, reason):
        self.ended = (step, reason)


def policy():
    return lambda *, step, evaler_summaries: fault == "saving" and step % 3 == 0


def config(directory, **fields):
    data = Disturbed.default_config().set(is_training=True, global_batch_size=12)
    evaler = SpmdEvaler.default_config().set(
        input=data.clone(is_eval=True, total_num_batches=10_000),
        eval_policy=config_for_function(evaluate_every_n_steps).set(n=4),
    )
    checkpointer = Checkpointer.default_config().set(
        save_policy=config_for_function(policy),
        storage=SlowStorage.default_config(),
        keep_last_n=100,
    )
    optimizer = config_for_function(sgd_optimizer).set(
        learning_rate=1e-3, decouple_weight_decay=True
    )
    return SpmdTrainer.default_config().set(
        name="trainer",
        dir=directory,
        model=Fitted.default_config().set(dtype=jnp.float32),
        learner=Learner.default_config().set(optimizer=optimizer),
        input=data,
        evalers={"held_out": evaler},
        checkpointer=checkpointer,
        mesh_shape=(-1,),
        mesh_axis_names=("data",),
        **fields,
    )


def joined():
    """Joins the other processes by Weft, or as a program may that uses JAX alone."""
    if "JOINED_BY_JAX" not in os.environ:
        return joined_processes()
    jax.distributed.initialize(
        os.environ["JAX_COORDINATOR_ADDRESS"],
        int(os.environ["JAX_NUM_PROCESSES"]),
        int(os.environ["JAX_PROCESS_ID"]),
        cluster_detection_method="deactivate",
    )
    return contextlib.nullcontext()


def main():
    global fault
    directory, *faults = sys.argv[1:]
    # A process ends by force this soon after another is gone, not after ten seconds.
    vars(peers)["Peers"] = functools.partial(peers.Peers, end_seconds=4.0)
    # Nor does a stop wait ten seconds for the thread that waits for its input.
    vars(prefetch)["_CLOSE_TIMEOUT_SECONDS"] = 0.5
    with joined():
        trainers = {}
        for fault in faults:
            kind = "unrolled" if fault == "compiling" else "plain"
            if kind not in trainers:
                cfg = config(os.path.join(directory, kind))
                if kind == "unrolled":
                    cfg.model.unrolled = 1000
                    threading.Thread(target=report_compilation, daemon=True).start()
                if fault in ("absent", "unstarted"):
                    cfg.readiness_timeout_seconds = 5.0
                if "restoring" in faults:  # which the other process must have reached by then
                    cfg.readiness_timeout_seconds = 12.0
                if fault == "hanging":
                    cfg.crash_on_hang_timeout_seconds = 6.0
                trainers[kind] = cfg.instantiate(parent=None)
            trainer, listener = trainers[kind], Listener()
            if fault == "unstarted" and jax.process_index() == jax.process_count() - 1:
                report_phase("unstarted")
                time.sleep(120)
            try:
                trainer.run(listener=listener, resume=True)
            finally:
                done = {
                    "fault": fault,
                    "time": time.monotonic(),
                    "ended": listener.ended,
                    "resumed_from": listener.resumed_from,
                    "saved": listener.saved,
                    "steps": trainer.checkpointer.checkpoint_steps(trainer.checkpointer.config.dir),
                    "still_compiling": still_compiling(),
                }
                print("done", json.dumps(done), flush=True)
    os._exit(0)  # a compilation that was given up would keep it


if __name__ == "__main__":
    main()
