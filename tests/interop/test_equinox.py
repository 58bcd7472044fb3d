import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.interop.layers import KEY, Average, Perceptron, X
from weft.errors import LayerMethodError, LayerVariablesError
from weft.interop.equinox import EquinoxModel


def test_values_are_those_of_equinox():
    module = Perceptron(3, 2, key=KEY)
    for model in (EquinoxModel(module), EquinoxModel(Perceptron, 3, 2)):
        variables = model.init({"params": KEY}, X)
        np.testing.assert_array_equal(variables["params"]["inner"]["weight"], module.inner.weight)
        y, changed = model.apply(variables, X, rngs={}, mutable=True)
        np.testing.assert_allclose(y, module(X), rtol=1e-6)
        assert changed == {}


def test_other_arrays_are_constants():
    class Table(eqx.Module):
        index: jax.Array = eqx.field(converter=jnp.asarray)
        layers: tuple

        def __call__(self, x):
            return x[self.index] * self.layers[1][None]

    model = EquinoxModel(Table([1, 0], (None, jnp.ones(3))))
    variables = model.init({}, X)
    assert jax.tree.map(jnp.shape, variables) == {
        "constants": {"index": (2,)},
        "params": {"layers": {"1": (3,)}},
    }
    y, _ = model.apply(variables, X, rngs={}, mutable=True)
    np.testing.assert_array_equal(y, X[jnp.array([1, 0])])


def test_state_goes_in_and_comes_back():
    model = EquinoxModel(Average)
    variables = model.init({}, X)
    _, changed = model.apply(variables, X, rngs={}, mutable=["state"])
    np.testing.assert_allclose(changed["state"]["0"], X.sum(0), rtol=1e-6)
    assert model.apply(variables, X, rngs={}, mutable=False)[1] == {}
    assert model.apply(variables, X, rngs={}, mutable=True, training=False)[1] == {}


def test_a_key_is_given_to_what_takes_one():
    model = EquinoxModel(eqx.nn.Dropout(0.5))
    y, _ = model.apply({}, X, rngs={"dropout": KEY}, mutable=False)
    np.testing.assert_array_equal(y, eqx.nn.Dropout(0.5)(X, key=KEY))
    y, _ = model.apply({}, X, rngs={"dropout": KEY}, mutable=False, training=False)
    np.testing.assert_array_equal(y, X)


def test_what_does_not_fit_is_named():
    model = EquinoxModel(Perceptron, 3, 2)
    with pytest.raises(
        LayerVariablesError, match="Perceptron has a variable 'params/inner/weight'"
    ):
        model.apply({}, X, rngs={}, mutable=False)
    with pytest.raises(LayerMethodError, match="Perceptron has no method 'decode'"):
        variables = model.init({"params": KEY}, X)
        model.apply(variables, X, rngs={}, mutable=False, method="decode")
