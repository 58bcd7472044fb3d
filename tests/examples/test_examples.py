"""Each example runs from start to end, made short, and shows what it says it shows."""

import ast
import re
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.pages import ROOT
from weft import nnx

EXAMPLES = ROOT / "examples"


@pytest.fixture
def shown(capsys):
    """Runs an example by its name, with the arguments of its command line; what it prints."""

    def run(name, *arguments):
        runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](arguments)
        return capsys.readouterr().out

    return run


def numbers(pattern, text):
    return [float(found) for found in re.findall(pattern, text)]


def test_every_example_is_run_here():
    here = (ROOT / "tests" / "examples" / "test_examples.py").read_text(encoding="utf-8")
    missing = [path.stem for path in EXAMPLES.glob("*.py") if f'shown("{path.stem}"' not in here]
    assert missing == []


def test_batch_norm_digits(shown):
    text = shown("digits_batch_norm", "--epochs", "2")
    first, last = numbers(r"loss ([\d.]+)", text)
    assert last < first / 2
    accuracies = numbers(r"test accuracy ([\d.]+)%", text)
    (baseline,) = numbers(r"would get ([\d.]+)%", text)
    assert accuracies[-1] > 85
    assert 85 < baseline < 95


def test_lstm_learns_and_generates(shown):
    text = shown("char_rnn", "--steps", "12")
    first, last = numbers(r"step +\d+  ([\d.]+) bits per letter", text)
    assert first == pytest.approx(7, abs=0.1)  # a guess among 128
    assert last < 5.5
    held_out, by_frequency = numbers(r"([\d.]+)(?: bits per letter;|$)", text.split("it writes")[0])
    assert 4 < by_frequency < 5.5
    assert held_out < 5.5
    assert len(text.split("it writes:\n")[1]) == 301


def test_ensemble_is_better_than_its_members(shown):
    text = shown("ensemble_vmap", "--steps", "100")
    assert "'kernel': (8, 64, 32)" in text
    first, last = numbers(r"loss ([\d.]+)", text)
    assert last < first / 10
    rows = {
        name: numbers(r"(\d+\.\d+)", text.split(name)[1].splitlines()[0])
        for name in ("mean of members", "ensemble")
    }
    of_one, of_all = rows["mean of members"], rows["ensemble"]
    assert of_all[0] > of_one[0]  # the accuracy
    assert of_all[1] < of_one[1]  # the negative log-likelihood


def test_scanned_decoder_is_tabulated_and_learns(shown):
    text = shown("scanned_transformer", "--steps", "15", "--layers", "2")
    assert "blocks    │ Block " in text
    assert "Total Parameters" in text
    first, last = numbers(r"step +\d+  ([\d.]+) bits per byte", text)
    assert last < first - 1.5
    assert "by frequency alone" in text


def test_digits_are_reconstructed(shown):
    text = shown("vae", "--epochs", "3", "--show")
    first, last = numbers(r"ELBO (-[\d.]+) nats", text)
    assert last > first
    for title in ("digits", "reconstructed", "made up"):
        drawing = text.split(f"\n{title}\n")[1].splitlines()[:8]
        assert {len(line) for line in drawing} == {6 * 16 + 5 * 2}
        assert set("".join(drawing)) <= set(" .:*#")
    assert "#" in text.split("\nmade up\n")[1]


def test_nnx_digits_classifier(shown):
    text = shown("nnx_digits", "--epochs", "2")
    first, last = numbers(r"  loss ([\d.]+)", text)
    assert last < first / 2
    accuracies = numbers(r"test accuracy ([\d.]+)%", text)
    assert accuracies[-1] > 90


def test_scanned_nnx_blocks_learn_and_generate(shown):
    text = shown("nnx_transformer", "--steps", "15", "--layers", "2")
    assert "'kernel': (2, 96, 384)" in text
    first, last = numbers(r"step +\d+  ([\d.]+) bits per letter", text)
    assert last < first - 1.5
    written = [ast.literal_eval(line) for line in re.findall(r"it writes: (.*)", text)]
    assert [len(line) for line in written] == [64, 64]
    assert written[1].startswith("import ")


def test_cached_decoding_equals_full_forward():
    example = runpy.run_path(str(EXAMPLES / "nnx_transformer.py"))
    model = example["Decoder"](2, rngs=nnx.Rngs(0))
    letters = jax.random.randint(jax.random.key(1), (2, 5), 0, 128)
    at_once = model(letters, jnp.arange(5))
    writing = example["for_writing"](model, rows=2)
    for i in range(5):
        one = writing(letters[:, i : i + 1], jnp.array([i]))
        np.testing.assert_allclose(one[:, 0], at_once[:, i], atol=1e-5)


def test_lora_learns_odd_digits(shown):
    text = shown("nnx_lora", "--steps", "250")
    assert "2,344 numbers to train, 26,122 stay" in text
    assert "are as they were: True" in text
    even, odd = numbers(r"even digits +([\d.]+)", text), numbers(r"odd digits +([\d.]+)", text)
    assert even[0] == even[2] > 90
    assert odd[0] == odd[2] < 10
    assert odd[1] > 90


def test_gan_generates_digits(shown):
    text = shown("nnx_gan", "--steps", "300")
    first, last = numbers(r"drawn digits are ([\d.]+)", text)
    assert last < first - 0.5
    drawing = text.splitlines()[-8:]
    assert {len(line) for line in drawing} == {6 * 16 + 5 * 2}
    assert "#" in "".join(drawing)
