"""Two real processes fine-tune a base that they make, evaluate, sample, measure, and stop early."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.sockets import free_port
from tests.weft_process import finish
from weft.input import ByteTokenizer
from weft.interop.huggingface import from_huggingface
from weft.recipes.lm_lora import lm_lora

pytestmark = pytest.mark.long

PROGRAM = Path(__file__).with_name("fine_tuning.py")


@pytest.fixture(scope="module")
def directory(python_server, tmp_path_factory):
    directory = tmp_path_factory.mktemp("fine_tuning")
    finish(python_server.start(PROGRAM, directory, free_port()))
    return directory


@pytest.fixture(scope="module")
def results(directory):
    first, second = (directory / f"process_{i}.json" for i in (0, 1))
    assert first.read_text(encoding="utf-8") == second.read_text(encoding="utf-8")
    return json.loads(first.read_text(encoding="utf-8"))


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_processes_agree_and_stop_early_at_one_step(results):
    assert results["ended"] == [4, "early stopping"] and results["saved"] == [2, 4]
    assert [(name, step) for name, step, _ in results["evals"]] == [
        (name, step) for step in (2, 4) for name in ("held_out", "samples")
    ]
    losses = [values["loss"] for name, _, values in results["evals"] if name == "held_out"]
    assert losses[1] < losses[0] < 7  # so the larger one, which was wanted, was the first


def test_only_adapters_are_trained(results, directory):
    _, base = from_huggingface(directory / "runs/lm-llama/huggingface")
    sums = results["sums"]
    for name, layer in (
        ("emb/token_emb", base["decoder"]["emb"]["token_emb"]),
        ("lm_head", base["decoder"]["lm_head"]),
    ):
        expected = float(np.asarray(layer["weight"], np.float64).sum())
        assert sums[f"decoder/{name}/weight"] == pytest.approx(expected)
    ups = {name: x for name, x in sums.items() if "lora_up" in name}
    assert len(ups) == 5 and all(ups.values())  # they begin as 0


def test_one_process_reports_total_speed(directory):
    summaries = directory / "tuned/summaries"
    assert sorted(path.name for path in summaries.iterdir()) == [
        "held_out",
        "samples",
        "train_train",
    ]
    for path in summaries.iterdir():
        assert len(list(path.glob("events*"))) == 1
    last = lines(summaries / "train_train/summaries.jsonl")[-1]
    values = {
        name.removeprefix("throughput/"): x
        for name, x in last["values"].items()
        if name.startswith("throughput/")
    }
    assert last["step"] == 4
    # Of the whole batch: 4 rows of 16 tokens, whichever process reads them.
    assert values["examples_per_second"] == pytest.approx(4 * values["steps_per_second"])
    assert values["tokens_per_second"] == pytest.approx(64 * values["steps_per_second"])
    assert values["mfu"] > 0 and 0 < values["goodput"] < 1
    marks = json.loads((directory / "tuned/run.json").read_text(encoding="utf-8"))["goodput"]
    assert [mark["step"] for mark in marks] == [2, 4]
    assert 0 < marks[0]["productive_seconds"] <= marks[1]["productive_seconds"]


def test_samples_match_prompts_in_single_process_order(directory):
    cfg = lm_lora().evalers["held_out"].input
    cfg.source.set(sequence_length=16, global_batch_size=8, max_examples=8)
    cfg.source.corpus.set(pattern="json/*.py", held_out_fraction=0.1)
    (batch,) = cfg.set(name="input").instantiate(parent=None).dataset()
    prompts = [ByteTokenizer().decode(row[:5]) for row in batch["input_ids"]]
    for step in (2, 4):
        samples = lines(directory / f"tuned/summaries/samples/step_{step:08d}.jsonl")
        assert [sample["prompt"] for sample in samples] == prompts
        assert {sample["num_tokens"] for sample in samples} <= {0, 1, 2, 3}
