"""GPT-2: learned positions, LayerNorm, one fused projection (Radford et al., 2019)."""

from typing import Any

from weft import hierarchy
from weft.hierarchy.causal_lm import Model
from weft.interop.huggingface import family
from weft.interop.huggingface.settings import MAX_LAYERS, MAX_SIZE, Settings


def read(s: Settings) -> Model.Config:
    """Returns the config of the model that a `config.json` describes."""
    s.require("scale_attn_weights", True)
    s.require("scale_attn_by_inverse_layer_idx", False)
    s.require("add_cross_attention", False)
    dim = s.size("n_embd")
    num_layers = s.size("n_layer", most=MAX_LAYERS)
    num_heads = s.size("n_head")
    if dim % num_heads:
        raise s.refusal("n_head", num_heads, f"divides n_embd={dim}")
    norm = hierarchy.LayerNorm.default_config().set(
        eps=s.number("layer_norm_epsilon", 1e-5)
    )
    layer = hierarchy.TransformerLayer.default_config()
    layer.self_attention.set(
        norm=norm,
        dropout=s.dropout("resid_pdrop", 0.1),
        attention=hierarchy.MultiheadAttention.default_config().set(
            num_heads=num_heads,
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
    decoder = family.decoder_config(s, [layer] * num_layers, dim=dim, norm=norm)
    decoder.emb.pos_emb = (
        hierarchy.LearnedPositionalEmbedding.default_config().set(
            shape=(s.size("n_positions", 1024, most=MAX_SIZE),)
        )
    )
    decoder.emb.dropout = s.dropout("embd_pdrop", 0.1)
    if not s.flag("tie_word_embeddings", True):
        decoder.lm_head = hierarchy.LmHead.default_config()
    return Model.default_config().set(decoder=decoder)


def write(cfg: Any) -> dict[str, Any]:
    """Returns the content of `config.json` for a model: the inverse of `read`."""
    decoder = cfg.decoder
    layers = family.layers_of(decoder.transformer)
    layer = layers[0]
    return {
        "model_type": "gpt2",
        "n_embd": decoder.dim,
        "n_layer": len(layers),
        "n_head": layer.self_attention.attention.num_heads,
        "n_inner": family.hidden_dim(layer.feed_forward, decoder.dim),
        "n_positions": decoder.emb.pos_emb.shape[0],
        "vocab_size": decoder.vocab_size,
        "activation_function": family.activation_name(
            layer.feed_forward.activation
        ),
        "layer_norm_epsilon": decoder.output_norm.eps,
        "tie_word_embeddings": decoder.lm_head is None,
        **family.special_tokens(decoder),
        "attn_pdrop": family.dropout_rate(
            decoder, layer.self_attention.attention.dropout
        ),
        "embd_pdrop": family.dropout_rate(decoder, decoder.emb.dropout),
        "resid_pdrop": family.dropout_rate(
            decoder, layer.self_attention.dropout
        ),
    }


def entries(s: Settings) -> list[family.TensorMapping]:
    """Returns the table of tensors."""
    num_heads = s.size("n_head")
    attention, feed_forward = "self_attention.attention", "feed_forward"
    mappings = [
        *family.linear_entries("wte", "decoder.emb.token_emb"),
        *family.linear_entries("wpe", "decoder.emb.pos_emb", family.POSITIONS),
        *family.linear_entries(
            "h.{}.attn.c_attn",
            f"{attention}.i_proj.qkv_proj",
            family.fused_heads_of_conv(num_heads),
            family.fused_head_biases(num_heads),
        ),
        *family.linear_entries(
            "h.{}.attn.c_proj",
            f"{attention}.o_proj",
            family.output_heads_of_conv(num_heads),
            family.IDENTITY,
        ),
        *family.linear_entries(
            "h.{}.mlp.c_fc", f"{feed_forward}.linear1", bias=family.IDENTITY
        ),
        *family.linear_entries(
            "h.{}.mlp.c_proj", f"{feed_forward}.linear2", bias=family.IDENTITY
        ),
        *family.norm_entries("ln_f", "decoder.output_norm", bias=True),
        *family.norm_entries("h.{}.ln_1", "self_attention.norm", bias=True),
        *family.norm_entries("h.{}.ln_2", f"{feed_forward}.norm", bias=True),
    ]
    if not s.flag("tie_word_embeddings", True):
        mappings += family.linear_entries("lm_head", "decoder.lm_head")
    return mappings


GPT2 = family.Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    read=read,
    write=write,
    entries=entries,
    extra_allowed=r"lm_head\.weight|h\.\d+\.attn\.(masked_)?bias",
)
