from typing import Any

import jax
import pytest

from weft import hierarchy
from weft.errors import HuggingFaceConfigError, WeightsMismatchError
from weft.interop.huggingface import from_huggingface, to_huggingface
from weft.interop.huggingface.families.gpt_neox import GPT_NEOX
from weft.interop.huggingface.settings import Settings

# As published for Pythia.
VALUES = {
    "model_type": "gpt_neox",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "rotary_pct": 0.25,
    "rotary_emb_base": 20000,
    "use_parallel_residual": True,
    "vocab_size": 50304,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def test_config_of_a_published_model():
    cfg: Any = GPT_NEOX.read(Settings(VALUES))
    layer = cfg.decoder.transformer.layer
    qkv = layer.self_attention.input_linear
    assert isinstance(layer, hierarchy.ParallelTransformerLayer.Config)
    assert (qkv.partial_rope_factor, qkv.rope_pos_emb_layer.theta) == (0.25, 20000)
    assert layer.feed_forward.activation == "exact_gelu" and cfg.decoder.lm_head is not None
    written = GPT_NEOX.write(cfg)
    assert GPT_NEOX.read(Settings(written)) == cfg
    # For versions before transformers 5, and since.
    assert (written["rotary_pct"], written["rotary_emb_base"]) == (0.25, 20000)
    assert written["rope_parameters"]["partial_rotary_factor"] == 0.25


@pytest.mark.parametrize("is_parallel", [True, False])
def test_dropout_settings(is_parallel):
    rates = {"attention_dropout": 0.3, "hidden_dropout": 0.2}
    values = {**VALUES, **rates, "use_parallel_residual": is_parallel}
    cfg: Any = GPT_NEOX.read(Settings(values))
    layer = cfg.decoder.transformer.layer
    if is_parallel:
        attention, dropout = layer.self_attention, layer.dropout
    else:
        attention, dropout = layer.self_attention.attention, layer.self_attention.dropout
    assert (attention.dropout.rate, dropout.rate) == (0.3, 0.2)
    assert (layer.feed_forward.dropout.rate, layer.feed_forward.hidden_dropout.rate) == (0.2, 0)
    written = GPT_NEOX.write(cfg)
    assert {name: written[name] for name in rates} == rates


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"hidden_act": "tanh"}, "hidden_act='tanh'.* hidden_act can be 'silu' or"),
        ({"num_attention_heads": 10}, "num_attention_heads=10.* divides hidden_size=768"),
        ({"rotary_pct": 0.02}, "rotary_pct=0.02.* even number of the 64 dimensions .* not 1"),
        ({"rotary_pct": 2}, "rotary_pct=2.* can be a number from"),
        ({"rotary_emb_base": "a"}, "rotary_emb_base='a'.* can be a number"),
        ({"use_parallel_residual": 1}, "use_parallel_residual=1.* can be true or false"),
        ({"rope_scaling": {"rope_type": "x"}}, "rope_type='x'.* rope_type can be 'default'"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_unsupported_settings(setting, message):
    with pytest.raises(HuggingFaceConfigError, match=message):
        GPT_NEOX.read(Settings({**VALUES, **setting}))


def test_missing_output_layer_has_the_name_of_this_family(tmp_path):
    tiny = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    tiny |= {"intermediate_size": 8, "vocab_size": 16, "tie_word_embeddings": True}
    cfg = GPT_NEOX.read(Settings({**VALUES, **tiny}))
    model = cfg.clone(name="model").instantiate(parent=None)
    to_huggingface(tmp_path, cfg, model.initialize_parameters_recursively(jax.random.key(0)))
    config_file = tmp_path / "config.json"
    text = config_file.read_text(encoding="utf-8")
    untied = text.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    config_file.write_text(untied, encoding="utf-8")
    with pytest.raises(
        WeightsMismatchError, match=r"no 'embed_out.weight', but .*embed_in.weight'"
    ):
        from_huggingface(tmp_path)
