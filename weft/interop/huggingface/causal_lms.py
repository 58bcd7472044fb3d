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
    dim = s.size("n_embd")
    num_layers = s.size("n_layer", most=settings.MAX_LAYERS)
    num_heads = s.size("n_head")
    if dim % num_heads:
        raise s.refusal("n_head", num_heads, f"divides n_embd={dim}")
    norm = hierarchy.LayerNorm.default_config().set(eps=s.number("layer_norm_epsilon", 1e-5))
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
    num_heads = s.size("n_head")
    attention, feed_forward = "self_attention.attention", "feed_forward"
    return [
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
        *family.linear_entries("h.{}.mlp.c_fc", f"{feed_forward}.linear1", bias=family.IDENTITY),
        *family.linear_entries("h.{}.mlp.c_proj", f"{feed_forward}.linear2", bias=family.IDENTITY),
        *family.norm_entries("ln_f", "decoder.output_norm", bias=True),
        *family.norm_entries("h.{}.ln_1", "self_attention.norm", bias=True),
        *family.norm_entries("h.{}.ln_2", f"{feed_forward}.norm", bias=True),
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
    model_type = s.get("model_type")
    num_heads, dim = s.size("num_attention_heads"), s.size("hidden_size")
    qkv_bias = output_bias = mlp_bias = False
    if model_type == "qwen2":
        qkv_bias = True
    elif model_type != "mistral":
        qkv_bias = output_bias = s.flag("attention_bias", False)
    if model_type == "llama":
        mlp_bias = s.flag("mlp_bias", False)
    has_qk_norm = model_type == "qwen3"
    head_dim = s.size("head_dim", 128 if has_qk_norm else max(dim // num_heads, 1))
    if head_dim % 2:
        raise s.refusal("head_dim", head_dim, "can be even, as halves of it are rotated")
    # What `transformers` takes for a missing setting.
    default_kv_heads = {"llama": num_heads, "mistral": 8}.get(model_type, 32)
    kv_heads = s.size("num_key_value_heads", default_kv_heads)
    if num_heads % kv_heads:
        raise s.refusal("num_key_value_heads", kv_heads, f"divides num_attention_heads={num_heads}")
    return _Variant(qkv_bias, output_bias, mlp_bias, has_qk_norm, head_dim, kv_heads)


def _mask(s: settings.Settings) -> Any:
    if s.get("model_type") != "mistral" or s.values.get("sliding_window", 0) is None:
        return hierarchy.CausalAttentionBias.default_config()
    window = s.size("sliding_window", 4096, most=settings.MAX_SIZE)
    # Theirs counts the position itself.
    return hierarchy.SlidingWindowAttentionBias.default_config(sliding_window_size=window - 1)


def _read(s: settings.Settings) -> Model.Config:
    s.require("use_sliding_window", False)
    layer_types = s.get("layer_types", [])
    if not isinstance(layer_types, list):
        raise s.refusal("layer_types", layer_types, "can be a list")
    for layer_type in layer_types:
        if layer_type != "full_attention":
            raise s.refusal("layer_types", layer_type, "can be 'full_attention'")
    s.require("pretraining_tp", 1)
    variant = _variant(s)
    dim, num_heads = s.size("hidden_size"), s.size("num_attention_heads")
    norm = hierarchy.RMSNorm.default_config().set(eps=s.number("rms_norm_eps", 1e-6))
    qkv = hierarchy.RoFormerQKVLinear.default_config().set(
        rope_pos_emb_layer=s.rotary(),
        input_linear=hierarchy.GroupedQKVLinear.default_config().set(num_kv_heads=variant.kv_heads),
        rotary_value=False,
    )
    qkv.input_linear.layer.bias = variant.qkv_bias
    if variant.qk_norm:
        # Before the rotation; the scale of the logits comes after it, in the attention.
        one = config.config_for_function(hierarchy.constant_scale_fn).set(value=1.0)
        qkv.query_scale = hierarchy.ScaleQuery.default_config().set(norm=norm, scale_factor=one)
        qkv.key_scale = hierarchy.ScaleKey.default_config().set(norm=norm)
    layer = hierarchy.TransformerLayer.default_config()
    layer.self_attention.set(
        norm=norm,
        attention=hierarchy.GroupedQueryAttention.default_config().set(
            num_heads=num_heads,
            hidden_dim=num_heads * variant.head_dim,
            mask=_mask(s),
            input_linear=qkv,
            dropout=s.dropout("attention_dropout", 0.0),
        ),
    )
    layer.self_attention.attention.output_linear.bias = variant.output_bias
    layer.feed_forward.set(
        norm=norm,
        hidden_dim=s.size("intermediate_size"),
        activation=(s.activation("hidden_act", "silu"), "linear"),
    )
    layer.feed_forward.linear1.bias = layer.feed_forward.linear2.bias = variant.mlp_bias
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
    values = {
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
    }
    window = getattr(attention.mask, "sliding_window_size", None)
    if window is not None:
        values |= {"model_type": "mistral", "sliding_window": window + 1}
    return values


def _write(cfg: Any) -> dict[str, Any]:
    decoder = cfg.decoder
    values = similar_settings(cfg)
    layer = decoder.transformer.layer
    attention, feed_forward = layer.self_attention.attention, layer.feed_forward
    qkv = attention.input_linear
    qkv_bias, output_bias = qkv.input_linear.layer.bias, attention.output_linear.bias
    if isinstance(feed_forward.activation, str):
        raise TypeError("the feed-forward layers of these models are gated")
    model_type = values["model_type"]
    if model_type == "llama" and qkv.query_scale is not None:
        model_type = "qwen3"
    elif model_type == "llama" and qkv_bias and not output_bias:
        model_type = "qwen2"
    if model_type in ("llama", "qwen3"):
        values |= {"attention_bias": qkv_bias, "mlp_bias": feed_forward.linear1.bias}
    return {
        **values,
        "model_type": model_type,
        "num_key_value_heads": qkv.input_linear.num_kv_heads,
        "head_dim": (attention.hidden_dim or decoder.dim) // attention.num_heads,
        "hidden_act": family.activation_name(feed_forward.activation[0]),
        "rms_norm_eps": decoder.output_norm.eps,
        **settings.rope_settings(settings.rotary_settings(qkv.rope_pos_emb_layer)),
        "attention_dropout": family.dropout_rate(decoder, attention.dropout),
    }


def _entries(s: settings.Settings) -> list[family.TensorMapping]:
    variant, num_heads = _variant(s), s.size("num_attention_heads")
    attention, feed_forward = "self_attention.attention", "feed_forward"
    entries = [
        *family.linear_entries("embed_tokens", "decoder.emb.token_emb"),
        *family.norm_entries("norm", "decoder.output_norm"),
        *family.norm_entries("layers.{}.input_layernorm", "self_attention.norm"),
        *family.norm_entries("layers.{}.post_attention_layernorm", f"{feed_forward}.norm"),
    ]
    if not s.flag("tie_word_embeddings", False):
        entries += family.linear_entries("lm_head", "decoder.lm_head")
    for name in ("q_proj", "k_proj", "v_proj"):
        count = num_heads if name == "q_proj" else variant.kv_heads
        is_rotary = name != "v_proj"
        bias = family.head_biases(count, rotary=is_rotary) if variant.qkv_bias else None
        entries += family.linear_entries(
            f"layers.{{}}.self_attn.{name}",
            f"{attention}.i_proj.i_proj.{name}",
            family.input_heads(count, rotary=is_rotary),
            bias,
        )
    if variant.qk_norm:
        for hf_name, weft_name in (("q_norm", "query_scale"), ("k_norm", "key_scale")):
            entries.append(
                family.TensorMapping(
                    f"layers.{{}}.self_attn.{hf_name}.weight",
                    f"{attention}.i_proj.{weft_name}.norm.scale",
                    family.ROTARY,
                )
            )
    entries += family.linear_entries(
        "layers.{}.self_attn.o_proj",
        f"{attention}.o_proj",
        family.output_heads(num_heads),
        family.IDENTITY if variant.output_bias else None,
    )
    mlp_bias = family.IDENTITY if variant.mlp_bias else None
    for name, layer in (("gate", "linear1_0"), ("up", "linear1_1"), ("down", "linear2")):
        hf_name, weft_name = f"layers.{{}}.mlp.{name}_proj", f"{feed_forward}.{layer}"
        entries += family.linear_entries(hf_name, weft_name, family.TRANSPOSED, mlp_bias)
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
