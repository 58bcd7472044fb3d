"""Products of 8 bits with delayed scaling, against values worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft import linen as nn
from weft.errors import ArgumentValueError
from weft.functional import fp8

E4M3 = jnp.float8_e4m3fn  # numbers 1.xyz * 2^n, at most 448


def test_rounding_and_clipping():
    x = jnp.array([1.0625, -1.1, 17.0, 500.0, 1000.0])
    rounded = fp8.qdq(x, E4M3, jnp.array([2.0]), jnp.float32)
    np.testing.assert_array_equal(rounded, [1.0, -1.125, 16.0, 512.0, 896.0])


def test_scale_follows_the_largest_of_the_history():
    scale, history = jnp.array([3.0]), jnp.array([5.0, 896.0, 7.0])
    x = jnp.array([[1.0, -9.0]])
    new_scale, new_history = fp8.update_fp8_meta(x, E4M3, scale, history)
    np.testing.assert_array_equal(new_scale, [2.0])  # 896 becomes 448; x itself counts later
    np.testing.assert_array_equal(new_history, [9.0, 7.0, 5.0])
    for amax in (0.0, jnp.inf, jnp.nan):
        np.testing.assert_allclose(fp8.compute_scale(jnp.array(amax), scale, 448.0), scale)


def test_a_layer_returns_its_next_scales_as_gradients():
    layer = nn.Dense(1, use_bias=False, dot_general_cls=lambda: nn.Fp8DirectDotGeneralOp(2))
    variables = {"params": {"kernel": jnp.array([[2.0], [1.0]])}}
    meta = {"amax_history": jnp.array([0.0, 896.0]), "scale": jnp.ones(1)}
    names = ("input", "kernel", "output_grad")
    meta = {f"{of}_{name}": value for of in names for name, value in meta.items()}
    variables[fp8.OVERWRITE_WITH_GRADIENT] = {"Fp8DirectDotGeneralOp_0": meta}
    x = jnp.array([[1.1, 3.0], [0.0, 1.0]])

    y = layer.apply(variables, x)
    np.testing.assert_array_equal(y, [[2 * 1.125 + 3.0], [1.0]])
    grads = jax.grad(lambda v: 3 * layer.apply(v, x).sum())(variables)
    np.testing.assert_array_equal(grads["params"]["kernel"], [[3 * 1.125], [12.0]])
    new = grads[fp8.OVERWRITE_WITH_GRADIENT]["Fp8DirectDotGeneralOp_0"]
    for name, largest, scale in (("input", 3, 2), ("kernel", 2, 2), ("output_grad", 3, 1 / 64)):
        np.testing.assert_array_equal(new[f"{name}_amax_history"], [largest, 0.0])
        np.testing.assert_array_equal(new[f"{name}_scale"], [scale])


def test_a_dtype_of_more_bits_is_refused():
    with pytest.raises(ArgumentValueError, match="float32 is not a dtype of 8 bits; expected one"):
        fp8.get_fp8_max(jnp.float32, jnp.float32)
