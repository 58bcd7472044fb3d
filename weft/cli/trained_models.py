"""Trained models of runs: their parameters and tokenizers; `weft export` writes parameters."""

import argparse
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

import weft
from weft import config, errors, serialization, trainer
from weft.cli.configs import check_is_read, run_config, with_recorded_batch
from weft.core.axis_rules import logical_axis_rules
from weft.hierarchy import (
    Module,
    merge_adapters,
    without_lora,
    without_reference,
)
from weft.input.tokenizers import (
    Tokenizer,
    as_tokenizer,
)
from weft.recipes.load import best_step_of_run
from weft.report import display
from weft.serialization.untrusted import check_local_path, printable
from weft.trainer import run_dir
from weft.trainer.frozen_base import (
    FrozenBaseBuilder,
    base_location,
    merged_with_base,
)
from weft.trainer.mesh import build_mesh, rules_of
from weft.trainer.model import build_model, cast_floats
from weft.trainer.optimizers.base import at_least_float32
from weft.trainer.saved_params import read_params
from weft.trainer.state_builder import ImportedWeightsBuilder
from weft.trainer.supervised import Supervised
from weft.typing import NestedTensor, PyTree, Tensor

logger = logging.getLogger(__name__)

Sampler = Callable[[NestedTensor, Tensor], Tensor]
"""Function of parameters and a key that returns tokens."""

# Of files that other libraries save weights in; the name of a folder may have a dot, too.
_OTHER_SUFFIXES = (
    *(".bin", ".ckpt", ".gguf", ".h5", ".hdf5", ".json", ".keras", ".msgpack"),
    *(".npy", ".npz", ".onnx", ".pb", ".pickle", ".pkl", ".pt", ".pth"),
    *(".tflite", ".zip"),
)

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
        has_average = (
            getattr(getattr(cfg.learner, "ema", None), "decay", None)
            is not None
        )

        def initial_params(key: Tensor) -> NestedTensor:
            params = model.initialize_parameters_recursively(key, prebuilt=None)
            return at_least_float32(params) if has_average else params

        sharding = jax.sharding.NamedSharding(
            mesh, jax.sharding.PartitionSpec()
        )

        def on_device(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        shapes = jax.eval_shape(initial_params, jax.random.key(0))
        target: Any = {"model": jax.tree.map(on_device, shapes)}
        if isinstance(cfg.init_state_builder, FrozenBaseBuilder.Config):
            checkpointer.stop()
            saved = read_params(cfg.dir, step, like=target["model"])
            params: Any = saved.params
            return model, params
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


def find_tokenizer(cfg: trainer.SpmdTrainer.Config) -> Tokenizer | None:
    """Returns the tokenizer of the input of a trainer's config, or None."""
    tokenizers = list(run_dir.find_fields("tokenizer", cfg.input).values())
    if not tokenizers:
        return None
    add_bos = any(run_dir.find_fields("add_bos", cfg.input).values())
    return as_tokenizer(tokenizers[0], add_bos=add_bos)


# Export.


def export(arguments: argparse.Namespace) -> int:
    """Writes safetensors, or a checkpoint that transformers loads, and prints the files' names."""
    from weft.interop.huggingface import to_huggingface

    cfg = run_config(arguments.dir, **arguments.trust)
    _check_export(arguments)
    model_cfg: Any = cfg.model
    step: int | None = arguments.step
    if arguments.step == "best":
        step = best_step_of_run(cfg.dir)
    params: Any
    to_file = arguments.to.endswith(".safetensors")
    if arguments.merge or not to_file:
        advice = "A file needs no model: --to model.safetensors"
        check_is_read(cfg, "model", advice)
        cfg = with_recorded_batch(cfg)
        model: Any
        model, params = restore_model(cfg, step=step)
        model_cfg, params = without_reference(model_cfg, params)
        builder = cfg.init_state_builder
        if isinstance(builder, FrozenBaseBuilder.Config):
            if not arguments.merge:
                base = base_location(builder.path)
                return _export_adapter(arguments.to, model_cfg, params, base)
            model_cfg, params = merged_with_base(
                model_cfg, params, builder.path
            )
        else:
            model_cfg = without_lora(model_cfg)
            params = merge_adapters(model, params)
    else:
        params = read_params(cfg.dir, step).params
        model_cfg, params = without_reference(model_cfg, params)
    if isinstance(model_cfg, Supervised.Config):
        # The names are those of the user's model.
        model_cfg, params = model_cfg.layer, params["model"]
    max_shard_bytes = int(arguments.max_file_gb * 1e9)
    if to_file:
        # Describes the model, so that the file is useful without the run.
        metadata = {
            "weft": weft.__version__,
            "model": config.to_text(model_cfg),
        }
        files = serialization.save_safetensors(
            arguments.to,
            cast_floats(params, arguments.dtype),
            metadata=metadata,
            max_shard_bytes=max_shard_bytes,
        )
    else:
        base = base_folder(cfg)
        longest = None  # that of the base
        if base is None:
            fields = run_dir.find_fields("sequence_length", cfg.input)
            lengths = [
                length for length in fields.values() if isinstance(length, int)
            ]
            longest = max(lengths, default=2048)
        files = to_huggingface(
            arguments.to,
            model_cfg,
            params,
            max_position_embeddings=longest,
            base=base,
            tokenizer=_tokenizer_of(cfg),
            dtype=arguments.dtype,
            max_shard_bytes=max_shard_bytes,
        )
    return _print_files(files)


def _export_adapter(folder: str, model: Any, params: PyTree, base: str) -> int:
    from weft.interop.huggingface import to_peft

    if os.path.isfile(base):
        raise errors.CommandLineError(
            f"the base of the run, {base!r}, is a file, and PEFT loads an adapter for a folder. "
            "Write all weights: --merge."
        )
    return _print_files(to_peft(folder, model, params, base=base))


def _print_files(files: Sequence[Path]) -> int:
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
    suffix = Path(arguments.to).suffix.lower()
    if suffix in _OTHER_SUFFIXES and not Path(arguments.to).is_dir():
        name = Path(arguments.to).with_suffix("")
        raise errors.CommandLineError(
            f"--to={arguments.to!r}: files in the form {suffix} are not written. Name a file that "
            f"ends in .safetensors, such as {name}.safetensors, or a folder for a Hugging Face "
            f"checkpoint, such as {name}."
        )
    if Path(arguments.to).is_file() and not arguments.to.endswith(
        ".safetensors"
    ):
        raise errors.CommandLineError(
            f"--to={arguments.to!r} is a file. Name a folder for a Hugging Face checkpoint, or a "
            "file that ends in .safetensors."
        )


def base_folder(cfg: trainer.SpmdTrainer.Config) -> str | None:
    """Returns the folder of the Hugging Face checkpoint that a run began with, if it is there."""
    builder = cfg.init_state_builder
    if not isinstance(builder, ImportedWeightsBuilder.Config):
        return None
    try:
        folder = Path(base_location(builder.path))
    except errors.FrozenBaseError:
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
        path = (
            tokenizer
            if isinstance(tokenizer, str)
            else getattr(tokenizer, "path", None)
        )
        if isinstance(path, str):
            return path
    return None
