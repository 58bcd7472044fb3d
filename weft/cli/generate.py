"""Text from a trained language model."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from weft.config import maybe_instantiate
from weft.errors import CommandLineError
from weft.functional import scale_by
from weft.hierarchy.module import Module, functional
from weft.input.text import Tokenizer
from weft.trainer.run_record import values_named


def find_tokenizer(cfg: Any) -> Any | None:
    """The tokenizer that a config's data is read with, None if there is none.

    Args:
        cfg: A trainer's config.
    """
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
    """Samples what a language model adds to a prompt.

    Args:
        model: A causal language model.
        params: Its parameters.
        tokenizer: From text to ids and back.
        prompt: What the text begins with; may be empty.
        num_tokens: How many tokens to add, at most: the model may end the text.
        temperature: Divides the logits; 0 takes the likeliest token each time.
        seed: Decides what is drawn.

    Returns:
        The added text.

    Raises:
        CommandLineError: if the model does not generate text, or a number is out of range.
    """
    if not hasattr(model, "sample_decode"):
        raise CommandLineError(
            f"{type(model).__name__} generates no text. Sample from a run of a language model."
        )
    if num_tokens < 1 or temperature < 0:
        raise CommandLineError(
            f"--tokens={num_tokens} --temperature={temperature:g}: there must be at least one "
            "token to add, and the temperature may not be below 0."
        )
    # A document begins with the token that ends the one before.
    ids = np.concatenate([[tokenizer.eos_id], tokenizer.encode(prompt.encode())])
    num_prompt = len(ids) - 1
    inputs = {
        "input_batch": {"prefix": jnp.asarray(ids[None], jnp.int32)},
        "max_sequence_length": num_prompt + num_tokens,
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
        return outputs.sequences

    # The result leaves out the first token.
    added = np.asarray(sample(params, jax.random.key(seed)))[0, 0, num_prompt:]
    ends = np.flatnonzero((added == tokenizer.eos_id) | (added == tokenizer.pad_id))
    return tokenizer.decode(added[: ends[0]] if len(ends) else added)
