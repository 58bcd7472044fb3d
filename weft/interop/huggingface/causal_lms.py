"""The families of causal LMs: what `config.json` says of each, and its tensors.

gpt2      learned positions, LayerNorm, tied embeddings (Radford et al., 2019)
llama     rotary positions, RMSNorm, gated feed-forward layers; biases of all projections, or none
mistral   as Llama, with attention within a window; no biases
qwen2     as Llama, with biases of queries, keys and values
qwen3     as Llama, with norms of queries and keys, before they are rotated
"""

from typing import Any, NamedTuple

from weft import config, hierarchy
from weft.hierarchy.causal_lm import Model
from weft.interop.huggingface import family, settings


def _read_gpt2(s: settings.Settings) -> Model.Config:
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
        shape=(s.size("n_positions", 1024, most=settings.MAX_SIZE),)
    )
    decoder.emb.dropout = s.dropout("embd_pdrop", 0.1)
    return Model.default_config().set(decoder=decoder)


def _write_gpt2(cfg: Any) -> dict[str, Any]:
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


def _gpt2_entries(s: settings.Settings) -> list[family.TensorMapping]:
    attention, ff = "self_attention.attention", "feed_forward"
    heads, same = s.size("n_head"), family.IDENTITY
    fused = family.fused_heads_of_conv(heads), family.fused_head_biases(heads)
    linear: list[tuple[Any, ...]] = [
        ("wte", "decoder.emb.token_emb"),
        ("wpe", "decoder.emb.pos_emb", family.POSITIONS),
        ("h.{}.attn.c_attn", f"{attention}.i_proj.qkv_proj", *fused),
        ("h.{}.attn.c_proj", f"{attention}.o_proj", family.output_heads_of_conv(heads), same),
        ("h.{}.mlp.c_fc", f"{ff}.linear1", same, same),
        ("h.{}.mlp.c_proj", f"{ff}.linear2", same, same),
    ]
    return [
        *(entry for row in linear for entry in family.linear_entries(*row)),
        *family.norm_entries("ln_f", "decoder.output_norm", bias=True),
        *family.norm_entries("h.{}.ln_1", "self_attention.norm", bias=True),
        *family.norm_entries("h.{}.ln_2", f"{ff}.norm", bias=True),
    ]


GPT2 = family.Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    read=_read_gpt2,
    write=_write_gpt2,
    entries=_gpt2_entries,
    extra_allowed=r"lm_head\.weight|h\.\d+\.attn\.(masked_)?bias",
)


class _Variant(NamedTuple):
    """Differences between Llama-like models."""

    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    head_dim: int
    kv_heads: int


def _variant(s: settings.Settings) -> _Variant:
    kind, heads, dim = s.get("model_type"), s.size("num_attention_heads"), s.size("hidden_size")
    bias = kind == "qwen2" or (kind != "mistral" and s.flag("attention_bias", False))
    head_dim = s.size("head_dim", 128 if kind == "qwen3" else max(dim // heads, 1))
    if head_dim % 2:
        raise s.refusal("head_dim", head_dim, "can be even, as halves of it are rotated")
    kv_heads = s.size("num_key_value_heads", {"llama": heads, "mistral": 8}.get(kind, 32))
    if heads % kv_heads:
        raise s.refusal("num_key_value_heads", kv_heads, f"divides num_attention_heads={heads}")
    mlp_bias = kind == "llama" and s.flag("mlp_bias", False)
    return _Variant(bias, bias and kind != "qwen2", mlp_bias, kind == "qwen3", head_dim, kv_heads)


def _mask(s: settings.Settings) -> Any:
    if s.get("model_type") != "mistral" or s.values.get("sliding_window", 0) is None:
        return hierarchy.CausalAttentionBias.default_config()
    # Theirs counts the position itself.
    window = s.size("sliding_window", 4096, most=settings.MAX_SIZE) - 1
    return hierarchy.SlidingWindowAttentionBias.default_config(sliding_window_size=window)


def _read(s: settings.Settings) -> Model.Config:
    s.require("use_sliding_window", False)
    kinds = s.get("layer_types", [])
    if not isinstance(kinds, list):
        raise s.refusal("layer_types", kinds, "can be a list")
    for kind in kinds:
        if kind != "full_attention":
            raise s.refusal("layer_types", kind, "can be 'full_attention'")
    s.require("pretraining_tp", 1)
    v, dim, heads = _variant(s), s.size("hidden_size"), s.size("num_attention_heads")
    norm = hierarchy.RMSNorm.default_config().set(eps=s.number("rms_norm_eps", 1e-6))
    qkv = hierarchy.RoFormerQKVLinear.default_config().set(
        rope_pos_emb_layer=s.rotary(),
        input_linear=hierarchy.GroupedQKVLinear.default_config().set(num_kv_heads=v.kv_heads),
        rotary_value=False,
    )
    qkv.input_linear.layer.bias = v.qkv_bias
    if v.qk_norm:
        # Before the rotation; the scale of the logits comes after it, in the attention.
        one = config.config_for_function(hierarchy.constant_scale_fn).set(value=1.0)
        qkv.query_scale = hierarchy.ScaleQuery.default_config().set(norm=norm, scale_factor=one)
        qkv.key_scale = hierarchy.ScaleKey.default_config().set(norm=norm)
    layer = hierarchy.TransformerLayer.default_config()
    layer.self_attention.set(
        norm=norm,
        attention=hierarchy.GroupedQueryAttention.default_config().set(
            num_heads=heads,
            hidden_dim=heads * v.head_dim,
            mask=_mask(s),
            input_linear=qkv,
            dropout=s.dropout("attention_dropout", 0.0),
        ),
    )
    layer.self_attention.attention.output_linear.bias = v.output_bias
    layer.feed_forward.set(
        norm=norm,
        hidden_dim=s.size("intermediate_size"),
        activation=(s.activation("hidden_act", "silu"), "linear"),
    )
    layer.feed_forward.linear1.bias = layer.feed_forward.linear2.bias = v.mlp_bias
    num_layers = s.size("num_hidden_layers", most=settings.MAX_LAYERS)
    decoder = family.decoder_config(s, layer, num_layers=num_layers, dim=dim, norm=norm)
    if not s.flag("tie_word_embeddings", False):
        decoder.lm_head = hierarchy.LmHead.default_config()
    return Model.default_config().set(decoder=decoder)


def similar_settings(cfg: Any) -> dict[str, Any]:
    """Returns settings with the sizes of any decoder with attention, to compare both."""
    decoder = cfg.decoder
    layer = decoder.transformer.layer
    attention = layer.self_attention.attention
    window = getattr(attention.mask, "sliding_window_size", None)
    return {
        "model_type": "llama",
        "hidden_size": decoder.dim,
        "intermediate_size": family.hidden_dim(layer.feed_forward, decoder.dim),
        "num_hidden_layers": decoder.transformer.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_heads,
        "rms_norm_eps": getattr(decoder.output_norm, "eps", 1e-6),
        "tie_word_embeddings": decoder.lm_head is None,
        "vocab_size": decoder.vocab_size,
        **family.special_tokens(decoder),
        **({} if window is None else {"model_type": "mistral", "sliding_window": window + 1}),
    }


def _write(cfg: Any) -> dict[str, Any]:
    decoder, values = cfg.decoder, similar_settings(cfg)
    attention = decoder.transformer.layer.self_attention.attention
    ff, qkv = decoder.transformer.layer.feed_forward, attention.input_linear
    qkv_bias, output_bias = qkv.input_linear.layer.bias, attention.output_linear.bias
    if isinstance(ff.activation, str):
        raise TypeError("the feed-forward layers of these models are gated")
    kind = values["model_type"]
    if kind == "llama" and qkv.query_scale is not None:
        kind = "qwen3"
    elif kind == "llama" and qkv_bias and not output_bias:
        kind = "qwen2"
    own = {"attention_bias": qkv_bias, "mlp_bias": ff.linear1.bias}
    return {
        **values,
        "model_type": kind,
        "num_key_value_heads": qkv.input_linear.num_kv_heads,
        "head_dim": (attention.hidden_dim or decoder.dim) // attention.num_heads,
        "hidden_act": family.activation_name(ff.activation[0]),
        "rms_norm_eps": decoder.output_norm.eps,
        **settings.rope_settings(settings.rotary_settings(qkv.rope_pos_emb_layer)),
        "attention_dropout": family.dropout_rate(decoder, attention.dropout),
        **(own if kind in ("llama", "qwen3") else {}),
    }


def _entries(s: settings.Settings) -> list[family.TensorMapping]:
    v, heads = _variant(s), s.size("num_attention_heads")
    attention, ff = "self_attention.attention", "feed_forward"
    qkv = f"{attention}.i_proj"
    entries = [
        *family.linear_entries("embed_tokens", "decoder.emb.token_emb"),
        *family.norm_entries("norm", "decoder.output_norm"),
        *family.norm_entries("layers.{}.input_layernorm", "self_attention.norm"),
        *family.norm_entries("layers.{}.post_attention_layernorm", f"{ff}.norm"),
    ]
    if not s.flag("tie_word_embeddings", False):
        entries += family.linear_entries("lm_head", "decoder.lm_head")
    for name, count in (("q_proj", heads), ("k_proj", v.kv_heads), ("v_proj", v.kv_heads)):
        rotary = name != "v_proj"
        biases = family.head_biases(count, rotary=rotary) if v.qkv_bias else None
        kernel = family.input_heads(count, rotary=rotary)
        hf_name, weft_name = f"layers.{{}}.self_attn.{name}", f"{qkv}.i_proj.{name}"
        entries += family.linear_entries(hf_name, weft_name, kernel, biases)
    for name, scale in (("q_norm", "query_scale"), ("k_norm", "key_scale")) if v.qk_norm else ():
        hf_name, weft_name = f"layers.{{}}.self_attn.{name}.weight", f"{qkv}.{scale}.norm.scale"
        entries.append(family.TensorMapping(hf_name, weft_name, family.ROTARY))
    kernel, bias = family.output_heads(heads), family.IDENTITY if v.output_bias else None
    hf_name, weft_name = "layers.{}.self_attn.o_proj", f"{attention}.o_proj"
    entries += family.linear_entries(hf_name, weft_name, kernel, bias)
    bias = family.IDENTITY if v.mlp_bias else None
    for name, layer in (("gate", "linear1_0"), ("up", "linear1_1"), ("down", "linear2")):
        hf_name, weft_name = f"layers.{{}}.mlp.{name}_proj", f"{ff}.{layer}"
        entries += family.linear_entries(hf_name, weft_name, family.TRANSPOSED, bias)
    return entries


LLAMA, MISTRAL, QWEN2, QWEN3 = (
    family.Family(
        model_type=name.lower(),
        architecture=f"{name}ForCausalLM",
        prefix="model.",
        read=_read,
        write=_write,
        entries=_entries,
        extra_allowed=r"lm_head\.weight|.*rotary_emb\.inv_freq",
    )
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
)
