import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.interop.layers import KEY, X
from weft.errors import LayerMethodError
from weft.interop.haiku import HaikuModel


class Coder(hk.Module):
    def encode(self, x):
        return hk.Linear(2)(x)

    def __call__(self, x, is_training):
        x = self.encode(x)
        x = hk.BatchNorm(True, True, 0.9)(x, is_training)
        return hk.dropout(hk.next_rng_key(), 0.5, x) if is_training else x


def test_values_are_those_of_haiku():
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


def test_a_transformed_function_without_state():
    model = HaikuModel(hk.transform(lambda x: hk.Linear(2)(x)))
    variables = model.init({"params": KEY}, X)
    assert jax.tree.map(jnp.shape, variables) == {"params": {"linear": {"b": (2,), "w": (3, 2)}}}
    assert model.apply(variables, X, rngs={}, mutable=True)[0].shape == (4, 2)


def test_methods():
    model = HaikuModel(Coder)
    variables = model.init({"params": KEY}, X, method="encode")
    assert set(variables) == {"params"}
    assert model.apply(variables, X, rngs={}, mutable=False, method="encode")[0].shape == (4, 2)
    with pytest.raises(LayerMethodError, match="'decode'"):
        model.init({"params": KEY}, X, method="decode")
    with pytest.raises(LayerMethodError, match=r"transformed function .* 'encode'"):
        HaikuModel(hk.transform(lambda x: x)).init({}, X, method="encode")
