"""The `config.json` of Hugging Face: a model that can be made, or an error that says why not."""

import json
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import jax

from tests.fuzz.readers import DEEP, ODD, damaged_json, read, source_of, untouched
from weft.errors import HuggingFaceConfigError, WeightsReadError
from weft.interop.huggingface import huggingface_model_config

_LLAMA = {
    **{"model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 16},
    **{"hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_dropout": 0.0, "rope_theta": 1e4},
    **{"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": False},
    **{"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": None, "rope_scaling": None},
    **{"max_position_embeddings": 64, "layer_types": ["full_attention"], "pretraining_tp": 1},
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0}
VALID = [
    _LLAMA,
    _LLAMA | {"model_type": "qwen3", "rope_scaling": _YARN},
    _LLAMA | {"model_type": "qwen2", "rope_scaling": {"type": "linear", "factor": 2.0}},
    _LLAMA | {"rope_parameters": _LLAMA3 | {"original_max_position_embeddings": 32}},
    {
        **{"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2, "n_inner": None},
        **{"n_positions": 16, "vocab_size": 16, "activation_function": "gelu_new"},
        **{"layer_norm_epsilon": 1e-5, "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1},
        **{"bos_token_id": 1, "eos_token_id": 1, "tie_word_embeddings": True},
    },
]


@st.composite
def _one_invalid_field(draw: st.DrawFn) -> bytes:
    """Yields models with one invalid field each."""
    values = draw(st.sampled_from(VALID))
    key = draw(st.sampled_from(sorted(values)))
    return json.dumps(values | {key: draw(st.sampled_from(ODD))}).encode()


_CRAFTED = [b"", b"7", b"null", b"[]", b'"llama"', DEEP.encode(), b"{}", b"\xff", b"9" * 5_000]
CASES = st.one_of(st.sampled_from(_CRAFTED), _one_invalid_field(), damaged_json(VALID))
SHORT = 120


def check(case: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_bytes(case)
        with untouched(folder):
            returned, cfg = read(
                lambda: huggingface_model_config(folder), (HuggingFaceConfigError, WeightsReadError)
            )
    if returned:
        model = cfg.clone(name="model").instantiate(parent=None)
        if cfg.decoder.transformer.num_layers < 1_000:
            jax.eval_shape(model.initialize_parameters_recursively, jax.random.key(0))


def source(case: bytes) -> str:
    return source_of("fuzz_hf_config", case)
