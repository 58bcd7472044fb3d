"""GPT-2 (Radford et al., 2019): learned positions, LayerNorm, tied embeddings."""

from typing import Any

from weft.hierarchy.attention.bias import CausalAttentionBias
from weft.hierarchy.attention.multihead_attention import MultiheadAttention
from weft.hierarchy.attention.qkv_linear import FusedQKVLinear
from weft.hierarchy.attention.transformer import TransformerLayer
from weft.hierarchy.causal_lm import Model
from weft.hierarchy.layers.embedding import LearnedPositionalEmbedding
from weft.hierarchy.layers.normalization import LayerNorm
from weft.hierarchy.layers.stochastic import Dropout
from weft.interop.huggingface import family
from weft.interop.huggingface.family import (
    IDENTITY,
    Family,
    TensorMapping,
    activation_name,
    decoder_config,
    dropout_rate,
    hidden_dim,
    norm_entries,
    special_tokens,
)
from weft.interop.huggingface.settings import MAX_LAYERS, Settings


def _read(s: Settings) -> Model.Config:
    s.require("scale_attn_weights", True)
    s.require("scale_attn_by_inverse_layer_idx", False)
    s.require("add_cross_attention", False)
    s.require("tie_word_embeddings", True)
    dim, num_layers = s.size("n_embd"), s.size("n_layer", most=MAX_LAYERS)
    heads = s.size("n_head")
    if dim % heads:
        raise s.refusal("n_head", heads, f"divides n_embd={dim}")
    norm = LayerNorm.default_config().set(eps=s.number("layer_norm_epsilon", 1e-5))
    layer = TransformerLayer.default_config()
    layer.self_attention.set(
        norm=norm,
        dropout=s.dropout("resid_pdrop", 0.1),
        attention=MultiheadAttention.default_config().set(
            num_heads=heads,
            mask=CausalAttentionBias.default_config(),
            input_linear=FusedQKVLinear.default_config(),
            dropout=s.dropout("attn_pdrop", 0.1),
        ),
    )
    layer.feed_forward.set(
        norm=norm,
        hidden_dim=s.size("n_inner", 4 * dim),
        activation=s.activation("activation_function", "gelu_new"),
        dropout=s.dropout("resid_pdrop", 0.1),
        hidden_dropout=Dropout.default_config().set(rate=0.0),
    )
    decoder = decoder_config(s, layer, num_layers=num_layers, dim=dim, norm=norm)
    decoder.emb.pos_emb = LearnedPositionalEmbedding.default_config().set(
        shape=(s.size("n_positions", 1024),)
    )
    decoder.emb.dropout = s.dropout("embd_pdrop", 0.1)
    return Model.default_config().set(decoder=decoder)


def _write(cfg: Any) -> dict[str, Any]:
    decoder = cfg.decoder
    layer = decoder.transformer.layer
    return {
        "model_type": "gpt2",
        "n_embd": decoder.dim,
        "n_layer": decoder.transformer.num_layers,
        "n_head": layer.self_attention.attention.num_heads,
        "n_inner": hidden_dim(layer.feed_forward, decoder.dim),
        "n_positions": decoder.emb.pos_emb.shape[0],
        "vocab_size": decoder.vocab_size,
        "activation_function": activation_name(layer.feed_forward.activation),
        "layer_norm_epsilon": decoder.output_norm.eps,
        "tie_word_embeddings": True,
        **special_tokens(decoder),
        "attn_pdrop": dropout_rate(decoder, layer.self_attention.attention.dropout),
        "embd_pdrop": dropout_rate(decoder, decoder.emb.dropout),
        "resid_pdrop": dropout_rate(decoder, layer.self_attention.dropout),
    }


def _entries(s: Settings) -> list[TensorMapping]:
    heads = s.size("n_head")
    attention, ff = "self_attention.attention", "feed_forward"
    fused = f"{attention}.i_proj.qkv_proj"
    return [
        TensorMapping("wte.weight", "decoder.emb.token_emb.weight", IDENTITY),
        TensorMapping("wpe.weight", "decoder.emb.pos_emb.weight", family.POSITIONS),
        *norm_entries("ln_f", "decoder.output_norm", bias=True),
        *norm_entries("h.{}.ln_1", "self_attention.norm", bias=True),
        *norm_entries("h.{}.ln_2", f"{ff}.norm", bias=True),
        TensorMapping(
            "h.{}.attn.c_attn.weight", f"{fused}.weight", family.fused_heads_of_conv(heads)
        ),
        TensorMapping("h.{}.attn.c_attn.bias", f"{fused}.bias", family.fused_head_biases(heads)),
        TensorMapping(
            "h.{}.attn.c_proj.weight",
            f"{attention}.o_proj.weight",
            family.output_heads_of_conv(heads),
        ),
        TensorMapping("h.{}.attn.c_proj.bias", f"{attention}.o_proj.bias", IDENTITY),
        TensorMapping("h.{}.mlp.c_fc.weight", f"{ff}.linear1.weight", IDENTITY),
        TensorMapping("h.{}.mlp.c_fc.bias", f"{ff}.linear1.bias", IDENTITY),
        TensorMapping("h.{}.mlp.c_proj.weight", f"{ff}.linear2.weight", IDENTITY),
        TensorMapping("h.{}.mlp.c_proj.bias", f"{ff}.linear2.bias", IDENTITY),
    ]


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    read=_read,
    write=_write,
    entries=_entries,
    extra_allowed=r"lm_head\.weight|h\.\d+\.attn\.(masked_)?bias",
)
