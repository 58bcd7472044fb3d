"""The questions about GPUs, on a machine without one: a tiny run is measured on the CPU."""

import sys
import types

import jax

import benchmarks.__main__ as program
from benchmarks import _llama, gpu_training


def test_questions_about_gpus_are_refused_without_one(capsys):
    assert program.main(["--gpu"]) == 2
    assert "JAX finds no GPU here" in capsys.readouterr().out


def test_questions_about_gpus_are_asked_alone():
    assert "gpu_training" in program.chosen([], gpu=True)[0]
    assert program.chosen(["gpu_training"]) == ([], ["gpu_training"])
    assert all(name.startswith("gpu_") for name in program.chosen([], gpu=True)[0])


def test_training_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(gpu_training, "EVERY", 1)
    monkeypatch.setattr(gpu_training, "TRACED", 5)
    cfg = _llama.recipe(
        _llama.TINY | {"num_hidden_layers": 1}, sequence_length=16, batch_size=8, steps=7
    )
    (speed, *layers), seconds = gpu_training.measure(cfg, peak=1e9)
    assert speed.pairs == 3 and "MFU" in speed.note
    assert any("self_attention" in row.question for row in layers)
    assert 0.5 < sum(row.median for row in layers) <= 1.0
    assert gpu_training.against_torch(_llama.TINY, cfg, seconds, device="cuda") == []
    assert "PyTorch is left out: " in capsys.readouterr().out  # for the CPU, or none


def test_the_step_for_a_gpu_calls_fused_attention(monkeypatch, tmp_path):
    # What says whether cuDNN is there.
    version = types.SimpleNamespace(cudnn_get_version=lambda: 91000)
    attention = sys.modules[jax.nn.dot_product_attention.__module__].cudnn_dot_product_attention
    monkeypatch.setattr(sys.modules[attention.__module__], "cuda_versions", version)
    cfg = _llama.recipe(_llama.TINY, sequence_length=64, batch_size=8, steps=1)
    layer = cfg.model.decoder.transformer.layer
    layer.self_attention.attention.implementation = "cudnn"
    trainer = cfg.set(dir=str(tmp_path), evalers={}).instantiate(parent=None)
    with trainer.mesh():
        state = jax.eval_shape(lambda: trainer._new_state(jax.random.key(0)))
        traced = trainer._train_step.trace(state, trainer.input.element_spec())
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # Forward, its recomputation, and backward; XLA puts in cuDNN's calls for each device's part.
    assert text.count("CustomSPMDPartitioning") == 3
    assert "x4x64x64x" not in text  # no logits of all pairs
