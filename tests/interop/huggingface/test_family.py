import pytest

from weft.errors import HuggingFaceConfigError
from weft.hierarchy.attention import TransformerFeedForwardLayer, scaled_hidden_dim
from weft.hierarchy.decoder import Decoder
from weft.interop.huggingface.family import (
    activation_name,
    dropout_rate,
    hidden_dim,
    norm_entries,
)
from weft.interop.huggingface.settings import ACTIVATIONS


def test_activations_have_the_name_that_leads_back():
    assert activation_name("nn.silu") == "silu"
    assert all(ACTIVATIONS[activation_name(ours)] == ours for ours in ACTIVATIONS.values())
    with pytest.raises(HuggingFaceConfigError, match=r"'nn.elu' has no name in Hugging Face's"):
        activation_name("nn.elu")


def test_hidden_dimensions():
    cfg = TransformerFeedForwardLayer.default_config().set(hidden_dim=7)
    assert hidden_dim(cfg, 4) == 7
    assert hidden_dim(cfg.set(hidden_dim=scaled_hidden_dim(2)), 4) == 8


def test_the_decoder_s_rate_is_for_dropouts_without_one():
    decoder = Decoder.default_config().set(dropout_rate=0.1)
    assert dropout_rate(decoder, decoder.emb.dropout) == 0.1
    assert dropout_rate(decoder, decoder.emb.dropout.set(rate=0.0)) == 0.0


def test_a_norm_with_and_without_a_bias():
    assert [e[:2] for e in norm_entries("a", "b", bias=True)] == [
        ("a.weight", "b.scale"),
        ("a.bias", "b.bias"),
    ]
    assert [e[:2] for e in norm_entries("a", "b")] == [("a.weight", "b.scale")]
