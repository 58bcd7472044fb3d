"""Llama, Mistral, Qwen: rotary positions, RMSNorm before each branch, gated feed-forward layers.

llama     biases of all projections, or of none
mistral   attention within a window; no biases
qwen2     biases of queries, keys and values
qwen3     norms of queries and keys, before they are rotated
"""

from typing import Any, NamedTuple

from weft import config, hierarchy
from weft.hierarchy.causal_lm import Model
from weft.interop.huggingface import family, settings


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
    return _Variant(
        qkv_bias=bias,
        output_bias=bias and kind != "qwen2",
        mlp_bias=kind == "llama" and s.flag("mlp_bias", False),
        qk_norm=kind == "qwen3",
        head_dim=head_dim,
        kv_heads=kv_heads,
    )


def _mask(s: settings.Settings) -> Any:
    if s.get("model_type") != "mistral" or s.values.get("sliding_window", 0) is None:
        return hierarchy.CausalAttentionBias.default_config()
    # Theirs counts the position itself.
    window = s.size("sliding_window", 4096) - 1
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
        "rope_parameters": settings.rotary_settings(qkv.rope_pos_emb_layer),
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
        entries += family.linear_entries(
            f"layers.{{}}.self_attn.{name}",
            f"{qkv}.i_proj.{name}",
            family.input_heads(count, rotary=rotary),
            family.head_biases(count, rotary=rotary) if v.qkv_bias else None,
        )
    for name, scale in (("q_norm", "query_scale"), ("k_norm", "key_scale")) if v.qk_norm else ():
        hf_name, weft_name = f"layers.{{}}.self_attn.{name}.weight", f"{qkv}.{scale}.norm.scale"
        entries.append(family.TensorMapping(hf_name, weft_name, family.ROTARY))
    entries += family.linear_entries(
        "layers.{}.self_attn.o_proj",
        f"{attention}.o_proj",
        family.output_heads(heads),
        family.IDENTITY if v.output_bias else None,
    )
    bias = family.IDENTITY if v.mlp_bias else None
    for name, layer in (("gate", "linear1_0"), ("up", "linear1_1"), ("down", "linear2")):
        hf_name, weft_name = f"layers.{{}}.mlp.{name}_proj", f"{ff}.{layer}"
        entries += family.linear_entries(hf_name, weft_name, family.TRANSPOSED, bias)
    return entries


def _family(model_type: str, architecture: str) -> family.Family:
    return family.Family(
        model_type=model_type,
        architecture=architecture,
        prefix="model.",
        read=_read,
        write=_write,
        entries=_entries,
        extra_allowed=r"lm_head\.weight|.*rotary_emb\.inv_freq",
    )


LLAMA = _family("llama", "LlamaForCausalLM")
MISTRAL = _family("mistral", "MistralForCausalLM")
QWEN2 = _family("qwen2", "Qwen2ForCausalLM")
QWEN3 = _family("qwen3", "Qwen3ForCausalLM")
