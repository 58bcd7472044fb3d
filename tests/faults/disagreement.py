"""Two processes that differ in one thing after another: `python disagreement.py DIR disagreement`.

They say "done {…}" as JSON after each, with the error and the last step.
"""

import json
import os
import sys
from pathlib import Path

import jax

from tests.faults import training
from weft.config import config_class, config_for_function
from weft.errors import WeftError
from weft.launch.distributed import joined_processes
from weft.trainer.checkpointer import every_n_steps_policy
from weft.trainer.learner import Learner
from weft.trainer.optimizers import sgd_optimizer


class FromFiles(training.Disturbed):
    """Four features per row, and the files that they would come from."""

    @config_class
    class Config(training.Disturbed.Config):
        paths: str = ""


def learning_rate(rate):
    optimizer = config_for_function(sgd_optimizer)
    optimizer.set(learning_rate=rate, decouple_weight_decay=True)
    return {"learner": Learner.default_config().set(optimizer=optimizer)}


# What process 1 has instead.
SCENARIOS = {
    "another learning rate": learning_rate(0.5),
    "another seed": {"seed": 7},
    "another max_step": {"max_step": 9},
    "another save policy": "checkpointer",
    "another corpus": "paths",
    "another directory": "dir",
    "another key": "key",
    "nothing else": {},
}


def main():
    root = Path(sys.argv[1])
    with joined_processes():
        index = jax.process_index()
        for number, (name, fields) in enumerate(SCENARIOS.items()):
            data = root / f"host{index}"
            data.mkdir(parents=True, exist_ok=True)
            differs = index == 1 and name == "another corpus"
            (data / "a.jsonl").write_text("12\n" if differs else "1\n", encoding="utf-8")
            cfg = training.config(str(root / f"run{number}"), max_step=3)
            cfg.evalers = {}
            cfg.input = FromFiles.default_config().set(
                is_training=True, global_batch_size=12, paths=str(data / "*.jsonl")
            )
            # What concerns one process alone may differ, and so may the folder of the same data.
            cfg.watchdog_timeout_seconds = 100.0 + index
            cfg.compilation_cache_dir = os.fspath(data)
            if index == 1 and isinstance(fields, dict):
                cfg.set(**fields)
            elif index == 1 and fields == "checkpointer":
                cfg.checkpointer.save_policy = config_for_function(every_n_steps_policy).set(n=2)
            elif index == 1 and fields == "dir":
                cfg.dir = f"{cfg.dir}-elsewhere"
            key = jax.random.key(index if fields == "key" else 0)
            trainer, error = cfg.instantiate(parent=None), ""
            try:
                trainer.run(key)
            except WeftError as raised:
                error = f"{type(raised).__name__}: {raised}"
            done = {"scenario": name, "error": error, "step": trainer.step}
            print("done", json.dumps(done), flush=True)


if __name__ == "__main__":
    main()
