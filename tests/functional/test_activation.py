import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from weft.errors import UnknownActivationError
from weft.functional import get_activation_fn
from weft.functional.activation import ACTIVATIONS

X = np.linspace(-3, 3, 13).astype(np.float32)

FORMULAS = {
    "linear": lambda x: x,
    "exact_gelu": lambda x: x * (1 + special.erf(x / np.sqrt(2))) / 2,
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "squared_relu": lambda x: np.maximum(x, 0) ** 2,
    "nn.relu": lambda x: np.maximum(x, 0),
    "nn.silu": lambda x: x / (1 + np.exp(-x)),
    "nn.gelu": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "nn.sigmoid": special.expit,
    "jnp.tanh": np.tanh,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas(name):
    np.testing.assert_allclose(
        get_activation_fn(name)(jnp.array(X)), FORMULAS[name](X), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_named_functions_keep_the_dtype(name):
    x = jnp.ones((2, 4), jnp.bfloat16)
    assert jax.eval_shape(get_activation_fn(name), x).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "name, hint",
    [
        ("nn.rellu", "Did you mean 'nn.relu'"),
        ("gelu", "Did you mean 'nn.gelu'"),
        ("jax.nn.silu", "Did you mean 'nn.silu'"),
        ("zzz", "There are: linear, exact_gelu"),
        ("nn.initializers", "There are: "),
    ],
)
def test_unknown_name_suggests_near_ones(name, hint):
    with pytest.raises(
        UnknownActivationError, match=f"Unknown activation function '{name}'.*{hint}"
    ):
        get_activation_fn(name)
