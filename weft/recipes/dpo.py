"""Preference optimization of an imported checkpoint on pairs of answers.

    weft train dpo base=FOLDER data=preferences.jsonl
    weft train dpo base=FOLDER data=preferences.jsonl loss=ipo beta=0.2 tuning=full

The reference is the base. Adapters need no second copy of it: the reference is the model without
them. With `tuning=full` it is a frozen copy.
"""

from typing import Literal

from weft.config import config_for_function
from weft.hierarchy import PreferenceModel
from weft.hierarchy.preferences import PreferenceLossMetrics
from weft.input.preferences import preference_arrays
from weft.recipes.lm import trainer_config
from weft.recipes.preferences import (
    HELD_OUT,
    TRAIN,
    learning_rate_of,
    num_rows,
    read_base,
    rows_input,
    set_training,
)
from weft.recipes.sft import Tuning, run_directory, set_best
from weft.trainer import SpmdTrainer


def dpo(
    base: str,
    data: str,
    *,
    loss: Literal["dpo", "ipo"] = "dpo",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    rpo_alpha: float = 0.0,
    reference: bool = True,
    tuning: Tuning = "lora",
    rank: int = 16,
    alpha: float | None = None,
    targets: str = "",
    held_out: float = 0.1,
    max_length: int = 1024,
    batch_size: int | None = None,
    epochs: int = 1,
    steps: int | None = None,
    learning_rate: float | None = None,
) -> SpmdTrainer.Config:
    """Returns a recipe for tuning a checkpoint on which of two answers is preferred.

    Args:
        base: The folder of a Hugging Face checkpoint, with its tokenizer.
        data: A file of JSON lines or Parquet, whose rows have a `prompt`, and the answers `chosen`
            and `rejected`, all texts or all messages.
        loss: "dpo" or "ipo".
        beta: The larger, the closer the model stays to the base.
        label_smoothing: The probability that the rejected answer is the better one, for "dpo".
        rpo_alpha: Weight of the mean loss of a token of the chosen answer, which is added.
        reference: Whether the loss compares the model with the base.
        tuning: What is trained: "full", "lora", "lora-int8" or "lora-nf4"; see `sft`.
        rank: Rank of the adapters.
        alpha: Their outputs are multiplied by `alpha / rank`; twice the rank by default.
        targets: The linear maps with adapters, such as "q_proj,v_proj"; all by default.
        held_out: Fraction of the rows to evaluate on; 0 for none.
        max_length: Largest number of tokens of a prompt with an answer. Longer rows are left out.
        batch_size: Pairs per step; 8 by default, or as many as there are.
        epochs: Number of passes over the data.
        steps: Number of steps, in place of `epochs`.
        learning_rate: Highest learning rate, after the warm-up; 1e-6 for "full", otherwise 2e-5.

    Raises:
        WeightsReadError: if there is no checkpoint at `base`.
        HuggingFaceConfigError: if its model is not supported.
        InputReadError: if the data cannot be read.
        LayerConfigError: if there is no such target.
    """
    read = read_base(
        base, tuning=tuning, rank=rank, alpha=alpha, targets=targets
    )
    metrics = PreferenceLossMetrics.default_config().set(
        loss=loss,
        beta=beta,
        label_smoothing=label_smoothing,
        rpo_alpha=rpo_alpha,
    )
    arrays = config_for_function(preference_arrays).set(
        data=data,
        tokenizer=read.tokenizer,
        template=read.template,
        max_length=read.max_length(max_length),
    )
    count = num_rows(data, held_out)
    if batch_size is None:
        batch_size = min(8, count)
    if steps is None:
        steps = max(1, epochs * count // batch_size)
    if learning_rate is None:
        learning_rate = learning_rate_of(tuning)
    cfg = trainer_config(
        run_directory("dpo", data),
        model=PreferenceModel.from_model(
            read.model, has_reference=reference, metrics=metrics
        ),
        train_input=rows_input(arrays, TRAIN, held_out, batch_size),
        held_out_input=rows_input(arrays, HELD_OUT, held_out, batch_size),
        max_step=steps,
        peak_lr=learning_rate,
        eval_every=max(1, steps // 5),
    )
    if held_out > 0:
        set_best(cfg, HELD_OUT)
    else:
        cfg.evalers = {}
    set_training(cfg, base, tuning)
    return cfg
