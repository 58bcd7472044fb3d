"""The questions about GPUs, on a machine without one: a tiny run is measured on the CPU."""

import benchmarks.__main__ as program
from benchmarks import _llama, gpu_training


def test_questions_about_gpus_are_refused_without_one(capsys):
    assert program.main(["--gpu"]) == 2
    assert "JAX finds no GPU here" in capsys.readouterr().out


def test_questions_about_gpus_are_asked_alone():
    assert "gpu_training" in program.chosen([], gpu=True)[0]
    assert program.chosen(["gpu_training"]) == ([], ["gpu_training"])
    assert all(name.startswith("gpu_") for name in program.chosen([], gpu=True)[0])


def test_training_is_measured(monkeypatch):
    monkeypatch.setattr(gpu_training, "EVERY", 1)
    monkeypatch.setattr(gpu_training, "TRACED", 5)
    cfg = _llama.recipe(_llama.TINY, sequence_length=32, batch_size=8, steps=7)
    speed, *layers = gpu_training.measure(cfg, device="none", peak=1e9)
    assert speed.pairs == 3 and "MFU" in speed.note
    assert any("self_attention" in row.question for row in layers)
    assert 0.5 < sum(row.median for row in layers) <= 1.0
