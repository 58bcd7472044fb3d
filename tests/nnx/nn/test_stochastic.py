import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import (
    ArgumentValueError,
    InvalidRngError,
    MissingModeError,
    RngArgumentError,
    RngStreamNotFoundError,
)
from weft.nnx.module import Module, view
from weft.nnx.nn.stochastic import Dropout
from weft.nnx.rngs import Rngs, split_rngs
from weft.nnx.splitting import merge, split

X = jnp.ones((50, 40))


def test_what_stays_is_scaled_up():
    y = Dropout(0.25, rngs=Rngs(0))(X)
    assert set(np.unique(y).tolist()) == {0.0, float(jnp.float32(1 / 0.75))}
    assert abs(float(y.mean()) - 1) < 0.1


def test_each_call_drops_others():
    layer = Dropout(0.5, rngs=Rngs(0))
    assert (layer(X) != layer(X)).any()
    assert layer.rngs is not None and layer.rngs.count[...] == 2


def test_layers_of_one_source_drop_others():
    rngs = Rngs(0)
    a, b = Dropout(0.5, rngs=rngs), Dropout(0.5, rngs=rngs)
    assert (a(X) != b(X)).any()


def test_along_axes():
    y = Dropout(0.5, broadcast_dims=(0,), rngs=Rngs(0))(X)
    assert (y == y[:1]).all() and (y != y[:, :1]).any()
    with pytest.raises(ArgumentValueError, match=r"broadcast_dims=\(2,\) .*\(50, 40\)"):
        Dropout(0.5, broadcast_dims=(2,), rngs=Rngs(0))(X)


def test_modes_of_a_model():
    class Model(Module):
        def __init__(self, rngs):
            self.layers = [Dropout(0.5, rngs=rngs), Dropout(0.5, deterministic=None, rngs=rngs)]

        def __call__(self, x, **kwargs):
            return self.layers[1](self.layers[0](x, **kwargs), **kwargs)

    model = Model(Rngs(0))
    with pytest.raises(
        MissingModeError, match=r"Dropout was called with deterministic=None, and ha"
    ):
        model(X)
    model.eval()
    assert model(X) is X
    assert (model(X, deterministic=False) != X).any()
    model.train()
    assert (model(X) != X).any()
    evaluated = view(model, deterministic=True)
    evaluated.layers[0].set_view()
    assert evaluated(X) is X and model.layers[0].deterministic is False


def test_no_key_is_needed_where_nothing_is_random():
    assert Dropout(0.0)(X) is X
    assert Dropout(0.5)(X, deterministic=True) is X
    assert (Dropout(1.0)(X) == 0).all()
    with pytest.raises(
        InvalidRngError, match=r"Dropout with rate=0.5 applies .* rngs=nnx.Rngs\(drop"
    ):
        Dropout(0.5)(X)


def test_the_call_gives_streams_a_stream_or_a_key():
    layer = Dropout(0.5, rng_collection="noise")
    key = jax.random.key(3)
    a = layer(X, rngs=Rngs(noise=key))
    np.testing.assert_array_equal(a, layer(X, rngs=Rngs(key).default))
    np.testing.assert_array_equal(a, layer(X, rngs=jax.random.fold_in(key, 0)))
    with pytest.raises(RngStreamNotFoundError, match="no PRNG stream 'noise'"):
        layer(X, rngs=Rngs(dropout=0))
    with pytest.raises(
        RngArgumentError, match=r"was given rngs='noise'; expected PRNG streams such"
    ):
        layer(X, rngs="noise")  # pyright: ignore[reportArgumentType]


def test_members_of_a_batch_drop_others():
    layer = Dropout(0.5, rngs=Rngs(0))
    split_rngs(layer, splits=3)
    graphdef, state = split(layer)
    y = jax.vmap(lambda state: merge(graphdef, state)(X))(state)
    assert (y[0] != y[1]).any() and (y[1] != y[2]).any()


@pytest.mark.parametrize("rate", [-0.5, 1.5])
def test_a_rate_is_between_0_and_1(rate):
    with pytest.raises(ArgumentValueError, match=rf"rate={rate} must be in \[0, 1"):
        Dropout(rate, rngs=Rngs(0))(X)
