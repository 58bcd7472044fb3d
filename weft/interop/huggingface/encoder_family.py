"""Common parts of families of encoders: layers, poolers, classifiers, and their tensors.

Which model a folder has, the encoder alone or one with an output layer, is in `architectures` of
its `config.json`.
"""

from collections.abc import Collection, Sequence
from typing import Any

from weft import hierarchy
from weft.interop.huggingface import family
from weft.interop.huggingface.family import TensorMapping
from weft.interop.huggingface.settings import MAX_LAYERS, Setting, Settings

# The argument of transformers' classes; `config.json` does not say it.
_HAS_POOLER = "add_pooling_layer"
_POOLER = "pooler.dense.weight"


def architecture(s: Settings, supported: Sequence[str]) -> str:
    """Returns which of the supported models a `config.json` describes; by default the first."""
    names = s.get("architectures", [supported[0]])
    for name in supported:
        if names == [name]:
            return name
    options = " or ".join(f"[{name!r}]" for name in supported)
    raise s.refusal("architectures", names, f"can be {options}")


def settings_of_files(tensor_names: Collection[str]) -> dict[str, Setting]:
    """Returns the settings that only the files tell: whether the encoder has a pooler."""
    has_pooler = any(name.endswith(_POOLER) for name in tensor_names)
    return {_HAS_POOLER: has_pooler}


def dims(s: Settings) -> tuple[int, int]:
    """Returns the model dimension and the number of heads."""
    dim, num_heads = s.size("hidden_size"), s.size("num_attention_heads")
    if dim % num_heads:
        raise s.refusal(
            "num_attention_heads", num_heads, f"divides hidden_size={dim}"
        )
    return dim, num_heads


def norm_config(s: Settings) -> hierarchy.LayerNorm.Config:
    """Returns the config of all norms."""
    return hierarchy.LayerNorm.default_config().set(
        eps=s.number("layer_norm_eps", 1e-12)
    )


def transformer_config(
    s: Settings, structure: str, *, has_qkv_bias: bool = True
) -> hierarchy.BaseStackedTransformerLayer.Config:
    """Returns the config of the layers.

    Args:
        structure: "prenorm" or "postnorm", the place of the norms.
    """
    _, num_heads = dims(s)
    layer: Any = hierarchy.TransformerLayer.default_config()
    qkv: Any = hierarchy.QKVLinear.default_config()
    qkv.layer.bias = has_qkv_bias
    layer.self_attention.set(
        structure=structure,
        norm=norm_config(s),
        dropout=hidden_dropout(s),
        attention=hierarchy.MultiheadAttention.default_config().set(
            num_heads=num_heads,
            input_linear=qkv,
            dropout=s.dropout("attention_probs_dropout_prob", _dropout_rate(s)),
        ),
    )
    layer.feed_forward.set(
        structure=structure,
        norm=norm_config(s),
        hidden_dim=s.size("intermediate_size", 3072),
        activation=s.activation("hidden_act", "gelu"),
        dropout=hidden_dropout(s),
        hidden_dropout=hierarchy.Dropout.default_config().set(rate=0.0),
    )
    num_layers = s.size("num_hidden_layers", 12, most=MAX_LAYERS)
    return hierarchy.RepeatedTransformerLayer.default_config().set(
        num_layers=num_layers, layer=layer
    )


def hidden_dropout(s: Settings) -> hierarchy.Dropout.Config:
    """Returns the dropout of embeddings and branches."""
    return s.dropout("hidden_dropout_prob", _dropout_rate(s))


def _dropout_rate(s: Settings) -> float:
    """Returns the rate where a setting is missing: 0.1 of texts, 0 of images."""
    return 0.0 if s.get("model_type") == "vit" else 0.1


def pooler_config(s: Settings) -> hierarchy.PoolingWithProjection.Config | None:
    """Returns the config of a linear map of the first position; None where files have none."""
    if not s.flag(_HAS_POOLER, True):
        return None
    dim, _ = dims(s)
    return hierarchy.PoolingWithProjection.default_config().set(
        output_dim=s.size("pooler_output_size", dim),
        pooler=hierarchy.FirstNTokenPooling.default_config(),
    )


def classifier_config(
    s: Settings, encoder: hierarchy.Encoder.Config
) -> hierarchy.EncoderClassifier.Config:
    """Returns the config of a classifier of one class per text or image."""
    s.require("problem_type", "single_label_classification")
    names_by_id = s.get("id2label", None)
    if names_by_id is None:
        count = s.size("num_labels", 2)
        names = None
    else:
        count = 0
        names = _class_names(s, names_by_id)
        if names is not None:
            count = len(names)
    if count < 2:
        name = "num_labels" if names_by_id is None else "id2label"
        raise s.refusal(
            name,
            s.get(name),
            "can have two classes or more, by their numbers, and an example has one of them",
        )
    return hierarchy.EncoderClassifier.default_config().set(
        encoder=encoder, num_classes=count, class_names=names
    )


def _class_names(s: Settings, names_by_id: Setting) -> list[str] | None:
    """Returns the names of classes in order; None if their numbers are not those from 0."""
    if not isinstance(names_by_id, dict):
        return None
    names: list[str] = []
    for i in range(len(names_by_id)):
        name = names_by_id.get(str(i))
        if not isinstance(name, str):
            return None
        names.append(name)
    return names


def classes_settings(names: Sequence[str]) -> dict[str, Setting]:
    """Returns the settings of classes with these names."""
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }


def written_settings(cfg: Any) -> dict[str, Any]:
    """Returns the settings of the layers, the pooler and the classes, the inverse of the above.

    `cfg` is the config of an encoder, or of a model that has one.
    """
    encoder = encoder_of(cfg)
    layer = family.layers_of(encoder.transformer)[0]
    attention = layer.self_attention.attention
    feed_forward = layer.feed_forward
    values: dict[str, Any] = {
        "hidden_size": encoder.dim,
        "num_hidden_layers": len(family.layers_of(encoder.transformer)),
        "num_attention_heads": attention.num_heads,
        "intermediate_size": family.hidden_dim(feed_forward, encoder.dim),
        "hidden_act": family.activation_name(feed_forward.activation),
        "hidden_dropout_prob": layer.self_attention.dropout.rate or 0.0,
        "attention_probs_dropout_prob": attention.dropout.rate or 0.0,
        "layer_norm_eps": layer.self_attention.norm.eps,
    }
    if isinstance(cfg, hierarchy.Encoder.Config) and encoder.pooler is None:
        values[_HAS_POOLER] = False
    if isinstance(cfg, hierarchy.EncoderClassifier.Config):
        names = cfg.class_names
        if names is None:
            names = [f"LABEL_{i}" for i in range(cfg.num_classes)]
        values |= classes_settings(names)
    return values


def encoder_of(cfg: Any) -> Any:
    """Returns the config of the encoder, which may be the whole model."""
    if isinstance(cfg, hierarchy.Encoder.Config):
        return cfg
    return cfg.encoder


def body_of(cfg: Any) -> Any:
    """Returns the config of the part of a model that has its layers."""
    if isinstance(
        cfg, hierarchy.Encoder.Config | hierarchy.BaseEncoderModel.Config
    ):
        return encoder_of(cfg)
    return cfg.decoder


def layer_entries(
    s: Settings,
    prefix: str,
    *,
    attention: str,
    has_qkv_bias: bool = True,
) -> list[TensorMapping]:
    """Returns the entries of the linear maps of all layers.

    Args:
        prefix: of the names of the layers, up to the number.
        attention: name of the part with queries, keys and values.
    """
    _, num_heads = dims(s)
    entries: list[TensorMapping] = []
    for hf_name in ("query", "key", "value"):
        bias = family.head_biases(num_heads) if has_qkv_bias else None
        entries += family.linear_entries(
            f"{prefix}.{{}}.{attention}.{hf_name}",
            f"self_attention.attention.i_proj.{hf_name[0]}_proj",
            family.input_heads(num_heads),
            bias,
        )
    entries += family.linear_entries(
        f"{prefix}.{{}}.attention.output.dense",
        "self_attention.attention.o_proj",
        family.output_heads(num_heads),
        family.IDENTITY,
    )
    for hf_name, weft_name in (("intermediate", "1"), ("output", "2")):
        entries += family.linear_entries(
            f"{prefix}.{{}}.{hf_name}.dense",
            f"feed_forward.linear{weft_name}",
            family.TRANSPOSED,
            family.IDENTITY,
        )
    return entries


def linear_entries(
    hf_name: str, weft_name: str, *, is_optional: bool = False
) -> list[TensorMapping]:
    """Returns the entries of a linear map outside of the layers."""
    entries = family.linear_entries(
        hf_name, weft_name, family.TRANSPOSED, family.IDENTITY
    )
    return [entry._replace(is_optional=is_optional) for entry in entries]
