"""Files that contradict what `config.json` says of the output layer."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from weft.errors import WeightsMismatchError
from weft.interop.huggingface import from_huggingface, huggingface_model_config, to_huggingface

SETTINGS = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 24,
    "eos_token_id": 1,
}
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def write(tmp_path):
    """Writes a checkpoint whose tensors are changed by a function, and returns the folder."""

    def write(change, **settings):
        settings = {**SETTINGS, **settings}
        text = json.dumps(settings)
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        cfg = huggingface_model_config(tmp_path)
        model = cfg.clone(name="model").instantiate(parent=None)
        shapes = jax.eval_shape(model.initialize_parameters_recursively, jax.random.key(0))
        random = np.random.default_rng(0)
        params = jax.tree.map(lambda x: random.normal(size=x.shape).astype(x.dtype), shapes)
        to_huggingface(tmp_path, cfg, params)
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        tensors = load_file(tmp_path / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return write


def test_copy_of_the_table_is_no_contradiction(write):
    def add_copies(tensors):
        tensors[TABLE] = tensors[TABLE].astype(ml_dtypes.bfloat16)
        tensors[TABLE][0, 0] = np.nan
        tensors[HEAD] = tensors[TABLE].astype(np.float32)
        tensors[f"model.{HEAD}"] = tensors[TABLE]

    _, params = from_huggingface(write(add_copies, tie_word_embeddings=True))
    assert "lm_head" not in params["decoder"]


@pytest.mark.parametrize("name", [HEAD, f"model.{HEAD}"])
@pytest.mark.parametrize("shape", [(24, 8), (25, 8)], ids=str)
def test_other_output_layer_of_a_tied_model(write, name, shape):
    def add_other(tensors):
        tensors[name] = np.zeros(shape, np.float32)

    with pytest.raises(WeightsMismatchError) as error:
        from_huggingface(write(add_other, tie_word_embeddings=True))
    message = str(error.value)
    assert message.startswith(f"'{name}' and '{TABLE}' in ")
    assert "are not equal, but " in message
    assert "config.json says tie_word_embeddings=True: the output layer is 'model.embed" in message
    assert "Set tie_word_embeddings to false if the output layer is a tensor of its own" in message


def test_other_output_layer_by_default_of_gpt2(write):
    def add_other(tensors):
        tensors[HEAD] = tensors["transformer.wte.weight"] + 1

    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}
    with pytest.raises(WeightsMismatchError, match=r"embeddings, which .*lacks, is True by def"):
        from_huggingface(write(add_other, model_type="gpt2", **sizes))


def test_untied_model_without_an_output_layer(write):
    message = (
        r"has no 'lm_head.weight', but tie_word_embeddings, which '?.*config.json'? lacks, is False"
        r" by default: .* Set tie_word_embeddings to true if it is 'model.embed_tokens.weight'"
    )
    with pytest.raises(WeightsMismatchError, match=message):
        from_huggingface(write(lambda tensors: tensors.pop(HEAD)))


def test_two_output_layers(write):
    def add_other(tensors):
        tensors[f"model.{HEAD}"] = tensors[HEAD] + 1

    message = r"'model.lm_head.weight' and 'lm_head.weight' in .* Leave 'model.lm_head.weight' out"
    with pytest.raises(WeightsMismatchError, match=message):
        from_huggingface(write(add_other, tie_word_embeddings=False))


def test_missing_table(write):
    def rename(tensors):
        tensors[HEAD] = tensors.pop(TABLE)

    with pytest.raises(WeightsMismatchError, match=r"missing: model.embed_tokens.weight"):
        from_huggingface(write(rename, tie_word_embeddings=True))
