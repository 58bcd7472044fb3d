import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.interop.layers import KEY, Average, Perceptron, X
from weft.errors import LayerMethodError, LayerVariablesError
from weft.interop.equinox_haiku import EquinoxModel, HaikuModel


def test_values_match_equinox():
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


def test_key_is_passed_where_accepted():
    model = EquinoxModel(eqx.nn.Dropout(0.5))
    y, _ = model.apply({}, X, rngs={"dropout": KEY}, mutable=False)
    np.testing.assert_array_equal(y, eqx.nn.Dropout(0.5)(X, key=KEY))
    y, _ = model.apply({}, X, rngs={"dropout": KEY}, mutable=False, training=False)
    np.testing.assert_array_equal(y, X)


def test_mismatch_is_named():
    model = EquinoxModel(Perceptron, 3, 2)
    with pytest.raises(
        LayerVariablesError, match="Perceptron has a variable 'params/inner/weight'"
    ):
        model.apply({}, X, rngs={}, mutable=False)
    with pytest.raises(LayerMethodError, match="Perceptron has no method 'decode'"):
        variables = model.init({"params": KEY}, X)
        model.apply(variables, X, rngs={}, mutable=False, method="decode")


class Coder(hk.Module):
    def encode(self, x):
        return hk.Linear(2)(x)

    def __call__(self, x, is_training):
        x = self.encode(x)
        x = hk.BatchNorm(True, True, 0.9)(x, is_training)
        return hk.dropout(hk.next_rng_key(), 0.5, x) if is_training else x


def test_values_match_haiku():
    pair = hk.transform_with_state(lambda x, t: Coder()(x, t))
    params, state = pair.init(KEY, X, True)
    for model, args in ((HaikuModel(pair), (X, True)), (HaikuModel(Coder), (X,))):
        variables = model.init({"params": KEY}, *args, training=True)
        np.testing.assert_array_equal(
            variables["params"]["coder"]["~encode"]["linear"]["w"],
            params["coder/~encode/linear"]["w"],
        )
        y, changed = model.apply(
            variables, *args, rngs={"dropout": KEY}, mutable=["state"], training=True
        )
        want, after = pair.apply(params, state, KEY, X, True)
        np.testing.assert_allclose(y, want, rtol=1e-6)
        ema = changed["state"]["coder"]["batch_norm"]["~"]["mean_ema"]["hidden"]
        np.testing.assert_allclose(ema, after["coder/batch_norm/~/mean_ema"]["hidden"])
        assert model.apply(variables, *args, rngs={"x": KEY}, mutable=False, training=True)[1] == {}


def test_methods():
    model = HaikuModel(Coder)
    variables = model.init({"params": KEY}, X, method="encode")
    assert set(variables) == {"params"}
    assert model.apply(variables, X, rngs={}, mutable=False, method="encode")[0].shape == (4, 2)
    with pytest.raises(LayerMethodError, match="'decode'"):
        model.init({"params": KEY}, X, method="decode")
    with pytest.raises(LayerMethodError, match=r"transformed function .* 'encode'"):
        HaikuModel(hk.transform(lambda x: x)).init({}, X, method="encode")


def test_state_round_trips():
    model = EquinoxModel(Average)
    variables = model.init({}, X)
    _, changed = model.apply(variables, X, rngs={}, mutable=["state"])
    np.testing.assert_allclose(changed["state"]["0"], X.sum(0), rtol=1e-6)
    assert model.apply(variables, X, rngs={}, mutable=False)[1] == {}
    assert model.apply(variables, X, rngs={}, mutable=True, training=False)[1] == {}
