"""Answers that a model gives to prompts during its training, and their rewards.

    prompts ── generate ── answers, several to each prompt ── reward ── advantages ── step

A `PolicyTrainer` draws the answers of a step from the model as it is before the step. The reward is
a function of the user:

    def reward(answer: str, row: dict) -> float:
        return float(answer.strip() == row["solution"])
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from weft import functional
from weft.config import (
    REQUIRED,
    ConfigOr,
    Configurable,
    Required,
)
from weft.errors import ArgumentValueError, RewardError, describe_error
from weft.generation import Completion, Generator, LanguageModel
from weft.hierarchy import Module, WeightedScalar, nowrap
from weft.hierarchy.module import functional as invoke
from weft.input.datasets import read_rows
from weft.input.dispatch import host_to_global_device_array
from weft.input.tokenizers import Tokenizer, as_tokenizer
from weft.recipes import find_recipe
from weft.trainer import SpmdTrainer, run_dir
from weft.trainer.flops import forward_flops
from weft.trainer.metric_calculator import BaseMetricCalculator
from weft.trainer.schedule import Schedule, ScheduleFn, as_schedule_fn
from weft.trainer.train_step import TrainerState
from weft.typing import Nested, NestedTensor

Reward = Callable[[str, Mapping[str, Any]], float]
"""Function of an answer and the row of its prompt."""

_MAX_ROWS = 64


class Rollouts(Configurable):
    """Answers of a model to prompts of a file, with their rewards."""

    _needs_allow = ("reward",)  # a program of the user

    class Config(Configurable.Config):
        """Configures a Rollouts."""

        data: Required[str] = REQUIRED
        """File of JSON lines or Parquet with the rows of the prompts."""
        reward: Required[str] = REQUIRED
        """The function that returns the reward of an answer, as `path/to/file.py:function` or
        `module:function`."""
        tokenizer: Required[ConfigOr[Tokenizer] | str] = REQUIRED
        """That of the model; may be the path of a tokenizer's file."""
        num_answers: int = 8
        """Number of answers to each prompt."""
        num_tokens: int = 64
        """Largest number of tokens of an answer."""
        temperature: float = 1.0
        """Divides the logits that answers are drawn by."""

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        if cfg.num_answers < 2:
            raise ArgumentValueError(
                f"num_answers={cfg.num_answers} to each prompt cannot be compared; expected 2 or "
                "more."
            )
        self._rows = read_rows(cfg.data)
        self._tokenizer = as_tokenizer(cfg.tokenizer)
        self._reward: Reward = find_recipe(cfg.reward).load_function()
        self._generator: Generator | None = None

    def answers(
        self,
        model: Module,
        params: NestedTensor,
        prompts: Mapping[str, np.ndarray],
        *,
        seed: int,
        is_training: bool,
    ) -> "Answers":
        """Returns answers to a batch of `weft.input.preferences.prompt_arrays`.

        Args:
            is_training: whether to draw several answers to each prompt, or to take the likeliest
                tokens of one.

        Raises RewardError if the reward function fails, or returns no number.
        """
        cfg = self.config
        prompt_ids = np.asarray(prompts["prompt_ids"])
        lengths = np.asarray(prompts["prompt_length"])
        numbers = np.asarray(prompts["row"])
        ids = [
            row[:length]
            for row, length in zip(prompt_ids, lengths, strict=True)
            if length > 0
        ]
        settings: dict[str, Any] = {"n": 1, "temperature": 0.0}
        if is_training:
            settings = {"n": cfg.num_answers, "temperature": cfg.temperature}
        generator = self._generator_of(model, params, len(ids) * settings["n"])
        completions = generator.generate(
            ids, tokens=cfg.num_tokens, seed=seed, **settings
        )
        rewards: list[float] = []
        for completion in completions:
            number = int(numbers[completion.prompt_index])
            rewards.append(self._reward_of(completion.text, number))
        return Answers(ids, completions, np.array(rewards, np.float32))

    def _generator_of(
        self, model: Module, params: NestedTensor, num_rows: int
    ) -> Generator:
        if self._generator is not None:
            self._generator.set_params(params)
            return self._generator
        language_model = LanguageModel(
            layer=model,
            params=params,
            tokenizer=self._tokenizer,
            end_ids=[
                *run_dir.end_ids(model.config),
                self._tokenizer.eos_id,
                self._tokenizer.pad_id,
            ],
        )
        self._generator = Generator(
            language_model, batch_size=min(num_rows, _MAX_ROWS)
        )
        return self._generator

    def _reward_of(self, answer: str, number: int) -> float:
        name = f"the reward {self.config.reward}"
        where = f"an answer to {self._rows.describe(number)}"
        row: Any = self._rows[number]
        try:
            reward = self._reward(answer, row)
        except Exception as error:
            raise RewardError(
                f"{name} failed for {where}, {answer!r:.60}: {describe_error(error)}"
            ) from error
        try:
            value = float(reward)
        except (TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            raise RewardError(
                f"{name} returned {reward!r:.60} for {where}, {answer!r:.60}; expected a finite "
                "number, the higher the better the answer."
            )
        return value


class Answers:
    """Answers to prompts.

    Args:
        prompts: the ids of each.
        completions: of each prompt equally many, in the order of prompts.
        rewards: of each completion.
    """

    def __init__(
        self,
        prompts: Sequence[np.ndarray],
        completions: Sequence[Completion],
        rewards: np.ndarray,
    ):
        self.completions = completions
        self.rewards = rewards
        self._prompts = prompts

    def batch(self, length: int, pad_id: int) -> dict[str, np.ndarray]:
        """Returns the batch of a `weft.hierarchy.PolicyModel`, whose rows have this length."""
        shape = (len(self.completions), length)
        input_ids = np.full(shape, pad_id, np.int32)
        target_labels = np.full(shape, pad_id, np.int32)
        live_targets = np.zeros(shape, bool)
        for i, completion in enumerate(self.completions):
            prompt = self._prompts[completion.prompt_index]
            ids = np.append(prompt, completion.token_ids).astype(np.int32)
            num_targets = len(ids) - 1
            input_ids[i, :num_targets] = ids[:-1]
            target_labels[i, :num_targets] = ids[1:]
            live_targets[i, len(prompt) - 1 : num_targets] = True
        groups = self.rewards.reshape(len(self._prompts), -1)
        advantages = functional.group_advantages(jnp.asarray(groups))
        return {
            "input_ids": input_ids,
            "target_labels": target_labels,
            "live_targets": live_targets,
            "advantages": np.asarray(advantages).reshape(-1),
            "rewards": self.rewards,
        }


def schedule_of_updates(schedule: Schedule, num_updates: int) -> ScheduleFn:
    """Returns a schedule of updates from one of steps, which have several updates each.

    >>> rate = schedule_of_updates(lambda step: 0.1 * step, num_updates=2)
    >>> [rate(update) for update in (1, 2, 3)]
    [0.1, 0.1, 0.2]
    """
    schedule_fn = as_schedule_fn(schedule)
    return lambda update: schedule_fn((update + num_updates - 1) // num_updates)


class PolicyTrainer(SpmdTrainer):
    """Trainer of a `weft.hierarchy.PolicyModel` on rewards of its own answers.

    The input has batches of `weft.input.preferences.prompt_arrays`. The answers of a step depend on
    the seed, the number of the step and the parameters, so that a resumed run repeats them.
    """

    class Config(SpmdTrainer.Config):
        """Configures a PolicyTrainer."""

        rollouts: Required[Rollouts.Config] = REQUIRED
        """The answers and their rewards."""
        num_updates: int = 1
        """Number of updates of the parameters in a step, all with the same answers. After the
        first, ratios to the model that has drawn the answers are clipped."""

    def __init__(self, cfg: Config, *, parent: Module | None, **kwargs: Any):
        super().__init__(cfg, parent=parent, **kwargs)
        if cfg.num_updates < 1:
            raise ArgumentValueError(
                f"{self.path()}.num_updates={cfg.num_updates}; expected 1, or more updates with "
                "the answers of a step."
            )
        if cfg.num_updates > 1 and cfg.anomaly_policy is not None:
            raise ArgumentValueError(
                f"{self.path()} has an anomaly_policy, which judges one update in each step, and "
                f"num_updates={cfg.num_updates}; set num_updates=1, or leave the policy out."
            )
        if jax.process_count() > 1:
            raise ArgumentValueError(
                f"{self.path()} generates answers in one process, and there are "
                f"{jax.process_count()}; start the run with one."
            )
        self._rollouts: Rollouts = cfg.rollouts.instantiate()
        self._log_probs = jax.jit(
            self._target_log_probs, out_shardings=self._batch_sharding()
        )

    @nowrap
    def advance(self, batch: NestedTensor) -> dict[str, Any]:
        """Updates the parameters with answers to a batch of prompts; returns the last outputs."""
        answers = self.batch_of_step(batch)
        outputs: dict[str, Any] = {}
        for _ in range(self.config.num_updates):
            self._state, outputs = self._train_step(self._state, answers)
        self._step += 1
        return outputs

    @nowrap
    def trace_train_step(
        self, state: TrainerState, batch: Nested[Any]
    ) -> jax.stages.Traced:
        """Traces the step for the answers to a batch of prompts."""
        return super().trace_train_step(state, self._batch_shapes(batch))

    @nowrap
    def model_flops(self) -> int:
        """Counts the operations that the update with the answers needs."""
        with self.mesh():
            state, prompts = self._step_shapes()
            batch: Any = self._batch_shapes(prompts)
            return 3 * forward_flops(self.model, state.model, batch)

    @nowrap
    def batch_of_step(self, batch: NestedTensor) -> NestedTensor:
        """Returns answers of the model to a batch of prompts, with their rewards."""
        prompts: Any = batch
        step_seed = np.random.SeedSequence([self.config.seed, self._step])
        answers = self._rollouts.answers(
            self.model,
            self.trainer_state.model,
            prompts,
            seed=int(step_seed.generate_state(1)[0]) >> 1,
            is_training=True,
        )
        pad_id = self.model.decoder.config.pad_token_id
        rows: Any = host_to_global_device_array(
            answers.batch(self._length(prompts), pad_id),
            partition=self._batch_partition(),
        )
        if self.config.num_updates > 1:
            # The first update changes the model that has drawn the answers.
            rows["old_log_probs"] = self._log_probs(
                self.trainer_state.model, rows
            )
        return rows

    def _target_log_probs(self, params: NestedTensor, rows: Any) -> Any:
        """Returns the log probability of each target."""
        scores, _ = invoke(
            self.model, None, params, [rows], method="score", is_training=False
        )
        return -scores["per_token_loss"]

    def _batch_sharding(self) -> jax.sharding.NamedSharding:
        return jax.sharding.NamedSharding(self._mesh, self._batch_partition())

    def _length(self, prompts: Mapping[str, Any]) -> int:
        """Returns the number of inputs of a prompt with its answer."""
        num_prompt_tokens = prompts["prompt_ids"].shape[1]
        return num_prompt_tokens + self.config.rollouts.num_tokens - 1

    def _batch_shapes(self, prompts: Any) -> dict[str, jax.ShapeDtypeStruct]:
        num_prompts = prompts["prompt_ids"].shape[0]
        num_rows = num_prompts * self.config.rollouts.num_answers
        matrix = (num_rows, self._length(prompts))
        shapes = {
            "input_ids": (matrix, jnp.int32),
            "target_labels": (matrix, jnp.int32),
            "live_targets": (matrix, jnp.bool_),
            "advantages": ((num_rows,), jnp.float32),
            "rewards": ((num_rows,), jnp.float32),
        }
        if self.config.num_updates > 1:
            shapes["old_log_probs"] = (matrix, jnp.float32)
        sharding = self._batch_sharding()
        return {
            name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
            for name, (shape, dtype) in shapes.items()
        }


class RewardCalculator(BaseMetricCalculator):
    """Metric calculator of the rewards of the model's likeliest answers.

    Its metrics are `reward` and `response_length`, means over prompts, and `sample_0` and
    `sample_1`, two prompts with answers.
    """

    class Config(BaseMetricCalculator.Config):
        """Configures a RewardCalculator."""

        rollouts: Required[Rollouts.Config] = REQUIRED

    def __init__(self, cfg: Config, *, parent: Module | None, **kwargs: Any):
        super().__init__(cfg, parent=parent, **kwargs)
        self._rollouts: Rollouts = cfg.rollouts.instantiate()
        self._tokenizer = as_tokenizer(cfg.rollouts.tokenizer)

    def forward(
        self,
        input_batch: NestedTensor,
        *,
        model_params: NestedTensor,
        state: dict[str, Any],
    ) -> dict[str, Any]:
        """Answers a batch of prompts; see `BaseMetricCalculator.forward`."""
        prompts: Any = input_batch
        answers = self._rollouts.answers(
            self._model, model_params, prompts, seed=0, is_training=False
        )
        texts: list[str] = []
        for completion in answers.completions:
            length = int(prompts["prompt_length"][completion.prompt_index])
            prompt = np.asarray(
                prompts["prompt_ids"][completion.prompt_index, :length]
            )
            texts.append(self._tokenizer.decode(prompt) + completion.text)
        output = {
            "rewards": answers.rewards,
            "lengths": [len(x.token_ids) for x in answers.completions],
            "texts": texts,
        }
        return {"state": state, "output": output}

    def get_summaries(
        self,
        *,
        model_params: NestedTensor,
        state: dict[str, Any],
        all_forward_outputs: list[Any],
    ) -> dict[str, Any]:
        rewards = np.concatenate([x["rewards"] for x in all_forward_outputs])
        lengths = np.concatenate([x["lengths"] for x in all_forward_outputs])
        summaries: dict[str, Any] = {
            "reward": WeightedScalar(float(np.mean(rewards)), len(rewards)),
            "response_length": WeightedScalar(
                float(np.mean(lengths)), len(lengths)
            ),
        }
        for i, text in enumerate(all_forward_outputs[0]["texts"][:2]):
            summaries[f"sample_{i}"] = text
        return self._with_prefix(summaries)
