"""Llama-like language models of 1, 8 and 70 billion parameters, for a mesh of many devices.

They have the shapes of Llama 3, compute in bfloat16 with parameters and moments in float32, and
recompute the activations of each layer in the backward pass. The corpus is the user's:

    weft check lm-8b --mesh fsdp=64 --device H100
    weft train lm-8b data_dir=corpus tokenizer=tokenizer.json --mesh-selector gpu-h100-64
"""

from typing import Any

from weft import trainer
from weft.config import InstantiableConfig, config_for_function
from weft.hierarchy import RematSpec
from weft.input import ByteTokenizer, folder_corpus
from weft.interop.huggingface import FAMILIES
from weft.interop.huggingface.settings import Settings
from weft.recipes.lm import initializer, text_trainer_config

# In the form of a config.json.
_LLAMA = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "num_key_value_heads": 8,
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5,
    "eos_token_id": ByteTokenizer.eos_id,
    "pad_token_id": ByteTokenizer.pad_id,
}
_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "tie_word_embeddings": True,
}
_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
}
_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}


def lm_1b(
    data_dir: str | None = None,
    tokenizer: str | None = None,
    *,
    text_key: str = "text",
    learning_rate: float = 4e-4,
    batch_size: int = 256,
    sequence_length: int = 8192,
    steps: int = 100_000,
) -> InstantiableConfig:
    """Returns a recipe for a model of 1.2 billion parameters.

    Args:
        data_dir: A folder to train on, as in `lm`; needed to train.
        tokenizer: As in `lm`.
        text_key: Field of a record that holds the text.
        learning_rate: Highest learning rate, after the warm-up.
        batch_size: Sequences per step.
        sequence_length: Tokens per sequence.
        steps: Number of steps, and length of the schedule.
    """
    return _trainer_config(
        "runs/lm-1b",
        data_dir,
        tokenizer,
        text_key=text_key,
        shape=_1B,
        tensor_parallelism=1,
        peak_lr=learning_rate,
        batch_size=batch_size,
        sequence_length=sequence_length,
        max_step=steps,
    )


def lm_8b(
    data_dir: str | None = None,
    tokenizer: str | None = None,
    *,
    text_key: str = "text",
    learning_rate: float = 3e-4,
    batch_size: int = 256,
    sequence_length: int = 8192,
    steps: int = 250_000,
) -> InstantiableConfig:
    """Returns a recipe for a model of 8 billion parameters.

    Args:
        data_dir: A folder to train on, as in `lm`; needed to train.
        tokenizer: As in `lm`.
        text_key: Field of a record that holds the text.
        learning_rate: Highest learning rate, after the warm-up.
        batch_size: Sequences per step.
        sequence_length: Tokens per sequence.
        steps: Number of steps, and length of the schedule.
    """
    return _trainer_config(
        "runs/lm-8b",
        data_dir,
        tokenizer,
        text_key=text_key,
        shape=_8B,
        tensor_parallelism=1,
        peak_lr=learning_rate,
        batch_size=batch_size,
        sequence_length=sequence_length,
        max_step=steps,
    )


def lm_70b(
    data_dir: str | None = None,
    tokenizer: str | None = None,
    *,
    text_key: str = "text",
    learning_rate: float = 1.5e-4,
    batch_size: int = 256,
    sequence_length: int = 8192,
    steps: int = 500_000,
) -> InstantiableConfig:
    """Returns a recipe for a model of 70 billion parameters.

    Args:
        data_dir: A folder to train on, as in `lm`; needed to train.
        tokenizer: As in `lm`.
        text_key: Field of a record that holds the text.
        learning_rate: Highest learning rate, after the warm-up.
        batch_size: Sequences per step.
        sequence_length: Tokens per sequence.
        steps: Number of steps, and length of the schedule.
    """
    return _trainer_config(
        "runs/lm-70b",
        data_dir,
        tokenizer,
        text_key=text_key,
        shape=_70B,
        tensor_parallelism=8,
        peak_lr=learning_rate,
        batch_size=batch_size,
        sequence_length=sequence_length,
        max_step=steps,
    )


def _trainer_config(
    directory: str,
    data_dir: str | None,
    tokenizer: str | None,
    *,
    text_key: str,
    shape: dict[str, Any],
    tensor_parallelism: int,
    **training: Any,
) -> trainer.SpmdTrainer.Config:
    """Returns a config whose default mesh divides the parameters over all devices."""
    model: Any = (
        FAMILIES["llama"]
        .read(Settings({**_LLAMA, **shape}))
        .set(param_init=initializer(variance=1.0))
    )
    # A loop over the layers keeps its recomputation apart by itself.
    model.decoder.transformer.layer.remat_spec = RematSpec(prevent_cse=False)
    cfg = text_trainer_config(
        directory,
        data_dir,
        tokenizer,
        text_key=text_key,
        model=model,
        eval_every=1000,
        **training,
    )
    cfg.precision = "mixed_bfloat16"
    if data_dir is None:
        _require_corpus(cfg, text_key)
    cfg = (
        trainer.ParallelismModifier.default_config()
        .set(fsdp=-1)
        .instantiate()(cfg)
    )
    sizes = {"fsdp": -1, "model": tensor_parallelism}
    mesh_shape = tuple(sizes.get(name, 1) for name in cfg.mesh_axis_names)
    return cfg.set(mesh_rules=[("(gpu|tpu)-.*", mesh_shape)])


def _require_corpus(cfg: trainer.SpmdTrainer.Config, text_key: str) -> None:
    """Leaves the paths of the corpus to be set, without which a run ends with their name."""
    corpus = config_for_function(folder_corpus).set(text_key=text_key)
    for input_cfg in (cfg.input, cfg.evalers["held_out"].input):
        input_cfg.source.corpus = corpus.clone()
