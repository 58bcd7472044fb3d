"""The part of a config that makes a model, from a model of any library."""

import hashlib
import re
from typing import Any

import jax
import jax.numpy as jnp

from weft import nnx
from weft.config import InMemory, InstantiableConfig
from weft.hierarchy import Module
from weft.interop.models import adapter_of, model_of
from weft.interop.nnx import NNXModel


def layer_of(model: object) -> Any:
    """Returns the config of a model, or the model as a value of a config."""
    if isinstance(model, Module):
        return model.config
    if isinstance(model, type | InstantiableConfig) or adapter_of(
        model
    ).endswith("LinenModel"):
        return model
    name = f"{type(model).__module__}.{type(model).__qualname__}"
    description = f"an object of type {name}{_structure(model)}"
    adapter = model_of(model)
    if isinstance(adapter, NNXModel):
        # A config begins with the same values each time, also if the module has been trained.
        return InMemory(adapter.nnx.clone(model), description)
    return InMemory(model, description)


def _structure(model: object) -> str:
    """Returns a digest of an NNX object's attributes, with the shapes of its variables' values."""
    if not isinstance(model, nnx.Pytree):
        return ""
    graphdef, state = nnx.split(model)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), state
    )
    description = repr(nnx.merge(graphdef, shapes))
    description = re.sub(
        r" at 0x[0-9a-f]+", "", description
    )  # the same in another process
    digest = hashlib.sha256(description.encode()).hexdigest()
    return f" with structure {digest[:12]}"
