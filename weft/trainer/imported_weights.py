"""Runs that start from imported parameters: a Hugging Face checkpoint or an exported file.

    cfg.init_state_builder = ImportedWeightsBuilder.default_config().set(path="checkpoints/llama")

Adapters of the imported layers (`weft.hierarchy.lora`) are initialized as in any new run, since
imported models have none. Parameters are read one at a time, and each process
keeps the shards of its devices.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax

from weft.config import REQUIRED, Required, config_class
from weft.hierarchy.lora_setters import base_state, with_base_state
from weft.interop.huggingface import load_huggingface_params
from weft.serialization import load_safetensors
from weft.trainer.builder_base import Builder
from weft.trainer.checkpoint_index import flatten_state


def import_weights(path: str, params: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a model with the values of a checkpoint.

    Args:
        path: The folder of a Hugging Face checkpoint, with its `config.json`; or safetensors files
            with the names of these parameters, as `weft export` writes them.
        params: The parameters, or their shapes (`jax.ShapeDtypeStruct`), with the target dtypes
            and shardings. Those of adapters are returned unchanged.

    Raises:
        WeightsReadError: if a file is missing or damaged.
        WeightsMismatchError: if the files do not match the model.
        HuggingFaceConfigError: if Weft has no counterpart of the checkpoint's model.
    """
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), base_state(params)
    )
    base: Any
    if (Path(path) / "config.json").exists():
        base = load_huggingface_params(path, target)
    else:
        base = load_safetensors(path, target, cast=True)
    return with_base_state(params, base)


class ImportedWeightsBuilder(Builder):
    """Builder that reads the parameters of a checkpoint; see `import_weights`."""

    @config_class
    class Config(Builder.Config):
        """Configures an ImportedWeightsBuilder.

        Attributes:
            path: The folder of a Hugging Face checkpoint, or safetensors files.
        """

        path: Required[str] = REQUIRED

    def input_state_type(self) -> Builder.StateType:
        return Builder.StateType.TENSOR_SPECS

    def __call__(self, state: Builder.State) -> Builder.State:
        params: Any = state.trainer_state.model
        built = state.trainer_state._replace(model=import_weights(self.config.path, params))
        leaves = flatten_state({"model": built.model})
        read = {path for path, leaf in leaves if isinstance(leaf, jax.Array)}
        return dataclasses.replace(state, trainer_state=built, built_keys=state.built_keys | read)
