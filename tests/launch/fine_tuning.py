"""Two processes fine-tune a model and stop early: `fine_tuning.py DIR PORT`.

They are forked once everything is imported, before JAX is used. Each writes what it has seen.
"""

import json
import os
import sys
from pathlib import Path

import jax
import numpy as np

from weft.config import config_for_class, config_for_function
from weft.inference.decoding_evaler import DecodingEvaler
from weft.input import ByteTokenizer
from weft.launch.distributed import joined_processes
from weft.recipes import lm_lora
from weft.trainer.checkpointer.policy import EvalMetric
from weft.trainer.evaler import EarlyStopping, every_n_steps_policy
from weft.trainer.hooks import Hook

lm_lora._LLAMA |= {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
ROWS, LENGTH, PROMPT, ADDED = 4, 16, 5, 3


class Seen(Hook):
    def __init__(self):
        self.evals, self.saved = [], []

    def on_checkpoint(self, step):
        self.saved.append(step)

    def on_eval(self, name, step, summaries):
        values = {name: getattr(x, "mean", x) for name, x in summaries.items()}
        values = {name: x if isinstance(x, str) else float(x) for name, x in values.items()}
        self.evals.append([name, step, values])

    def on_end(self, step, reason):
        self.ended = [step, reason]


def small(cfg):
    for input_cfg in (cfg.input, cfg.evalers["held_out"].input):
        input_cfg.source.set(sequence_length=LENGTH, global_batch_size=ROWS)
        input_cfg.source.corpus.set(pattern="json/*.py", held_out_fraction=0.1)
    return cfg.set(mesh_shape=(-1, 1))


def config():
    """Returns the recipe, stopped when its loss has not become worse between two evaluations."""
    cfg = small(lm_lora.lm_lora()).set(dir="tuned", max_step=40)
    held_out = cfg.evalers["held_out"]
    held_out.input.source.max_examples = 2 * ROWS
    held_out.eval_policy = config_for_function(every_n_steps_policy).set(n=2)
    samples = DecodingEvaler.default_config().set(
        input=held_out.input.clone(), eval_policy=held_out.eval_policy.clone()
    )
    samples.metric_calculator.set(
        tokenizer=config_for_class(ByteTokenizer), prompt_length=PROMPT, num_tokens=ADDED
    )
    cfg.evalers["samples"] = samples
    cfg.early_stopping = EarlyStopping.default_config().set(
        metric=EvalMetric("held_out", "loss"), mode="max"
    )
    cfg.throughput.set(every_n_steps=2, peak_flops_per_device=1e9)
    cfg.checkpointer.save_policy.n = 2
    cfg.summary_writer.writers["json_lines"].write_every_n_steps = 1
    return cfg


def made_base(name, cfg):
    trainer = small(cfg).set(evalers={}).instantiate(parent=None)
    trainer.init(jax.random.key(0))  # as good as any, and sooner there
    return trainer


def main():
    cfg, seen = config(), Seen()
    assert lm_lora.prepare(cfg, made_base)
    trainer = cfg.instantiate(parent=None)
    trainer.run(listener=seen)
    # Per process; adapters and frozen parameters must be equal on all.
    sums = jax.tree.map(
        lambda x: float(np.asarray(x.addressable_data(0), np.float64).sum()),
        trainer.trainer_state.model,
    )
    leaves = jax.tree_util.tree_leaves_with_path(sums)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}
    return {"ended": seen.ended, "saved": seen.saved, "evals": seen.evals, "sums": named}


if __name__ == "__main__":
    directory, port = sys.argv[1:]
    os.chdir(directory)
    child = os.fork()
    environ = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "0" if child else "1",
    }
    with joined_processes(environ) as place:
        Path(f"process_{place.process_id}.json").write_text(json.dumps(main()), encoding="utf-8")
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
