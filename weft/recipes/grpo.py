"""Tuning of an imported checkpoint by a reward of its own answers.

    weft train grpo base=FOLDER data=prompts.jsonl reward=reward.py:reward

The reward is a function of an answer and of the row of its prompt:

    def reward(answer: str, row: dict) -> float:
        return float(answer.strip() == row["solution"])

In each step the model gives several answers to each of some prompts. Those with a larger reward
than the other answers to the same prompt become likelier (Shao et al., 2024).
"""

from typing import Any

from weft.config import config_for_function
from weft.hierarchy import PolicyModel
from weft.hierarchy.preferences import PolicyLossMetrics
from weft.input.preferences import prompt_arrays
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
from weft.recipes.rollouts import (
    PolicyTrainer,
    RewardCalculator,
    Rollouts,
    schedule_of_updates,
)
from weft.recipes.sft import Tuning, run_directory
from weft.trainer.checkpointer.policy import EvalMetric, KeepBest


def grpo(
    base: str,
    data: str,
    reward: str,
    *,
    answers: int = 8,
    tokens: int = 64,
    temperature: float = 1.0,
    beta: float = 0.04,
    updates: int = 1,
    clip: float = 0.2,
    tuning: Tuning = "lora",
    rank: int = 16,
    alpha: float | None = None,
    targets: str = "",
    held_out: float = 0.1,
    max_length: int = 512,
    batch_size: int | None = None,
    steps: int = 100,
    learning_rate: float | None = None,
) -> PolicyTrainer.Config:
    """Returns a recipe for tuning a checkpoint by a reward of its own answers.

    Args:
        base: The folder of a Hugging Face checkpoint, with its tokenizer.
        data: A file of JSON lines or Parquet, whose rows have a `prompt`, a text or messages, and
            what the reward needs.
        reward: The function that returns the reward of an answer, as `file.py:function`.
        answers: Number of answers to each prompt.
        tokens: Largest number of tokens of an answer.
        temperature: Divides the logits that answers are drawn by.
        beta: The weight of the divergence from the base; 0 for none.
        updates: Number of updates of the model with the answers of a step.
        clip: After the first update, how far ratios to the model that has drawn the answers may
            be from 1.
        tuning: What is trained: "full", "lora", "lora-int8" or "lora-nf4"; see `sft`.
        rank: Rank of the adapters.
        alpha: Their outputs are multiplied by `alpha / rank`; twice the rank by default.
        targets: The linear maps with adapters, such as "q_proj,v_proj"; all by default.
        held_out: Fraction of the rows to evaluate on; 0 for none.
        max_length: Largest number of tokens of a prompt. Longer rows are left out.
        batch_size: Prompts per step; 8 by default, or as many as there are.
        steps: Number of steps.
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
    rollouts = Rollouts.default_config().set(
        data=data,
        reward=reward,
        tokenizer=read.tokenizer,
        num_answers=answers,
        num_tokens=tokens,
        temperature=temperature,
    )
    arrays = config_for_function(prompt_arrays).set(
        data=data,
        tokenizer=read.tokenizer,
        template=read.template,
        max_length=max(1, read.max_length(max_length + tokens) - tokens),
    )
    if batch_size is None:
        batch_size = min(8, num_rows(data, held_out))
    if learning_rate is None:
        learning_rate = learning_rate_of(tuning)
    fields = trainer_config(
        run_directory("grpo", data),
        model=PolicyModel.from_model(
            read.model,
            has_reference=beta > 0,
            metrics=PolicyLossMetrics.default_config().set(
                beta=beta, clip=clip
            ),
        ),
        train_input=rows_input(arrays, TRAIN, held_out, batch_size),
        held_out_input=rows_input(arrays, HELD_OUT, held_out, batch_size),
        max_step=steps,
        peak_lr=learning_rate,
        eval_every=max(1, steps // 5),
    )
    cfg = PolicyTrainer.default_config().set(
        rollouts=rollouts, num_updates=updates
    )
    for name, value in fields.items():
        if name != "klass":
            setattr(cfg, name, value)
    if updates > 1:
        optimizer: Any = cfg.learner.optimizer.inner  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.learning_rate = config_for_function(schedule_of_updates).set(
            schedule=optimizer.learning_rate, num_updates=updates
        )
    if held_out > 0:
        cfg.evalers[
            HELD_OUT
        ].metric_calculator = RewardCalculator.default_config().set(
            rollouts=rollouts.clone()
        )
        cfg.checkpointer.keep_best = KeepBest.default_config().set(  # pyright: ignore[reportAttributeAccessIssue]
            metric=EvalMetric(HELD_OUT, "reward"), mode="max"
        )
    else:
        cfg.evalers = {}
    set_training(cfg, base, tuning)
    return cfg
