"""Fine-tuning of a base that is sharded over a mesh from the moment it is read."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import weft
from weft.errors import MeshError, UnknownFieldError
from weft.hierarchy import base_state, set_weight_format_recursively
from weft.interop.huggingface import (
    huggingface_model_config,
    load_huggingface_params,
    parameter_shapes,
    to_huggingface,
)
from weft.recipes.lm import VOCAB_SIZE

ROWS = [{"prompt": f"{i} + 1 = ", "completion": str(i + 1)} for i in range(16)]
SETTINGS = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,  # of bytes, so it needs no tokenizer
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 256,
    "pad_token_id": 257,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    (folder / "config.json").write_text(json.dumps(SETTINGS), encoding="utf-8")
    cfg = huggingface_model_config(folder)
    random = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: random.normal(scale=0.1, size=x.shape).astype(np.float32), parameter_shapes(cfg)
    )
    to_huggingface(folder, cfg, params)
    return str(folder)


def tune(base, **arguments):
    return weft.finetune(
        base,
        ROWS,
        steps=1,
        batch_size=8,
        sequence_length=16,
        held_out=0,
        progress=False,
        **arguments,
    )


@pytest.mark.long
def test_codes_are_rounded_onto_the_mesh(base):
    result = tune(base, tuning="lora-nf4", mesh={"fsdp": 4, "model": 2})
    params = result.last.variables
    layer = params["decoder"]["transformer"]["repeat"]["layer"]["feed_forward"]["linear2"]
    assert layer["layer"]["weight_codes"].sharding.spec[1:] == ("model", "fsdp")
    assert np.asarray(layer["adapter"]["lora_up"]["weight"]).any()
    cfg = huggingface_model_config(base, dtype=jnp.bfloat16)
    set_weight_format_recursively(cfg, "nf4")
    expected = load_huggingface_params(base, parameter_shapes(cfg))
    jax.tree.map(np.testing.assert_array_equal, base_state(params), expected)


def test_meshes_that_do_not_fit(base):
    with pytest.raises(UnknownFieldError, match=r"'tensor'"):
        tune(base, mesh={"tensor": 2})
    with pytest.raises(MeshError, match=r"does not divide over model = 8 devices"):
        tune(base, mesh={"model": 8})
