"""The default recipe keeps its promise: below the bigrams of its corpus within 200 steps."""

import jax
import pytest

from weft.input import ngram_baselines
from weft.recipes.lm import lm


@pytest.mark.long
def test_the_loss_falls_below_the_bigrams_in_half_of_the_steps(tmp_path):
    # With the whole batch on one device, as on a machine of a few cores.
    cfg = lm().set(dir=str(tmp_path), max_step=100, mesh_shape=(1, 1))
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:1])
    summaries = trainer.run(return_evaler_summaries=True)
    loss = summaries["held_out"]["loss"].value()
    assert loss < ngram_baselines(cfg.input.source.corpus.instantiate())["bigram"].nats_per_token
