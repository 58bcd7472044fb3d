"""BERT: an encoder of texts with norms after the branches (Devlin et al., 2019)."""

from collections.abc import Collection
from typing import Any

from weft import hierarchy
from weft.interop.huggingface import encoder_family, family
from weft.interop.huggingface.settings import MAX_SIZE, Setting, Settings

_ENCODER = "BertModel"
_MASKED_LM = "BertForMaskedLM"
_CLASSIFIER = "BertForSequenceClassification"
_ARCHITECTURES = (_ENCODER, _MASKED_LM, _CLASSIFIER)
# Files of 2018 have names of TensorFlow for the parameters of norms.
_OLD_NORM_NAMES = "old_norm_names"


def settings_of_files(tensor_names: Collection[str]) -> dict[str, Setting]:
    """Returns the settings that only the files tell."""
    has_old_names = any(name.endswith("Norm.gamma") for name in tensor_names)
    return {
        **encoder_family.settings_of_files(tensor_names),
        _OLD_NORM_NAMES: has_old_names,
    }


def read(s: Settings) -> Any:
    """Returns the config of the model that a `config.json` describes."""
    architecture = encoder_family.architecture(s, _ARCHITECTURES)
    s.require("is_decoder", False)
    s.require("add_cross_attention", False)
    s.require("position_embedding_type", "absolute")
    dim, _ = encoder_family.dims(s)
    norm = encoder_family.norm_config(s)
    embedding = hierarchy.TransformerTextEmbeddings.default_config().set(
        vocab_size=s.size("vocab_size", 30522, most=MAX_SIZE),
        type_emb=hierarchy.Embedding.default_config().set(
            num_embeddings=s.size("type_vocab_size", 2)
        ),
        pos_emb=hierarchy.LearnedPositionalEmbedding.default_config().set(
            shape=(s.size("max_position_embeddings", 512, most=MAX_SIZE),)
        ),
        norm=norm,
        dropout=encoder_family.hidden_dropout(s),
    )
    encoder = hierarchy.Encoder.default_config().set(
        dim=dim,
        emb=embedding,
        transformer=encoder_family.transformer_config(s, "postnorm"),
    )
    if architecture == _MASKED_LM:
        s.require("tie_word_embeddings", True)
        head: Any = hierarchy.MaskedLmHead.default_config()
        head.set(activation=s.activation("hidden_act", "gelu"), norm=norm)
        return hierarchy.MaskedLanguageModel.default_config().set(
            encoder=encoder, head=head
        )
    if architecture == _ENCODER:
        return encoder.set(pooler=encoder_family.pooler_config(s))
    encoder.pooler = encoder_family.pooler_config(
        Settings({**s.values, "add_pooling_layer": True}, s.source)
    )
    model = encoder_family.classifier_config(s, encoder)
    model.dropout = encoder_family.hidden_dropout(s)
    if s.get("classifier_dropout", None) is not None:
        model.dropout = s.dropout("classifier_dropout", 0.0)
    return model


def write(cfg: Any) -> dict[str, Any]:
    """Returns the `config.json` of a model, the inverse of `read`."""
    architecture = _ENCODER
    if isinstance(cfg, hierarchy.MaskedLanguageModel.Config):
        architecture = _MASKED_LM
    if isinstance(cfg, hierarchy.EncoderClassifier.Config):
        architecture = _CLASSIFIER
    encoder = encoder_family.encoder_of(cfg)
    values = {
        "model_type": "bert",
        "architectures": [architecture],
        **encoder_family.written_settings(cfg),
        "vocab_size": encoder.emb.vocab_size,
        "type_vocab_size": encoder.emb.type_emb.num_embeddings,
        "max_position_embeddings": encoder.emb.pos_emb.shape[0],
    }
    if architecture == _CLASSIFIER:
        values["classifier_dropout"] = cfg.dropout.rate
    return values


def entries(s: Settings) -> list[family.TensorMapping]:
    """Returns the table of tensors."""
    architecture = encoder_family.architecture(s, _ARCHITECTURES)
    hf, ours = "bert.", "encoder."
    if architecture == _ENCODER:
        hf, ours = "", ""
    mappings = [
        *family.linear_entries(
            f"{hf}embeddings.word_embeddings", f"{ours}emb.token_emb"
        ),
        *family.linear_entries(
            f"{hf}embeddings.token_type_embeddings", f"{ours}emb.type_emb"
        ),
        *family.linear_entries(
            f"{hf}embeddings.position_embeddings",
            f"{ours}emb.pos_emb",
            family.POSITIONS,
        ),
        *encoder_family.layer_entries(
            s, f"{hf}encoder.layer", attention="attention.self"
        ),
    ]
    norms = {
        f"{hf}embeddings": f"{ours}emb.norm",
        f"{hf}encoder.layer.{{}}.attention.output": "self_attention.norm",
        f"{hf}encoder.layer.{{}}.output": "feed_forward.norm",
    }
    if architecture == _MASKED_LM:
        norms["cls.predictions.transform"] = "head.norm"
        mappings += encoder_family.linear_entries(
            "cls.predictions.transform.dense", "head.linear"
        )
        mappings.append(
            family.TensorMapping(
                "cls.predictions.bias", "head.bias", family.IDENTITY
            )
        )
    else:
        mappings += encoder_family.linear_entries(
            f"{hf}pooler.dense",
            f"{ours}pooler.proj",
            is_optional=architecture == _ENCODER,
        )
    if architecture == _CLASSIFIER:
        mappings += encoder_family.linear_entries("classifier", "output_layer")
    scale, bias = "weight", "bias"
    if s.flag(_OLD_NORM_NAMES, False):
        scale, bias = "gamma", "beta"
    for hf_name, weft_name in norms.items():
        for hf_part, weft_part in ((scale, "scale"), (bias, "bias")):
            mappings.append(
                family.TensorMapping(
                    f"{hf_name}.LayerNorm.{hf_part}",
                    f"{weft_name}.{weft_part}",
                    family.IDENTITY,
                )
            )
    return mappings


BERT = family.Family(
    model_type="bert",
    architecture=_ENCODER,
    prefix="",
    read=read,
    write=write,
    entries=entries,
    # Files of the pretrained model have the parts of both tasks that it was trained on.
    extra_allowed=r"(bert\.)?embeddings\.position_ids|bert\.pooler\.dense\.(weight|bias)"
    r"|cls\.seq_relationship\.(weight|bias)|cls\.predictions\.decoder\.(weight|bias)",
    settings_of_files=settings_of_files,
    copies={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    generates=False,
    classifier=_CLASSIFIER,
)
