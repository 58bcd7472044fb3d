"""Texts of a tiny Llama: as of `transformers`, alone and in batches, whole and in parts."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import weft
from weft import linen
from weft.cli import main
from weft.config import config_for_class
from weft.errors import GenerationError
from weft.generation import Generator, LanguageModel
from weft.generation.engine import Request
from weft.generation.generator import language_model
from weft.generation.sampler import Sampling, choose_tokens
from weft.hierarchy.attention.kv_cache import KVRing
from weft.input import ByteTokenizer
from weft.trainer.model import LibraryModel

pytestmark = pytest.mark.usefixtures("one_device")

PROMPTS = ["to be", "the question is whether", "n", "that is not nobler than the mind, is it?"]


def test_likeliest_tokens_are_those_of_transformers(generator, reference):
    tokenizer = generator.model.tokenizer
    completions = generator.generate(PROMPTS, tokens=20, temperature=0)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        ids = [1, *tokenizer.encode(prompt)]
        assert completion.token_ids == reference(ids, 20)


def test_repetition_penalty_is_that_of_transformers(generator, reference):
    ids = [1, *generator.model.tokenizer.encode(PROMPTS[0])]
    settings = {"tokens": 20, "temperature": 0, "repetition_penalty": 1.5}
    (completion,) = generator.generate(ids, **settings)
    assert completion.token_ids == reference(ids, 20, repetition_penalty=1.5)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0},
        {
            "temperature": 0.9,
            "top_k": 40,
            "top_p": 0.95,
            "min_p": 0.01,
            "repetition_penalty": 1.2,
        },
    ],
    ids=["likeliest", "sampled"],
)
def test_batch_is_as_one_by_one(generator, settings):
    # There are three rows for four prompts, and lengths differ.
    batch = generator.generate(PROMPTS, tokens=12, **settings)
    for index, completion in enumerate(batch):
        alone = generator.generate(PROMPTS[: index + 1], tokens=12, **settings)[-1]
        assert alone == completion


def test_streamed_parts_are_the_whole(generator):
    settings = {"tokens": 24, "top_k": 10, "seed": 1, "n": 2}
    texts = {}
    completions = []
    for part in generator.stream(PROMPTS[:2], **settings):
        key = (part.prompt_index, part.sample_index)
        texts[key] = texts.get(key, "") + part.text
        if part.completion is not None:
            completions.append(part.completion)
    whole = generator.generate(PROMPTS[:2], **settings)
    assert sorted(completions, key=lambda each: (each.prompt_index, each.sample_index)) == whole
    for completion in whole:
        assert texts[completion.prompt_index, completion.sample_index] == completion.text


def test_samples_of_a_prompt_differ(generator):
    completions = generator.generate(PROMPTS[0], tokens=12, n=3)
    assert [each.sample_index for each in completions] == [0, 1, 2]
    assert len({each.text for each in completions}) == 3
    other = generator.generate(PROMPTS[0], tokens=12, n=3, seed=1)
    assert {each.text for each in other}.isdisjoint(each.text for each in completions)


def test_text_ends_before_a_stop_string_that_spans_tokens(generator):
    settings = {"tokens": 24, "seed": 3}
    (whole,) = generator.generate("to", **settings)
    boundary = len(generator.model.tokenizer.decode(whole.token_ids[:10]))
    stop = whole.text[boundary - 1 : boundary + 1]
    (stopped,) = generator.generate("to", stop=["never said", stop], **settings)
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert stopped.finish_reason == "stop"
    assert whole.finish_reason == "length"
    parts = list(generator.stream("to", stop=stop, **settings))
    assert "".join(part.text for part in parts) == stopped.text
    assert parts[-1].completion == stopped


def test_special_token_is_a_stop_string(folder):
    model = dataclasses.replace(language_model(folder), end_ids=[])
    generator = Generator(model)
    settings = {"tokens": 120, "temperature": 100.0, "n": 8}
    samples = generator.generate("to", **settings)
    stopped = generator.generate("to", stop="<pad>", **settings)
    for sample, completion in zip(samples, stopped, strict=True):
        tokens = sample.token_ids
        if 0 in tokens:
            tokens = tokens[: tokens.index(0) + 1]
        assert completion.token_ids == tokens
    assert "stop" in {completion.finish_reason for completion in stopped}


def test_every_end_token_stops(folder):
    model = language_model(folder)
    first = Generator(model).generate("to be", tokens=8, temperature=0)[0].token_ids
    for end in (first[3], first[5]):
        several = dataclasses.replace(model, end_ids=(2, end))
        (completion,) = Generator(several).generate("to be", tokens=8, temperature=0)
        assert completion.token_ids == first[: first.index(end) + 1]
        assert completion.finish_reason == "stop"


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ("a", {"tokens": 0}, "tokens=0; expected 1, or more"),
        ("a", {"n": 0}, "n=0; expected 1, or more"),
        ("a", {"temperature": -1.0}, "temperature=-1; expected 0, or more"),
        ("a", {"top_k": 0}, "top_k=0; expected 1, or more"),
        ("a", {"top_p": 1.5}, "top_p=1.5; expected more than 0, at most 1"),
        ("a", {"min_p": -0.5}, "min_p=-0.5; expected a number from 0 to 1"),
        ("a", {"repetition_penalty": 0.0}, "repetition_penalty=0; expected more than 0"),
        ("a", {"stop": ["b", ""]}, "stop has an empty text"),
        (["a", []], {}, "prompt 1 has no tokens"),
        ([[1, 300]], {}, r"prompt 0 has tokens from 1 to 300.* from 0 to 299"),
    ],
)
def test_bad_arguments_are_reported(generator, prompts, settings, message):
    with pytest.raises(GenerationError, match=message):
        generator.generate(prompts, **settings)


def test_text_needs_a_tokenizer(folder):
    model = language_model(folder)
    model = dataclasses.replace(model, tokenizer=None)
    with pytest.raises(GenerationError, match=r"prompt 0 is a text.*pass tokenizer="):
        weft.generate(model, "a")
    with pytest.raises(GenerationError, match=r"stop=\['b'\] needs a tokenizer"):
        weft.generate(model, [1, 2], stop="b")
    with pytest.raises(GenerationError, match="batch_size=0; expected 1"):
        weft.generate(model, [1, 2], batch_size=0)
    (completion,) = weft.generate(model, np.array([1, 2]), tokens=3, top_k=1)
    assert len(completion.token_ids) == 3
    assert completion.text == ""


def test_directory_of_a_run_is_refused_with_what_to_pass(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["max_step=1", "dir=run", "evalers={}", "model.decoder.dim=16"]
    assert main(["train", "lm-tiny", *words]) == 0
    message = r"'run' is the directory of a run.*weft\.load\('run'\)"
    with pytest.raises(GenerationError, match=message):
        weft.generate("run", "def ")
    model = weft.load("run")
    (completion,) = weft.generate(model, "def ", tokens=3, tokenizer=ByteTokenizer())
    assert len(completion.token_ids) == 3


def test_one_program_per_power_of_two(folder):
    engine: Any = Generator(folder)._engine
    # Programs of one function are counted together, also those of other generators.
    before = [program._cache_size() for program in (engine._prefill, engine._decode)]
    for lengths in ([5, 9, 16], [17, 30], [3, 32]):
        for length in lengths:
            request = Request(np.full(length, 5), 3, jax.random.key(0))
            for _ in engine.run([request], [Tokens()], Sampling()):
                pass
    # For prompts of 16 and of 32 tokens; caches have 16, 32 and 48 positions.
    assert engine._prefill._cache_size() - before[0] == 2
    assert engine._decode._cache_size() - before[1] == 3


def test_of_equally_likely_tokens_the_first_is_chosen():
    sampling = Sampling(temperature=0)
    logits = jnp.array([[1.0, 3.0, 3.0], [-2.0, -2.0, -5.0], [0.0, -jnp.inf, 1.0]])
    keys = jax.random.split(jax.random.key(0), 3)
    tokens = choose_tokens(sampling.rules, sampling.values, logits, keys, None)
    assert tokens.tolist() == [1, 0, 2]
    assert tokens.dtype == jnp.int32


@pytest.mark.parametrize(
    ("num_prompt", "num_new", "num_positions"),
    [(64, 128, 192), (64, 60, 128), (20, 100, 128), (3, 5, 16)],
)
def test_cache_has_room_for_two_powers_of_two_or_one(folder, num_prompt, num_new, num_positions):
    engine: Any = Generator(folder)._engine
    request = Request(np.full(num_prompt, 5), num_new, jax.random.key(0))
    for _ in engine.run([request], [Tokens()], Sampling(temperature=0)):
        pass
    (state,) = engine._idle_rows.values()
    rings = jax.tree.leaves(state.model, is_leaf=lambda x: isinstance(x, KVRing))
    assert {x.key.shape[2] for x in rings if isinstance(x, KVRing)} == {num_positions}


class Tokens(list):
    def add(self, tokens):
        self.extend(tokens)
        return True


def test_model_without_caches_generates_many_texts():
    class NextByte(linen.Module):
        def __call__(self, input_batch):
            return jnp.float32(0), {}

        def predict(self, input_batch):
            return {"logits": 99.0 * jax.nn.one_hot(input_batch["input_ids"] + 1, 258)}

    inputs = ({"input_ids": jax.ShapeDtypeStruct((1, 4), jnp.int32)},)
    layer = LibraryModel.default_config().set(layer=config_for_class(NextByte), inputs=inputs)
    layer = layer.set(name="model").instantiate(parent=None)
    model = LanguageModel(layer, {}, ByteTokenizer(), end_ids=[ord("g")])
    completions = weft.generate(model, ["a", "wxab", "", "d"], tokens=3, batch_size=2)
    assert [each.text for each in completions] == ["bcd", "cde", "hij", "ef"]
    assert completions[3].finish_reason == "stop"
