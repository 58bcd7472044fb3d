import pytest

from weft.errors import HuggingFaceConfigError
from weft.interop.huggingface.families.gpt2 import GPT2
from weft.interop.huggingface.settings import Settings

# As published; omitted settings have their defaults.
VALUES = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}


def test_config_of_the_published_model():
    cfg = GPT2.read(Settings({**VALUES, "eos_token_id": 50256}))
    decoder = cfg.decoder
    assert (decoder.dim, decoder.vocab_size, decoder.eos_token_id) == (768, 50257, 50256)
    assert decoder.emb.pos_emb.shape == (1024,)
    assert decoder.transformer.layer.feed_forward.hidden_dim == 3072
    assert decoder.transformer.layer.feed_forward.activation == "nn.gelu"
    assert decoder.output_norm.eps == 1e-5 and decoder.lm_head is None
    again = GPT2.read(Settings(GPT2.write(cfg)))
    assert again == cfg


def test_dropout_settings():
    rates = {"attn_pdrop": 0.3, "embd_pdrop": 0, "resid_pdrop": 0.2}
    decoder = GPT2.read(Settings({**VALUES, **rates})).decoder
    layer = decoder.transformer.layer
    assert layer.self_attention.attention.dropout.rate == 0.3 and decoder.emb.dropout.rate == 0.0
    assert layer.self_attention.dropout.rate == layer.feed_forward.dropout.rate == 0.2
    assert layer.feed_forward.hidden_dropout.rate == decoder.dropout_rate == 0.0
    written = GPT2.write(GPT2.read(Settings({**VALUES, **rates})))
    assert {name: written[name] for name in rates} == rates
    assert GPT2.write(GPT2.read(Settings(VALUES)))["embd_pdrop"] == 0.1  # that of transformers


@pytest.mark.parametrize(
    "setting",
    [
        {"scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True},
        {"add_cross_attention": True},
        {"activation_function": "tanh"},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_unsupported_settings(setting):
    with pytest.raises(HuggingFaceConfigError, match=f"{next(iter(setting))}=.* no counterpart"):
        GPT2.read(Settings({**VALUES, **setting}))
