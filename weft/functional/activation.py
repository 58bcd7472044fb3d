"""Activation functions, and the names by which configs refer to them.

A name is the function's usual path: `nn.gelu` is `jax.nn.gelu`, `jnp.tanh` is `jax.numpy.tanh`.
The table is closed: a name in a config can only select a function of one array.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from weft.errors import UnknownActivationError
from weft.typing import ActivationName

ActivationFn = Callable[[Array], Array]
"""An activation function, applied to each element."""


def linear(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns `x`: the identity, not a linear map."""
    return x


def exact_gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns `x * Φ(x)` (Hendrycks and Gimpel, 2016); `nn.gelu` is the tanh approximation."""
    return jax.nn.gelu(x, approximate=False)


def quick_gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns `x * sigmoid(1.702 * x)`, CLIP's approximation (Radford et al., 2021)."""
    return x * jax.nn.sigmoid(1.702 * x)


def squared_relu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns `max(x, 0)²` (So et al., 2021)."""
    return jnp.square(jax.nn.relu(x))


_OF_JAX = {
    "nn": (
        jax.nn,
        "celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh identity leaky_relu "
        "log_sigmoid log_softmax mish relu relu6 selu sigmoid silu soft_sign softmax softplus "
        "sparse_plus squareplus standardize swish tanh",
    ),
    "jnp": (jnp, "abs cos exp sin square tanh"),
}
ACTIVATIONS: dict[str, ActivationFn] = {
    "linear": linear,
    "exact_gelu": exact_gelu,
    "quick_gelu": quick_gelu,
    "squared_relu": squared_relu,
}
"""Activation functions by name, for `get_activation_fn`."""

for _prefix, (_module, _names) in _OF_JAX.items():
    for _name in _names.split():
        ACTIVATIONS[f"{_prefix}.{_name}"] = getattr(_module, _name)


def get_activation_fn(name: ActivationName) -> ActivationFn:
    """Returns the activation function with the given name.

    Raises UnknownActivationError if `name` is not one of `ACTIVATIONS`.

    >>> get_activation_fn("nn.relu")(jnp.array([-1.0, 2.0])).tolist()
    [0.0, 2.0]
    """
    if name in ACTIVATIONS:
        return ACTIVATIONS[name]
    # "relu" and "jax.nn.relu" mean "nn.relu": compare last parts, which the prefix cannot blur.
    names_by_last_part = {}
    for activation_name in ACTIVATIONS:
        _, _, last_part = activation_name.rpartition(".")
        names_by_last_part[last_part] = activation_name
    _, _, last_part = name.rpartition(".")
    near_parts = get_close_matches(
        last_part.lower(), names_by_last_part, n=3, cutoff=0.6
    )
    if near_parts:
        near_names = [repr(names_by_last_part[part]) for part in near_parts]
        hint = f"Did you mean {' or '.join(near_names)}?"
    else:
        hint = f"There are: {', '.join(ACTIVATIONS)}."
    raise UnknownActivationError(
        f"Unknown activation function {name!r}. {hint}"
    )
