"""Runs of adapters on a frozen base, whose checkpoints do not hold the base.

A checkpoint has the adapters, the digest of the base's files, and where they are. Restoring reads
the base again and checks the digest, so that adapters are never used with other weights. A base
that has moved is found through the environment variable `WEFT_BASE`.
"""

import math
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from weft import errors
from weft.hierarchy import merge_adapters, without_lora
from weft.hierarchy.lora import (
    adapter_state,
    base_state,
    with_adapter_state,
)
from weft.input.data_files import files_record
from weft.serialization import safetensors
from weft.serialization.untrusted import check_json, is_possible_shape
from weft.trainer import run_dir
from weft.trainer.checkpointer import index
from weft.trainer.state_builder import ImportedWeightsBuilder, import_weights
from weft.typing import PyTree

BASE = "base"
"""Name of the part of a checkpoint that says which base its adapters belong to."""

_VARIABLE = "WEFT_BASE"
# Dtypes by their names in safetensors files.
_FLOATS = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
}


def base_location(path: str) -> str:
    """Returns where the base of a run is, which may have moved since from `path`.

    Raises FrozenBaseError if it is not there.
    """
    folder = os.environ.get(_VARIABLE, path)
    if not os.path.exists(folder):
        raise errors.FrozenBaseError(
            f"there is no {folder!r}, the base that the run began with: checkpoints hold neither "
            "its tokenizer, nor the weights that were not trained. Put it there, or set the "
            f"environment variable {_VARIABLE} to its folder."
        )
    return folder


def check_base_of_new_run(path: str) -> None:
    """Checks that the base that a run begins with is the one that would be read later.

    Raises FrozenBaseError if `WEFT_BASE` names another one.
    """
    moved_to = os.environ.get(_VARIABLE)
    if moved_to is None or not os.path.exists(path):
        return
    if os.path.realpath(moved_to) != os.path.realpath(path):
        raise errors.FrozenBaseError(
            f"the environment variable {_VARIABLE} names {moved_to!r}, and the base of the run is "
            f"{path!r}. Unset the variable, which is for runs whose base has moved, or begin with "
            "the base that it names."
        )


class FrozenBaseBuilder(ImportedWeightsBuilder):
    """Builder that reads a base that is not trained, and that checkpoints do not hold.

    The model has adapters (`weft.hierarchy.lora`), and no other parameter may be trained.
    """

    class Config(ImportedWeightsBuilder.Config):
        """Configures a FrozenBaseBuilder; see `import_weights` for `path`."""


def keep_builder_of_run(cfg: Any) -> None:
    """Sets the builder of a run whose checkpoints hold its base, if the config's is for others.

    Recipes of earlier versions made such runs; they continue as they began.
    """
    builder = cfg.init_state_builder
    if not isinstance(builder, FrozenBaseBuilder.Config):
        return
    try:
        text = run_dir.read_config(cfg.dir)
    except OSError:  # a new run, or one whose directory is refused later
        return
    if "ImportedWeightsBuilder" in text and "FrozenBaseBuilder" not in text:
        cfg.init_state_builder = ImportedWeightsBuilder.default_config().set(
            path=builder.path
        )


class FrozenBase:
    """The base of a run, as a savable part of its checkpoints.

    Args:
        path: Of the base; None until a state is restored.
        parameters: The base's parameters, or their shapes.

    Attributes:
        path: Where the base is, or was when the checkpoint was written.
    """

    def __init__(
        self, path: str | None = None, parameters: PyTree | None = None
    ):
        self.path = path
        self._digest: str | None = None
        self._shapes: dict[str, tuple[str, list[int]]] = {}
        for name, leaf in index.flatten_state(parameters or {}):
            self._shapes[name] = (jnp.dtype(leaf.dtype).name, [*leaf.shape])

    def get_state(self) -> dict[str, Any]:
        """Returns where the base is, its digest, and the shapes of its parameters."""
        # A run continues if its base is removed while it trains.
        digest = self._digest or self._checked_digest()
        return {
            "path": self.path,
            "digest": digest,
            "parameters": {
                name: {"dtype": dtype, "shape": shape}
                for name, (dtype, shape) in self._shapes.items()
            },
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a saved state; raises FrozenBaseError if the base is another one."""
        check_json(state, {"path": str, "digest": str, "parameters": dict})
        if self.path is None:
            self.path = state["path"]
        self._digest = state["digest"]
        for name, parameter in state["parameters"].items():
            check_json(parameter, {"dtype": str, "shape": [int]})
            dtype, shape = jnp.dtype(parameter["dtype"]), parameter["shape"]
            if not is_possible_shape(shape, dtype.itemsize):
                raise ValueError(f"no array has the shape {shape}")
            self._shapes[name] = (dtype.name, shape)
        self._checked_digest()

    def _checked_digest(self) -> str:
        """Returns the digest of the base's files; raises FrozenBaseError if it has changed."""
        digest = str(files_record(_files(self.folder))["sha256"])
        if self._digest is None:
            self._digest = digest
        if digest != self._digest:
            raise errors.FrozenBaseError(
                f"the base {self.folder!r} is not the one that the adapters were trained on: its "
                f"files have the SHA-256 {digest[:12]}…, those had {self._digest[:12]}…. Put that "
                f"one back, or set the environment variable {_VARIABLE} to its folder."
            )
        return digest

    @property
    def folder(self) -> str:
        """Path from which the base is read."""
        assert self.path is not None, "set when a state is restored"
        return base_location(self.path)

    def complete(self, adapters: PyTree, like: PyTree | None = None) -> PyTree:
        """Returns the parameters of the model: those of the base, read again, and the adapters.

        Args:
            like: All parameters, or their shapes, with the layouts to use; None for one device.
        """
        if like is None:
            base = self._on_one_device()
        else:
            base = base_state(like)
        return with_adapter_state(import_weights(self.folder, base), adapters)

    def _on_one_device(self) -> PyTree:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        base: dict[str, Any] = {}
        for path, (dtype, shape) in self._shapes.items():
            *parents, name = path.split("/")
            node = base
            for parent in parents:
                node = node.setdefault(parent, {})
            node[name] = jax.ShapeDtypeStruct(
                tuple(shape), dtype, sharding=sharding
            )
        return base


def _files(folder: str) -> list[str]:
    """Returns the files that decide what a base computes."""
    path = Path(folder)
    if path.is_file():
        return [folder]
    files = [*path.glob("config.json"), *path.glob("*.safetensors")]
    return sorted(str(file) for file in files)


def frozen_base_of(
    builder: object, parameters: PyTree, optimized: PyTree
) -> FrozenBase | None:
    """Returns the frozen base of a run; None if its checkpoints hold all parameters.

    Args:
        builder: That of the initial state.
        parameters: Specs of the model's parameters.
        optimized: For each of them, whether optimizers update it.

    Raises StateBuilderError if the model has no adapters, or parameters of the base are trained.
    """
    if not isinstance(builder, FrozenBaseBuilder):
        return None
    if not jax.tree.leaves(adapter_state(parameters)):
        raise errors.StateBuilderError(
            f"{builder.path()}, a FrozenBaseBuilder, is for a model with adapters, and this one "
            "has none. Add them with set_lora_recursively, or use an ImportedWeightsBuilder."
        )
    for path, is_optimized in index.flatten_state(base_state(optimized)):
        if is_optimized:
            raise errors.StateBuilderError(
                f"{builder.path()}, a FrozenBaseBuilder, is for a base that is not trained, but "
                f"{path!r} is, so checkpoints would lack it. Set update_rules of the learner to "
                "train adapters alone, or use an ImportedWeightsBuilder."
            )
    return FrozenBase(builder.config.path, base_state(parameters))


def merged_with_base(cfg: Any, params: PyTree, path: str) -> tuple[Any, PyTree]:
    """Returns the config and parameters of a model without adapters, in the dtypes of its base.

    The adapters are added to the weights of the base as its files have them, also if the run stored
    them in fewer bits.

    Args:
        cfg: The config of the model with adapters.
        params: Its parameters.
        path: Of the base.
    """
    base = FrozenBase(path)
    dtype = stored_dtype(base.folder)
    merged_cfg = without_lora(cfg).set(dtype=dtype, compute_dtype=None)
    adapted_cfg = cfg.clone(dtype=dtype)
    model = merged_cfg.clone(name="model").instantiate(parent=None)
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(
            model.initialize_parameters_recursively, jax.random.key(0)
        ),
    )
    state = with_adapter_state(
        import_weights(base.folder, shapes), adapter_state(params)
    )
    adapted = adapted_cfg.clone(name="model").instantiate(parent=None)
    return merged_cfg, merge_adapters(adapted, state)


def stored_dtype(folder: str) -> str:
    """Returns the dtype of most floating-point numbers of a base's files."""
    sizes: dict[str, int] = {}
    with safetensors.TensorFiles(folder) as files:
        for tensor in files.tensors.values():
            dtype = _FLOATS.get(tensor.dtype)
            if dtype is not None:
                sizes[dtype] = sizes.get(dtype, 0) + math.prod(tensor.shape)
    return max(sizes, key=lambda name: sizes[name], default="float32")
