"""T5: an encoder and a decoder with relative positions in buckets (Raffel et al., 2020).

Version 1.1 (Shazeer, 2020) has gated feed-forward layers and an output layer of its own, which is
written as `tie_word_embeddings` false before transformers 5, and as `scale_decoder_outputs` false
since.
"""

import math
from collections.abc import Collection
from typing import Any

from weft import config, functional, hierarchy
from weft.hierarchy.encoder_decoder import EncoderDecoderModel, SourceEncoder
from weft.interop.huggingface import family
from weft.interop.huggingface.settings import (
    ACTIVATIONS,
    MAX_LAYERS,
    Setting,
    Settings,
)

_HAS_OUTPUT_LAYER = "has_output_layer"  # `config.json` does not say it
_GATED_GELU = "gated-gelu"
_GATED = "gated-"
_ACTIVATION = "feed_forward_proj"


def read(s: Settings) -> EncoderDecoderModel.Config:
    """Returns the config of the model that a `config.json` describes."""
    dim = s.size("d_model")
    num_layers = s.size("num_layers", most=MAX_LAYERS)
    num_decoder_layers = s.size(
        "num_decoder_layers", num_layers, most=MAX_LAYERS
    )
    rate = s.number("dropout_rate", 0.1, most=1.0)
    decoder_layer = _layer(s)
    decoder_layer.cross_attention = _attention(s).set(source_dim=dim)
    decoder = family.decoder_config(
        s, [decoder_layer] * num_decoder_layers, dim=dim, norm=_norm(s)
    )
    pad = s.token("pad_token_id", 0)
    decoder.set(
        attention_mask=_biases(s, is_causal=True),
        dropout_rate=rate,
        pad_token_id=pad,
    )
    if _is_scaled(s):
        decoder.output_logits_modifier = config.config_for_function(
            functional.scale_by
        ).set(temperature=math.sqrt(dim), min_temperature=0.0)
    if not _is_tied(s):
        decoder.lm_head = hierarchy.LmHead.default_config()
    encoder = SourceEncoder.default_config().set(
        attention_mask=_biases(s, is_causal=False),
        transformer=family.stack_of(
            [_layer(s)] * num_layers,
            hierarchy.RepeatedTransformerLayer.default_config(),
        ),
        output_norm=_norm(s),
        dropout_rate=rate,
    )
    return EncoderDecoderModel.default_config().set(
        encoder=encoder,
        decoder=decoder,
        pad_token_id=pad,
        decoder_start_token_id=s.token("decoder_start_token_id", pad),
    )


def _norm(s: Settings) -> hierarchy.RMSNorm.Config:
    return hierarchy.RMSNorm.default_config().set(
        eps=s.number("layer_norm_epsilon", 1e-6)
    )


def _layer(s: Settings) -> hierarchy.TransformerLayer.Config:
    """Returns the config of a layer without cross attention."""
    layer = hierarchy.TransformerLayer.default_config()
    layer.self_attention = _attention(s)
    layer.feed_forward.set(
        norm=_norm(s), hidden_dim=s.size("d_ff"), activation=_activation(s)
    )
    layer.feed_forward.linear1.bias = layer.feed_forward.linear2.bias = False
    return layer


def _attention(s: Settings) -> hierarchy.TransformerAttentionLayer.Config:
    num_heads = s.size("num_heads")
    projections = hierarchy.QKVLinear.default_config()
    projections.layer.bias = False
    # Logits have no factor: the initial values of the weights make up for it.
    no_scale = config.config_for_function(hierarchy.constant_scale_fn).set(
        value=1.0
    )
    attention = hierarchy.MultiheadAttention.default_config().set(
        num_heads=num_heads,
        hidden_dim=num_heads * s.size("d_kv"),
        input_linear=projections,
        query_scale=hierarchy.ScaleQuery.default_config().set(
            scale_factor=no_scale
        ),
    )
    attention.output_linear.bias = False
    return hierarchy.TransformerAttentionLayer.default_config().set(
        norm=_norm(s), attention=attention
    )


def _biases(
    s: Settings, *, is_causal: bool
) -> hierarchy.RelativePositionAttentionLogitBiasLayer.Config:
    num_buckets = s.size("relative_attention_num_buckets", 32)
    max_distance = s.size(
        "relative_attention_max_distance", 128, most=_MAX_DISTANCE
    )
    if num_buckets < 4 or num_buckets % 2:
        raise s.refusal(
            "relative_attention_num_buckets",
            num_buckets,
            "can be an even number from 4 on",
        )
    if max_distance <= num_buckets // 2:
        raise s.refusal(
            "relative_attention_max_distance",
            max_distance,
            f"can be above {num_buckets // 2}, half of relative_attention_num_buckets",
        )
    cls = hierarchy.RelativePositionAttentionLogitBiasLayer
    return cls.default_config().set(
        num_heads=s.size("num_heads"),
        num_buckets=num_buckets,
        max_distance=max_distance,
        is_causal=is_causal,
    )


_MAX_DISTANCE = 2**20  # the buckets are a table of as many entries


def _activation(s: Settings) -> Any:
    value = s.get(_ACTIVATION, "relu")
    if value == _GATED_GELU:
        return ("nn.gelu", "linear")  # theirs means that of `gelu_new`
    if isinstance(value, str):
        name = value.removeprefix(_GATED)
        if name in ACTIVATIONS:
            activation = ACTIVATIONS[name]
            return (
                (activation, "linear")
                if value.startswith(_GATED)
                else activation
            )
    names = ", ".join(ACTIVATIONS)
    raise s.refusal(
        _ACTIVATION,
        value,
        f"can be one of {names}, or one of these after 'gated-'",
    )


def _is_scaled(s: Settings) -> bool:
    """Returns whether logits are divided by the root of the dimension."""
    return s.flag("scale_decoder_outputs", s.flag("tie_word_embeddings", True))


def _is_tied(s: Settings) -> bool:
    """Returns whether the output layer is the table of token embeddings."""
    if not s.flag("tie_word_embeddings", True):
        return False
    return _is_scaled(s) or not s.flag(_HAS_OUTPUT_LAYER, True)


def settings_of_files(tensor_names: Collection[str]) -> dict[str, Setting]:
    """Returns the settings that only the files tell: whether there is an output layer.

    Since transformers 5, `tie_word_embeddings` is true in any case.
    """
    return {_HAS_OUTPUT_LAYER: T5.output_layer in tensor_names}


def write(cfg: Any) -> dict[str, Any]:
    """Returns the content of `config.json` for a model: the inverse of `read`."""
    decoder, encoder = cfg.decoder, cfg.encoder
    layer = family.layers_of(encoder.transformer)[0]
    attention = layer.self_attention.attention
    biases = encoder.attention_mask
    is_tied = decoder.lm_head is None
    is_scaled = decoder.output_logits_modifier is not None
    output_layer: dict[str, bool] = {}
    if is_scaled != is_tied:
        output_layer["scale_decoder_outputs"] = is_scaled
    if is_tied and not is_scaled:
        output_layer[_HAS_OUTPUT_LAYER] = False
    return {
        "model_type": "t5",
        "is_encoder_decoder": True,
        "d_model": decoder.dim,
        "d_kv": (attention.hidden_dim or decoder.dim) // attention.num_heads,
        "d_ff": family.hidden_dim(layer.feed_forward, decoder.dim),
        "num_heads": attention.num_heads,
        "num_layers": len(family.layers_of(encoder.transformer)),
        "num_decoder_layers": len(family.layers_of(decoder.transformer)),
        "vocab_size": decoder.vocab_size,
        # As published. Relative positions have no longest sequence.
        "n_positions": 512,
        "relative_attention_num_buckets": biases.num_buckets,
        "relative_attention_max_distance": biases.max_distance,
        "feed_forward_proj": _activation_name(layer.feed_forward.activation),
        "layer_norm_epsilon": decoder.output_norm.eps,
        "dropout_rate": decoder.dropout_rate,
        "tie_word_embeddings": is_tied,
        **output_layer,
        **family.special_tokens(decoder),
        "pad_token_id": cfg.pad_token_id,
        "decoder_start_token_id": cfg.decoder_start_token_id,
    }


def _activation_name(activation: Any) -> str:
    if isinstance(activation, str):
        return family.activation_name(activation)
    if activation[0] == "nn.gelu":
        return _GATED_GELU
    return _GATED + family.activation_name(activation[0])


def entries(s: Settings) -> list[family.TensorMapping]:
    """Returns the table of tensors."""
    mappings = family.linear_entries("shared", "decoder.emb.token_emb")
    # The feed-forward layer comes last in both: the second or the third part.
    for name, feed_forward in (("encoder", 1), ("decoder", 2)):
        block = f"{name}.block.{{}}.layer"
        layer = "encoder.transformer." if name == "encoder" else ""
        mappings += _attention_entries(
            s, f"{block}.0", "SelfAttention", f"{layer}self_attention"
        )
        mappings += _feed_forward_entries(
            s, f"{block}.{feed_forward}", f"{layer}feed_forward"
        )
        mappings += family.norm_entries(
            f"{name}.final_layer_norm", f"{name}.output_norm"
        )
        mappings += family.linear_entries(
            f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias",
            f"{name}.attention_mask",
        )
    mappings += _attention_entries(
        s, "decoder.block.{}.layer.1", "EncDecAttention", "cross_attention"
    )
    for mapping in family.linear_entries("lm_head", "decoder.lm_head"):
        if not s.flag("tie_word_embeddings", True):
            mappings.append(mapping)
        elif not _is_scaled(s):
            mappings.append(mapping._replace(is_optional=True))
    return mappings


def _attention_entries(
    s: Settings, part: str, hf_name: str, weft_name: str
) -> list[family.TensorMapping]:
    num_heads = s.size("num_heads")
    mappings = [
        *family.norm_entries(f"{part}.layer_norm", f"{weft_name}.norm"),
        *family.linear_entries(
            f"{part}.{hf_name}.o",
            f"{weft_name}.attention.o_proj",
            family.output_heads(num_heads),
        ),
    ]
    for name in "qkv":
        mappings += family.linear_entries(
            f"{part}.{hf_name}.{name}",
            f"{weft_name}.attention.i_proj.{name}_proj",
            family.input_heads(num_heads),
        )
    return mappings


def _feed_forward_entries(
    s: Settings, part: str, weft_name: str
) -> list[family.TensorMapping]:
    names = {"wi": "linear1", "wo": "linear2"}
    if not isinstance(_activation(s), str):
        names = {"wi_0": "linear1_0", "wi_1": "linear1_1", "wo": "linear2"}
    mappings = family.norm_entries(f"{part}.layer_norm", f"{weft_name}.norm")
    for hf_name, layer in names.items():
        mappings += family.linear_entries(
            f"{part}.DenseReluDense.{hf_name}",
            f"{weft_name}.{layer}",
            family.TRANSPOSED,
        )
    return mappings


T5 = family.Family(
    model_type="t5",
    architecture="T5ForConditionalGeneration",
    prefix="",
    read=read,
    write=write,
    entries=entries,
    extra_allowed=r"lm_head\.weight|(encoder|decoder)\.embed_tokens\.weight"
    # Published files have it, and it is not used.
    r"|decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    settings_of_files=settings_of_files,
    copies={
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
    },
    has_source=True,
)
