"""The default recipe keeps its promise: below the bigrams of its corpus within 200 steps."""

import jax
import pytest

from weft.input import ngram_baselines
from weft.recipes.lm import lm


@pytest.fixture
def optimized():
    """Sixty steps of this size gain more by XLA's optimizations than compiling with them costs."""
    name = "jax_disable_most_optimizations"
    before = jax.config.values[name]
    jax.config.update(name, False)
    yield
    jax.config.update(name, before)


@pytest.mark.long
@pytest.mark.usefixtures("optimized")
def test_the_loss_falls_below_the_bigrams_in_a_third_of_the_steps(tmp_path):
    # With the whole batch on one device, as on a machine of a few cores.
    cfg = lm().set(dir=str(tmp_path), max_step=60, mesh_shape=(1, 1))
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:1])
    summaries = trainer.run(return_evaler_summaries=True)
    loss = summaries["held_out"]["loss"].value()
    assert loss < ngram_baselines(cfg.input.source.corpus.instantiate())["bigram"].nats_per_token
