"""ViT: an encoder of images, cut into patches (Dosovitskiy et al., 2021)."""

from typing import Any

from weft import hierarchy
from weft.interop.huggingface import encoder_family, family
from weft.interop.huggingface.settings import MAX_WIDTH, Setting, Settings
from weft.typing import ActivationName, Tensor

_ENCODER, _CLASSIFIER = "ViTModel", "ViTForImageClassification"
_ARCHITECTURES = (_ENCODER, _CLASSIFIER)
_POOLER_ACTIVATIONS: dict[str, ActivationName] = {
    "tanh": "nn.tanh",
    "relu": "nn.relu",
    "gelu": "exact_gelu",
}


def read(s: Settings) -> Any:
    """Returns the config of the model that a `config.json` describes."""
    architecture = encoder_family.architecture(s, _ARCHITECTURES)
    dim, _ = encoder_family.dims(s)
    image_size = _height_and_width(s, "image_size", 224)
    patch_size = _height_and_width(s, "patch_size", 16)
    for size, patch in zip(image_size, patch_size, strict=True):
        if size % patch:
            raise s.refusal(
                "patch_size",
                s.get("patch_size", 16),
                f"divides image_size={s.get('image_size', 224)}",
            )
    embedding = hierarchy.PatchEmbedding.default_config().set(
        image_size=image_size,
        patch_size=patch_size,
        num_channels=s.size("num_channels", 3),
        dropout=encoder_family.hidden_dropout(s),
    )
    encoder = hierarchy.Encoder.default_config().set(
        dim=dim,
        emb=embedding,
        transformer=encoder_family.transformer_config(
            s, "prenorm", has_qkv_bias=s.flag("qkv_bias", True)
        ),
        output_norm=encoder_family.norm_config(s),
    )
    if architecture == _CLASSIFIER:
        return encoder_family.classifier_config(s, encoder)
    encoder.pooler = encoder_family.pooler_config(s)
    if encoder.pooler is not None:
        activation = s.get("pooler_act", "tanh")
        if activation not in _POOLER_ACTIVATIONS:
            options = " or ".join(map(repr, _POOLER_ACTIVATIONS))
            raise s.refusal("pooler_act", activation, f"can be {options}")
        encoder.pooler_activation = _POOLER_ACTIVATIONS[activation]
    return encoder


def _height_and_width(s: Settings, name: str, default: int) -> tuple[int, int]:
    value = s.get(name, default)
    sizes: list[Setting] = [value, value]
    if isinstance(value, list) and len(value) == 2:
        sizes = value
    for size in sizes:
        if type(size) is not int or not 1 <= size <= MAX_WIDTH:
            raise s.refusal(
                name, value, "can be a number of pixels, or [height, width]"
            )
    return sizes[0], sizes[1]


def write(cfg: Any) -> dict[str, Any]:
    """Returns the `config.json` of a model, the inverse of `read`."""
    encoder = encoder_family.encoder_of(cfg)
    embedding = encoder.emb
    layer = family.layers_of(encoder.transformer)[0]
    qkv = layer.self_attention.attention.input_linear
    values = {
        "model_type": "vit",
        "architectures": [_ENCODER],
        **encoder_family.written_settings(cfg),
        "image_size": _number_or_list(embedding.image_size),
        "patch_size": _number_or_list(embedding.patch_size),
        "num_channels": embedding.num_channels,
        "qkv_bias": qkv.layer.bias,
    }
    if isinstance(cfg, hierarchy.EncoderClassifier.Config):
        values["architectures"] = [_CLASSIFIER]
    elif encoder.pooler is not None:
        values["pooler_output_size"] = encoder.pooler.output_dim
        for hf_name, weft_name in _POOLER_ACTIVATIONS.items():
            if weft_name == encoder.pooler_activation:
                values["pooler_act"] = hf_name
    return values


def _number_or_list(size: tuple[int, int]) -> int | list[int]:
    height, width = size
    return height if height == width else [height, width]


def _kernel_to_weft(kernel: Tensor) -> Tensor:
    return kernel.transpose(2, 3, 1, 0)


def _kernel_to_hf(kernel: Tensor) -> Tensor:
    return kernel.transpose(3, 2, 0, 1)


_KERNEL = family.Conversion(_kernel_to_weft, _kernel_to_hf)
"""A kernel `(outputs, inputs, height, width)` of torch's Conv2d."""


def entries(s: Settings) -> list[family.TensorMapping]:
    """Returns the table of tensors."""
    architecture = encoder_family.architecture(s, _ARCHITECTURES)
    hf, ours = "vit.", "encoder."
    if architecture == _ENCODER:
        hf, ours = "", ""
    mappings = [
        family.TensorMapping(
            f"{hf}embeddings.cls_token",
            f"{ours}emb.class_token_weight",
            family.Conversion(lambda x: x[0], lambda x: x[None]),
        ),
        family.TensorMapping(
            f"{hf}embeddings.position_embeddings",
            f"{ours}emb.pos_emb.weight",
            family.IDENTITY,
        ),
        *family.linear_entries(
            f"{hf}embeddings.patch_embeddings.projection",
            f"{ours}emb.patch",
            _KERNEL,
            family.IDENTITY,
        ),
        *encoder_family.layer_entries(
            s,
            f"{hf}encoder.layer",
            attention="attention.attention",
            has_qkv_bias=s.flag("qkv_bias", True),
        ),
        *family.norm_entries(
            f"{hf}encoder.layer.{{}}.layernorm_before",
            "self_attention.norm",
            bias=True,
        ),
        *family.norm_entries(
            f"{hf}encoder.layer.{{}}.layernorm_after",
            "feed_forward.norm",
            bias=True,
        ),
        *family.norm_entries(f"{hf}layernorm", f"{ours}output_norm", bias=True),
    ]
    if architecture == _CLASSIFIER:
        return mappings + encoder_family.linear_entries(
            "classifier", "output_layer"
        )
    return mappings + encoder_family.linear_entries(
        "pooler.dense", "pooler.proj", is_optional=True
    )


VIT = family.Family(
    model_type="vit",
    architecture=_ENCODER,
    prefix="",
    read=read,
    write=write,
    entries=entries,
    # Of the pretraining that hides patches.
    extra_allowed=r"(vit\.)?embeddings\.mask_token",
    settings_of_files=encoder_family.settings_of_files,
    generates=False,
    classifier=_CLASSIFIER,
)
