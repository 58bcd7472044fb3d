"""Parameters of NNX layers, and the dtype of their computation."""

import jax
import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import ArgumentShapeError, ArgumentValueError, InvalidRngError
from weft.nnx.nn.linear import Linear
from weft.nnx.nn.normalization import LayerNorm
from weft.nnx.nn.parameters import default_kernel_init, new_param, params_key, promote_dtype
from weft.nnx.rngs import Rngs


def test_parameter_is_initialized_with_the_next_key():
    init = jax.nn.initializers.normal()
    made = new_param(init, nnx.Rngs(0), (2, 3), jnp.bfloat16, {"tag": "a"}, nnx.BatchStat)
    assert made.get_metadata(exclude_required=True) == {"tag": "a"}
    assert isinstance(made, nnx.BatchStat)
    assert (made[...] == init(params_key(nnx.Rngs(0)), (2, 3), jnp.bfloat16)).all()
    assert default_kernel_init(jax.random.key(0), (2, 3), jnp.float32).shape == (2, 3)


def test_first_given_argument_is_found_for_layers_of_others():
    from weft.nnx.module import first_from

    assert first_from(None, False, True, error_msg="no mode") is False
    with pytest.raises(ArgumentValueError, match="no mode"):
        first_from(None, None, error_msg="no mode")


@pytest.mark.parametrize("rngs", [0, None, {"params": 0}], ids=str)
def test_missing_streams_are_named(rngs):
    with pytest.raises(InvalidRngError, match=r"rngs=.*expected streams, such as rngs=nnx.Rngs\(0"):
        Linear(2, 3, rngs=rngs)


def test_arrays_get_one_dtype_and_none_is_kept():
    x, kernel, bias = promote_dtype((jnp.ones(2, jnp.bfloat16), jnp.ones(2), None))
    assert (x.dtype, kernel.dtype, bias) == (jnp.float32, jnp.float32, None)
    (half,) = promote_dtype((jnp.ones(2),), dtype=jnp.float16)
    assert half.dtype == jnp.float16
    (ids,) = promote_dtype((jnp.arange(2),), inexact=False)
    assert ids.dtype == jnp.int32


def test_dtype_that_cannot_hold_fractions_is_rejected():
    with pytest.raises(ArgumentValueError, match="dtype=int32 cannot hold fractions"):
        promote_dtype((jnp.ones(2),), dtype=jnp.int32)


X = jnp.ones((2, 3, 4))


def test_unused_parameter_draws_no_key():
    rngs = Rngs(0)
    norm = LayerNorm(3, use_scale=False, use_bias=False, rngs=rngs)
    assert (norm.scale, norm.bias) == (None, None)
    assert rngs.default.count[...] == 0
    norm = LayerNorm(
        3, use_bias=False, param_dtype=jnp.bfloat16, scale_metadata={"tag": "x"}, rngs=rngs
    )
    assert rngs.default.count[...] == 1
    assert (norm.scale.shape, norm.scale.dtype, norm.scale.tag) == ((3,), jnp.bfloat16, "x")


def test_norm_result_has_the_promoted_dtype():
    def half(args, *, dtype=None, inexact=True):
        return promote_dtype(args, dtype=jnp.float16)

    layer = LayerNorm(4, rngs=Rngs(0))
    assert layer(X.astype(jnp.bfloat16)).dtype == jnp.float32
    plain = LayerNorm(4, use_scale=False, use_bias=False, rngs=Rngs(0))
    assert plain(X.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    layer.dtype = jnp.bfloat16
    assert layer(X).dtype == jnp.bfloat16
    layer.promote_dtype = half
    assert layer(X).dtype == jnp.float16


def test_scales_are_along_the_feature_axes():
    layer = LayerNorm(
        6, feature_axes=(0, 1), use_bias=False, scale_init=lambda *_: jnp.arange(6.0), rngs=Rngs(0)
    )
    x = jnp.broadcast_to(jnp.array([1.0, -1.0, 1.0, -1.0]), X.shape)
    assert layer(x)[1, :, 0].round(4).tolist() == [3, 4, 5]
    with pytest.raises(
        ArgumentShapeError, match=r"num_features=6 .*\(2, 3, 4\), .*\(axis 2\) are 4"
    ):
        LayerNorm(6, rngs=Rngs(0))(X)
