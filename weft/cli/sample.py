"""`weft sample`: text from a run's newest checkpoint."""

import argparse
import os
from typing import Any

import jax

from weft.cli.configs import run_config
from weft.cli.generate import find_tokenizer, generate
from weft.core.axis_rules import logical_axis_rules
from weft.errors import CheckpointNotFoundError, CommandLineError
from weft.hierarchy.module import Module
from weft.trainer.checkpointer import CheckpointValidationType
from weft.trainer.mesh import build_mesh
from weft.trainer.model import build_model
from weft.trainer.rules_by_kind import rules_of
from weft.trainer.run_record import CHECKPOINTS_DIR


def run(arguments: argparse.Namespace) -> int:
    """Prints the prompt and its continuation."""
    cfg = run_config(arguments.dir, allow=arguments.allow)
    tokenizer = find_tokenizer(cfg)
    if tokenizer is None:
        raise CommandLineError(
            f"the run in {arguments.dir!r} reads no text: its input has no tokenizer."
        )
    model, params = restore_model(cfg)
    text = generate(
        model,
        params,
        tokenizer=tokenizer,
        prompt=arguments.prompt,
        num_tokens=arguments.tokens,
        temperature=arguments.temperature,
        seed=arguments.seed,
    )
    print(arguments.prompt + text)
    return 0


def restore_model(cfg: Any, *, step: int | None = None) -> tuple[Module, Any]:
    """Builds the model of a run and restores its parameters on one device.

    Restores the moving average of the parameters if the learner keeps one.

    Args:
        step: The step of the checkpoint; None for the newest complete one.

    Raises:
        CheckpointNotFoundError: if the run has not saved yet.
    """
    axes = cfg.mesh_axis_names
    mesh = build_mesh((1,) * len(axes), axes, jax.devices()[:1])
    with jax.set_mesh(mesh), logical_axis_rules(rules_of(cfg).activations):
        model = build_model(cfg)
        checkpointer = cfg.checkpointer.set(
            name="checkpointer",
            dir=os.path.join(cfg.dir, CHECKPOINTS_DIR),
            validation=CheckpointValidationType.CONTAINS_STATE,
        ).instantiate(parent=None)
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        shapes = jax.eval_shape(model.initialize_parameters_recursively, jax.random.key(0))
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes
        )
        averaged = getattr(getattr(cfg.learner, "ema", None), "decay", None) is not None
        wanted = {"learner": {"ema": {"ema": target}}} if averaged else {"model": target}
        restored, state = checkpointer.restore(step=step, state=wanted)
        checkpointer.stop()
    if restored is None:
        raise CheckpointNotFoundError(
            f"the run in {cfg.dir!r} has not saved a checkpoint yet. Train it longer."
        )
    return model, state["learner"]["ema"]["ema"] if averaged else state["model"]
