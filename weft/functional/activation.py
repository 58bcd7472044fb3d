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
    **{fn.__name__: fn for fn in (linear, exact_gelu, quick_gelu, squared_relu)},
    **{
        f"{prefix}.{name}": getattr(module, name)
        for prefix, (module, names) in _OF_JAX.items()
        for name in names.split()
    },
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
