"""Byte-level language models on the text of Python's standard library.

A Transformer decoder with RMS norms, rotary positions, gated feed-forward layers and tied
embeddings, trained by AdamW with a warm-up and a cosine decay. Its tokens are bytes, which avoids a
download and allows a comparison of the loss with n-gram counts. `trainer_config` has the training,
evaluation, checkpoints and reports that all recipes share.
"""

import os
import re
from pathlib import Path
from typing import Any

from weft import hierarchy, trainer
from weft.config import InstantiableConfig, config_for_function
from weft.hierarchy.causal_lm import Model
from weft.hierarchy.param_init import normal_weights
from weft.input import (
    ByteTokenizer,
    as_tokenizer,
    base,
    folder_corpus,
    stdlib_corpus,
)
from weft.input.grain import Input
from weft.input.text import lm_text_source
from weft.trainer.checkpointer.policy import every_n_steps_policy
from weft.trainer.evaler import (
    every_n_steps_policy as eval_every_n_steps_policy,
)
from weft.trainer.optimizers.clipping import skip_and_clip_by_global_norm


def trainer_config(
    directory: str,
    *,
    model: InstantiableConfig,
    train_input: base.Input.Config,
    held_out_input: base.Input.Config,
    max_step: int,
    peak_lr: float,
    eval_every: int,
    save_every: int | None = None,
) -> trainer.SpmdTrainer.Config:
    """Returns a config with AdamW, a warm-up and a cosine decay on a mesh of data and model.

    Args:
        directory: Directory of the run.
        held_out_input: Data to evaluate on; it must end.
        peak_lr: The learning rate after the warm-up.
        eval_every: Number of steps between evaluations.
        save_every: Number of steps between checkpoints; defaults to that between evaluations.
    """
    optimizer = config_for_function(trainer.adamw_optimizer).set(
        learning_rate=config_for_function(
            trainer.cosine_with_linear_warmup
        ).set(peak_lr=peak_lr, warmup_steps=0.05, alpha=0.1),
        b1=0.9,
        b2=0.95,
        eps=1e-8,
        weight_decay=0.1,
    )
    evaler = trainer.SpmdEvaler.default_config().set(
        input=held_out_input,
        eval_policy=config_for_function(eval_every_n_steps_policy).set(
            n=eval_every
        ),
        summary_writer=summary_writer(every_n_steps=1),
    )
    checkpointer = trainer.Checkpointer.default_config().set(
        save_policy=config_for_function(every_n_steps_policy).set(
            n=save_every or eval_every
        ),
        keep_last_n=2,
    )
    return trainer.SpmdTrainer.default_config().set(
        name="trainer",
        dir=directory,
        max_step=max_step,
        model=model,
        learner=trainer.Learner.default_config().set(
            optimizer=config_for_function(skip_and_clip_by_global_norm).set(
                inner=optimizer, max_norm=1.0
            )
        ),
        input=train_input,
        evalers={"held_out": evaler},
        checkpointer=checkpointer,
        summary_writer=summary_writer(every_n_steps=5),
        mesh_shape=(-1, 1),
        mesh_axis_names=("data", "model"),
    )


def summary_writer(*, every_n_steps: int) -> trainer.CompositeWriter.Config:
    """Returns writers for TensorBoard and, for the report, JSON lines."""
    writers = {
        "tensorboard": trainer.SummaryWriter.default_config(),
        "json_lines": trainer.JsonLinesWriter.default_config(),
    }
    for writer in writers.values():
        writer.write_every_n_steps = every_n_steps
    return trainer.CompositeWriter.default_config().set(writers=writers)


# Only two of the ids above the bytes are used; a multiple of 8 divides over a mesh.
VOCAB_SIZE = 264


def lm(
    data_dir: str | None = None,
    tokenizer: str | None = None,
    *,
    text_key: str = "text",
    learning_rate: float = 6e-3,
    batch_size: int = 16,
    steps: int = 600,
) -> InstantiableConfig:
    """Returns the default recipe, which beats its corpus's trigrams within minutes on two cores.

    Args:
        data_dir: A folder to train on, of text, JSON lines or Parquet files with a text in each
            record, which then writes to `runs/lm-FOLDER`; None for the standard library.
        tokenizer: The path of a tokenizer's file, see `weft.input.as_tokenizer`; None for bytes.
        text_key: Field of a record that holds the text.
        learning_rate: Highest learning rate, after the warm-up.
        batch_size: Sequences per step.
        steps: Number of steps, and length of the schedule.
    """
    return text_trainer_config(
        "runs/lm",
        data_dir,
        tokenizer,
        text_key=text_key,
        model=_model(dim=96, num_layers=3, num_heads=4, context=128),
        batch_size=batch_size,
        max_step=steps,
        peak_lr=learning_rate,
        eval_every=200,
    )


def lm_tiny(
    data_dir: str | None = None,
    tokenizer: str | None = None,
    *,
    text_key: str = "text",
    learning_rate: float = 1e-2,
    batch_size: int = 8,
    steps: int = 60,
) -> InstantiableConfig:
    """Returns a small version of `lm`, with steps of milliseconds, on a part of the corpus.

    Args:
        data_dir: A folder to train on, as in `lm`.
        tokenizer: As in `lm`.
        text_key: Field of a record that holds the text.
        learning_rate: Highest learning rate, after the warm-up.
        batch_size: Sequences per step.
        steps: Number of steps, and length of the schedule.
    """
    cfg = text_trainer_config(
        "runs/lm-tiny",
        data_dir,
        tokenizer,
        text_key=text_key,
        model=_model(dim=24, num_layers=2, num_heads=2, context=32),
        sequence_length=32,
        batch_size=batch_size,
        max_step=steps,
        peak_lr=learning_rate,
        eval_every=30,
        save_every=20,
    )
    if data_dir is None:
        set_corpus(cfg, pattern="json/*.py", held_out_fraction=0.3)
    return cfg


def set_corpus(cfg: trainer.SpmdTrainer.Config, **fields: object) -> None:
    """Sets fields of the corpora to train and evaluate on."""
    for input_cfg in (cfg.input, cfg.evalers["held_out"].input):
        input_cfg.source.corpus.set(**fields)


def _set_tokenizer(
    cfg: trainer.SpmdTrainer.Config, tokenizer: str | None
) -> None:
    """Sets the tokenizer to train and evaluate with, and the ids of the model; None for bytes."""
    if tokenizer is None:
        return
    loaded = as_tokenizer(tokenizer)
    for input_cfg in (cfg.input, cfg.evalers["held_out"].input):
        input_cfg.source.tokenizer = tokenizer
    model: Any = cfg.model
    owner = getattr(model, "decoder", model)
    owner.set(
        vocab_size=-(-loaded.vocab_size // 8) * 8, pad_token_id=loaded.pad_id
    )
    if hasattr(owner, "eos_token_id"):
        owner.set(eos_token_id=loaded.eos_id)


def _model(
    *, dim: int, num_layers: int, num_heads: int, context: int
) -> Model.Config:
    layer = hierarchy.TransformerLayer.default_config()
    # Training sequences are not longer. When sampling, positions must not attend over distances
    # that did not occur in training.
    window = hierarchy.SlidingWindowAttentionBias.default_config(
        sliding_window_size=context - 1
    )
    layer.self_attention.set(
        norm=hierarchy.RMSNorm.default_config(),
        attention=hierarchy.MultiheadAttention.default_config().set(
            num_heads=num_heads,
            mask=window,
            input_linear=hierarchy.RoFormerQKVLinear.default_config().set(
                input_linear=hierarchy.FusedQKVLinear.default_config(),
                rotary_value=False,
            ),
        ),
    )
    layer.feed_forward.set(
        norm=hierarchy.RMSNorm.default_config(),
        hidden_dim=hierarchy.scaled_hidden_dim(8 / 3),
        activation=("nn.silu", "linear"),
    )
    hierarchy.set_bias_recursively(layer, False)
    # Each layer adds to the residual stream twice; the sum of all has the variance of one.
    for to_residual in (
        layer.self_attention.attention.output_linear,
        layer.feed_forward.linear2,
    ):
        to_residual.param_init = initializer(variance=1 / (2 * num_layers))
    decoder = hierarchy.Decoder.default_config().set(
        dim=dim,
        vocab_size=VOCAB_SIZE,
        transformer=hierarchy.RepeatedTransformerLayer.default_config().set(
            num_layers=num_layers, layer=layer
        ),
        output_norm=hierarchy.RMSNorm.default_config(),
        eos_token_id=ByteTokenizer.eos_id,
        pad_token_id=ByteTokenizer.pad_id,
    )
    decoder.emb.token_emb.scale = hierarchy.Embedding.Scale.UNIT
    return Model.default_config().set(
        decoder=decoder, param_init=initializer(variance=1.0)
    )


def initializer(*, variance: float) -> hierarchy.DefaultInitializer.Config:
    """Returns an initializer whose outputs have this variance for inputs of variance 1."""
    return normal_weights("fan_in", scale=variance)


def _weight(*, variance: float) -> hierarchy.WeightInitializer.Config:
    return hierarchy.WeightInitializer.default_config().set(
        fan="fan_in", distribution="normal", scale=variance
    )


def text_trainer_config(
    directory: str,
    data_dir: str | None,
    tokenizer: str | None = None,
    *,
    text_key: str = "text",
    model: InstantiableConfig,
    sequence_length: int = 128,
    batch_size: int,
    peak_lr: float,
    **training: int,
) -> trainer.SpmdTrainer.Config:
    """Returns a config that trains on a folder of text; None for the standard library.

    A run on a folder has a directory of its own, such as `runs/lm-notes`.

    `training` are further arguments of `trainer_config`.
    """
    corpus = config_for_function(stdlib_corpus).set(held_out_fraction=0.02)
    if data_dir is not None:
        corpus = config_for_function(folder_corpus).set(
            paths=data_dir, text_key=text_key
        )
        name = re.sub(
            r"[^\w.]+", "-", Path(os.path.abspath(data_dir)).stem
        ).strip("-")
        directory = f"{directory}-{name or 'data'}"

    def text(split: str, global_batch_size: int) -> Input.Config:
        source = config_for_function(lm_text_source).set(
            corpus=corpus,
            split=split,
            sequence_length=sequence_length,
            is_training=split == "train",
            global_batch_size=global_batch_size,
        )
        return Input.default_config().set(source=source)

    cfg = trainer_config(
        directory,
        model=model,
        train_input=text("train", batch_size),
        held_out_input=text("held_out", 4 * batch_size),
        peak_lr=peak_lr,
        **training,
    )
    _set_tokenizer(cfg, tokenizer)
    return cfg


_NUM_LAYERS = 3
_MOE_MESH_AXES = ("data", "expert", "model")


def lm_moe(
    data_dir: str | None = None,
    tokenizer: str | None = None,
    *,
    text_key: str = "text",
    learning_rate: float = 6e-3,
    batch_size: int = 16,
    steps: int = 400,
) -> InstantiableConfig:
    """Returns a mixture-of-experts language model that trains in minutes on two cores.

    Args:
        data_dir: A folder to train on, as in `lm`.
        tokenizer: As in `lm`.
        text_key: Field of a record that holds the text.
        learning_rate: Highest learning rate, after the warm-up.
        batch_size: Sequences per step.
        steps: Number of steps, and length of the schedule.
    """
    cfg = text_trainer_config(
        "runs/lm-moe",
        data_dir,
        tokenizer,
        text_key=text_key,
        model=_moe_model(),
        batch_size=batch_size,
        max_step=steps,
        peak_lr=learning_rate,
        eval_every=200,
    )
    return cfg.set(
        mesh_shape=(-1, 1, 1),
        mesh_axis_names=_MOE_MESH_AXES,
        batch_axis_names=("data", "expert"),
    )


def _moe_model() -> Model.Config:
    """Returns a model in which each token goes to two of eight experts in each layer.

    The experts have half the hidden dimensions of the dense layer: the same arithmetic per token
    with four times the parameters. The router losses are part of the loss.
    """
    model = _model(dim=96, num_layers=_NUM_LAYERS, num_heads=4, context=128)
    transformer = model.decoder.transformer
    layer: Any = transformer.layer
    experts = hierarchy.TransformerFeedForwardDropFreeMoE.default_config().set(
        norm=hierarchy.RMSNorm.default_config(),
        hidden_dim=hierarchy.scaled_hidden_dim(4 / 3),
        activation=("nn.silu", "linear"),
        num_experts=8,
        load_balance_loss_weight=0.01,
        router_z_loss_weight=0.001,
        # Experts start like dense layers, routers close to uniform.
        param_init=hierarchy.DefaultInitializer.default_config().set(
            init_by_param_name={
                ".*gate_weight$": _weight(variance=0.01),
                ".*wo_weight$": _weight(variance=1 / (2 * _NUM_LAYERS)),
                hierarchy.PARAM_REGEXP_WEIGHT: _weight(variance=1.0),
            }
        ),
    )
    layer.feed_forward = experts
    hierarchy.set_partition_specs_recursively(model, _MOE_MESH_AXES)
    # By default a loop drops side outputs of its layers.
    transformer.repeat.drop_output.rules = [r"module_outputs(?!.*/aux_loss$).*"]
    return model.set(
        metrics=hierarchy.metrics_config(
            aux_loss_regex="decoder/transformer/.*/aux_loss"
        )
    )
