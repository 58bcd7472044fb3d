"""GPT-NeoX: rotary positions, LayerNorm, both branches of a layer in parallel (Black et al., 2022).

Pythia and Dolly 2 are such models. With `use_parallel_residual` false, the branches follow each
other as in GPT-2.
"""

from typing import Any

from weft import hierarchy
from weft.hierarchy.causal_lm import Model
from weft.interop.huggingface import family, rotary_decoder, settings
from weft.interop.huggingface.settings import MAX_LAYERS, Settings


def read(s: Settings) -> Model.Config:
    """Returns the config of the model that a `config.json` describes."""
    dim = s.size("hidden_size")
    norm = hierarchy.LayerNorm.default_config().set(
        eps=s.number("layer_norm_eps", 1e-5)
    )
    activation: Any = s.activation("hidden_act", "gelu")
    feed_forward = hierarchy.TransformerFeedForwardLayer.default_config().set(
        hidden_dim=s.size("intermediate_size"),
        activation=activation,
        dropout=s.dropout("hidden_dropout", 0.0),
        hidden_dropout=hierarchy.Dropout.default_config().set(rate=0.0),
    )
    if s.flag("use_parallel_residual", True):
        layer = hierarchy.ParallelTransformerLayer.default_config().set(
            norm=norm,
            self_attention=_attention(s),
            feed_forward_norm=norm.clone(),
            feed_forward=feed_forward.set(structure="nonorm"),
            dropout=s.dropout("hidden_dropout", 0.0),
        )
    else:
        layer = hierarchy.TransformerLayer.default_config()
        layer.self_attention.set(
            norm=norm,
            attention=_attention(s),
            dropout=s.dropout("hidden_dropout", 0.0),
        )
        layer.feed_forward = feed_forward.set(norm=norm)
    num_layers = s.size("num_hidden_layers", most=MAX_LAYERS)
    decoder = family.decoder_config(s, [layer] * num_layers, dim=dim, norm=norm)
    if not _is_tied(s):
        decoder.lm_head = hierarchy.LmHead.default_config()
    return Model.default_config().set(decoder=decoder)


def _attention(s: Settings) -> hierarchy.MultiheadAttention.Config:
    num_heads, rotary_dim = s.size("num_attention_heads"), _rotary_dim(s)
    head_dim = s.size("hidden_size") // num_heads
    factor = None
    if rotary_dim != head_dim:
        factor = _rotary_factor(s)
    # One fused projection, as the files have it.
    projections = hierarchy.FusedQKVLinear.default_config()
    projections.layer.bias = _has_bias(s)
    qkv = hierarchy.RoFormerQKVLinear.default_config().set(
        rope_pos_emb_layer=s.rotary(theta=_theta(s)),
        input_linear=projections,
        rotary_value=False,
        partial_rope_factor=factor,
    )
    attention = hierarchy.MultiheadAttention.default_config().set(
        num_heads=num_heads,
        mask=hierarchy.CausalAttentionBias.default_config(),
        input_linear=qkv,
        dropout=s.dropout("attention_dropout", 0.0),
    )
    attention.output_linear.bias = _has_bias(s)
    return attention


def _has_bias(s: Settings) -> bool:
    return s.flag("attention_bias", True)


def _is_tied(s: Settings) -> bool:
    return s.flag("tie_word_embeddings", False)


def _theta(s: Settings) -> float:
    # The name before transformers 5.
    return s.number("rotary_emb_base", 10000.0, least=1.0)


def _rotary_factor(s: Settings) -> float:
    """Returns which part of a head's dimensions is rotated."""
    # The name before transformers 5.
    default = s.number("rotary_pct", 0.25, least=1e-6, most=1.0)
    return s.partial_rotary_factor(default) or 1.0


def _rotary_dim(s: Settings) -> int:
    """Returns how many of a head's dimensions are rotated."""
    dim, num_heads = s.size("hidden_size"), s.size("num_attention_heads")
    if dim % num_heads:
        raise s.refusal(
            "num_attention_heads", num_heads, f"divides hidden_size={dim}"
        )
    factor = _rotary_factor(s)
    rotary_dim = int(dim // num_heads * factor)
    if rotary_dim < 2 or rotary_dim % 2:
        raise s.refusal(
            "rotary_pct",
            factor,
            f"can be such that an even number of the {dim // num_heads} dimensions of a head is "
            f"rotated, not {rotary_dim}",
        )
    return rotary_dim


def write(cfg: Any) -> dict[str, Any]:
    """Returns the content of `config.json` for a model: the inverse of `read`."""
    decoder = cfg.decoder
    layers = family.layers_of(decoder.transformer)
    layer = layers[0]
    is_parallel = isinstance(layer, hierarchy.ParallelTransformerLayer.Config)
    attention, dropout = layer.self_attention, layer.feed_forward.dropout
    if not is_parallel:
        attention = attention.attention
    qkv = attention.input_linear
    rotary = settings.rotary_settings(qkv.rope_pos_emb_layer)
    factor = qkv.partial_rope_factor
    rotary["partial_rotary_factor"] = 1.0 if factor is None else factor
    return {
        "model_type": "gpt_neox",
        "hidden_size": decoder.dim,
        "intermediate_size": family.hidden_dim(layer.feed_forward, decoder.dim),
        "num_hidden_layers": len(layers),
        "num_attention_heads": attention.num_heads,
        "vocab_size": decoder.vocab_size,
        "hidden_act": family.activation_name(layer.feed_forward.activation),
        "layer_norm_eps": decoder.output_norm.eps,
        "use_parallel_residual": is_parallel,
        "attention_bias": attention.output_linear.bias,
        "tie_word_embeddings": decoder.lm_head is None,
        **settings.rope_settings(rotary),
        # As versions before transformers 5 read them.
        "rotary_emb_base": rotary["rope_theta"],
        "rotary_pct": rotary["partial_rotary_factor"],
        **rotary_decoder.length_settings(qkv.rope_pos_emb_layer),
        "attention_dropout": family.dropout_rate(decoder, attention.dropout),
        "hidden_dropout": family.dropout_rate(decoder, dropout),
        **family.special_tokens(decoder),
    }


def entries(s: Settings) -> list[family.TensorMapping]:
    """Returns the table of tensors."""
    num_heads, rotary_dim = s.size("num_attention_heads"), _rotary_dim(s)
    attention, norms = (
        "self_attention.attention",
        ("self_attention.norm", "feed_forward.norm"),
    )
    if s.flag("use_parallel_residual", True):
        attention, norms = "self_attention", ("norm", "feed_forward_norm")
    qkv_bias = output_bias = None
    if _has_bias(s):
        output_bias = family.IDENTITY
        qkv_bias = family.fused_parts_of_heads(
            num_heads, rotary_dim=rotary_dim, is_bias=True
        )
    mappings = [
        *family.linear_entries("embed_in", "decoder.emb.token_emb"),
        *family.linear_entries(
            "layers.{}.attention.query_key_value",
            f"{attention}.i_proj.i_proj.qkv_proj",
            family.fused_parts_of_heads(num_heads, rotary_dim=rotary_dim),
            qkv_bias,
        ),
        *family.linear_entries(
            "layers.{}.attention.dense",
            f"{attention}.o_proj",
            family.output_heads(num_heads),
            output_bias,
        ),
        *family.norm_entries(
            "final_layer_norm", "decoder.output_norm", bias=True
        ),
    ]
    for hf_name, weft_name in (
        ("dense_h_to_4h", "linear1"),
        ("dense_4h_to_h", "linear2"),
    ):
        mappings += family.linear_entries(
            f"layers.{{}}.mlp.{hf_name}",
            f"feed_forward.{weft_name}",
            family.TRANSPOSED,
            family.IDENTITY,
        )
    for hf_name, weft_name in zip(
        ("input_layernorm", "post_attention_layernorm"), norms, strict=True
    ):
        mappings += family.norm_entries(
            f"layers.{{}}.{hf_name}", weft_name, bias=True
        )
    if not _is_tied(s):
        mappings += family.linear_entries("embed_out", "decoder.lm_head")
    return mappings


GPT_NEOX = family.Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    prefix="gpt_neox.",
    read=read,
    write=write,
    entries=entries,
    extra_allowed=r"(embed_out|lm_head)\.weight"
    r"|layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)",
    output_layer="embed_out.weight",
)
