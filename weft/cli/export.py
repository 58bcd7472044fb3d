"""`weft export`: a run's parameters as safetensors, or as a checkpoint that transformers loads."""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import weft
from weft.cli.configs import run_config
from weft.cli.display import bytes_text
from weft.cli.sample import restore_model
from weft.config import to_text
from weft.errors import CommandLineError
from weft.hierarchy.lora import merge_adapters
from weft.hierarchy.lora_setters import without_lora
from weft.interop.huggingface import to_huggingface
from weft.serialization import save_safetensors
from weft.trainer.run_record import values_named

_FLOATS = ("float32", "bfloat16", "float16", "float64")


def run(arguments: argparse.Namespace) -> int:
    """Writes the files, and prints their names."""
    cfg = run_config(arguments.dir, allow=arguments.allow)
    _check(arguments)
    model: Any
    model, params = restore_model(cfg, step=arguments.step)
    model_cfg, to_file = cfg.model, arguments.to.endswith(".safetensors")
    if arguments.merge or not to_file:
        model_cfg, params = without_lora(model_cfg), merge_adapters(model, params)
    if arguments.dtype is not None:
        params = jax.tree.map(_converter(arguments.dtype), params)
    max_shard_bytes = int(arguments.max_file_gb * 1e9)
    if to_file:
        files = save_safetensors(
            arguments.to,
            params,
            # Describes the model, so that the file is useful without the run.
            metadata={"weft": weft.__version__, "model": to_text(model_cfg)},
            max_shard_bytes=max_shard_bytes,
        )
    else:
        files = to_huggingface(
            arguments.to,
            model_cfg,
            params,
            max_position_embeddings=_longest(cfg),
            max_shard_bytes=max_shard_bytes,
        )
        files += _copy_tokenizer(cfg, Path(arguments.to))
    _report(files)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    if arguments.dtype is not None and arguments.dtype not in _FLOATS:
        raise CommandLineError(
            f"--dtype={arguments.dtype!r} is not one of {', '.join(_FLOATS)}. Write --dtype "
            "bfloat16."
        )
    if not arguments.max_file_gb > 0:
        raise CommandLineError(
            f"--max-file-gb={arguments.max_file_gb:g} is too small; expected more than 0."
        )
    if Path(arguments.to).is_file() and not arguments.to.endswith(".safetensors"):
        raise CommandLineError(
            f"--to={arguments.to!r} is a file. Name a folder for a Hugging Face checkpoint, or a "
            "file that ends in .safetensors."
        )


def _converter(dtype: str) -> Any:
    return lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _longest(cfg: Any) -> int:
    """Returns the length of the training sequences; 2048 if the config does not set it."""
    lengths = values_named("sequence_length", cfg.input).values()
    return max((n for n in lengths if isinstance(n, int)), default=2048)


def _copy_tokenizer(cfg: Any, folder: Path) -> list[Path]:
    """Copies the tokenizer's file if transformers can read it."""
    tokenizers = [getattr(t, "path", None) for t in values_named("tokenizer", cfg.input).values()]
    source = Path(next((path for path in tokenizers if isinstance(path, str)), ""))
    if source.name != "tokenizer.json":
        return []
    shutil.copyfile(source, folder / source.name)
    return [folder / source.name]


def _report(files: Sequence[Path]) -> None:
    for file in files:
        print(f"{file}  {bytes_text(file.stat().st_size)}")
