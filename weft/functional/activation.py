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

ActivationFn = Callable[[Array], Array]
"""An activation function, applied to each element."""


def linear(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns `x`."""
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


ACTIVATIONS: dict[str, ActivationFn] = {
    "linear": linear,
    "exact_gelu": exact_gelu,
    "quick_gelu": quick_gelu,
    "squared_relu": squared_relu,
    "nn.celu": jax.nn.celu,
    "nn.elu": jax.nn.elu,
    "nn.gelu": jax.nn.gelu,
    "nn.glu": jax.nn.glu,
    "nn.hard_sigmoid": jax.nn.hard_sigmoid,
    "nn.hard_silu": jax.nn.hard_silu,
    "nn.hard_swish": jax.nn.hard_swish,
    "nn.hard_tanh": jax.nn.hard_tanh,
    "nn.identity": jax.nn.identity,
    "nn.leaky_relu": jax.nn.leaky_relu,
    "nn.log_sigmoid": jax.nn.log_sigmoid,
    "nn.log_softmax": jax.nn.log_softmax,
    "nn.mish": jax.nn.mish,
    "nn.relu": jax.nn.relu,
    "nn.relu6": jax.nn.relu6,
    "nn.selu": jax.nn.selu,
    "nn.sigmoid": jax.nn.sigmoid,
    "nn.silu": jax.nn.silu,
    "nn.soft_sign": jax.nn.soft_sign,
    "nn.softmax": jax.nn.softmax,
    "nn.softplus": jax.nn.softplus,
    "nn.sparse_plus": jax.nn.sparse_plus,
    "nn.squareplus": jax.nn.squareplus,
    "nn.standardize": jax.nn.standardize,
    "nn.swish": jax.nn.swish,
    "nn.tanh": jax.nn.tanh,
    "jnp.abs": jnp.abs,
    "jnp.cos": jnp.cos,
    "jnp.exp": jnp.exp,
    "jnp.sin": jnp.sin,
    "jnp.square": jnp.square,
    "jnp.tanh": jnp.tanh,
}
"""Activation functions by name, for `get_activation_fn`."""


def get_activation_fn(name: str) -> ActivationFn:
    """Returns the activation function with the given name.

    Raises UnknownActivationError if `name` is not one of `ACTIVATIONS`.

    >>> get_activation_fn("nn.relu")(jnp.array([-1.0, 2.0])).tolist()
    [0.0, 2.0]
    """
    if name in ACTIVATIONS:
        return ACTIVATIONS[name]
    # "relu" and "jax.nn.relu" mean "nn.relu": compare last parts, which the prefix cannot blur.
    last = {known.rsplit(".", 1)[-1]: known for known in ACTIVATIONS}
    near = get_close_matches(name.rsplit(".", 1)[-1].lower(), last, n=3, cutoff=0.6)
    if near:
        hint = f"Did you mean {' or '.join(repr(last[n]) for n in near)}?"
    else:
        hint = f"There are: {', '.join(ACTIVATIONS)}."
    raise UnknownActivationError(f"Unknown activation function {name!r}. {hint}")
