"""The language model of NNX learns from the same batches, and sees nothing of what comes later."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft import nnx
from weft.recipes.lm_nnx import LanguageModel, lm_nnx
from weft.trainer.hooks import Hook

TINY = {"dim": 16, "num_layers": 2, "num_heads": 2, "hidden_dim": 32, "window": 7}


class Losses(Hook):
    def __init__(self):
        self.losses, self.evals = [], []

    def on_step(self, step, outputs, batch):
        self.losses.append(float(outputs["loss"]))

    def on_eval(self, name, step, summaries):
        self.evals.append(summaries)


@pytest.mark.long
def test_small_model_learns(tmp_path):
    cfg = lm_nnx().set(dir=str(tmp_path), max_step=20, mesh_shape=(1, 1))
    cfg.model.set(**TINY)
    evaler = cfg.evalers["held_out"]
    for input_ in (cfg.input, evaler.input):
        input_.source.set(sequence_length=16, global_batch_size=8)
        input_.source.corpus.set(pattern="json/*.py", held_out_fraction=0.3)
    evaler.input.source.max_examples = 16
    listener = Losses()
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:1])
    trainer.run(listener=listener, return_evaler_summaries=True)
    assert listener.losses[-1] < listener.losses[0] - 0.5
    summaries = listener.evals[-1]
    # A byte is a token, but for the ends of documents, which are of no byte.
    ratio = summaries["bits_per_byte"].mean / (summaries["loss"].mean / np.log(2))
    np.testing.assert_allclose(ratio, 1, rtol=0.02)
    assert trainer.trainer_state.model["params"]["blocks"]["up"]["kernel"].shape == (2, 16, 32)


def test_attention_is_limited_to_the_window():
    with nnx.use_eager_sharding(False):
        model = LanguageModel(**{**TINY, "num_layers": 1}, rngs=nnx.Rngs(0))
    ids = jnp.arange(12)[None]
    changed = ids.at[0, 3].set(99)

    @nnx.jit
    def logits(model, ids):
        return model.predict({"input_ids": ids})["logits"]

    same = np.isclose(logits(model, ids), logits(model, changed), atol=1e-5).all(-1)[0]
    assert same.tolist() == [True] * 3 + [False] * 8 + [True]
