"""The default recipe keeps its promise: below the bigrams of its corpus within 200 steps.

The mixture of experts learns, and its routers' losses are a part of what is trained.
"""

import json

import jax
import numpy as np
import pytest

from weft.input import ngram_baselines
from weft.recipes.lm import lm, lm_moe, set_corpus


@pytest.fixture
def optimized():
    """Enables XLA's optimizations, which pay off over fifty steps of this size."""
    name = "jax_disable_most_optimizations"
    before = jax.config.values[name]
    jax.config.update(name, False)
    yield
    jax.config.update(name, before)


@pytest.mark.long
@pytest.mark.usefixtures("optimized")
def test_loss_falls_below_the_bigrams_in_a_quarter_of_the_steps(tmp_path):
    # With the whole batch on one device, as on a machine of a few cores.
    cfg = lm().set(dir=str(tmp_path), max_step=50, mesh_shape=(1, 1))
    set_corpus(cfg, held_out_fraction=0.004)
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:1])
    summaries = trainer.run(return_evaler_summaries=True)["evaler_summaries"]
    loss = summaries["held_out"]["loss"].value()
    assert loss < ngram_baselines(cfg.input.source.corpus.instantiate())["bigram"].nats_per_token


@pytest.mark.long
def test_small_model_learns_and_balances_experts(tmp_path):
    cfg = lm_moe().set(dir=str(tmp_path), max_step=30, mesh_shape=(1, 1, 1), evalers={})
    decoder = cfg.model.decoder.set(dim=24)
    decoder.transformer.num_layers = 1
    decoder.transformer.layer.self_attention.attention.num_heads = 2
    decoder.transformer.layer.feed_forward.num_experts = 4
    cfg.input.source.set(sequence_length=32, global_batch_size=8)
    cfg.input.source.corpus.set(pattern="json/*.py", held_out_fraction=0.3)
    schedule = cfg.learner.optimizer.inner.learning_rate
    schedule.set(warmup_steps=2, peak_lr=1e-2)
    for writer in cfg.summary_writer.writers.values():
        writer.write_every_n_steps = 1
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:1])
    trainer.run()
    values = [
        v
        for path in tmp_path.rglob("*.jsonl")
        for line in path.read_text(encoding="utf-8").splitlines()
        if "loss" in (v := json.loads(line).get("values", {}))
    ]
    first, last = values[0], values[-1]
    assert last["model/cross_entropy_loss"] < first["model/cross_entropy_loss"] - 1
    # The loss is that of the tokens and those of the routers.
    gating = "model/decoder/transformer/repeat/layer0/feed_forward/gating"
    aux_loss = 0.01 * last[f"{gating}/load_balance_loss"] + 0.001 * last[f"{gating}/router_z_loss"]
    np.testing.assert_allclose(last["model/aux_loss"], aux_loss, rtol=1e-4)
    np.testing.assert_allclose(last["loss"], last["model/cross_entropy_loss"] + aux_loss, rtol=1e-5)
    # The entropy of four equal shares is 1.39.
    assert last[f"{gating}/dispatch_entropy"] > 1
