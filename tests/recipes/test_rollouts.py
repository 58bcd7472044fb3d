"""Answers of a model during its training, and their rewards."""

import json

import jax
import numpy as np
import pytest

from weft.config import config_for_function
from weft.debug.anomalies import AnomalyPolicy
from weft.errors import ArgumentValueError, InputReadError, RecipeError, RewardError
from weft.generation import Completion
from weft.hierarchy import PolicyModel
from weft.input import ArrayInput
from weft.input.preferences import prompt_arrays
from weft.input.text import BYTES
from weft.recipes import lm
from weft.recipes.rollouts import Answers, PolicyTrainer, RewardCalculator, Rollouts
from weft.trainer import UpdateType

REWARDS = """
def share_of_letters(answer, row):
    assert row["prompt"].endswith("=")
    letters = [x for x in answer if x.isascii() and x.isalpha()]
    return len(letters) / max(1, len(answer))

def failing(answer, row):
    return row["solution"]

def missing(answer, row):
    return None

def infinite(answer, row):
    return float("inf")

def undefined(answer, row):
    return float("nan")

def several(answer, row):
    return [1.0, 0.0]

def without_row(answer):
    return 1.0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rollouts")
    prompts = "".join(json.dumps({"prompt": f"{i}="}) + "\n" for i in range(12))
    (folder / "prompts.jsonl").write_text(prompts, encoding="utf-8")
    (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")
    return folder


def rollouts(folder, reward="share_of_letters", **fields):
    return Rollouts.default_config().set(
        data=str(folder / "prompts.jsonl"),
        reward=f"{folder / 'rewards.py'}:{reward}",
        tokenizer=BYTES,
        num_answers=8,
        num_tokens=4,
        **fields,
    )


def trainer_config(folder, steps, *, reward="share_of_letters"):
    def prompts(part, batch_size):
        arrays = config_for_function(prompt_arrays).set(
            data=str(folder / "prompts.jsonl"), part=part, held_out=0.25
        )
        return ArrayInput.default_config().set(
            arrays=arrays, global_batch_size=batch_size, padding={}
        )

    base = lm.trainer_config(
        str(folder / "run"),
        model=PolicyModel.from_model(lm._model(dim=16, num_layers=1, num_heads=2, context=32)),
        train_input=prompts("train", 4),
        held_out_input=prompts("held_out", 4),
        max_step=steps,
        peak_lr=3e-2,
        eval_every=steps,
    )
    cfg = PolicyTrainer.default_config()
    cfg.set(**{name: value for name, value in base.items() if name != "klass"})
    cfg.set(rollouts=rollouts(folder, reward), mesh_shape=(1, 1))
    cfg.evalers["held_out"].metric_calculator = RewardCalculator.default_config().set(
        rollouts=cfg.rollouts
    )
    cfg.learner.update_rules = [
        ("reference/.*", UpdateType.NO_UPDATE),
        (".*", UpdateType.ALL_UPDATES),
    ]
    return cfg


def run(cfg):
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:1])
    result = trainer.run(return_evaler_summaries=True, progress=False)
    return trainer, result["evaler_summaries"]["held_out"]


@pytest.mark.long
def test_model_learns_what_is_rewarded(folder):
    trainer, summaries = run(trainer_config(folder, 15))
    assert summaries["reward"].mean > 0.9
    assert summaries["reward"].weight == 3  # the row that fills the batch does not count
    assert summaries["response_length"].mean > 1
    reference = trainer.trainer_state.model["reference"]
    first = trainer.config.instantiate(parent=None, devices=jax.devices()[:1])
    first.init(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, reference, first.trainer_state.model["reference"])


def test_batch_has_answers_after_their_prompts():
    def completion(ids, prompt_index, sample_index):
        return Completion("", ids, "length", prompt_index, sample_index)

    answers = Answers(
        [np.array([5, 6, 7]), np.array([8])],
        [
            completion([1], 0, 0),
            completion([2, 3], 0, 1),
            completion([4], 1, 0),
            completion([4, 9], 1, 1),
        ],
        np.array([1.0, 0.0, 3.0, 3.0], np.float32),
    )
    batch = answers.batch(5, pad_id=0)
    assert batch["input_ids"].tolist() == [
        [5, 6, 7, 0, 0],
        [5, 6, 7, 2, 0],
        [8, 0, 0, 0, 0],
        [8, 4, 0, 0, 0],
    ]
    labels = [
        row[live].tolist()
        for row, live in zip(batch["target_labels"], batch["live_targets"], strict=True)
    ]
    assert labels == [[1], [2, 3], [4], [4, 9]]
    np.testing.assert_allclose(batch["advantages"], [1, -1, 0, 0], atol=1e-3)
    assert batch["rewards"].tolist() == [1, 0, 3, 3]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("failing", "failed for an answer to line 1 of .*: KeyError: 'solution'"),
        ("missing", "returned None for an answer to line 1 of .*; expected a finite number"),
        ("infinite", "returned inf for an answer to line 1 of"),
        ("undefined", "returned nan for an answer to line 1 of"),
        (
            "several",
            r"returned \[1.0, 0.0\] for an answer to line 1 of .*; expected a finite number",
        ),
        (
            "without_row",
            r"failed for an answer to .*: TypeError: without_row\(\) takes 1 positional",
        ),
    ],
)
def test_rewards_that_are_not_numbers_are_refused(reward, message, folder):
    loaded = rollouts(folder, reward).instantiate()
    with pytest.raises(RewardError, match=message):
        loaded._reward_of("text", 0)


def test_bad_settings_are_refused(folder, monkeypatch):
    with pytest.raises(ArgumentValueError, match="num_answers=1 to each prompt cannot be compared"):
        rollouts(folder).set(num_answers=1).instantiate()
    with pytest.raises(RecipeError, match=r"defines no 'share'.*share_of_letters"):
        rollouts(folder, "share").instantiate()
    with pytest.raises(InputReadError, match="no file matches"):
        rollouts(folder).set(data=str(folder / "none.jsonl")).instantiate()
    cfg = trainer_config(folder, 1)
    for fields, message in (
        ({"num_updates": 0}, "num_updates=0; expected 1, or more updates"),
        (
            {"num_updates": 2, "anomaly_policy": AnomalyPolicy.default_config()},
            "has an anomaly_policy, which judges one update in each step, and num_updates=2",
        ),
    ):
        with pytest.raises(ArgumentValueError, match=message):
            cfg.clone(**fields).instantiate(parent=None, devices=jax.devices()[:1])
    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_count", lambda: 2)
        with pytest.raises(ArgumentValueError, match="in one process, and there are 2; start the"):
            cfg.instantiate(parent=None, devices=jax.devices()[:1])
