"""A Llama of 1.1 billion parameters in bfloat16 on sequences of 4,096 tokens, and a tiny one.

$ weft train benchmarks/_llama.py:llama_1b
"""

from typing import Any

import jax

from weft.hierarchy import RematSpec
from weft.interop.huggingface import FAMILIES
from weft.interop.huggingface.settings import Settings
from weft.recipes.lm import initializer, text_trainer_config
from weft.trainer import SpmdTrainer

# In the form of a config.json.
LLAMA_1B = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 16,
    "vocab_size": 32768,
    "max_position_embeddings": 4096,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 256,
    "pad_token_id": 257,
}
TINY = LLAMA_1B | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}


def llama_1b(*, batch_size: int = 4, steps: int = 60) -> SpmdTrainer.Config:
    """Returns the large one, for a GPU of 80 GB."""
    return recipe(LLAMA_1B, sequence_length=4096, batch_size=batch_size, steps=steps)


def recipe(
    settings: dict[str, object], *, sequence_length: int, batch_size: int, steps: int
) -> SpmdTrainer.Config:
    """Returns the config of a run on the text of Python's standard library.

    The backward pass recomputes all of a layer but its matrix products.
    """
    model: Any = (
        FAMILIES["llama"].read(Settings(settings)).set(param_init=initializer(variance=1.0))
    )
    model.decoder.transformer.layer.remat_spec = RematSpec(
        prevent_cse=False, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    )
    cfg = text_trainer_config(
        "runs/llama-1b",
        None,
        model=model,
        sequence_length=sequence_length,
        batch_size=batch_size,
        max_step=steps,
        peak_lr=3e-4,
        eval_every=10**9,
        save_every=10**9,
    )
    cfg.precision = "mixed_bfloat16"
    return cfg
