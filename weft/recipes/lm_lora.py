"""LoRA fine-tuning of an imported checkpoint on another kind of text.

    lm-llama    a small Llama, trained on one part of the standard library ...
    lm-lora     ... and fine-tuned on another part, from its Hugging Face checkpoint

`weft train lm-lora base=PATH` starts from the folder of another Hugging Face checkpoint, or from a
file written by `weft export`. Without a base it uses the small Llama, training it first if needed.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from weft import config, errors, serialization
from weft.hierarchy import decoding
from weft.hierarchy.lora import set_lora_recursively, without_lora
from weft.input import ByteTokenizer, HuggingFaceTokenizer
from weft.interop.huggingface import (
    FAMILIES,
    check_generates_text,
    huggingface_model_config,
    to_huggingface,
)
from weft.interop.huggingface.settings import NO_PADDING, Settings
from weft.recipes.lm import initializer, set_corpus, text_trainer_config
from weft.trainer import (
    FrozenBaseBuilder,
    SpmdTrainer,
    UpdateType,
    run_dir,
)
from weft.trainer.checkpointer.dirs import step_dirs

_BASE_DIR = "runs/lm-llama"
_BASE = f"{_BASE_DIR}/huggingface"
_LENGTH = 128

# In the form of a config.json.
_LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 264,
    "eos_token_id": ByteTokenizer.eos_id,
    "pad_token_id": ByteTokenizer.pad_id,
}


def lm_llama(
    data_dir: str | None = None,
    *,
    text_key: str = "text",
    learning_rate: float = 6e-3,
    batch_size: int = 16,
    steps: int = 300,
) -> config.InstantiableConfig:
    """Returns a small byte-level Llama, which trains in a minute on two cores.

    Args:
        data_dir: A folder of text to train on; None for the standard library without the part for
            `lm_lora`.
        text_key: Field of a record that holds the text.
        learning_rate: Highest learning rate, after the warm-up.
        batch_size: Sequences per step.
        steps: Number of steps, and length of the schedule.
    """
    model: Any = (
        FAMILIES["llama"]
        .read(Settings(_LLAMA))
        .set(param_init=initializer(variance=1.0))
    )
    cfg = text_trainer_config(
        _BASE_DIR,
        data_dir,
        text_key=text_key,
        model=model,
        batch_size=batch_size,
        max_step=steps,
        peak_lr=learning_rate,
        eval_every=150,
    )
    if data_dir is None:
        set_corpus(cfg, pattern="[!e]*.py")
    return cfg


def lm_lora(
    data_dir: str | None = None,
    base: str | None = None,
    *,
    text_key: str = "text",
    learning_rate: float = 5e-3,
    batch_size: int = 16,
    steps: int = 200,
) -> config.InstantiableConfig:
    """Returns a recipe for low-rank adapters on all layers of an imported, frozen causal LM.

    Documents begin with the tokens that the base's own tokenizer puts before a text, if any.
    Checkpoints hold the adapters, not the base.

    Args:
        data_dir: A folder of text to train on; None for the standard library's tables of encodings.
        base: The folder of a Hugging Face checkpoint, or a file written by `weft export`; None for
            the export of `lm_llama`.
        text_key: Field of a record that holds the text.
        learning_rate: Highest learning rate, after the warm-up.
        batch_size: Sequences per step.
        steps: Number of steps, and length of the schedule.

    Raises:
        WeightsReadError: if there is no checkpoint at `base`.
        HuggingFaceConfigError: if its model is not supported, or has no tokenizer.
    """
    llama: Any = lm_llama()
    model = llama.model if base is None else _model_of(base)
    tokenizer = None if base is None else _tokenizer_of(base, model)
    set_lora_recursively(model, rank=8, alpha=16.0)
    cfg = text_trainer_config(
        "runs/lm-lora",
        data_dir,
        text_key=text_key,
        model=model,
        batch_size=batch_size,
        max_step=steps,
        peak_lr=learning_rate,
        eval_every=100,
    )
    cfg.learner.update_rules = [
        (".*/adapter/.*", UpdateType.ALL_UPDATES),
        (".*", UpdateType.NO_UPDATE),
    ]
    cfg.init_state_builder = FrozenBaseBuilder.default_config().set(
        path=base or _BASE
    )
    if tokenizer is not None:
        # The base learned texts that begin as the template of its tokenizer says.
        has_bos = bool(tokenizer.instantiate().bos_ids)
        for input_cfg in (cfg.input, cfg.evalers["held_out"].input):
            input_cfg.source.set(tokenizer=tokenizer, add_bos=has_bos)
    if data_dir is None:
        set_corpus(cfg, pattern="encodings/*.py", held_out_fraction=0.1)
    return cfg


def prepare(
    cfg: SpmdTrainer.Config,
    train: Callable[[str, SpmdTrainer.Config], SpmdTrainer | None],
) -> bool:
    """Creates the small Llama's checkpoint if a run needs it; returns whether the run can begin.

    Args:
        train: Trains a recipe by name and config, and returns the trainer, None if stopped.
    """
    builder: Any = cfg.init_state_builder
    path = builder.path
    saved_steps = step_dirs(os.path.join(cfg.dir, run_dir.CHECKPOINTS_DIR))
    # A run that continues had a base; other checkpoints are the user's.
    if path != _BASE or saved_steps or Path(path, "config.json").exists():
        return True
    base_cfg: Any = lm_llama()
    trainer = train("lm-llama", base_cfg)
    if trainer is None:
        return False
    _export(path, base_cfg.model, trainer)
    return True


def _export(path: str, model: Any, trainer: SpmdTrainer) -> None:
    """Writes a trained model once, regardless of the number of processes."""
    # Replicated over all processes.
    params = jax.tree.map(
        lambda x: np.asarray(x.addressable_data(0)), trainer.trainer_state.model
    )
    if jax.process_index() == 0:
        to_huggingface(path, model, params, max_position_embeddings=_LENGTH)
    if jax.process_count() > 1:
        from jax.experimental.multihost_utils import sync_global_devices

        sync_global_devices("the checkpoint that a run begins with is written")


def _model_of(base: str) -> Any:
    if not base.endswith(".safetensors"):
        check_generates_text(base)
        return huggingface_model_config(base)
    with serialization.TensorFiles(base) as files:
        text = files.metadata().get("model")
    if text is None:
        raise errors.HuggingFaceConfigError(
            f"{base!r} does not name its model. Use a file written by `weft export`, or the folder "
            "of a Hugging Face checkpoint."
        )
    model: Any = config.from_text(text, source=base)
    if without_lora(model) != model:
        raise errors.HuggingFaceConfigError(
            f"{base!r} has adapters in addition to its weights. Export it with --merge, which adds "
            "them to the weights."
        )
    return model


def _tokenizer_of(base: str, model: Any) -> Any:
    """Returns the config of a checkpoint's tokenizer, None for bytes; sets the model's padding."""
    decoder = model.decoder
    folder = Path(base) if Path(base).is_dir() else Path(base).parent
    path = folder / "tokenizer.json"
    if not path.exists():
        if decoder.vocab_size != _LLAMA["vocab_size"]:
            raise errors.HuggingFaceConfigError(
                f"there is no {str(path)!r}, and the vocabulary of {decoder.vocab_size} tokens is "
                "not that of bytes. Put the model's tokenizer.json there."
            )
        decoder.set(
            pad_token_id=ByteTokenizer.pad_id, eos_token_id=ByteTokenizer.eos_id
        )
        return None
    HuggingFaceTokenizer(
        str(path)
    )  # raises if the file, or the package to read it, is missing
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    # The first of several ends separates documents.
    eos_id, *_ = decoding.end_ids(decoder.eos_token_id)
    if eos_id == NO_PADDING:
        raise errors.HuggingFaceConfigError(
            f"the config of the checkpoint {base!r} has no eos_token_id, which separates "
            "documents. Add it to config.json."
        )
    eos_token = tokenizer.id_to_token(eos_id)
    if eos_token is None:
        raise errors.HuggingFaceConfigError(
            f"the config of the checkpoint {base!r} has eos_token_id={eos_id}, for which "
            f"{str(path)!r} has no token. Put the model's own tokenizer.json there, or correct "
            "config.json."
        )
    pad_id = decoder.pad_token_id
    pad_token = None if pad_id == NO_PADDING else tokenizer.id_to_token(pad_id)
    if pad_token is None:
        # The input knows padding by its position.
        pad_id, pad_token = eos_id, eos_token
    decoder.pad_token_id = pad_id
    return config.config_for_class(HuggingFaceTokenizer).set(
        path=str(path), eos_token=eos_token, pad_token=pad_token
    )
