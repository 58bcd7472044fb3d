"""What does a loss without whole logits save, and what does it cost?

Logits in chunks of the vocabulary against all at once: the memory of a training step of the default
trainer, and the time of a gradient, of a model and of the function alone.
"""

import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import Row, counted, ratios, row
from weft.functional import cross_entropy, linear_cross_entropy
from weft.hierarchy import functional
from weft.recipes import RECIPES

VOCAB = 131_072


def _config(vocab_chunk_size: int | None) -> Any:
    cfg = RECIPES[0]().set(evalers={})
    cfg.model.decoder.vocab_size = VOCAB
    cfg.model.vocab_chunk_size = vocab_chunk_size
    return cfg


def _temporary(vocab_chunk_size: int | None) -> tuple[int, Any]:
    """Returns the temporary memory of a step of the trainer, and its batch."""
    with tempfile.TemporaryDirectory() as directory:
        trainer = _config(vocab_chunk_size).set(dir=directory).instantiate(parent=None)
        step = trainer.compile_train_step()
        return step.memory_analysis().temp_size_in_bytes, trainer.input.element_spec()


def _memory() -> Row:
    (chunks, batch), (whole, _) = _temporary(None), _temporary(VOCAB)
    return counted(
        f"temporary memory of a step of the default trainer, {VOCAB:,} tokens in the vocabulary, "
        "logits in chunks / whole",
        chunks / whole,
        at_most=0.25,
        note=f"{chunks / 1e6:,.0f} against {whole / 1e6:,.0f} MB, of "
        f"{batch['input_ids'].size:,} targets",
    )


def _time_of_model() -> Row:
    rng = np.random.default_rng(0)
    ids = jnp.array(rng.integers(2, VOCAB, size=(4, 128)))
    batch = {"input_ids": ids, "target_labels": jnp.roll(ids, -1, axis=1)}

    def compiled(vocab_chunk_size: int | None) -> tuple[Any, Any]:
        cfg = _config(vocab_chunk_size).model.set(name="model", dtype=jnp.float32)
        model = cfg.instantiate(parent=None)

        @jax.jit
        def graded(params: Any) -> Any:
            def loss(params: Any) -> Any:
                (loss, _), outputs = functional(model, None, params, [batch], is_training=True)
                return loss, outputs.summaries

            return jax.value_and_grad(loss, has_aux=True)(params)

        return model, graded

    model, chunks = compiled(None)
    _, whole = compiled(VOCAB)
    params = model.initialize_parameters_recursively(jax.random.key(0))
    return _compare(
        f"gradient of the default model, {VOCAB:,} tokens in the vocabulary, logits in chunks / "
        "whole",
        lambda: chunks(params),
        lambda: whole(params),
    )


def _time_of_function() -> Row:
    rng = np.random.default_rng(0)
    x, weight = (
        jnp.array(rng.normal(size=size), jnp.float32) for size in ((1024, 512), (32_768, 512))
    )
    weight = weight * 0.05
    labels = jnp.array(rng.integers(0, len(weight), size=len(x)))
    chunks = jax.jit(
        jax.value_and_grad(lambda x, w: linear_cross_entropy(x, w, labels)[0], argnums=(0, 1))
    )
    whole = jax.jit(
        jax.value_and_grad(lambda x, w: cross_entropy(x @ w.T, labels)[0], argnums=(0, 1))
    )
    return _compare(
        f"gradient of linear_cross_entropy, {len(weight):,} classes, dim {x.shape[1]}, in chunks / "
        "cross_entropy of whole logits",
        lambda: chunks(x, weight),
        lambda: whole(x, weight),
    )


def _compare(question: str, chunks: Any, whole: Any) -> Row:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), chunks(), whole()
    )
    measured = ratios(
        lambda: jax.block_until_ready(chunks()), lambda: jax.block_until_ready(whole())
    )
    why = (
        "Chunks take four matrix products, whole logits three: the backward pass computes the "
        "logits again. At large dimensions the products outweigh what chunks save, and the "
        "limit is 1.33."
    )
    return row(question, measured, at_most=1 / 0.9, why=why)


def run() -> list[Row]:
    """Measures the memory of a step, and the time of gradients."""
    return [_memory(), _time_of_model(), _time_of_function()]
