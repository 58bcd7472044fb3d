"""GPT-2 (Radford et al., 2019): learned positions, LayerNorm, tied embeddings."""

from typing import Any

from weft import hierarchy
from weft.hierarchy.causal_lm import Model
from weft.interop.huggingface import family, settings


def _read(s: settings.Settings) -> Model.Config:
    s.require("scale_attn_weights", True)
    s.require("scale_attn_by_inverse_layer_idx", False)
    s.require("add_cross_attention", False)
    s.require("tie_word_embeddings", True)
    dim, num_layers = s.size("n_embd"), s.size("n_layer", most=settings.MAX_LAYERS)
    heads = s.size("n_head")
    if dim % heads:
        raise s.refusal("n_head", heads, f"divides n_embd={dim}")
    norm = hierarchy.LayerNorm.default_config().set(eps=s.number("layer_norm_epsilon", 1e-5))
    layer = hierarchy.TransformerLayer.default_config()
    layer.self_attention.set(
        norm=norm,
        dropout=s.dropout("resid_pdrop", 0.1),
        attention=hierarchy.MultiheadAttention.default_config().set(
            num_heads=heads,
            mask=hierarchy.CausalAttentionBias.default_config(),
            input_linear=hierarchy.FusedQKVLinear.default_config(),
            dropout=s.dropout("attn_pdrop", 0.1),
        ),
    )
    layer.feed_forward.set(
        norm=norm,
        hidden_dim=s.size("n_inner", 4 * dim),
        activation=s.activation("activation_function", "gelu_new"),
        dropout=s.dropout("resid_pdrop", 0.1),
        hidden_dropout=hierarchy.Dropout.default_config().set(rate=0.0),
    )
    decoder = family.decoder_config(s, layer, num_layers=num_layers, dim=dim, norm=norm)
    decoder.emb.pos_emb = hierarchy.LearnedPositionalEmbedding.default_config().set(
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
        "n_inner": family.hidden_dim(layer.feed_forward, decoder.dim),
        "n_positions": decoder.emb.pos_emb.shape[0],
        "vocab_size": decoder.vocab_size,
        "activation_function": family.activation_name(layer.feed_forward.activation),
        "layer_norm_epsilon": decoder.output_norm.eps,
        "tie_word_embeddings": True,
        **family.special_tokens(decoder),
        "attn_pdrop": family.dropout_rate(decoder, layer.self_attention.attention.dropout),
        "embd_pdrop": family.dropout_rate(decoder, decoder.emb.dropout),
        "resid_pdrop": family.dropout_rate(decoder, layer.self_attention.dropout),
    }


def _entries(s: settings.Settings) -> list[family.TensorMapping]:
    heads = s.size("n_head")
    attention, ff = "self_attention.attention", "feed_forward"
    return [
        *family.linear_entries("wte", "decoder.emb.token_emb"),
        *family.linear_entries("wpe", "decoder.emb.pos_emb", family.POSITIONS),
        *family.norm_entries("ln_f", "decoder.output_norm", bias=True),
        *family.norm_entries("h.{}.ln_1", "self_attention.norm", bias=True),
        *family.norm_entries("h.{}.ln_2", f"{ff}.norm", bias=True),
        *family.linear_entries(
            "h.{}.attn.c_attn",
            f"{attention}.i_proj.qkv_proj",
            family.fused_heads_of_conv(heads),
            family.fused_head_biases(heads),
        ),
        *family.linear_entries(
            "h.{}.attn.c_proj",
            f"{attention}.o_proj",
            family.output_heads_of_conv(heads),
            family.IDENTITY,
        ),
        *family.linear_entries("h.{}.mlp.c_fc", f"{ff}.linear1", family.IDENTITY, family.IDENTITY),
        *family.linear_entries(
            "h.{}.mlp.c_proj", f"{ff}.linear2", family.IDENTITY, family.IDENTITY
        ),
    ]


GPT2 = family.Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    read=_read,
    write=_write,
    entries=_entries,
    extra_allowed=r"lm_head\.weight|h\.\d+\.attn\.(masked_)?bias",
)
