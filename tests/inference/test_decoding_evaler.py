import json
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.keys import quick_key
from weft.config import config_for_function
from weft.errors import DecodingEvalError
from weft.functional import scale_by
from weft.hierarchy.parameter_spec import ParameterSpec
from weft.inference.decoding_evaler import DecodingEvaler, SampleDecoding
from weft.input import ByteTokenizer
from weft.input.fake import fake_source
from weft.input.grain import Input, per_feed_batch
from weft.recipes.lm import lm_tiny
from weft.trainer.mesh import build_mesh
from weft.trainer.summary_writer import JsonLinesWriter, read_json_lines

TEXT = "def f(x): return x"


def prompts():
    """Returns three documents, which begin with the token that ends one."""
    tokens = np.concatenate([[ByteTokenizer.eos_id], ByteTokenizer().encode(TEXT)])
    examples = [{"input_ids": tokens.astype(np.int32)} for _ in range(3)]
    source = fake_source(False, examples, repeat=1)

    def build_dataset(dispatch_config):
        return per_feed_batch(
            source(dispatch_config), global_batch_size=3, dispatch_config=dispatch_config
        )

    return build_dataset


PROMPTS = config_for_function(prompts)


@pytest.fixture(scope="module")
def model():
    cfg = lm_tiny().model.set(name="model")
    cfg.decoder.set(dim=8)
    cfg.decoder.transformer.layer.self_attention.attention.set(num_heads=1)
    return cfg.instantiate(parent=None)


@pytest.fixture(scope="module")
def params(model):
    return jax.jit(model.initialize_parameters_recursively)(quick_key(0))


def evaler(directory, model, *, source=PROMPTS, **kwargs):
    calculator = SampleDecoding.default_config().set(
        **{"tokenizer": ByteTokenizer(), "prompt_length": 8, "num_tokens": 6, **kwargs}
    )
    cfg = DecodingEvaler.default_config().set(
        name="samples",
        input=Input.default_config().set(source=source),
        metric_calculator=calculator,
        summary_writer=JsonLinesWriter.default_config().set(dir=str(directory)),
    )
    specs = partition_specs_of(model)
    return cfg.instantiate(parent=None, model=model, model_param_partition_specs=specs)


def partition_specs_of(model):
    return jax.tree.map(
        lambda spec: spec.partition_spec,
        model.create_parameter_specs_recursively(),
        is_leaf=lambda x: isinstance(x, ParameterSpec),
    )


def written(directory, step):
    lines = Path(directory, f"step_{step:08d}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def mesh():
    return build_mesh((1, 1), ("data", "model"), jax.devices()[:1])


def test_samples_are_saved_with_the_summaries(tmp_path, model, params, mesh):
    samples = evaler(tmp_path, model)
    with jax.set_mesh(mesh):
        for step, key in ((1, 0), (2, 0), (3, 1)):
            samples.eval_step(step, prng_key=jax.random.key(key), model_params=params)
    first = written(tmp_path, 1)
    assert [sample["prompt"] for sample in first] == [TEXT[:7]] * 3
    assert all(1 <= sample["num_tokens"] <= 6 for sample in first if sample["text"])
    assert len({sample["text"] for sample in first}) > 1  # sampled, each for itself
    assert written(tmp_path, 2) == first  # by the key alone
    assert written(tmp_path, 3) != first
    values = {line["step"]: line["values"] for line in read_json_lines(str(tmp_path))}
    assert values[1]["sample_0"] == TEXT[:7] + first[0]["text"]
    assert values[1]["num_tokens"] == np.mean([sample["num_tokens"] for sample in first])
    assert "sample_2" not in values[1]


def short_prompts(pad_to):
    """Returns a document of five tokens, which its end pads to this length."""
    eos = ByteTokenizer.eos_id
    tokens = np.full(pad_to, eos, np.int32)
    tokens[1:5] = ByteTokenizer().encode(TEXT[:4])
    example = {"input_ids": tokens, "live_targets": np.arange(pad_to) < 5}
    source = fake_source(False, [example], repeat=1)

    def build_dataset(dispatch_config):
        return per_feed_batch(
            source(dispatch_config), global_batch_size=1, dispatch_config=dispatch_config
        )

    return build_dataset


def test_sequences_shorter_than_the_prompt_are_continued_at_their_end(
    tmp_path, model, params, mesh
):
    greedy = config_for_function(scale_by).set(temperature=0.0)
    texts = []
    for length in (5, 8):
        source = config_for_function(short_prompts).set(pad_to=length)
        samples = evaler(
            tmp_path / str(length),
            model,
            source=source,
            prompt_length=length,
            logits_modifier=greedy,
        )
        with jax.set_mesh(mesh):
            samples.eval_step(1, prng_key=jax.random.key(0), model_params=params)
        texts += written(tmp_path / str(length), 1)
    assert texts[0] == texts[1]
    assert texts[0]["prompt"] == TEXT[:4]


def test_texts_end_before_each_of_several_ends(tmp_path, params, mesh):
    cfg = lm_tiny().model.set(name="model")
    cfg.decoder.set(dim=8)
    cfg.decoder.transformer.layer.self_attention.attention.set(num_heads=1)
    greedy = config_for_function(scale_by).set(temperature=0.0)
    sampled, texts = [], []
    # The second end is what the model would continue with.
    for ends in ((256,), (256, None)):
        if None in ends:
            ends = (256, sampled[0][0])
        model = cfg.clone()
        model.decoder.eos_token_id = ends
        samples = evaler(
            tmp_path / str(len(ends)), model.instantiate(parent=None), logits_modifier=greedy
        )
        with jax.set_mesh(mesh):
            _, _, outputs = samples.eval_step(
                1, prng_key=jax.random.key(0), model_params=params, return_aux=True
            )
        sampled.append([int(i) for i in outputs[0]["sampled"][0]])
        texts.append(written(tmp_path / str(len(ends)), 1)[0])
    assert texts[0]["num_tokens"] > 0
    assert texts[1]["num_tokens"] == 0 and texts[1]["text"] == ""
    # Sampling stopped there, and padding follows.
    assert sampled[1] == [sampled[0][0]] + [257] * 5


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"prompt_field": "text"},
            "of 'text', but the field is missing. The batch has input_ids",
        ),
        ({"prompt_length": 100}, "first prompt_length=100 tokens of 'input_ids', but it has 19"),
    ],
    ids=["field", "length"],
)
def test_batches_without_prompts_are_named(tmp_path, model, params, mesh, kwargs, message):
    samples = evaler(tmp_path, model, **kwargs)
    with jax.set_mesh(mesh), pytest.raises(DecodingEvalError, match=message):
        samples.eval_step(1, prng_key=jax.random.key(0), model_params=params)


def test_no_tokens_are_rejected(tmp_path, model):
    with pytest.raises(DecodingEvalError, match=r"num_tokens=0; expected at least one token"):
        evaler(tmp_path, model, num_tokens=0)
