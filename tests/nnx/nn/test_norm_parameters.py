import jax
import jax.numpy as jnp
import pytest

from weft.errors import ArgumentShapeError
from weft.nnx.nn.dtypes import promote_dtype
from weft.nnx.nn.norm_parameters import along, optional_param, promoted
from weft.nnx.nn.normalization import LayerNorm
from weft.nnx.rngs import Rngs

X = jnp.ones((2, 3, 4))


def test_a_parameter_that_is_not_used_draws_no_key():
    rngs = Rngs(0)
    normal = jax.nn.initializers.normal()
    assert optional_param(False, normal, rngs, 3, jnp.float32, {}) is None
    assert rngs.default.count[...] == 0
    made = optional_param(True, normal, rngs, 3, jnp.bfloat16, {"tag": "x"})
    assert (made.shape, made.dtype, made.tag) == ((3,), jnp.bfloat16, "x")


def test_the_dtype_of_the_result():
    def half(args, *, dtype=None, inexact=True):
        return promote_dtype(args, dtype=jnp.float16)

    scale = jnp.ones(3)
    layer = LayerNorm(3, rngs=Rngs(0))
    assert promoted(layer, X.astype(jnp.bfloat16), scale) == (jnp.float32, (scale,))
    assert promoted(layer, X.astype(jnp.bfloat16), None) == (jnp.bfloat16, (None,))
    layer.dtype = jnp.bfloat16
    assert promoted(layer, X, scale)[0] == jnp.bfloat16
    layer.promote_dtype = half
    dtype, (given,) = promoted(layer, X, scale)
    assert dtype == jnp.float16 and given is not None and given.dtype == jnp.float16


def test_values_stand_beside_the_axes_of_their_features():
    values = jnp.arange(6.0)
    assert along(None, None, (2,), X, 7) is None
    assert along(None, values[:4], (2,), X, 4) is not None
    y = along(None, values, (0, 1), X, 6)
    assert y.shape == (2, 3, 1) and y[1, 0, 0] == 3
    with pytest.raises(
        ArgumentShapeError, match=r"num_features=6 .*\(2, 3, 4\), .*\(axis 2\) are 4"
    ):
        along(LayerNorm(6, rngs=Rngs(0)), values, (2,), X, 6)
