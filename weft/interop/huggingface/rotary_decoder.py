"""Decoders with rotary positions and gated feed-forward layers, as Llama and most families have.

A family says in `Parts` what its layers have, and adds the settings of its own to those of `write`.
Config, settings and the table of tensors follow from that.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

from weft import config, functional, hierarchy
from weft.hierarchy.causal_lm import Model
from weft.interop.huggingface import family, settings
from weft.interop.huggingface.settings import Settings

EXTRA_ALLOWED = r"lm_head\.weight|.*rotary_emb\.inv_freq"
"""Tensors that published files have besides: of tied embeddings, and frequencies."""

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True)
class Experts:
    """Mixture of experts of some layers.

    Attributes:
        is_sparse: of each layer, whether it has experts.
        name: of the mixture in a layer, such as "mlp".
        projection_names: of the gate, the other input and the output of an expert.
        shared_hidden_dim: size of an expert that all tokens pass, weighed by a gate; None for none.
    """

    is_sparse: Sequence[bool]
    num_experts: int
    num_experts_per_token: int
    hidden_dim: int
    normalize_gates: bool
    name: str = "mlp"
    projection_names: tuple[str, str, str] = (
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    shared_hidden_dim: int | None = None


@dataclasses.dataclass(frozen=True)
class Parts:
    """Parts of the layers of a family.

    Attributes:
        default_head_dim: size of a head if `head_dim` is not set; None for an equal share of
            `hidden_size`.
        windows: of each layer, the number of positions that it attends to, itself included; None
            for all positions, and instead of the list for all positions in all layers.
        rotaries: the positions of each layer; None for none, and instead of the list for those of
            the settings in all layers.
        partial_rope_factor: part of the dimensions of a head that is rotated; None for all.
        qkv_bias: whether projections to queries, keys and values have biases.
        qk_norm: "head" for a norm of each head of queries and keys before their rotation, "all" for
            one norm of all heads together.
        is_fused: whether one tensor has queries, keys and values, and one the inputs of a gated
            layer.
        structure: of the residual layers; "v2" for a norm of the branch's output alone.
        scale_offset: number added to the scales of norms.
        activation: name of the setting, and its default.
        query_scale: factor of queries; None for `head_dim ** -0.5`.
        atten_logit_cap: bound of the logits of attention.
        logit_cap: bound of the logits of tokens, if the embeddings are tied.
        embedding_scale: factor of embeddings; "unit" for the square root of `hidden_size`.
        residual_weight: factor of the output of a branch.
        logit_divisor: number by which the logits of tokens are divided.
        residual_dropout: name of the setting with the rate of dropout of a branch.
    """

    num_kv_heads: int
    default_head_dim: int | None = None
    windows: Sequence[int | None] | None = None
    rotaries: Sequence[settings.Rotary | None] | None = None
    partial_rope_factor: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["head", "all"] | None = None
    is_fused: bool = False
    structure: Literal["prenorm", "hybridnorm", "v2"] = "prenorm"
    default_eps: float = 1e-6
    scale_offset: float = 0.0
    activation: tuple[str, str] = ("hidden_act", "silu")
    query_scale: float | None = None
    atten_logit_cap: float | None = None
    logit_cap: float | None = None
    embedding_scale: float | Literal["unit"] | None = None
    residual_weight: float = 1.0
    logit_divisor: float = 1.0
    residual_dropout: str | None = None
    is_tied_by_default: bool = False
    experts: Experts | None = None


def rotary_family(
    model_type: str,
    architecture: str,
    parts: Callable[[Settings], Parts],
    write: Callable[[Any], dict[str, Any]],
) -> family.Family:
    """Returns a family by the `Parts` of its settings."""
    return family.Family(
        model_type=model_type,
        architecture=architecture,
        prefix="model.",
        read=lambda s: _read(s, parts(s)),
        write=write,
        entries=lambda s: _entries(s, parts(s)),
        extra_allowed=EXTRA_ALLOWED,
    )


# Settings.


def num_layers(s: Settings) -> int:
    """Returns the number of layers."""
    return s.size("num_hidden_layers", most=settings.MAX_LAYERS)


def layer_types(s: Settings, default: Sequence[str]) -> list[str]:
    """Returns the kind of attention of each layer; `default` if the setting is missing."""
    types = s.get("layer_types", list(default))
    count = num_layers(s)
    if not isinstance(types, list) or len(types) != count:
        raise s.refusal(
            "layer_types",
            types,
            f"can be a list with one entry for each of {count} layers",
        )
    for layer_type in types:
        if layer_type not in (FULL, SLIDING):
            raise s.refusal(
                "layer_types", layer_type, f"can be {FULL!r} or {SLIDING!r}"
            )
    return types


def windows_by_type(
    s: Settings, types: Sequence[str], *default: int
) -> list[int | None]:
    """Returns the window of each layer: that of `sliding_window` if its type is sliding."""
    windows: list[int | None] = [None] * len(types)
    for i, layer_type in enumerate(types):
        if layer_type == SLIDING:
            windows[i] = s.size(
                "sliding_window", *default, most=settings.MAX_SIZE
            )
    return windows


def qwen_windows(s: Settings) -> list[int | None]:
    """Returns the window of each layer of Qwen: the first `max_window_layers` have none."""
    count = num_layers(s)
    if not s.flag("use_sliding_window", False):
        return windows_by_type(s, layer_types(s, [FULL] * count))
    if s.values.get("sliding_window", 4096) is None:
        return [None] * count
    num_full = s.get("max_window_layers", 28)
    if type(num_full) is not int or num_full < 0:
        raise s.refusal("max_window_layers", num_full, "can be a whole number")
    types = [FULL] * min(num_full, count)
    types += [SLIDING] * (count - len(types))
    return windows_by_type(s, layer_types(s, types), 4096)


def windows_of(cfg: Any) -> list[int | None]:
    """Returns the window of each layer of a model, the position itself included."""
    windows: list[int | None] = []
    for layer in family.layers_of(cfg.decoder.transformer):
        mask = layer.self_attention.attention.mask
        window = getattr(mask, "sliding_window_size", None)
        windows.append(None if window is None else window + 1)
    return windows


def window_settings(cfg: Any) -> dict[str, Any]:
    """Returns `layer_types`, and the size of the windows if there are any."""
    windows = windows_of(cfg)
    types = [FULL if window is None else SLIDING for window in windows]
    sizes = [window for window in windows if window is not None]
    if not sizes:
        return {"layer_types": types}
    return {"layer_types": types, "sliding_window": sizes[0]}


def qwen_window_settings(cfg: Any) -> dict[str, Any]:
    """Returns the settings that `qwen_windows` reads."""
    values = window_settings(cfg)
    if "sliding_window" not in values:
        return {"use_sliding_window": False}
    num_full = values["layer_types"].index(SLIDING)
    return {
        **values,
        "use_sliding_window": True,
        "max_window_layers": num_full,
    }


def query_pre_attn_scalar(attention: Any) -> float:
    """Returns the number whose root divides queries, as Gemma has it."""
    scale = attention.query_scale.scale_factor.value**-2
    # Rounded where the root was.
    return round(scale) if math.isclose(scale, round(scale)) else scale


def num_choices(s: Settings, num_experts: int, default: int) -> int:
    """Returns the number of experts of a token."""
    count = s.size("num_experts_per_tok", default)
    if count > num_experts:
        raise s.refusal(
            "num_experts_per_tok", count, f"can be at most {num_experts}"
        )
    return count


def qwen_experts(
    s: Settings, *, shared_hidden_dim: int | None = None
) -> Experts:
    """Returns the experts of Qwen: in each layer, or as often as `decoder_sparse_step` says."""
    dense = s.get("mlp_only_layers", [])
    if not isinstance(dense, list) or any(type(i) is not int for i in dense):
        raise s.refusal(
            "mlp_only_layers", dense, "can be a list of numbers of layers"
        )
    step = s.size("decoder_sparse_step", 1)
    is_sparse: list[bool] = []
    for i in range(num_layers(s)):
        is_sparse.append(i not in dense and (i + 1) % step == 0)
    # The name since transformers 5, and before.
    name = "num_experts"
    if s.values.get("num_local_experts") is not None:
        name = "num_local_experts"
    num_experts = s.size(name, 128, most=settings.MAX_EXPERTS)
    return Experts(
        is_sparse=is_sparse,
        num_experts=num_experts,
        num_experts_per_token=num_choices(s, num_experts, 8),
        hidden_dim=s.size("moe_intermediate_size", 768),
        normalize_gates=s.flag("norm_topk_prob", False),
        shared_hidden_dim=shared_hidden_dim,
    )


def qwen_expert_settings(cfg: Any) -> dict[str, Any]:
    """Returns the settings that `qwen_experts` reads."""
    layers = family.layers_of(cfg.decoder.transformer)
    experts, is_sparse = experts_of(layers)
    dense_layers: list[int] = []
    values: dict[str, Any] = {}
    for i, layer in enumerate(layers):
        if not is_sparse[i]:
            dense_layers.append(i)
            values["intermediate_size"] = family.hidden_dim(
                layer.feed_forward, cfg.decoder.dim
            )
    return {
        **values,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.gating.num_experts_per_token,
        "moe_intermediate_size": family.hidden_dim(experts, cfg.decoder.dim),
        "norm_topk_prob": experts.gating.normalize_gates,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense_layers,
    }


def _head_dim(s: Settings, parts: Parts) -> int:
    share = max(s.size("hidden_size") // s.size("num_attention_heads"), 1)
    head_dim = s.size("head_dim", parts.default_head_dim or share)
    rotary_dim = int(head_dim * (parts.partial_rope_factor or 1.0))
    if rotary_dim < 2 or rotary_dim % 2:
        raise s.refusal(
            "head_dim",
            head_dim,
            f"can be even, as halves of {rotary_dim} dimensions are rotated",
        )
    return head_dim


def _is_tied(s: Settings, parts: Parts) -> bool:
    return s.flag("tie_word_embeddings", parts.is_tied_by_default)


# Configs.


@dataclasses.dataclass(frozen=True)
class _LayerKind:
    """Differences of a layer from others of its model."""

    window: int | None
    rotary: settings.Rotary | None
    is_sparse: bool


def _read(s: Settings, parts: Parts) -> Model.Config:
    """Returns the config of the model that a `config.json` describes."""
    num_heads = s.size("num_attention_heads")
    if num_heads % parts.num_kv_heads:
        raise s.refusal(
            "num_key_value_heads",
            parts.num_kv_heads,
            f"divides num_attention_heads={num_heads}",
        )
    norm = _norm(s, parts)
    decoder = family.decoder_config(
        s, _layers(s, parts), dim=s.size("hidden_size"), norm=norm
    )
    if not _is_tied(s, parts):
        decoder.lm_head = hierarchy.LmHead.default_config()
    elif parts.logit_cap is not None:
        decoder.emb.soft_cap_logits = parts.logit_cap
    if parts.logit_cap is not None and not _is_tied(s, parts):
        raise s.refusal("tie_word_embeddings", False, "can be true")
    embedding = decoder.emb.token_emb
    if parts.embedding_scale == "unit":
        embedding.scale = hierarchy.Embedding.Scale.UNIT
    elif parts.embedding_scale not in (None, 1.0):
        embedding.scale = hierarchy.Embedding.Scale.CONSTANT
        embedding.scale_constant = parts.embedding_scale
    if parts.logit_divisor != 1:
        decoder.output_logits_modifier = config.config_for_function(
            functional.scale_by
        ).set(temperature=parts.logit_divisor, min_temperature=0.0)
    return Model.default_config().set(decoder=decoder)


def _layers(
    s: Settings, parts: Parts
) -> list[hierarchy.TransformerLayer.Config]:
    """Returns the config of each layer; equal layers share one."""
    count = num_layers(s)
    windows = parts.windows
    if windows is None:
        types = layer_types(s, [FULL] * count)
        if SLIDING in types:
            raise s.refusal("layer_types", SLIDING, f"can be {FULL!r}")
        windows = [None] * count
    rotaries = parts.rotaries
    if rotaries is None:
        rotaries = [s.rotary()] * count
    if parts.partial_rope_factor is None and s.partial_rotary_factor():
        raise s.refusal(
            "partial_rotary_factor", s.partial_rotary_factor(), "can be 1"
        )
    is_sparse = [False] * count
    if parts.experts is not None:
        is_sparse = parts.experts.is_sparse
    # Configs cannot be hashed, and a stranger's settings may have many layers.
    layer_by_key: dict[Any, hierarchy.TransformerLayer.Config] = {}
    layers: list[hierarchy.TransformerLayer.Config] = []
    for window, rotary, sparse in zip(
        windows, rotaries, is_sparse, strict=True
    ):
        key = (window, id(rotary), sparse)
        if key not in layer_by_key:
            kind = _LayerKind(window, rotary, sparse)
            layer_by_key[key] = _layer(s, parts, kind)
        layers.append(layer_by_key[key])
    return layers


def _norm(s: Settings, parts: Parts) -> hierarchy.RMSNorm.Config:
    return hierarchy.RMSNorm.default_config().set(
        eps=s.number("rms_norm_eps", parts.default_eps),
        scale_offset=parts.scale_offset,
    )


def _layer(
    s: Settings, parts: Parts, kind: _LayerKind
) -> hierarchy.TransformerLayer.Config:
    norm: Any = _norm(s, parts)
    if parts.structure == "v2":
        norm = {hierarchy.NormPosition.RES_NORM: norm}
    dropout = hierarchy.Dropout.default_config()
    if parts.residual_dropout is not None:
        dropout = s.dropout(parts.residual_dropout, 0.0)
    layer = hierarchy.TransformerLayer.default_config()
    layer.self_attention.set(
        norm=norm,
        structure=parts.structure,
        residual_weight=parts.residual_weight,
        attention=_attention(s, parts, kind),
        dropout=dropout,
    )
    activation: Any = (s.activation(*parts.activation), "linear")
    if kind.is_sparse:
        layer.feed_forward = _experts(parts, activation)
    else:
        layer.feed_forward.set(
            hidden_dim=s.size("intermediate_size"), activation=activation
        )
        if parts.residual_dropout is not None:
            no_dropout = hierarchy.Dropout.default_config().set(rate=0.0)
            layer.feed_forward.hidden_dropout = no_dropout
        layer.feed_forward.linear1.bias = parts.mlp_bias
        layer.feed_forward.linear2.bias = parts.mlp_bias
    layer.feed_forward.set(
        norm=norm,
        structure=parts.structure,
        residual_weight=parts.residual_weight,
        dropout=dropout,
    )
    return layer


def _experts(
    parts: Parts, activation: Any
) -> hierarchy.TransformerFeedForwardDropFreeMoE.Config:
    experts = parts.experts
    assert experts is not None, "of a layer that is sparse"
    gating = hierarchy.TopKDropFreeGating.default_config().set(
        num_experts_per_token=experts.num_experts_per_token,
        normalize_gates=experts.normalize_gates,
    )
    cls = hierarchy.TransformerFeedForwardDropFreeMoE
    moe = cls.default_config().set(
        hidden_dim=experts.hidden_dim,
        activation=activation,
        num_experts=experts.num_experts,
        gating=gating,
    )
    if experts.shared_hidden_dim is not None:
        shared = hierarchy.TransformerFeedForwardLayer.default_config().set(
            structure="nonorm",
            hidden_dim=experts.shared_hidden_dim,
            activation=activation,
        )
        shared.linear1.bias = shared.linear2.bias = False
        moe.set(shared_expert=shared, shared_expert_gate=True)
    return moe


def _attention(
    s: Settings, parts: Parts, kind: _LayerKind
) -> hierarchy.GroupedQueryAttention.Config:
    num_heads, head_dim = s.size("num_attention_heads"), _head_dim(s, parts)
    mask = hierarchy.CausalAttentionBias.default_config()
    if kind.window is not None:
        # Theirs counts the position itself.
        mask = hierarchy.SlidingWindowAttentionBias.default_config(
            sliding_window_size=kind.window - 1
        )
    attention = hierarchy.GroupedQueryAttention.default_config().set(
        num_heads=num_heads,
        hidden_dim=num_heads * head_dim,
        mask=mask,
        input_linear=_qkv(s, parts, kind.rotary),
        dropout=s.dropout("attention_dropout", 0.0),
        atten_logit_cap=parts.atten_logit_cap,
    )
    if parts.query_scale is not None:
        attention.query_scale = hierarchy.ScaleQuery.default_config().set(
            scale_factor=_constant(parts.query_scale)
        )
    attention.output_linear.bias = parts.output_bias
    return attention


def _constant(value: float) -> Any:
    return config.config_for_function(hierarchy.constant_scale_fn).set(
        value=value
    )


def _qkv(
    s: Settings, parts: Parts, rotary: settings.Rotary | None
) -> hierarchy.BaseQKVLinear.Config:
    projections = hierarchy.GroupedQKVLinear.default_config().set(
        num_kv_heads=parts.num_kv_heads
    )
    projections.layer.bias = parts.qkv_bias
    if rotary is None:
        return projections
    _check_rotary(s, parts, rotary)
    qkv = hierarchy.RoFormerQKVLinear.default_config().set(
        rope_pos_emb_layer=rotary,
        input_linear=projections,
        rotary_value=False,
        partial_rope_factor=parts.partial_rope_factor,
    )
    if parts.qk_norm is None:
        return qkv
    # Before the rotation; the scale of the logits comes after it, in the attention.
    query_norm = key_norm = _norm(s, parts)
    if parts.qk_norm == "all":
        norm = hierarchy.MultiheadRMSNorm.default_config().set(
            eps=s.number("rms_norm_eps", parts.default_eps)
        )
        query_norm = norm.clone(num_heads=s.size("num_attention_heads"))
        key_norm = norm.clone(num_heads=parts.num_kv_heads)
    return qkv.set(
        query_scale=hierarchy.ScaleQuery.default_config().set(
            norm=query_norm, scale_factor=_constant(1.0)
        ),
        key_scale=hierarchy.ScaleKey.default_config().set(norm=key_norm),
    )


def _check_rotary(s: Settings, parts: Parts, rotary: settings.Rotary) -> None:
    """Checks that positions fit the size of the heads."""
    dim = int(_head_dim(s, parts) * (parts.partial_rope_factor or 1.0))
    if isinstance(
        rotary, hierarchy.LongRoPESinusoidalPositionalEmbedding.Config
    ):
        for name in ("short_factors", "long_factors"):
            factors = getattr(rotary, name)
            if 2 * len(factors) != dim:
                raise s.refusal(
                    name.removesuffix("s"),
                    factors,
                    f"can be a list of {dim // 2} numbers",
                )
    is_dynamic = isinstance(
        rotary, hierarchy.DynamicNTKSinusoidalPositionalEmbedding.Config
    )
    if is_dynamic and dim < 4:
        raise s.refusal("head_dim", dim, "can be 4 or more with this rope_type")


# Settings of a config.


def similar_settings(cfg: Any) -> dict[str, Any]:
    """Returns settings with the sizes of any decoder with attention, to compare both."""
    decoder = cfg.decoder
    layers = family.layers_of(decoder.transformer)
    layer = layers[0]
    attention = layer.self_attention.attention
    values = {
        "model_type": "llama",
        "hidden_size": decoder.dim,
        "intermediate_size": family.hidden_dim(layer.feed_forward, decoder.dim),
        "num_hidden_layers": len(layers),
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_heads,
        "rms_norm_eps": getattr(decoder.output_norm, "eps", 1e-6),
        "tie_word_embeddings": decoder.lm_head is None,
        "vocab_size": decoder.vocab_size,
        **family.special_tokens(decoder),
    }
    window = windows_of(cfg)[0]
    if window is not None:
        values |= {"model_type": "mistral", "sliding_window": window}
    return values


def write(cfg: Any) -> dict[str, Any]:
    """Returns the settings that all families have; each adds its own."""
    decoder = cfg.decoder
    layers = family.layers_of(decoder.transformer)
    attention, feed_forward = (
        layers[0].self_attention.attention,
        layers[0].feed_forward,
    )
    if isinstance(feed_forward.activation, str):
        raise TypeError("the feed-forward layers of these models are gated")
    rotary = getattr(attention.input_linear, "rope_pos_emb_layer", None)
    return {
        **length_settings(rotary),
        **similar_settings(cfg),
        "num_key_value_heads": projections_of(attention).num_kv_heads,
        "head_dim": (attention.hidden_dim or decoder.dim)
        // attention.num_heads,
        "hidden_act": family.activation_name(feed_forward.activation[0]),
        "rms_norm_eps": decoder.output_norm.eps,
        **settings.rope_settings(rotary_settings(layers)),
        "attention_dropout": family.dropout_rate(decoder, attention.dropout),
    }


def length_settings(rotary: settings.Rotary | None) -> dict[str, int]:
    """Returns the longest sequence if rotary positions depend on it, else nothing."""
    if isinstance(
        rotary, hierarchy.DynamicNTKSinusoidalPositionalEmbedding.Config
    ):
        return {"max_position_embeddings": rotary.original_max_seq_length}
    return {}


def projections_of(attention: Any) -> Any:
    """Returns the config of the projections to queries, keys and values, rotated or not."""
    qkv = attention.input_linear
    if isinstance(qkv, hierarchy.RoFormerQKVLinear.Config):
        return qkv.input_linear
    return qkv


def is_rotary(layer: Any) -> bool:
    """Returns whether a layer rotates queries and keys."""
    qkv = layer.self_attention.attention.input_linear
    return isinstance(qkv, hierarchy.RoFormerQKVLinear.Config)


def rotary_settings(layers: Sequence[Any]) -> dict[str, Any]:
    """Returns the rotary positions of the first of some layers that has them."""
    for layer in layers:
        if is_rotary(layer):
            qkv = layer.self_attention.attention.input_linear
            values = settings.rotary_settings(qkv.rope_pos_emb_layer)
            if qkv.partial_rope_factor is not None:
                values["partial_rotary_factor"] = qkv.partial_rope_factor
            return values
    raise TypeError("no layer of the model has rotary positions")


def experts_of(layers: Sequence[Any]) -> tuple[Any, list[bool]]:
    """Returns the config of the experts of a model, and which layers have them."""
    is_sparse: list[bool] = []
    experts: Any = None
    for layer in layers:
        is_sparse.append(hasattr(layer.feed_forward, "num_experts"))
        if is_sparse[-1]:
            experts = layer.feed_forward
    if experts is None:
        raise TypeError("no layer of the model has experts")
    return experts, is_sparse


# Tensors.

_ATTENTION, _FEED_FORWARD = "self_attention.attention", "feed_forward"


# Norms of a layer by its structure: names of theirs and of ours.
_NORMS = {
    "prenorm": {
        "input_layernorm": "self_attention.norm",
        "post_attention_layernorm": "feed_forward.norm",
    },
    "hybridnorm": {
        "input_layernorm": "self_attention.prenorm",
        "post_attention_layernorm": "self_attention.postnorm",
        "pre_feedforward_layernorm": "feed_forward.prenorm",
        "post_feedforward_layernorm": "feed_forward.postnorm",
    },
    "v2": {
        "post_attention_layernorm": "self_attention.res_norm",
        "post_feedforward_layernorm": "feed_forward.res_norm",
    },
}


def _entries(s: Settings, parts: Parts) -> list[family.TensorMapping]:
    """Returns the table of tensors."""
    entries = [
        *family.linear_entries("embed_tokens", "decoder.emb.token_emb"),
        *family.norm_entries("norm", "decoder.output_norm"),
        *_attention_entries(s, parts),
    ]
    for hf_name, weft_name in _NORMS[parts.structure].items():
        entries += family.norm_entries(f"layers.{{}}.{hf_name}", weft_name)
    experts = parts.experts
    if experts is not None and any(experts.is_sparse):
        entries += _expert_entries(experts)
    if experts is None or not all(experts.is_sparse):
        entries += _feed_forward_entries(s, parts)
    if not _is_tied(s, parts):
        entries += family.linear_entries("lm_head", "decoder.lm_head")
    return entries


def _attention_entries(s: Settings, parts: Parts) -> list[family.TensorMapping]:
    entries = family.linear_entries(
        "layers.{}.self_attn.o_proj",
        f"{_ATTENTION}.o_proj",
        family.output_heads(s.size("num_attention_heads")),
        family.IDENTITY if parts.output_bias else None,
    )
    rotaries = parts.rotaries
    if rotaries is None or any(rotary is not None for rotary in rotaries):
        entries += _qkv_entries(s, parts, is_rotated=True)
    if rotaries is not None and None in rotaries:
        entries += _qkv_entries(s, parts, is_rotated=False)
    return entries


def _qkv_entries(
    s: Settings, parts: Parts, *, is_rotated: bool
) -> list[family.TensorMapping]:
    """Returns the entries of projections and norms, in layers with rotary positions or without."""
    num_heads, num_kv_heads = s.size("num_attention_heads"), parts.num_kv_heads
    head_dim = _head_dim(s, parts)
    rotary_dim = int(head_dim * (parts.partial_rope_factor or 1.0))
    path = f"{_ATTENTION}.i_proj"
    if is_rotated:
        path = f"{path}.i_proj"
    entries: list[family.TensorMapping] = []
    start = 0
    for name, count in (
        ("q_proj", num_heads),
        ("k_proj", num_kv_heads),
        ("v_proj", num_kv_heads),
    ):
        is_rotary_name = is_rotated and name != "v_proj"
        order = {"rotary": is_rotary_name, "rotary_dim": rotary_dim}
        rows = None
        if parts.is_fused:
            rows = (start, start + count * head_dim)
            start = rows[1]
        entries += family.linear_entries(
            f"layers.{{}}.self_attn.{'qkv_proj' if parts.is_fused else name}",
            f"{path}.{name}",
            family.input_heads(count, **order),
            family.head_biases(count, **order) if parts.qkv_bias else None,
            rows=rows,
        )
    if parts.qk_norm is None:
        return entries
    for hf_name, weft_name, count in (
        ("q_norm", "query_scale", num_heads),
        ("k_norm", "key_scale", num_kv_heads),
    ):
        change = family.rotary_order(rotary_dim)
        if parts.qk_norm == "all":
            change = family.head_biases(
                count, rotary=True, rotary_dim=rotary_dim
            )
        entries.append(
            family.TensorMapping(
                f"layers.{{}}.self_attn.{hf_name}.weight",
                f"{_ATTENTION}.i_proj.{weft_name}.norm.scale",
                change,
            )
        )
    return entries


def _feed_forward_entries(
    s: Settings, parts: Parts
) -> list[family.TensorMapping]:
    entries: list[family.TensorMapping] = []
    bias = family.IDENTITY if parts.mlp_bias else None
    hidden_dim = s.size("intermediate_size")
    for i, (name, layer) in enumerate(
        (
            ("gate_proj", "linear1_0"),
            ("up_proj", "linear1_1"),
            ("down_proj", "linear2"),
        )
    ):
        hf_name, rows = name, None
        if parts.is_fused and layer != "linear2":
            hf_name = "gate_up_proj"
            rows = (i * hidden_dim, (i + 1) * hidden_dim)
        entries += family.linear_entries(
            f"layers.{{}}.mlp.{hf_name}",
            f"{_FEED_FORWARD}.{layer}",
            family.TRANSPOSED,
            bias,
            rows=rows,
        )
    return entries


def _expert_entries(experts: Experts) -> list[family.TensorMapping]:
    mixture = f"layers.{{}}.{experts.name}"
    entries = [
        family.TensorMapping(
            f"{mixture}.gate.weight",
            f"{_FEED_FORWARD}.gate_weight",
            family.TRANSPOSED,
        )
    ]
    for hf_name, weft_name in zip(
        experts.projection_names,
        ("wi_0_weight", "wi_1_weight", "wo_weight"),
        strict=True,
    ):
        entries.append(
            family.TensorMapping(
                f"{mixture}.experts.{{expert}}.{hf_name}.weight",
                f"{_FEED_FORWARD}.{weft_name}",
                family.TRANSPOSED,
            )
        )
    if experts.shared_hidden_dim is None:
        return entries
    for hf_name, weft_name in zip(
        experts.projection_names,
        ("linear1_0", "linear1_1", "linear2"),
        strict=True,
    ):
        entries += family.linear_entries(
            f"{mixture}.shared_expert.{hf_name}",
            f"{_FEED_FORWARD}.shared_expert.{weft_name}",
            family.TRANSPOSED,
        )
    entries.append(
        family.TensorMapping(
            f"{mixture}.shared_expert_gate.weight",
            f"{_FEED_FORWARD}.shared_expert_gate_weight",
            family.TRANSPOSED,
        )
    )
    return entries
