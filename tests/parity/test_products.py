"""The products that layers call, for libraries that replace them: the same on Flax and on Weft."""

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import weft.linen
import weft.nnx
from tests.keys import draw, quick_key
from tests.parity.products import recorded

X = draw(1, 2, 6, 4)


def same_calls(of_flax, of_weft):
    for run in (of_flax, of_weft):  # what is cached inside of JAX is recorded in neither
        run()
    with recorded() as calls:
        of_flax()
        theirs = list(calls)
    with recorded() as calls:
        of_weft()
    assert calls == theirs
    assert calls


LINEN = {
    "Dense": lambda nn: nn.Dense(3, dtype=jnp.bfloat16),
    "DenseGeneral": lambda nn: nn.DenseGeneral((3, 2), (-1,), (0,)),
    "Einsum": lambda nn: nn.Einsum((4, 6), "abc,cd->abd"),
    "Conv": lambda nn: nn.Conv(3, (3,), padding="CIRCULAR"),
    "ConvTranspose": lambda nn: nn.ConvTranspose(3, (3,), strides=2),
    "attention": lambda nn: nn.MultiHeadDotProductAttention(2),
    "attention in half precision": lambda nn: nn.SelfAttention(2, dtype=jnp.bfloat16),
    "WeightNorm": lambda nn: nn.WeightNorm(nn.Dense(3)),
}


@pytest.mark.parametrize("name", LINEN)
@pytest.mark.filterwarnings("ignore:SelfAttention:DeprecationWarning")
def test_linen(name):
    def run(nn):
        layer = LINEN[name](nn)
        variables = jax.jit(layer.init)(quick_key(0), X)
        return lambda: layer.apply(variables, X)

    same_calls(run(flax.linen), run(weft.linen))


NNX = {
    "Linear": lambda nnx, rngs: nnx.Linear(4, 3, rngs=rngs),
    "LinearGeneral": lambda nnx, rngs: nnx.LinearGeneral((6, 4), (3, 2), axis=(1, 2), rngs=rngs),
    "Einsum": lambda nnx, rngs: nnx.Einsum("abc,cd->abd", (4, 3), (3,), rngs=rngs),
    "Conv": lambda nnx, rngs: nnx.Conv(4, 3, (3,), rngs=rngs),
    "ConvTranspose": lambda nnx, rngs: nnx.ConvTranspose(4, 3, (3,), strides=2, rngs=rngs),
    "attention": lambda nnx, rngs: nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs),
    "LSTM": lambda nnx, rngs: nnx.RNN(nnx.LSTMCell(4, 3, rngs=rngs)),
    "GRU": lambda nnx, rngs: nnx.RNN(nnx.GRUCell(4, 3, rngs=rngs)),
}


@pytest.mark.parametrize("name", NNX)
def test_nnx(name):
    def run(nnx):
        layer = NNX[name](nnx, nnx.Rngs(0))
        return lambda: layer(X)

    same_calls(run(flax.nnx), run(weft.nnx))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_product_given_to_attention(dtype):
    def run(nn):
        calls = []

        def dot_general(*args, **kwargs):
            calls.append((*(x.shape for x in args[:2]), args[2:], sorted(kwargs.items())))
            return jax.lax.dot_general(*args, **kwargs)

        x = X[:, :, None].astype(dtype)
        options = {"einsum_dot_general": dot_general, "precision": "highest"}
        return jnp.asarray(nn.dot_product_attention(x, x, x, **options), jnp.float32), calls

    (expected, theirs), (y, ours) = run(flax.linen), run(weft.linen)
    np.testing.assert_allclose(y, expected, rtol=1e-2)
    assert str(ours) == str(theirs)


@pytest.mark.parametrize("heads", [1, 2])
def test_attention_calls_a_replaced_dot_general(monkeypatch, heads):
    product = jax.lax.dot_general
    monkeypatch.setattr(
        jax.lax, "dot_general", lambda *args, **kwargs: 2 * product(*args, **kwargs)
    )
    of_flax, of_weft = (
        nn.MultiHeadDotProductAttention(heads).init_with_output(quick_key(0), X)[0]
        for nn in (flax.linen, weft.linen)
    )
    np.testing.assert_allclose(of_flax, of_weft, rtol=1e-4, atol=1e-5)
