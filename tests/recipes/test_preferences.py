"""The recipes dpo and grpo, from a folder of Hugging Face and a file to an exported model."""

import json
import shutil

import jax
import numpy as np
import optax
import pytest

from weft.cli import main
from weft.cli.configs import load_config, run_config
from weft.cli.trained_models import restore_model
from weft.errors import CommandLineError, InputDatasetError, LayerConfigError, RecipeError
from weft.hierarchy.lora import base_state
from weft.hierarchy.module import functional
from weft.input import ByteTokenizer
from weft.interop.huggingface import from_huggingface, huggingface_model_config, to_huggingface
from weft.recipes import lm_lora

pytestmark = pytest.mark.usefixtures("one_device")

SMALL = {**lm_lora._LLAMA, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
REWARD = """
def reward(answer, row):
    letters = [x for x in answer if x.isascii() and x.isalpha()]
    return len(letters) / max(1, len(answer))
"""

CHECKER = """
def is_right(answer, row):
    return answer == row["solution"]
"""


def write_base(base, settings):
    """Writes the folder of a model of bytes with random parameters."""
    base.mkdir()
    (base / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    cfg = huggingface_model_config(base)
    model = cfg.clone(name="model").instantiate(parent=None)
    shapes = jax.eval_shape(model.initialize_parameters_recursively, jax.random.key(0))
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: (
            jax.numpy.asarray(1.0 + 0.3 * rng.normal(size=x.shape), x.dtype)
            if x.ndim == 1
            else jax.numpy.asarray(0.2 * rng.normal(size=x.shape), x.dtype)
        ),
        shapes,
    )
    to_huggingface(base, cfg, params)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a base of bytes, preferences for the shorter answer, and a reward."""
    folder = tmp_path_factory.mktemp("preferences")
    write_base(folder / "base", SMALL)
    rows = [
        {"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": f"It is {a + b}, I think."}
        for a in range(4)
        for b in range(5)
    ]
    write_rows(folder / "pairs.jsonl", rows)
    (folder / "letters.py").write_text(REWARD, encoding="utf-8")
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


def train(recipe, *words):
    words = ["base=base", "data=pairs.jsonl", *words]
    assert main(["train", recipe, *words]) == 0
    return run_config(f"runs/{recipe}-pairs")


def shown_by(capsys):
    output = capsys.readouterr()
    return output.out + output.err


@pytest.mark.long
def test_adapters_learn_to_prefer_the_shorter_answer(here, capsys):
    cfg = train("dpo", "steps=12", "learning_rate=1e-2", "rank=4")
    shown = shown_by(capsys)
    assert "held_out at step 12: loss" in shown and "accuracy 1.000" in shown
    _, base = from_huggingface("base")
    _, params = restore_model(cfg)
    base_of_run = base_state(params)["decoder"]
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(x, y.astype(x.dtype)),
        base_of_run,
        base["decoder"],
    )
    assert "reference" not in params
    # The base is a model of bytes, without a file of a tokenizer.
    assert main(["sample", "runs/dpo-pairs", "--prompt", "a", "--tokens", "2"]) == 0
    # The merged model has the parameters of the base alone.
    assert main(["export", "runs/dpo-pairs", "--to", "preferred", "--merge"]) == 0
    _, merged = from_huggingface("preferred")
    assert jax.tree.structure(merged) == jax.tree.structure(base)
    assert any((x != y).any() for x, y in zip(*map(jax.tree.leaves, (merged, base)), strict=True))


def right_rate(summaries, steps):
    """Returns the mean reward of some steps of a training."""
    lines = (summaries / "train_train/summaries.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    rewards = {x["step"]: x["values"]["model/reward"] for x in records if "values" in x}
    return np.mean([rewards[step] for step in steps])


def train_on(folder, texts):
    """Trains the model of a folder on texts of equal lengths, all at once."""
    cfg, params = from_huggingface(folder)
    model = cfg.clone(name="model").instantiate(parent=None)
    ids = np.array([[*text.encode(), ByteTokenizer.eos_id] for text in texts])
    batch = {"input_ids": ids[:, :-1], "target_labels": ids[:, 1:]}
    optimizer = optax.adam(1e-2)

    def loss(params):
        return functional(model, None, params, [batch], is_training=True)[0][0]

    def step(carry, _):
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return (optax.apply_updates(params, updates), state), None

    carry = (params, optimizer.init(params))
    (params, _), _ = jax.jit(lambda carry: jax.lax.scan(step, carry, length=150))(carry)
    to_huggingface(folder, cfg, params)


@pytest.mark.long
def test_sums_become_right_by_a_checker_and_the_reference_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_base(tmp_path / "base", {**SMALL, "hidden_size": 32, "intermediate_size": 64})
    sums = [(a, b) for a in range(4) for b in range(6)]
    draw = np.random.default_rng(0)
    # What the base learns from is right in 7 of 10 rows.
    answers = [a + b if draw.random() < 0.7 else draw.integers(9) for a, b in sums * 10]
    pairs = zip(sums * 10, answers, strict=True)
    train_on("base", [f"{a}+{b}={answer}" for (a, b), answer in pairs])
    rows = [{"prompt": f"{a}+{b}=", "solution": f"{a + b}"} for a, b in sums]
    write_rows(tmp_path / "sums.jsonl", rows)
    (tmp_path / "checker.py").write_text(CHECKER, encoding="utf-8")

    words = ["base=base", "data=sums.jsonl", "reward=checker.py:is_right", "held_out=0"]
    words += ["tuning=full", "learning_rate=5e-3", "tokens=2", "steps=40", "updates=2"]
    words += ["summary_writer.writers.json_lines.write_every_n_steps=1"]
    assert main(["train", "grpo", *words]) == 0
    summaries = tmp_path / "runs/grpo-sums/summaries"
    before, after = right_rate(summaries, [1, 2]), right_rate(summaries, [37, 38, 39, 40])
    assert before < 0.75 and after > 0.9
    _, base = from_huggingface("base")
    _, params = restore_model(run_config("runs/grpo-sums"))
    jax.tree.map(np.testing.assert_array_equal, params["reference"]["decoder"], base["decoder"])
    assert main(["export", "runs/grpo-sums", "--to", "rewarded"]) == 0
    _, exported = from_huggingface("rewarded")
    jax.tree.map(np.testing.assert_array_equal, exported["decoder"], params["decoder"])


def run_steps(cfg):
    """Runs a config as a new process would; returns the state after it."""
    trainer = cfg.clone().instantiate(parent=None, devices=jax.devices()[:1])
    trainer.run(progress=False)
    return jax.device_get(trainer.trainer_state.model)


@pytest.mark.long
def test_resumed_run_with_adapters_gives_the_same_answers_and_bits(here):
    words = ["reward=letters.py:reward", "held_out=0", "tokens=3", "answers=4", "batch_size=4"]
    words += ["base=base", "data=pairs.jsonl", "steps=6", "updates=2", "rank=2"]
    cfg = load_config("grpo", [*words, "learning_rate=1e-2", "mesh_shape=1,1", "dir=runs/whole"])
    cfg.checkpointer.save_policy.n = 3
    whole = run_steps(cfg)
    # As after a kill in the middle of the steps after the first checkpoint.
    shutil.rmtree("runs/whole/checkpoints/step_00000006")
    assert (here / "runs/whole/checkpoints/step_00000003").exists()
    jax.tree.map(np.testing.assert_array_equal, run_steps(cfg), whole)
    leaves = jax.tree_util.tree_leaves_with_path(whole)
    adapters = [x for path, x in leaves if "adapter" in jax.tree_util.keystr(path)]
    assert adapters and all((x != 0).any() for x in adapters)


def test_variants_are_fields_of_the_config(here):
    words = ["base=base", "data=pairs.jsonl", "held_out=0", "reference=false", "loss=ipo"]
    cfg = load_config("dpo", [*words, "beta=0.3", "rpo_alpha=0.5", "epochs=2"])
    assert cfg.model.metrics.rpo_alpha == 0.5
    assert (cfg.model.metrics.loss, cfg.model.metrics.beta) == ("ipo", 0.3)
    assert not cfg.model.has_reference and cfg.evalers == {}
    assert cfg.max_step == 2 * 20 // 8


@pytest.mark.parametrize(
    ("recipe", "words", "error", "message"),
    [
        ("dpo", ["loss=kto"], CommandLineError, "loss=kto"),
        ("dpo", ["targets=qproj"], LayerConfigError, "there is no linear map 'qproj'"),
        ("dpo", ["batch_size=50"], InputDatasetError, "a batch of 50 rows is larger than the data"),
        ("grpo", [], RecipeError, "reward of the function must be given"),
        ("grpo", ["reward=letters.py:rewards"], RecipeError, "defines no 'rewards'"),
    ],
)
def test_bad_words_are_refused(recipe, words, error, message, here):
    with pytest.raises(error, match=message):
        cfg = load_config(recipe, ["base=base", "data=pairs.jsonl", *words])
        cfg.instantiate(parent=None, devices=jax.devices()[:1])
