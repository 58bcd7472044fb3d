"""Metrics of language models: those of transformers, of lm_eval, and of formulas."""

import itertools
import json
import math

import numpy as np
import pytest

from tests.generation.conftest import TEXT
from weft.cli import main
from weft.errors import EvaluationError, GenerationError, MissingExtraError
from weft.evaluation import Scorer, evaluate
from weft.evaluation.tasks import Question, examples_for, pass_at_k, with_examples
from weft.generation.generator import language_model

QUESTIONS = [
    {"prompt": "to be or not", "choices": ["to be", "to sleep", "the question"], "answer": 0},
    {"question": "that is the", "choices": ["question", "mind"], "answer": "question"},
    {"prompt": "nobler in the", "choices": ["whether", "mind"], "answer": "B"},
]


@pytest.fixture(scope="module")
def model(folder):
    return language_model(folder)


@pytest.fixture(scope="module")
def log_probs(transformers, folder):
    """Returns a function: the log probability of each token but the first, by transformers."""
    import torch

    reference = transformers.LlamaForCausalLM.from_pretrained(folder).eval()

    def compute(ids):
        with torch.no_grad():
            logits = reference(torch.tensor([list(ids)])).logits[0].double()
        predictions = torch.log_softmax(logits, -1)[:-1]
        return predictions[np.arange(len(ids) - 1), list(ids)[1:]].numpy()

    return compute


def test_scores_are_those_of_transformers(model, log_probs):
    rng = np.random.default_rng(0)
    pairs = [
        (rng.integers(3, 300, num_context).tolist(), rng.integers(3, 300, num_scored).tolist())
        for num_context, num_scored in [(1, 1), (15, 1), (16, 2), (3, 40), (1, 15)]
    ]
    scores = Scorer(model).score(pairs)
    for (context, continuation), score in zip(pairs, scores, strict=True):
        expected = log_probs(context + continuation)[len(context) - 1 :].sum()
        assert score.log_prob == pytest.approx(expected, abs=1e-3)
        assert score.num_tokens == len(continuation)


def test_start_of_a_long_context_is_left_out(model, log_probs):
    context, continuation = list(range(3, 30)), [40, 41]
    (score,) = Scorer(model, max_length=10).score([(context, continuation)])
    expected = log_probs([*context[-8:], *continuation])[7:].sum()
    assert score.log_prob == pytest.approx(expected, abs=1e-3)
    with pytest.raises(GenerationError, match="pair 0 has 12 tokens, and the model has 10"):
        Scorer(model, max_length=10).score([([1], [5] * 12)])


def test_perplexity_with_a_stride(folder, model, log_probs):
    ids = [1, *model.tokenizer.encode(TEXT).tolist()]
    length, stride = 12, 5
    total, num_scored = 0.0, 0
    previous_end = 1
    for begin in range(0, len(ids), stride):
        end = min(begin + length, len(ids))
        scored = end - previous_end
        total += log_probs(ids[begin:end])[-scored:].sum()
        num_scored += scored
        previous_end = end
        if end == len(ids):
            break
    rows = [{"text": TEXT}, {"text": TEXT}]
    result = evaluate(folder, rows, length=length, stride=stride)
    assert num_scored == len(ids) - 1
    assert result.metrics["loss"] == pytest.approx(-total / num_scored, abs=1e-4)
    assert result.metrics["perplexity"] == pytest.approx(math.exp(-total / num_scored), rel=1e-3)
    bits = -total / math.log(2) / len(TEXT.encode())
    assert result.metrics["bits_per_byte"] == pytest.approx(bits, abs=1e-4)


def test_choices_by_log_probability(folder, model, log_probs):
    result = evaluate(folder, QUESTIONS)
    right = []
    for row, example in zip(QUESTIONS, result.examples, strict=True):
        prompt = row.get("prompt") or row["question"]
        context = [1, *model.tokenizer.encode(prompt).tolist()]
        sums = []
        for choice in row["choices"]:
            ids = [1, *model.tokenizer.encode(f"{prompt} {choice}").tolist()]
            sums.append(log_probs(ids)[len(context) - 1 :].sum())
        np.testing.assert_allclose(example["log_probs"], sums, atol=1e-3)
        right.append(row["choices"][int(np.argmax(sums))] == example["answer"])
    assert [example["answer"] for example in result.examples] == ["to be", "question", "mind"]
    assert result.metrics["accuracy"] == np.mean(right)
    error = np.std(right, ddof=1) / math.sqrt(3)
    assert result.standard_errors["accuracy"] == pytest.approx(error)


def test_answers_and_samples(folder):
    rows = [{"prompt": "to be or not"}, {"prompt": "that is"}]
    seen = []

    def is_even(row, text):
        seen.append((row["prompt"], text))
        return len(text) % 2 == 0

    sampled = evaluate(folder, rows, checker=is_even, k=[1, 3], n=4, tokens=5)
    assert [prompt for prompt, _ in seen] == ["to be or not"] * 4 + ["that is"] * 4
    counts = [sum(example["is_right"]) for example in sampled.examples]
    for k in (1, 3):
        expected = np.mean([pass_at_k(4, count, k) for count in counts])
        assert sampled.metrics[f"pass@{k}"] == pytest.approx(expected)

    greedy = evaluate(folder, [{**row, "answer": "x"} for row in rows], tokens=5)
    assert greedy.metrics == {"exact_match": 0.0}
    texts = [example["completion"] for example in greedy.examples]
    answers = [{**rows[0], "answer": ["x", f" {texts[0]} "]}, {**rows[1], "answer": "x"}]
    assert evaluate(folder, answers, tokens=5).metrics == {"exact_match": 0.5}


@pytest.mark.parametrize(("num_samples", "num_right"), [(5, 0), (5, 2), (5, 5)])
def test_pass_at_k_is_the_share_of_subsets(num_samples, num_right):
    samples = [i < num_right for i in range(num_samples)]
    for k in range(1, num_samples + 1):
        subsets = list(itertools.combinations(samples, k))
        assert pass_at_k(num_samples, num_right, k) == pytest.approx(
            np.mean(list(map(any, subsets)))
        )


def test_solved_rows_precede_the_prompt():
    rows = [Question(f"{i} + 1 =", (), [str(i + 1)], {}) for i in range(4)]
    shown = [examples_for(2, rows, shots=2, seed=seed) for seed in range(20)]
    assert all(len(set(map(id, two))) == 2 and rows[2] not in two for two in shown)
    assert len({tuple(question.prompt for question in two) for two in shown}) > 3
    assert with_examples(rows[2], [rows[1], rows[0]]) == "1 + 1 = 2\n\n0 + 1 = 1\n\n2 + 1 ="


def test_prompts_in_the_chat_template(folder):
    rows = [{"prompt": "to be", "choices": ["or", "not"], "answer": "or"}] * 2
    plain = evaluate(folder, rows, shots=1).examples[0]["log_probs"]
    chat = evaluate(folder, rows, shots=1, chat=True).examples[0]["log_probs"]
    assert plain != chat


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([], {}, "has no rows"),
        ([3], {}, "row 0 is of type int; expected `text`; `prompt` with `answer`"),
        ([{"id": 1}], {}, "row 0 has the fields \\['id'\\]"),
        ([{"choices": ["a", "b"], "answer": 0}], {}, "expected a text `prompt` or `question`"),
        ([{"prompt": "a", "choices": ["b"], "answer": 0}], {}, "a list of two texts, or more"),
        ([{**QUESTIONS[0], "answer": 3}], {}, "is 3; expected one of its 3 choices"),
        ([{**QUESTIONS[0], "answer": "D"}], {}, "is 'D'; expected one of its 3 choices"),
        ([{"prompt": "a", "answer": 3}], {}, "`answer` of row 0 is 3; expected a text"),
        ([QUESTIONS[0], {"text": "a"}], {}, "row 1 has the fields \\['text'\\]"),
        ([{"text": "a"}, QUESTIONS[0]], {}, "row 1 is not a text"),
        ([{"text": "a b c"}], {"length": 8, "stride": 8}, "length=8 and stride=8"),
        (QUESTIONS, {"shots": 3}, "shots=3, and there are 2 other rows"),
        (QUESTIONS, {"task": "choice"}, "there is no task 'choice'"),
        (QUESTIONS, {"task": "pass@k"}, "pass@k needs a checker"),
        (QUESTIONS, {"limit": 0}, "limit=0; expected 1"),
        (
            [{"prompt": "a"}],
            {"checker": lambda row: True},
            "the checker raised TypeError for row 0",
        ),
        ([{"prompt": "a"}], {"checker": len, "k": [2], "n": 1}, "k=\\[2\\] and n=1"),
    ],
)
def test_rows_and_settings_that_do_not_fit(folder, rows, settings, message):
    with pytest.raises(EvaluationError, match=message):
        evaluate(folder, rows, tokens=1, **settings)


def test_command_prints_and_writes(folder, tmp_path, capsys):
    data = tmp_path / "questions.jsonl"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)), encoding="utf-8")
    out = tmp_path / "result.json"
    assert main(["eval", str(folder), str(data), "--json", str(out)]) == 0
    assert "accuracy_per_byte" in capsys.readouterr().out
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["metrics"] == dict(evaluate(folder, str(data)).metrics)
    assert result["examples"][1]["name"] == f"line 2 of {data}"

    (tmp_path / "check_a.py").write_text(
        "def is_right(row, completion):\n    return row['prompt'] != 'b'\n", encoding="utf-8"
    )
    data.write_text('{"prompt": "a"}\n{"prompt": "b"}\n', encoding="utf-8")
    checker = f"{tmp_path}/check_a.py:is_right"
    words = ["--checker", checker, "--k", "1", "--k", "2", "--tokens", "2"]
    assert main(["eval", str(folder), str(data), *words]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:2] for row in rows[1:]] == [["pass@1", "0.500"], ["pass@2", "0.500"]]


def test_result_of_a_run_is_in_its_report(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("def f(x):\n    return x\n" * 20, encoding="utf-8")
    words = ["max_step=2", "dir=run", "evalers={}", "model.decoder.dim=16"]
    assert main(["train", "lm-tiny", *words]) == 0
    assert main(["eval", "run", "text.txt", "--length", "32"]) == 0
    assert main(["eval", "run", "text.txt", "--length", "32", "--stride", "31"]) == 0
    assert "bits_per_byte" in capsys.readouterr().out
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "length=32, stride=31" in page
    assert page.index("length=32, stride=31") < page.rindex("length=32")

    (tmp_path / "run" / "evaluations.json").write_text("[3]", encoding="utf-8")
    assert main(["report", "run"]) == 2
    assert "evaluations.json cannot be read: [0] is 3" in capsys.readouterr().err


def test_harness_gets_the_values_of_its_own_model(folder, log_probs, model):
    pytest.importorskip("lm_eval", reason="the extra eval is not installed")
    from lm_eval.api.instance import Instance

    from weft.evaluation import LmEvalModel

    harness_model = LmEvalModel(folder, max_length=16)

    def requests(kind, *arguments):
        return [Instance(kind, {}, argument, 0) for argument in arguments]

    pairs = [("to be", " or not"), ("that is the ", "question")]
    scores = harness_model.loglikelihood(requests("loglikelihood", *pairs))
    for (context, continuation), (log_prob, _) in zip(pairs, scores, strict=True):
        ids = [1, *model.tokenizer.encode(context + continuation).tolist()]
        num_context = 1 + len(model.tokenizer.encode(context.rstrip()))
        expected = log_probs(ids)[num_context - 1 :].sum()
        assert log_prob == pytest.approx(expected, abs=1e-3)
    short, long = harness_model.loglikelihood_rolling(
        requests("loglikelihood_rolling", ("to be",), (TEXT,))
    )
    assert short == pytest.approx(
        log_probs([1, *model.tokenizer.encode("to be").tolist()]).sum(), abs=1e-3
    )
    assert long < 3 * short
    settings = {"until": ["\n"], "max_gen_toks": 3, "do_sample": False}
    texts = harness_model.generate_until(
        requests("generate_until", ("to be", settings), ("that", {**settings, "max_gen_toks": 2}))
    )
    assert len(texts) == 2
    assert all(isinstance(text, str) for text in texts)


def test_missing_harness_is_named(monkeypatch):
    import sys

    for name in ("lm_eval", "lm_eval.api.model", "weft.evaluation.lm_eval"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "weft.evaluation.lm_eval")
    with pytest.raises(MissingExtraError, match=r"weft-jax\[eval\]"):
        import weft.evaluation.lm_eval  # noqa: F401
