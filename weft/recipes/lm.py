"""Byte-level language model on the text of Python's standard library.

A Transformer decoder with RMS norms, rotary positions, gated feed-forward layers and tied
embeddings, trained by AdamW with a warm-up and a cosine decay. Its tokens are bytes, which avoids a
download and allows a comparison of the loss with n-gram counts.
"""

from typing import Any

from weft.config import InstantiableConfig, config_for_function
from weft.hierarchy.attention import (
    FusedQKVLinear,
    MultiheadAttention,
    RepeatedTransformerLayer,
    RoFormerQKVLinear,
    TransformerLayer,
    scaled_hidden_dim,
)
from weft.hierarchy.attention_bias import SlidingWindowAttentionBias
from weft.hierarchy.causal_lm import Model
from weft.hierarchy.decoder import Decoder
from weft.hierarchy.layers import Embedding, RMSNorm
from weft.hierarchy.param_init import PARAM_REGEXP_WEIGHT, DefaultInitializer, WeightInitializer
from weft.input import ByteTokenizer, folder_corpus, stdlib_corpus
from weft.input.grain import Input
from weft.input.text import lm_text_source
from weft.recipes.training import trainer_config

# Only two of the ids above the bytes are used; a multiple of 8 divides over a mesh.
_VOCAB_SIZE = 264


def lm(data_dir: str | None = None) -> InstantiableConfig:
    """Returns the default recipe, which beats its corpus's trigrams within minutes on two cores.

    Args:
        data_dir: A folder to train on, of text, JSON lines or Parquet files with a `text` in each
            record; None for the standard library.
    """
    return _trainer(
        "runs/lm",
        data_dir,
        model=_model(dim=96, num_layers=3, num_heads=4, context=128),
        sequence_length=128,
        batch_size=16,
        max_step=600,
        peak_lr=6e-3,
        eval_every=200,
        save_every=200,
    )


def lm_tiny(data_dir: str | None = None) -> InstantiableConfig:
    """Returns a small version of `lm`, with steps of milliseconds, on a part of the corpus."""
    cfg = _trainer(
        "runs/lm-tiny",
        data_dir,
        model=_model(dim=24, num_layers=2, num_heads=2, context=32),
        sequence_length=32,
        batch_size=8,
        max_step=60,
        peak_lr=1e-2,
        eval_every=30,
        save_every=20,
    )
    if data_dir is None:
        for input_cfg in (cfg.input, cfg.evalers["held_out"].input):
            input_cfg.source.corpus.set(pattern="json/*.py", held_out_fraction=0.3)
    return cfg


def _model(*, dim: int, num_layers: int, num_heads: int, context: int) -> Any:
    layer = TransformerLayer.default_config()
    # Training sequences are not longer. When sampling, positions must not attend over distances
    # that did not occur in training.
    window = SlidingWindowAttentionBias.default_config(sliding_window_size=context - 1)
    layer.self_attention.set(
        norm=RMSNorm.default_config(),
        attention=MultiheadAttention.default_config().set(
            num_heads=num_heads,
            mask=window,
            input_linear=RoFormerQKVLinear.default_config().set(
                input_linear=FusedQKVLinear.default_config(), rotary_value=False
            ),
        ),
    )
    layer.self_attention.attention.input_linear.input_linear.layer.bias = False
    layer.self_attention.attention.output_linear.bias = False
    layer.feed_forward.set(
        norm=RMSNorm.default_config(),
        hidden_dim=scaled_hidden_dim(8 / 3),
        activation=("nn.silu", "linear"),
    )
    layer.feed_forward.linear1.bias = False
    layer.feed_forward.linear2.bias = False
    # Each layer adds to the residual stream twice; the sum of all has the variance of one.
    for to_residual in (layer.self_attention.attention.output_linear, layer.feed_forward.linear2):
        to_residual.param_init = _init(variance=1 / (2 * num_layers))
    decoder = Decoder.default_config().set(
        dim=dim,
        vocab_size=_VOCAB_SIZE,
        transformer=RepeatedTransformerLayer.default_config().set(
            num_layers=num_layers, layer=layer
        ),
        output_norm=RMSNorm.default_config(),
        eos_token_id=ByteTokenizer.eos_id,
        pad_token_id=ByteTokenizer.pad_id,
    )
    decoder.emb.token_emb.scale = Embedding.Scale.UNIT
    return Model.default_config().set(decoder=decoder, param_init=_init(variance=1.0))


def _init(*, variance: float) -> Any:
    """Returns an initializer whose outputs have this variance for inputs of variance 1."""
    weight = WeightInitializer.default_config().set(
        fan="fan_in", distribution="normal", scale=variance
    )
    return DefaultInitializer.default_config().set(init_by_param_name={PARAM_REGEXP_WEIGHT: weight})


def _trainer(
    directory: str,
    data_dir: str | None,
    *,
    model: Any,
    sequence_length: int,
    batch_size: int,
    max_step: int,
    peak_lr: float,
    eval_every: int,
    save_every: int,
) -> Any:
    corpus = config_for_function(stdlib_corpus).set(held_out_fraction=0.02)
    if data_dir is not None:
        corpus = config_for_function(folder_corpus).set(paths=data_dir)

    def text(split: str, **kwargs: Any) -> Any:
        source = config_for_function(lm_text_source).set(
            corpus=corpus,
            split=split,
            sequence_length=sequence_length,
            is_training=split == "train",
            **kwargs,
        )
        return Input.default_config().set(source=source)

    return trainer_config(
        directory,
        model=model,
        train_input=text("train", global_batch_size=batch_size),
        held_out_input=text("held_out", global_batch_size=4 * batch_size),
        max_step=max_step,
        peak_lr=peak_lr,
        eval_every=eval_every,
        save_every=save_every,
    )
