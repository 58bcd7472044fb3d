"""Text generation with a trained language model."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from weft.config import maybe_instantiate
from weft.errors import CommandLineError
from weft.functional import scale_by
from weft.hierarchy.module import Module, functional
from weft.input.text import Tokenizer
from weft.trainer.model import LibraryModel
from weft.trainer.run_record import values_named


def find_tokenizer(cfg: Any) -> Any | None:
    """Returns the tokenizer of the input of a trainer's config, or None."""
    found = values_named("tokenizer", cfg.input)
    return maybe_instantiate(next(iter(found.values()))) if found else None


def generate(
    model: Module,
    params: Any,
    *,
    tokenizer: Tokenizer,
    prompt: str,
    num_tokens: int,
    temperature: float,
    seed: int,
) -> str:
    """Samples a continuation of a prompt, and returns it without the prompt.

    Args:
        num_tokens: Maximum number of tokens; the model may end the text earlier.
        temperature: Divides the logits; 0 for greedy decoding.

    Raises:
        CommandLineError: if the model does not generate text, or a number is out of range.
    """
    if not generates(model):
        raise CommandLineError(
            f"{type(model).__name__} generates no text. Sample from a run of a language model: "
            "one of the hierarchy, or one with a method `predict(input_batch)` that returns "
            "the `logits` for `input_ids`."
        )
    if num_tokens < 1 or temperature < 0:
        raise CommandLineError(
            f"--tokens={num_tokens} --temperature={temperature:g}: expected at least one "
            "token, and a temperature of 0 or more."
        )
    # A document begins with the end token of the previous one.
    ids = np.concatenate([[tokenizer.eos_id], tokenizer.encode(prompt.encode())])
    sample = _by_decoding if hasattr(model, "sample_decode") else _by_predicting
    # The result omits the first token.
    added = sample(model, params, ids, num_tokens, temperature, jax.random.key(seed))
    added = np.asarray(added)[len(ids) - 1 :]
    ends = np.flatnonzero((added == tokenizer.eos_id) | (added == tokenizer.pad_id))
    return tokenizer.decode(added[: ends[0]] if len(ends) else added)


def generates(model: Module) -> bool:
    """Returns whether `generate` can sample from a trainer's model."""
    return hasattr(model, "sample_decode") or (isinstance(model, LibraryModel) and model.predicts)


def _by_decoding(
    model: Module, params: Any, ids: np.ndarray, num_tokens: int, temperature: float, key: Any
) -> Any:
    """Decodes token by token with the model's own method."""
    inputs = {
        "input_batch": {"prefix": jnp.asarray(ids[None], jnp.int32)},
        "max_sequence_length": len(ids) - 1 + num_tokens,
        "logits_modifier": scale_by(temperature),
    }

    @jax.jit
    def sample(params: Any, key: Any) -> Any:
        outputs, _ = functional(
            model,
            prng_key=key,
            state=params,
            inputs=inputs,
            method="sample_decode",
            is_training=False,
        )
        return outputs.sequences[0, 0]

    return sample(params, key)


def _by_predicting(
    model: Module, params: Any, ids: np.ndarray, num_tokens: int, temperature: float, key: Any
) -> Any:
    """Predicts each token from all earlier ones, for models without a cache."""
    modify = scale_by(temperature)

    def add(at: Any, carried: Any) -> Any:
        tokens, key, params = carried
        outputs, _ = functional(
            model,
            prng_key=None,
            state=params,
            inputs={"input_batch": {"input_ids": tokens[None]}},
            method="predict",
            is_training=False,
        )
        key, draw = jax.random.split(key)
        logits = modify(outputs["logits"][0, at][None])[0]
        return tokens.at[at + 1].set(jax.random.categorical(draw, logits)), key, params

    @jax.jit
    def sample(params: Any, tokens: Any, key: Any) -> Any:
        first, last = len(ids) - 1, len(ids) - 1 + num_tokens
        return jax.lax.fori_loop(first, last, add, (tokens, key, params))[0][1:]

    tokens = np.concatenate([ids, np.zeros(num_tokens, ids.dtype)])
    return sample(params, jnp.asarray(tokens, jnp.int32), key)
