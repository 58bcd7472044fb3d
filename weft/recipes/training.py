"""Common parts of the recipes: training, evaluation, checkpoints and reports."""

from typing import Any

from weft.config import config_for_function
from weft.trainer.checkpointer import Checkpointer, every_n_steps_policy
from weft.trainer.evaler import SpmdEvaler
from weft.trainer.evaler import every_n_steps_policy as eval_every_n_steps_policy
from weft.trainer.learner import Learner
from weft.trainer.optimizers import adamw_optimizer, skip_and_clip_by_global_norm
from weft.trainer.schedule import cosine_with_linear_warmup
from weft.trainer.summary_writer import CompositeWriter, JsonLinesWriter, SummaryWriter
from weft.trainer.trainer import SpmdTrainer


def trainer_config(
    directory: str,
    *,
    model: Any,
    train_input: Any,
    held_out_input: Any,
    max_step: int,
    peak_lr: float,
    eval_every: int,
    save_every: int,
) -> Any:
    """Returns a config with AdamW, a warm-up and a cosine decay on a mesh of data and model.

    Args:
        directory: Directory of the run.
        held_out_input: Data to evaluate on; it must end.
        peak_lr: The learning rate after the warm-up.
        eval_every: Number of steps between evaluations.
        save_every: Number of steps between checkpoints.
    """
    optimizer = config_for_function(adamw_optimizer).set(
        learning_rate=config_for_function(cosine_with_linear_warmup).set(
            peak_lr=peak_lr, max_step=max_step, warmup_steps=max_step // 20, alpha=0.1
        ),
        b1=0.9,
        b2=0.95,
        eps=1e-8,
        weight_decay=0.1,
    )
    evaler = SpmdEvaler.default_config().set(
        input=held_out_input,
        eval_policy=config_for_function(eval_every_n_steps_policy).set(n=eval_every),
        summary_writer=_writer(every_n_steps=1),
    )
    checkpointer = Checkpointer.default_config().set(
        save_policy=config_for_function(every_n_steps_policy).set(n=save_every),
        keep_last_n=2,
    )
    return SpmdTrainer.default_config().set(
        name="trainer",
        dir=directory,
        max_step=max_step,
        model=model,
        learner=Learner.default_config().set(
            optimizer=config_for_function(skip_and_clip_by_global_norm).set(
                inner=optimizer, max_norm=1.0
            )
        ),
        input=train_input,
        evalers={"held_out": evaler},
        checkpointer=checkpointer,
        summary_writer=_writer(every_n_steps=5),
        mesh_shape=(-1, 1),
        mesh_axis_names=("data", "model"),
    )


def _writer(*, every_n_steps: int) -> Any:
    """Returns writers for TensorBoard and, for the report, JSON lines."""
    writers = {
        "tensorboard": SummaryWriter.default_config(),
        "json_lines": JsonLinesWriter.default_config(),
    }
    for writer in writers.values():
        writer.write_every_n_steps = every_n_steps
    return CompositeWriter.default_config().set(writers=writers)
