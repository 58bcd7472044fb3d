"""Generated text, from a model that says what comes next by a rule."""

import jax
import jax.numpy as jnp
import pytest

from weft import linen
from weft.cli.configs import load_config
from weft.cli.generate import find_tokenizer, generate
from weft.config import config_for_class
from weft.errors import CommandLineError
from weft.hierarchy.base_model import BaseModel
from weft.hierarchy.decoding import SampleOutputs
from weft.input import ByteTokenizer
from weft.trainer.model import LibraryModel


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


class NextByte(linen.Module):
    """The same by its logits, and only for what it has seen."""

    def __call__(self, input_batch):
        return jnp.float32(0), {}

    def predict(self, input_batch):
        following = input_batch["input_ids"] + 1
        following = jnp.where(following > ord("e"), ByteTokenizer.eos_id, following)
        return {"logits": 99.0 * jax.nn.one_hot(following, 264)}


class Silent(linen.Module):
    def __call__(self, input_batch):
        return jnp.float32(0), {}


def of_library(layer):
    inputs = ({"input_ids": jax.ShapeDtypeStruct((1, 4), jnp.int32)},)
    return LibraryModel.default_config().set(layer=config_for_class(layer), inputs=inputs)


class Of:
    def __init__(self, config):
        self.default_config = lambda: config


@pytest.mark.parametrize(("num_tokens", "text"), [(1, "c"), (9, "cde")])
def test_a_module_that_predicts_logits_generates_as_well(num_tokens, text):
    assert run(Of(of_library(NextByte)), num_tokens=num_tokens) == text
    assert run(Of(of_library(NextByte)), num_tokens=num_tokens, temperature=0.0) == text


def test_a_module_that_predicts_nothing_does_not():
    with pytest.raises(CommandLineError, match=r"LibraryModel generates no text.*`predict"):
        run(Of(of_library(Silent)))


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
