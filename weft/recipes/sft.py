"""Supervised fine-tuning of an imported checkpoint on conversations, or prompts and answers.

    weft train sft base=FOLDER data=chat.jsonl
    weft train sft base=FOLDER data=chat.jsonl tuning=lora-nf4 rank=32

`tuning` says what is trained, and how the base is stored:

    full        all parameters, in float32
    lora        low-rank adapters, on a frozen base in bfloat16
    lora-int8   the same, with the linear maps of the base in 8 bits
    lora-nf4    the same, with them in 4 bits (QLoRA, Dettmers et al., 2023)

`weft.finetune` does the same in Python. Checkpoints of adapters do not hold the base.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp

from weft import errors, functional, hierarchy
from weft.config import (
    ConfigOr,
    InstantiableConfig,
    config_for_class,
    config_for_function,
)
from weft.hierarchy.lora import EXPERTS, LORA_TARGETS
from weft.inference.decoding_evaler import DecodingEvaler, SampleDecoding
from weft.input import ByteTokenizer, ChatTemplate
from weft.input.conversations import (
    Rows,
    conversation_source,
    num_sequences,
    prompt_source,
)
from weft.input.grain import Input
from weft.input.tokenizers import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
)
from weft.interop.huggingface import (
    check_generates_text,
    huggingface_model_config,
    load_tokenizer,
)
from weft.interop.huggingface.settings import NO_PADDING
from weft.interop.huggingface.tokenizer import has_tokenizer
from weft.recipes.lm import VOCAB_SIZE, summary_writer, trainer_config
from weft.serialization import untrusted
from weft.trainer import (
    FrozenBaseBuilder,
    ImportedWeightsBuilder,
    SpmdTrainer,
    UpdateType,
)
from weft.trainer.checkpointer.policy import EvalMetric, KeepBest
from weft.trainer.evaler import every_n_steps_policy
from weft.trainer.frozen_base import base_location, check_base_of_new_run

Tuning = Literal["full", "lora", "lora-int8", "lora-nf4"]
"""What fine-tuning trains, and how the base is stored."""

_WEIGHT_FORMATS: dict[str, functional.WeightFormat] = {
    "lora-int8": "int8",
    "lora-nf4": "nf4",
}
HELD_OUT = "held_out"
"""Name of the evaler of the held-out rows."""
_BATCH_SIZE = 8
_NUM_PROMPTS = 4
_ANSWER_LENGTH = 64
_PROMPT_LENGTH = 256
# Names of linear maps in Hugging Face's models of this kind, and of what they are part of.
_OTHER_TARGETS: dict[str, Sequence[str]] = {
    "gate_proj": ["linear1"],
    "up_proj": ["linear1"],
    "gate_up_proj": ["linear1"],
    "down_proj": ["linear2"],
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
}


def sft(
    base: str,
    data: str,
    *,
    tuning: Tuning = "lora",
    rank: int = 16,
    alpha: float | None = None,
    targets: str = "",
    dropout: float = 0.0,
    held_out: float = 0.05,
    sequence_length: int = 1024,
    batch_size: int | None = None,
    epochs: int = 3,
    steps: int | None = None,
    learning_rate: float | None = None,
) -> SpmdTrainer.Config:
    """Returns a recipe for tuning a checkpoint on the answers of conversations.

    Args:
        base: The folder of a Hugging Face checkpoint, with its tokenizer.
        data: A file of JSON lines or Parquet; each row has `messages`, a `prompt` and a
            `completion`, or a `text`.
        tuning: "full", "lora", "lora-int8" or "lora-nf4".
        rank: Rank of the adapters.
        alpha: Their outputs are multiplied by `alpha / rank`; twice the rank by default.
        targets: The linear maps with adapters, such as "q_proj,v_proj"; all by default. "experts"
            are the weights of experts, which have none by default.
        dropout: Rate at which inputs of adapters are dropped in training.
        held_out: Fraction of the rows to evaluate on; 0 for none.
        sequence_length: Tokens of a sequence, into which rows are packed.
        batch_size: Sequences per step; 8 by default, or as many as there are.
        epochs: Number of passes over the data.
        steps: Number of steps, in place of `epochs`.
        learning_rate: Highest learning rate, after the warm-up; 2e-5 for "full", otherwise 2e-4.

    Raises:
        WeightsReadError: if there is no checkpoint at `base`.
        HuggingFaceConfigError: if its model is not supported.
        InputReadError: if a row of the data is of another form.
        LayerConfigError: if there is no such target.
    """
    return sft_config(
        run_directory("sft", data),
        base,
        data,
        tuning=tuning,
        rank=rank,
        alpha=alpha,
        targets=named_targets(targets),
        dropout=dropout,
        held_out=held_out,
        sequence_length=sequence_length,
        batch_size=batch_size,
        epochs=epochs,
        steps=steps,
        learning_rate=learning_rate,
    )


def sft_config(
    directory: str,
    base: str,
    data: str | Sequence[str] | Rows,
    *,
    tuning: Tuning,
    rank: int,
    alpha: float | None,
    targets: Sequence[str] | None,
    dropout: float,
    held_out: float,
    sequence_length: int,
    batch_size: int | None,
    epochs: int,
    steps: int | None,
    learning_rate: float | None,
) -> SpmdTrainer.Config:
    """Returns the config of a run in a directory; for the arguments see `sft`."""
    tokenizer, template = tokenizer_configs(base)
    model = tuned_model(
        base,
        tokenizer,
        tuning=tuning,
        rank=rank,
        alpha=alpha,
        targets=targets,
        dropout=dropout,
    )
    positions = model.decoder.emb.pos_emb
    if positions is not None:  # learned
        sequence_length = min(sequence_length, positions.shape[0])
    rows: dict[str, Any] = {
        "data": data,
        "tokenizer": tokenizer,
        "template": template,
        "held_out_fraction": held_out,
    }
    count = num_sequences(**rows, sequence_length=sequence_length)
    if batch_size is None:
        batch_size = min(_BATCH_SIZE, count)
    if steps is None:
        steps = max(1, epochs * count // batch_size)
    if learning_rate is None:
        # That of adapters is ten times that of all parameters.
        learning_rate = 2e-5 if tuning == "full" else 2e-4

    def packed(split: str, global_batch_size: int) -> Input.Config:
        source = config_for_function(conversation_source).set(
            **rows,
            split=split,
            sequence_length=sequence_length,
            global_batch_size=global_batch_size,
            is_training=split == "train",
        )
        return Input.default_config().set(source=source)

    eval_every = max(1, steps // 5)
    cfg = trainer_config(
        directory,
        model=model,
        train_input=packed("train", batch_size),
        held_out_input=packed("held_out", batch_size),
        max_step=steps,
        peak_lr=learning_rate,
        eval_every=eval_every,
    )
    if held_out == 0:
        cfg.evalers = {}
    else:
        set_best(cfg, HELD_OUT)
        cfg.evalers["answers"] = _answers(
            rows, tokenizer, sequence_length, eval_every
        )
    set_initial_state(cfg, base, tuning)
    return cfg


def run_directory(recipe: str, data: str) -> str:
    """Returns the directory of a run of a recipe on a file, such as `runs/sft-chat`."""
    name = re.sub(r"[^\w.]+", "-", Path(data).absolute().stem).strip("-")
    return f"runs/{recipe}-{name or 'data'}"


def set_initial_state(
    cfg: SpmdTrainer.Config, base: str, tuning: Tuning
) -> None:
    """Sets that a run begins with a base, and what it trains."""
    builder: Any = ImportedWeightsBuilder.default_config()
    if tuning != "full":
        builder = FrozenBaseBuilder.default_config()
        learner: Any = cfg.learner
        learner.update_rules = [
            (".*/adapter/.*", UpdateType.ALL_UPDATES),
            (".*", UpdateType.NO_UPDATE),
        ]
    cfg.init_state_builder = builder.set(path=base)


def named_targets(words: str) -> list[str] | None:
    """Returns the names between commas; None for no name, which means all linear maps."""
    names = [word.strip() for word in words.split(",") if word.strip()]
    return names or None


def tuned_model(
    base: str,
    tokenizer: ConfigOr[Tokenizer],
    *,
    tuning: Tuning,
    rank: int,
    alpha: float | None = None,
    targets: Sequence[str] | None = None,
    dropout: float = 0.0,
) -> Any:
    """Returns the config of a base, with adapters if they are trained; see `sft`."""
    model = _model(base, tuning, tokenizer)
    if tuning != "full":
        hierarchy.set_lora_recursively(
            model,
            rank=rank,
            alpha=2.0 * rank if alpha is None else alpha,
            dropout_rate=dropout,
            targets=_weft_targets(targets),
            dtype=jnp.float32,
        )
    return model


def set_best(cfg: SpmdTrainer.Config, evaler: str) -> None:
    """Keeps the checkpoint with the smallest loss of an evaler."""
    checkpointer: Any = cfg.checkpointer
    checkpointer.keep_best = KeepBest.default_config().set(
        metric=EvalMetric(evaler, "loss"), mode="min"
    )


def _model(base: str, tuning: str, tokenizer: ConfigOr[Tokenizer]) -> Any:
    """Returns the config of the base, stored as the tuning says."""
    if tuning == "full":
        model: Any = huggingface_model_config(base)
        if _is_half(base):
            model.compute_dtype = jnp.bfloat16
    else:
        model = huggingface_model_config(base, dtype=jnp.bfloat16)
        model.compute_dtype = jnp.bfloat16
        weight_format = _WEIGHT_FORMATS.get(tuning)
        hierarchy.set_weight_format_recursively(model, weight_format)
    decoder = model.decoder
    if decoder.pad_token_id == NO_PADDING:
        # The input knows padding by its position.
        decoder.pad_token_id = _instantiated(tokenizer).pad_id
    return model


def _instantiated(tokenizer: Any) -> Tokenizer:
    return tokenizer.instantiate()


def _is_half(base: str) -> bool:
    values = untrusted.read_json_file(Path(base) / "config.json")
    dtype = values.get("dtype", values.get("torch_dtype"))
    return dtype in ("bfloat16", "float16")


def _weft_targets(targets: Sequence[str] | None) -> list[str] | None:
    """Returns the names of Weft's linear maps; both parts of a gated layer belong together."""
    if targets is None:
        return None
    is_gate, is_up = "gate_proj" in targets, "up_proj" in targets
    if is_gate != is_up:
        raise errors.LayerConfigError(
            f"targets={','.join(targets)} has one of gate_proj and up_proj, which are one layer "
            "here, linear1; name both."
        )
    all_names = [*LORA_TARGETS, *_OTHER_TARGETS, EXPERTS]
    names: list[str] = []
    for target in targets:
        if target not in all_names:
            raise errors.LayerConfigError(
                f"targets={','.join(targets)}: there is no linear map {target!r}; expected some of "
                f"{', '.join(all_names)}. {errors.did_you_mean(target, all_names)}"
            )
        names += _OTHER_TARGETS.get(target, [target])
    return names


def _answers(
    rows: dict[str, Any],
    tokenizer: ConfigOr[Tokenizer],
    sequence_length: int,
    eval_every: int,
) -> DecodingEvaler.Config:
    """Returns an evaler that samples answers to held-out prompts, for the report."""
    answer_length = min(_ANSWER_LENGTH, sequence_length // 2)
    prompt_length = min(_PROMPT_LENGTH, sequence_length - answer_length)
    source = config_for_function(prompt_source).set(
        **rows, prompt_length=prompt_length, num_prompts=_NUM_PROMPTS
    )
    return DecodingEvaler.default_config().set(
        input=Input.default_config().set(source=source),
        eval_policy=config_for_function(every_n_steps_policy).set(n=eval_every),
        metric_calculator=SampleDecoding.default_config().set(
            tokenizer=tokenizer,
            prompt_length=prompt_length,
            num_tokens=answer_length,
            logits_modifier=config_for_function(functional.scale_by).set(
                temperature=0.0
            ),
        ),
        summary_writer=summary_writer(every_n_steps=1),
    )


def folder_tokenizer(
    folder: str,
) -> HuggingFaceTokenizer | SentencePieceTokenizer:
    """Returns the tokenizer of the folder of a base, which may have moved."""
    return load_tokenizer(base_location(folder)).tokenizer


def folder_template(folder: str) -> ChatTemplate | None:
    """Returns the chat template of such a folder, None if it has none."""
    return load_tokenizer(base_location(folder)).chat_template


def tokenizer_configs(
    base: str,
) -> tuple[InstantiableConfig[Any], InstantiableConfig[Any] | None]:
    """Returns the configs of the tokenizer and the chat template of a base.

    A model of bytes, such as an export of `lm-llama`, needs no file.

    Raises HuggingFaceConfigError if the base generates no text.
    """
    check_generates_text(base)
    check_base_of_new_run(base)
    if not has_tokenizer(base):
        model: Any = huggingface_model_config(base)
        if model.decoder.vocab_size == VOCAB_SIZE:
            return config_for_class(ByteTokenizer), None
    template = None
    if load_tokenizer(base).chat_template is not None:
        template = config_for_function(folder_template).set(folder=base)
    return config_for_function(folder_tokenizer).set(folder=base), template
