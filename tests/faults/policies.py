"""One process of several that skip, rewind and stop together: `python policies.py DIR policies`.

It says "here PHASE" where it may be asked to stop, and "done {…}" as JSON after each run.
"""

import hashlib
import json
import logging
import os
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

from weft import nnx
from weft.config import config_class, config_for_class, config_for_function
from weft.debug.anomalies import AnomalyPolicy
from weft.distributed.preemption import still_compiling
from weft.errors import UndefinedLossException
from weft.hierarchy.base_layer import BaseModel, ParameterSpec
from weft.input.fake import EmptyInput
from weft.interop import as_hierarchy
from weft.launch.distributed import joined_processes
from weft.trainer.checkpointer import every_n_steps_policy
from weft.trainer.evaler import SpmdEvaler
from weft.trainer.evaler import every_n_steps_policy as evaluate_every_n_steps
from weft.trainer.hooks import Hook
from weft.trainer.learner import Learner
from weft.trainer.optimizers import sgd_optimizer
from weft.trainer.summary_writer import JsonLinesWriter
from weft.trainer.trainer import SpmdTrainer

FAULTS = {2: "nan", 6: "large", 9: "root", 10: "root"}
traced = threading.Event()


class Root(nnx.Module):
    """Its gradient at 0 is not a number, but its value is."""

    def __call__(self, x):
        return jnp.sqrt(x)


class Rooted(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(4, 4, use_bias=False, rngs=rngs)
        self.root = Root()

    def __call__(self, x):
        return self.root(self.linear(x) ** 2)


def slowly(x, weight, num_steps):
    """Takes long to compile."""
    traced.set()
    for i in range(num_steps):
        x = jnp.sin(x @ weight + i)
    return x


class Fitted(BaseModel):
    """A module of NNX between two parameters of its own."""

    @config_class
    class Config(BaseModel.Config):
        slow: str = ""

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        inputs = (jax.ShapeDtypeStruct((4, 4), jnp.float32),)
        self._add_child("rooted", as_hierarchy(config_for_class(Rooted), inputs=inputs))

    def _create_layer_parameter_specs(self):
        return {"scale": ParameterSpec(shape=(4,), mesh_axes=(None,))}

    def initialize_parameters_recursively(self, prng_key, *, prebuilt=None):
        state = super().initialize_parameters_recursively(prng_key, prebuilt=prebuilt)
        if self.config.slow == "drawing":
            state["scale"] += 1e-9 * slowly(jnp.ones((4, 4)), jnp.ones((4, 4)), 600)[0]
        return state

    def forward(self, input_batch):
        x = self.rooted(input_batch["x"]) * self.state["scale"][None]
        if self.config.slow == "evaluating" and not self.is_training:
            x += slowly(x, jnp.ones((4, 4)), 1500)
            self.add_summary("x", jnp.mean(x))  # else XLA removes it
        return jnp.mean((x - 1.0) ** 2), {}


class Faulty(EmptyInput):
    """Batches that are faulty in their last row, which only the last process has."""

    @config_class
    class Config(EmptyInput.Config):
        faults: dict = {}

    def _global_batch(self, rng):
        x = rng.uniform(0.5, 1.0, size=(self.config.global_batch_size, 4)).astype(np.float32)
        fault = self.config.faults.get(int(rng.bit_generator.seed_seq.entropy))
        x[-1] *= {"nan": np.nan, "large": 1e3, "root": 0.0, None: 1.0}[fault]
        return {"x": x}


class Trainer(SpmdTrainer):
    """Knows whether a compiler was at work when it began to save."""

    left_compiler = False

    def save_checkpoint(self, evaler_summaries, *, force=False):
        self.left_compiler |= still_compiling()
        return super().save_checkpoint(evaler_summaries, force=force)


class Listener(Hook):
    def __init__(self):
        self.steps, self.saved, self.evaluated, self.ended = [], [], [], None

    def on_step(self, step, outputs, batch):
        self.steps.append(step)

    def on_checkpoint(self, step):
        self.saved.append(step)

    def on_eval(self, name, step, summaries):
        self.evaluated.append(step)

    def on_end(self, step, reason):
        self.ended = (step, reason)


def config(directory, slow="", faults=None):
    data = Faulty.default_config().set(is_training=True, global_batch_size=8, faults=faults or {})
    evaler = SpmdEvaler.default_config().set(
        input=data.clone(is_training=False, total_num_batches=1),
        summary_writer=JsonLinesWriter.default_config(),
        eval_policy=config_for_function(evaluate_every_n_steps).set(n=1),
    )
    optimizer = config_for_function(sgd_optimizer).set(
        learning_rate=0.01, decouple_weight_decay=True
    )
    cfg = Trainer.default_config().set(
        name="trainer",
        dir=os.path.join(directory, slow or "policies"),
        model=Fitted.default_config().set(dtype=jnp.float32, slow=slow),
        learner=Learner.default_config().set(optimizer=optimizer),
        input=data,
        evalers={"held_out": evaler} if slow == "evaluating" else {},
        summary_writer=JsonLinesWriter.default_config(),
        mesh_shape=(-1,),
        mesh_axis_names=("data",),
    )
    cfg.checkpointer.save_policy = config_for_function(every_n_steps_policy).set(n=4)
    return cfg


def report_compilation(phase):
    """Says that the program of this phase is being compiled."""
    traced.wait()
    while not still_compiling():
        time.sleep(0.02)
    print("here", phase, flush=True)


def run(phase, cfg):
    trainer, listener, error = cfg.instantiate(parent=None), Listener(), None
    try:
        trainer.run(listener=listener)
    except UndefinedLossException as raised:
        error = str(raised)
    state = trainer.trainer_state
    weights = [] if state is None else [np.asarray(x) for x in jax.tree.leaves(state.model)]
    done = {
        "phase": phase,
        "time": time.monotonic(),
        "error": error,
        "policy": trainer._run_state.get_state().get("anomalies"),
        "bits": [hashlib.sha256(x.tobytes()).hexdigest() for x in weights],
        "finite": all(np.isfinite(x).all() for x in weights),
        "left_compiler": trainer.left_compiler or still_compiling(),
        "checkpoints": trainer.checkpointer.checkpoint_steps(trainer.checkpointer.config.dir),
        **vars(listener),
    }
    print("done", json.dumps(done), flush=True)


def main():
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    with joined_processes():
        cfg = config(sys.argv[1], faults=FAULTS)
        cfg.anomaly_policy = AnomalyPolicy.default_config().set(
            on_undefined="skip",
            on_spike="rewind",
            spike_factor=3.0,
            spike_min_steps=3,
            max_skips_in_a_row=2,
        )
        run("policies", cfg)
        for phase in ("drawing", "evaluating"):
            traced.clear()
            threading.Thread(target=report_compilation, args=(phase,), daemon=True).start()
            run(phase, config(sys.argv[1], slow=phase))
    sys.stderr.flush()
    os._exit(0)  # a compilation that was given up would keep it


if __name__ == "__main__":
    main()
