"""Each example runs from start to end, made short, and shows what it says it shows."""

import re
import runpy

import pytest

from tests.pages import ROOT

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


def test_digits_are_told_apart(shown):
    text = shown("digits_batch_norm", "--epochs", "2")
    first, last = numbers(r"loss ([\d.]+)", text)
    assert last < first / 2
    accuracies = numbers(r"test accuracy ([\d.]+)%", text)
    (baseline,) = numbers(r"would get ([\d.]+)%", text)
    assert accuracies[-1] > 85
    assert 85 < baseline < 95


def test_an_lstm_learns_letters_and_writes(shown):
    text = shown("char_rnn", "--steps", "12")
    first, last = numbers(r"step +\d+  ([\d.]+) bits per letter", text)
    assert first == pytest.approx(7, abs=0.1)  # a guess among 128
    assert last < 5.5
    held_out, by_frequency = numbers(r"([\d.]+)(?: bits per letter;|$)", text.split("it writes")[0])
    assert 4 < by_frequency < 5.5
    assert held_out < 5.5
    assert len(text.split("it writes:\n")[1]) == 301


def test_an_ensemble_is_better_than_its_members(shown):
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


def test_a_scanned_decoder_is_tabulated_and_learns(shown):
    text = shown("scanned_transformer", "--steps", "15", "--layers", "2")
    assert "ScanCheckpointBlock" in text
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
