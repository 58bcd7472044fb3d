"""Use of a run's trained model: `weft sample` generates text, `weft export` writes parameters."""

import argparse
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import weft
from weft import config, errors, serialization, trainer
from weft.cli.configs import run_config
from weft.core.axis_rules import logical_axis_rules
from weft.functional import scale_by
from weft.hierarchy import Module, functional, merge_adapters, without_lora
from weft.input.tokenizers import Tokenizer, as_tokenizer, until_end
from weft.report import display
from weft.serialization.untrusted import check_local_path, printable
from weft.trainer import run_dir
from weft.trainer.compilation import options_for_steps
from weft.trainer.mesh import build_mesh, rules_of
from weft.trainer.model import LibraryModel, build_model, cast_floats
from weft.trainer.optimizers.base import at_least_float32
from weft.trainer.state_builder import ImportedWeightsBuilder
from weft.typing import NestedTensor, Tensor

logger = logging.getLogger(__name__)

Sampler = Callable[[NestedTensor, Tensor], Tensor]
"""Function of parameters and a key that returns tokens."""

_FLOATS = ("float32", "bfloat16", "float16", "float64")


def restore_model(
    cfg: trainer.SpmdTrainer.Config, *, step: int | None = None
) -> tuple[Module, dict[str, Any]]:
    """Builds the model of a run and restores its parameters on one device.

    Restores the moving average of the parameters if the learner keeps one.

    Args:
        step: The step of the checkpoint; None for the newest complete one.

    Raises CheckpointNotFoundError if the run has not saved yet.
    """
    axes = cfg.mesh_axis_names
    mesh = build_mesh((1,) * len(axes), axes, jax.devices()[:1])
    with jax.set_mesh(mesh), logical_axis_rules(rules_of(cfg).activations):
        model = build_model(cfg)
        checkpointer_cfg: Any = cfg.checkpointer
        checkpointer = checkpointer_cfg.set(
            name="checkpointer",
            dir=os.path.join(cfg.dir, run_dir.CHECKPOINTS_DIR),
            validation=trainer.CheckpointValidationType.CONTAINS_STATE,
        ).instantiate(parent=None)
        has_average = getattr(getattr(cfg.learner, "ema", None), "decay", None) is not None

        def initial_params(key: Tensor) -> NestedTensor:
            params = model.initialize_parameters_recursively(key, prebuilt=None)
            return at_least_float32(params) if has_average else params

        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

        def on_device(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        shapes = jax.eval_shape(initial_params, jax.random.key(0))
        target: Any = {"model": jax.tree.map(on_device, shapes)}
        if has_average:
            target = {"learner": {"ema": {"ema": target["model"]}}}
        restored_step, state = checkpointer.restore(step=step, state=target)
        checkpointer.stop()
    if restored_step is None:
        raise errors.CheckpointNotFoundError(
            f"the run in {cfg.dir!r} has not saved a checkpoint yet. Train it longer."
        )
    params = state["learner"]["ema"]["ema"] if has_average else state["model"]
    return model, params


# Text generation.


def print_sample(arguments: argparse.Namespace) -> int:
    """Prints a prompt and its continuation."""
    # What the system's encoding lacks arrives as surrogates.
    if any("\ud800" <= character <= "\udfff" for character in arguments.prompt):
        raise errors.CommandLineError(
            f"--prompt {arguments.prompt!a} has bytes that are not in "
            f"{sys.getfilesystemencoding()}, the encoding of this process; write it in that "
            "encoding, or set PYTHONUTF8=1 for UTF-8."
        )
    cfg = run_config(arguments.dir, **arguments.trust)
    tokenizer = find_tokenizer(cfg)
    if tokenizer is None:
        raise errors.CommandLineError(
            f"the run in {arguments.dir!r} reads no text: its input has no tokenizer."
        )
    model, params = restore_model(cfg)
    text = generate(
        model,
        params,
        tokenizer=tokenizer,
        prompt=arguments.prompt,
        num_tokens=arguments.tokens,
        temperature=arguments.temperature,
        seed=arguments.seed,
    )
    print(printable(arguments.prompt + text))
    return 0


def find_tokenizer(cfg: trainer.SpmdTrainer.Config) -> Tokenizer | None:
    """Returns the tokenizer of the input of a trainer's config, or None."""
    tokenizers = list(run_dir.find_fields("tokenizer", cfg.input).values())
    if not tokenizers:
        return None
    add_bos = any(run_dir.find_fields("add_bos", cfg.input).values())
    return as_tokenizer(tokenizers[0], add_bos=add_bos)


def generate(
    model: Module,
    params: NestedTensor,
    *,
    tokenizer: Tokenizer,
    prompt: str,
    num_tokens: int,
    temperature: float,
    seed: int,
) -> str:
    """Samples a continuation of a prompt, and returns it without the prompt.

    Args:
        num_tokens: Maximum number of tokens; the model may end the text earlier.
        temperature: Divides the logits; 0 for greedy decoding.

    Raises CommandLineError if the model does not generate text, or a number is out of range.
    """
    if not can_generate(model):
        raise errors.CommandLineError(
            f"{type(model).__name__} generates no text. Sample from a run of a language model: "
            "one of the hierarchy, or one with a method `predict(input_batch)` that returns "
            "the `logits` for `input_ids`."
        )
    if num_tokens < 1 or temperature < 0:
        raise errors.CommandLineError(
            f"--tokens={num_tokens} --temperature={temperature:g}: expected at least one "
            "token, and a temperature of 0 or more."
        )
    # A document begins with the end token of the previous one.
    ids = np.concatenate([[tokenizer.eos_id], tokenizer.encode(prompt.encode())])
    if hasattr(model, "sample_decode"):
        sampler = _decoder(model, ids, num_tokens, temperature)
    else:
        sampler = _predictor(model, ids, num_tokens, temperature)
    # A step per token, which is all that the model computes at once.
    options = options_for_steps(jax.default_backend(), params, lambda: ids[:1], num_tokens)
    sample = jax.jit(sampler, compiler_options=options)
    tokens = np.asarray(sample(params, jax.random.key(seed)))
    continuation = tokens[len(ids) - 1 :]  # without the prompt, whose first token is not returned
    return tokenizer.decode(until_end(continuation, tokenizer, run_dir.end_ids(model.config)))


def can_generate(model: Module) -> bool:
    """Returns whether `generate` can sample from a trainer's model."""
    return hasattr(model, "sample_decode") or (isinstance(model, LibraryModel) and model.predicts)


def _decoder(model: Module, ids: np.ndarray, num_tokens: int, temperature: float) -> Sampler:
    inputs = {
        "input_batch": {
            "prefix": jnp.asarray(ids[None], jnp.int32),
            "prefix_len": jnp.array([len(ids)]),
        },
        "max_sequence_length": len(ids) - 1 + num_tokens,
        "logits_modifier": scale_by(temperature),
    }

    def sample(params: NestedTensor, key: Tensor) -> Tensor:
        outputs, _ = functional(
            model, key, params, inputs, method="sample_decode", is_training=False
        )
        return outputs.sequences[0, 0]

    return sample


def _predictor(model: Module, ids: np.ndarray, num_tokens: int, temperature: float) -> Sampler:
    """Predicts each token from all earlier ones, for models without a cache."""
    modify_logits = scale_by(temperature)

    def sample(params: NestedTensor, key: Tensor) -> Tensor:
        def add_token(i: Tensor, carry: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            tokens, key = carry
            inputs = {"input_batch": {"input_ids": tokens[None]}}
            outputs, _ = functional(
                model, None, params, inputs, method="predict", is_training=False
            )
            key, token_key = jax.random.split(key)
            logits = modify_logits(outputs["logits"][0, i][None])[0]
            return tokens.at[i + 1].set(jax.random.categorical(token_key, logits)), key

        tokens = jnp.concatenate([ids, np.zeros(num_tokens, ids.dtype)]).astype(jnp.int32)
        last = len(ids) - 1
        tokens, _ = jax.lax.fori_loop(last, last + num_tokens, add_token, (tokens, key))
        return tokens[1:]

    return sample


# Export.


def export(arguments: argparse.Namespace) -> int:
    """Writes safetensors, or a checkpoint that transformers loads, and prints the files' names."""
    from weft.interop.huggingface import to_huggingface

    cfg = run_config(arguments.dir, **arguments.trust)
    _check_export(arguments)
    model: Any
    model, params = restore_model(cfg, step=arguments.step)
    model_cfg: Any = cfg.model
    to_file = arguments.to.endswith(".safetensors")
    if arguments.merge or not to_file:
        model_cfg = without_lora(model_cfg)
        params = merge_adapters(model, params)
    params = cast_floats(params, arguments.dtype)
    max_shard_bytes = int(arguments.max_file_gb * 1e9)
    if to_file:
        # Describes the model, so that the file is useful without the run.
        metadata = {"weft": weft.__version__, "model": config.to_text(model_cfg)}
        files = serialization.save_safetensors(
            arguments.to, params, metadata=metadata, max_shard_bytes=max_shard_bytes
        )
    else:
        base = _base_of(cfg)
        longest = None  # that of the base
        if base is None:
            fields = run_dir.find_fields("sequence_length", cfg.input)
            lengths = [length for length in fields.values() if isinstance(length, int)]
            longest = max(lengths, default=2048)
        files = to_huggingface(
            arguments.to,
            model_cfg,
            params,
            max_position_embeddings=longest,
            base=base,
            tokenizer=_tokenizer_of(cfg),
            max_shard_bytes=max_shard_bytes,
        )
    for file in files:
        print(printable(f"{file}  {display.bytes_text(file.stat().st_size)}"))
    return 0


def _check_export(arguments: argparse.Namespace) -> None:
    if arguments.dtype is not None and arguments.dtype not in _FLOATS:
        raise errors.CommandLineError(
            f"--dtype={arguments.dtype!r} is not one of {', '.join(_FLOATS)}. Write --dtype "
            "bfloat16."
        )
    if not arguments.max_file_gb > 0:
        raise errors.CommandLineError(
            f"--max-file-gb={arguments.max_file_gb:g} is too small; expected more than 0."
        )
    check_local_path(arguments.to, "--to")
    if Path(arguments.to).is_file() and not arguments.to.endswith(".safetensors"):
        raise errors.CommandLineError(
            f"--to={arguments.to!r} is a file. Name a folder for a Hugging Face checkpoint, or a "
            "file that ends in .safetensors."
        )


def _base_of(cfg: trainer.SpmdTrainer.Config) -> str | None:
    """Returns the folder of the Hugging Face checkpoint that a run began with, if it is there."""
    builder = cfg.init_state_builder
    if not isinstance(builder, ImportedWeightsBuilder.Config):
        return None
    folder = Path(builder.path)
    if (folder / "config.json").exists():
        return str(folder)
    if not folder.name.endswith(".safetensors"):
        logger.warning(
            "%s, with which the run began, is not there: its settings, chat template and "
            "generation config are not written. Put it there to have them.",
            folder,
        )
    return None


def _tokenizer_of(cfg: trainer.SpmdTrainer.Config) -> str | None:
    """Returns the file of the tokenizer that the input names, if it has one."""
    for tokenizer in run_dir.find_fields("tokenizer", cfg.input).values():
        path = tokenizer if isinstance(tokenizer, str) else getattr(tokenizer, "path", None)
        if isinstance(path, str):
            return path
    return None
