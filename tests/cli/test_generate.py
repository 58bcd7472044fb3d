"""Generated text, from a model that says what comes next by a rule."""

import jax.numpy as jnp
import pytest

from weft.cli.configs import load_config
from weft.cli.generate import find_tokenizer, generate
from weft.errors import CommandLineError
from weft.hierarchy.base_model import BaseModel
from weft.hierarchy.decoding import SampleOutputs
from weft.input import ByteTokenizer


class Successor(BaseModel):
    """After each byte comes the next one; after `e` the text ends."""

    def sample_decode(self, input_batch, *, max_sequence_length, logits_modifier):
        del logits_modifier
        (prefix,) = input_batch["prefix"]
        added = prefix[-1] + 1 + jnp.arange(max_sequence_length + 1 - len(prefix))
        added = jnp.where(added > ord("e"), ByteTokenizer.eos_id, added)
        sequence = jnp.concatenate([prefix[1:], added])[None, None]
        return SampleOutputs(sequences=sequence, token_scores=0.0 * sequence)


def run(model=Successor, **kwargs):
    arguments = {"prompt": "xab", "num_tokens": 2, "temperature": 1.0, "seed": 0} | kwargs
    model = model.default_config().set(name="model").instantiate(parent=None)
    return generate(model, {}, tokenizer=ByteTokenizer(), **arguments)


@pytest.mark.parametrize(("num_tokens", "text"), [(1, "c"), (2, "cd"), (9, "cde")])
def test_only_what_was_added_is_returned_up_to_the_end(num_tokens, text):
    assert run(num_tokens=num_tokens) == text


def test_a_model_without_text_is_named():
    with pytest.raises(CommandLineError, match="BaseModel generates no text"):
        run(BaseModel)


@pytest.mark.parametrize("wrong", [{"num_tokens": 0}, {"temperature": -0.5}])
def test_numbers_out_of_range_are_named(wrong):
    with pytest.raises(CommandLineError, match="at least one token"):
        run(**wrong)


def test_the_tokenizer_of_the_data_is_found():
    cfg = load_config("lm-tiny")
    assert isinstance(find_tokenizer(cfg), ByteTokenizer)
    cfg.input.source.tokenizer = ByteTokenizer()
    assert find_tokenizer(cfg) is cfg.input.source.tokenizer
    cfg.input.source.tokenizer = None
    assert find_tokenizer(cfg) is None
