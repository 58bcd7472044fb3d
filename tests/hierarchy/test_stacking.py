import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ParameterSpecError
from weft.hierarchy.base_layer import ParameterSpec
from weft.hierarchy.layers import Linear
from weft.hierarchy.stacking import initialize_copies, parameter_specs_of_copies
from weft.vdict import VDict


@pytest.fixture(scope="module")
def layer():
    cfg = Linear.default_config().set(name="l", input_dim=2, output_dim=3)
    return cfg.instantiate(parent=None)


KEY = jax.random.PRNGKey(0)


def test_one_without_a_stack(layer):
    specs = parameter_specs_of_copies(layer, None)
    assert type(specs) is dict and specs["weight"].shape == (2, 3)
    state = initialize_copies(layer, None, KEY)
    expected = layer.initialize_parameters_recursively(KEY)
    assert type(state) is dict
    np.testing.assert_array_equal(state["weight"], expected["weight"])


def test_the_same_compiled_and_not(layer):
    eager = initialize_copies(layer, 3, KEY)
    compiled = jax.jit(lambda key: initialize_copies(layer, 3, key))(KEY)
    assert isinstance(compiled, VDict)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), eager, compiled)


def test_prebuilt_compiled_and_not(layer):
    bias = jnp.arange(6.0).reshape(2, 3)
    # A spec represents a value to be drawn.
    prebuilt = {"bias": bias, "weight": ParameterSpec((2, 2, 3))}
    eager = initialize_copies(layer, 2, KEY, prebuilt=prebuilt)
    compiled = jax.jit(lambda key, bias: initialize_copies(layer, 2, key, prebuilt={"bias": bias}))(
        KEY, bias
    )
    np.testing.assert_array_equal(eager["bias"], bias)
    np.testing.assert_array_equal(compiled["bias"], bias)
    np.testing.assert_allclose(eager["weight"], compiled["weight"], rtol=1e-6)


def test_shapes_without_drawing(layer):
    shapes = jax.eval_shape(lambda key: initialize_copies(layer, 4, key), KEY)
    assert shapes["weight"].shape == (4, 2, 3)


def test_prebuilt_of_another_number(layer):
    with pytest.raises(ParameterSpecError, match="expected a leading axis of 3"):
        initialize_copies(layer, 3, KEY, prebuilt={"bias": jnp.zeros((2, 3))})
