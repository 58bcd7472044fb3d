"""Each example runs from start to end, made short, and shows what it says it shows."""

import functools
import math
import os
import re
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.flags import xla_flags
from tests.pages import ROOT
from weft import nnx
from weft.config import diff
from weft.recipes.lm import set_corpus

EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.usefixtures("one_device")  # a trainer uses all devices


@pytest.fixture
def shown(capsys):
    """Runs an example by its name, with the arguments of its command line; what it prints.

    To make it smaller, values replace those of the example, and dicts of arguments are passed to
    its functions and classes.
    """

    def run(name, *arguments, **changes):
        main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
        names = main.__globals__
        for key, value in changes.items():
            old = names[key]
            names[key] = functools.partial(old, **value) if isinstance(value, dict) else value
        main(arguments)
        return capsys.readouterr().out

    return run


def numbers(pattern, text):
    return [float(found) for found in re.findall(pattern, text)]


def test_every_example_is_run_here():
    here = (ROOT / "tests" / "examples" / "test_examples.py").read_text(encoding="utf-8")
    missing = [
        path.stem for path in EXAMPLES.glob("*.py") if not re.search(rf'shown\("{path.stem}"', here)
    ]
    assert missing == []


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
    text = shown("ensemble", "--steps", "100")
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


def test_digits_are_reconstructed(shown):
    text = shown("vae", "--epochs", "6")
    bound, by_pixel = numbers(r"(-[\d.]+)(?:;|$)", text.split("test images")[1].split("\n")[0])
    assert bound > by_pixel + 1
    for title in ("digits", "reconstructed", "generated"):
        drawing = text.split(f"\n{title}\n")[1].splitlines()[:8]
        assert {len(line) for line in drawing} == {4 * 16 + 3 * 2}
        assert set("".join(drawing)) <= set(" .:*#")
    assert "#" in text.split("\ngenerated\n")[1]


def test_image_classifier_beats_the_nearest_mean(shown):
    text = shown("image_classifier", "--epochs", "2")
    first, last = numbers(r"  loss ([\d.]+)", text)
    assert last < first / 2
    accuracies = numbers(r"test accuracy ([\d.]+)%", text)
    (baseline,) = numbers(r"mean image gets ([\d.]+)%", text)
    assert accuracies[-1] > baseline > 85
    assert re.search(r"a \d taken for a \d:\n", text)


def test_gpt_learns_and_generates(shown):
    text = shown("gpt", "--steps", "40", LAYERS=2, ROWS=8, LENGTH=64)
    assert numbers(r"step +0  ([\d.]+)", text)[0] > 7
    held_out, by_frequency = numbers(r"([\d.]+)(?: bits per letter;|$)", text.split("class ")[0])
    assert held_out < by_frequency - 0.5
    assert len(text.split("class ", 1)[1]) == 401


def test_cached_gpt_equals_full_forward():
    example = runpy.run_path(str(EXAMPLES / "gpt.py"))
    model = example["GPT"](rngs=nnx.Rngs(0))
    letters = jax.random.randint(jax.random.key(1), (2, 7), 0, 128)
    at_once = model(letters, jnp.arange(7))
    cached = nnx.view(model)
    cached.blocks.attention.cache = nnx.Cache(jnp.zeros((4, 2, 2, 9, 4, 24)))
    parts = [
        cached(letters[:, at], jnp.arange(7)[at]) for at in (slice(4), slice(4, 5), slice(5, 7))
    ]
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), at_once, atol=1e-5)
    assert model.blocks.attention.cache is None


def test_lora_learns_odd_digits(shown):
    text = shown("lora", "--steps", "250")
    assert "2,344 values to train, 26,122 frozen" in text
    assert "frozen weights unchanged: True" in text
    even, odd = numbers(r"even digits +([\d.]+)", text), numbers(r"odd digits +([\d.]+)", text)
    assert even[0] == even[2] > 90
    assert odd[0] == odd[2] < 10
    assert odd[1] > 90


def test_ppo_balances_poles(shown):
    text = shown("ppo", "--iterations", "10")
    at_random, untrained, _, trained = numbers(r"up for +(\d+) of 500", text)
    assert at_random < 30
    assert untrained < 150
    assert trained > 250


def test_poles_move_by_the_published_equations():
    """Two steps of a cart, worked out in Python."""
    example = runpy.run_path(str(EXAMPLES / "ppo.py"))
    x, velocity, angle, spin = 0.1, -0.2, 0.15, 0.4
    carts = jnp.tile(jnp.array([x, velocity, angle, spin]), (64, 1))
    for action in (1, 0):
        force = 10 if action else -10
        sin, cos = math.sin(angle), math.cos(angle)
        turn = 9.8 * sin + cos * (-force - 0.1 * 0.5 * spin**2 * sin) / 1.1
        turn /= 0.5 * (4 / 3 - 0.1 * cos**2 / 1.1)
        acceleration = (force + 0.1 * 0.5 * (spin**2 * sin - turn * cos)) / 1.1
        x, velocity = x + 0.02 * velocity, velocity + 0.02 * acceleration
        angle, spin = angle + 0.02 * spin, spin + 0.02 * turn
        carts, failed = example["push"](carts, jnp.full(64, action))
        np.testing.assert_allclose(carts[0], [x, velocity, angle, spin], rtol=1e-5)
        assert not failed.any()
    far = jnp.array([[2.5, 0, 0, 0], [0, 0, 0.22, 0], [0, 0, -0.22, 0], [2.3, 0, 0.2, 0]])
    np.testing.assert_array_equal(example["push"](far, 0)[1], [True, True, True, False])


def test_edges_help_to_classify_digits(shown):
    text = shown("graph_network", "--steps", "50")
    assert "20 images with a label, 1,777 without" in text
    _, alone, _, with_edges = numbers(r"without a label ([\d.]+)%", text)
    assert 55 < alone < 75
    assert with_edges > alone + 10


def test_experts_share_the_tokens(shown):
    def set_less(cfg, **_):
        set_corpus(cfg, pattern="json/*.py", held_out_fraction=0.2)

    text = shown("mixture_of_experts", "experts", "--steps", "40", set_corpus=set_less)
    (bits,) = numbers(r"([\d.]+) bits per byte", text)
    assert bits < 4  # 4.3 by frequency alone
    assert [len(bars) for bars in re.findall(r"layer\d (\S+)", text)] == [8, 8]
    for least, most in re.findall(r"(\d+)% to (\d+)%", text):
        assert int(least) <= 100 / 8 <= int(most) < 60


def test_experts_replace_one_layer_of_the_config():
    example = runpy.run_path(str(EXAMPLES / "mixture_of_experts.py"))
    lines = str(diff(example["dense"](5), example["with_experts"](5))).splitlines()
    changed = {re.split(r"[.\[:]", line.removeprefix("model."))[0] for line in lines}
    assert changed == {"mesh_axis_names", "mesh_shape", "decoder", "metrics"}
    assert sum("Layer.Config → " in line for line in lines) == 1


@pytest.mark.long
def test_processes_agree_on_parameters(shown, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", xla_flags())
    text = shown("multi_process", "--steps", "30")
    accuracies = numbers(r"test accuracy ([\d.]+)%", text)
    assert accuracies[-1] > 80
    found = re.findall(r"process (\d): 32 of 64 rows, parameters (\w{12})", text)
    assert sorted(number for number, _ in found) == ["0", "1"]
    assert len({parameters for _, parameters in found}) == 1


def test_gan_generates_digits(shown):
    text = shown("gan", "--steps", "200", WIDTH=64, BATCH=32)
    first, last = numbers(r"drawn digits are ([\d.]+)", text)
    assert last < first - 1
    drawing = text.splitlines()[-8:]
    assert {len(line) for line in drawing} == {4 * 16 + 3 * 2}
    assert "#" in "".join(drawing)


def test_vit_learns_shifted_digits(shown):
    text = shown("vit", "--steps", "40", ViT={"layers": 1})
    accuracy, linear = numbers(r"([\d.]+)%(?:;|$)", text.splitlines()[0])
    assert accuracy > 40
    assert linear > 95
    assert len(re.findall(r"\d \(\d+%\), is \d", text)) == 4


def test_diffusion_draws_the_digits_that_are_asked_for(shown):
    text = shown("diffusion", "--steps", "250", WIDTH=128)
    (right,) = numbers(r"(\d+)% are recognized", text)
    assert right > 35
    told_apart = numbers(r"test digits (\d+)%", text)
    assert len(told_apart) == 3
    assert told_apart[0] < 55
    drawing = text.splitlines()[-26:]
    assert {len(line) for line in drawing if line} == {4 * 16 + 3 * 2, 2 * 16 + 2}


def test_seq2seq_reads_unseen_dates(shown, tmp_path):
    arguments = ("--steps", "150", "--dir", str(tmp_path))
    smaller = {"recipe": {"dim": 32, "batch_size": 32}, "LONGEST": 12}
    text = shown("seq2seq", *arguments, **smaller, FORMATS=("%m/%d/%Y", "%d.%m.%y"))
    (right,) = numbers(r"([\d.]+)% of the days", text)
    assert right > 3  # a guess is right once in 36,500


def test_study_tries_hyperparameters_and_continues(shown, tmp_path, monkeypatch):
    pytest.importorskip("optuna", reason="the extra optuna is not installed")
    monkeypatch.chdir(tmp_path)
    trials = []
    for _ in range(2):
        text = shown("optuna_study", "--trials", "1", EPOCHS=1)
        trials += numbers(r"(\d+) trials, 0 of them ended early", text)
        assert 0 < numbers(r"best loss ([\d.]+) in trial", text)[0] < 3
    assert trials == [1, 2]
    assert sorted(path.name for path in (tmp_path / "runs" / "digits").iterdir()) == ["000", "001"]


def test_augmentation_moves_digits_in_training_alone(shown):
    text = shown("augmented_digits", "--epochs", "15", ConvNet={"width": 16}, PATIENCE=3)
    drawing = text.splitlines()[1:9]
    assert {len(line) for line in drawing} == {4 * 16 + 3 * 2}
    alone, augmented = numbers(r"test accuracy ([\d.]+)%", text)
    assert max(numbers(r"(\d+) epochs", text)) <= 15
    assert min(alone, augmented) > 40
    assert alone != augmented


def test_own_augmentation_keeps_the_digit():
    example = runpy.run_path(str(EXAMPLES / "augmented_digits.py"))
    image = np.zeros((8, 8, 1), np.float32)
    image[3:5, 3:5] = 1  # around the center
    batch = {"image": jnp.stack([image] * 20), "label": jnp.arange(20)}
    moved = example["augment"](batch, jax.random.key(0))
    np.testing.assert_array_equal(moved["label"], batch["label"])
    ink = moved["image"].sum((1, 2, 3))
    assert np.all((ink > 4 * 0.9**2 - 0.5) & (ink < 4 * 1.1**2 + 0.5))
    rows = (moved["image"].sum((2, 3)) @ jnp.arange(8.0)) / ink
    assert np.all(abs(rows - 3.5) < 1.1)  # up to a pixel away
    assert float(rows.std()) > 0.2


def test_exported_text_classifier_predicts_as_the_best_one(shown, tmp_path):
    arguments = ("--epochs", "6", "--dir", str(tmp_path))
    text = shown("text_classifier", *arguments, PACKAGES=("ctypes", "logging"))
    (best,) = numbers(r"macro-F1 ([\d.]+)", text)
    (exported,) = numbers(r"macro avg +[\d.]+ +[\d.]+ +([\d.]+)", text)
    assert exported == pytest.approx(best, abs=1e-3)
    assert best > 0.6
    assert (tmp_path / "best.safetensors").exists()


def test_sweep_ends_in_a_sorted_table(shown, tmp_path):
    text = shown("sweep", "--steps", "30", "--dir", str(tmp_path), LEARNING_RATES=(1e-4, 1e-2))
    rows = [[float(cell.rstrip("%")) for cell in line.split()] for line in text.splitlines()[1:]]
    losses = [row[2] for row in rows]
    assert losses == sorted(losses)
    assert {tuple(row[:2]) for row in rows} == {(1e-4, 8), (1e-4, 64), (1e-2, 8), (1e-2, 64)}
    assert rows[0][:2] == [1e-2, 64]
    assert rows[0][3] > 50


def test_own_loop_on_eight_devices_equals_one(shown, all_devices, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    text = shown("own_loop", "--steps", "20")
    assert os.environ["XLA_FLAGS"].split()[-1].endswith("device_count=8")
    assert "8 devices: (64, 64) of the kernel (64, 128) on each" in text
    (difference,) = numbers(r"two parameters (\S+)", text)
    assert difference < 1e-5
    losses = re.findall(r"^ *\d+ +([\d.]+) +([\d.]+)$", text, re.MULTILINE)
    one, eight = np.array(losses, float).T
    np.testing.assert_allclose(one, eight, atol=1e-4)
    assert one[-1] < one[0] / 1.5


def test_vae_reports_and_plots_the_parts_of_its_loss(shown, tmp_path):
    figure = tmp_path / "parts.png"
    text = shown("vae_fit", "--epochs", "4", "--figure", str(figure))
    rows = np.array(re.findall(r"^ *\d+ +([\d.]+) +([\d.]+) +([\d.]+)$", text, re.MULTILINE), float)
    loss, bce, kl = rows.T
    np.testing.assert_allclose(loss, bce + kl, atol=0.02)
    assert bce[-1] < bce[0] - 4
    assert kl[-1] > kl[0]
    assert figure.read_bytes().startswith(b"\x89PNG")
