import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import draw, quick_key
from weft.core import apply, init
from weft.core.nn import conv, conv_transpose, dense, dense_general, embedding
from weft.errors import ArgumentShapeError, ArgumentValueError

KEY = quick_key(0)


def test_linear_map_of_the_last_axis():
    x = jax.random.normal(KEY, (2, 3))
    y, variables = init(dense)(KEY, x, 4, bias_init=jax.nn.initializers.ones)
    kernel, bias = variables["params"]["kernel"], variables["params"]["bias"]
    np.testing.assert_allclose(y, x @ kernel + bias[None], rtol=1e-5)
    np.testing.assert_array_equal(apply(dense)(variables, x, 4), y)


def test_any_axes_are_contracted():
    x = jax.random.normal(KEY, (2, 3, 4))
    y, variables = init(dense_general)(KEY, x, (5, 6), axis=(1, -1))
    expected = jnp.einsum("bij,ijfg->bfg", x, variables["params"]["kernel"])
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_positions_of_batch_axes_have_their_own_parameters():
    x = jax.random.normal(KEY, (2, 3, 4))
    _, variables = init(dense_general)(KEY, x, 5, batch_dims=0)
    params = variables["params"]
    params["kernel"] = params["kernel"] * jnp.array([1.0, 2.0])[:, None, None]
    expected = jnp.einsum("bij,bjf->bif", x, params["kernel"])
    y = apply(dense_general)(variables, x, 5, batch_dims=0)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_batch_axes_keep_their_order():
    x = jax.random.normal(KEY, (2, 3, 4))
    y, variables = init(dense_general)(KEY, x, 5, batch_dims=(1, 0))
    expected = jnp.einsum("bij,ibjf->ibf", x, variables["params"]["kernel"])
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_batch_axes_come_first():
    with pytest.raises(ArgumentShapeError, match=r"batch_dims is \(1,\); expected the first axes"):
        init(dense_general)(KEY, jnp.ones((2, 3, 4)), 5, batch_dims=1)


def test_lookup_and_attend():
    table, variables = init(embedding)(jax.random.key(0), 7, 4)
    rows = variables["params"]["table"]
    np.testing.assert_array_equal(table.lookup(jnp.array([[3, 1]])), rows[jnp.array([[3, 1]])])
    np.testing.assert_allclose(table.attend(rows), rows @ rows.T, rtol=1e-5)


def test_out_of_range_id_is_nan():
    table, _ = init(embedding)(jax.random.key(0), 7, 4)
    assert jnp.isnan(table.lookup(jnp.array([100]))).all()
    assert (table.lookup([1, -1]) == table.table[jnp.array([1, 6])]).all()


def test_ids_are_integers():
    table, _ = init(embedding)(jax.random.key(0), 7, 4)
    with pytest.raises(ArgumentValueError, match="ids of dtype float32; expected integers"):
        table.lookup(jnp.ones(2))


X = draw(0, 2, 7, 3)


def test_same_padding_gives_ceil_of_size_by_stride():
    y, variables = init(conv)(KEY, X, 4, 3, strides=(2,))
    expected = jax.lax.conv_general_dilated(
        X, variables["params"]["kernel"], (2,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
    )
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_input_may_be_dilated():
    y, variables = init(conv)(KEY, X, 4, (3,), input_dilation=(2,), padding=((1, 1),))
    expected = jax.lax.conv_general_dilated(
        X,
        variables["params"]["kernel"],
        (1,),
        ((1, 1),),
        lhs_dilation=(2,),
        dimension_numbers=("NHC", "HIO", "NHC"),
    )
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_conv_transpose_matches_jax():
    y, variables = init(conv_transpose)(KEY, X, 4, 3, strides=(2,))
    kernel = variables["params"]["kernel"]
    expected = jax.lax.conv_transpose(
        X, kernel, (2,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
    )
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_scalar_applies_to_all_axes():
    x = jnp.ones((1, 8, 8, 2))
    for layer in (conv, conv_transpose):
        by_number, _ = init(layer)(KEY, x, 4, (3, 3), strides=2, kernel_dilation=2)
        by_axis, _ = init(layer)(KEY, x, 4, (3, 3), strides=(2, 2), kernel_dilation=(2, 2))
        np.testing.assert_array_equal(by_number, by_axis)


def test_bad_arguments():
    with pytest.raises(
        ArgumentShapeError, match=r"the same spatial axes, but their shapes are \(2"
    ):
        init(conv)(KEY, jnp.ones((2, 7, 3)), 4, (3, 3))
    with pytest.raises(ArgumentShapeError, match=r"their shapes are \(7, 3\) and \(3, 3, 4\)"):
        init(conv_transpose)(KEY, jnp.ones((7, 3)), 4, (3,))
    with pytest.raises(ArgumentValueError, match="give the padding as numbers"):
        init(conv)(KEY, X, 4, (3,), input_dilation=(2,))
    with pytest.raises(ArgumentShapeError, match=r"each of 2 group\(s\), but x has 3 channels"):
        init(conv)(KEY, X, 4, (3,), feature_group_count=2)
    with pytest.raises(ArgumentShapeError, match="4 output channels, which cannot be shared out"):
        init(conv)(KEY, X, 4, (3,), feature_group_count=3)
    with pytest.raises(ArgumentValueError, match="'FULL' is neither one of VALID, SAME"):
        init(conv)(KEY, X, 4, (3,), padding="FULL")
    with pytest.raises(ArgumentValueError, match=r"padding=\(1,\) is neither .* \(left, right\)"):
        init(conv_transpose)(KEY, X, 4, (3,), padding=(1,))
