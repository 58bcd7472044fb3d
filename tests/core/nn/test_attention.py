import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import quick_key
from weft.core import apply, init
from weft.core.nn import dot_product_attention, multi_head_dot_product_attention
from weft.errors import ArgumentShapeError, ArgumentValueError

KEY = quick_key(0)
X = np.random.default_rng(0).normal(size=(2, 6, 8)).astype(np.float32)
ATTEND = multi_head_dot_product_attention


def compiled(f):
    """As one program: leaks are looked for, so JAX would compile each operation at each use."""
    return lambda *args, **kwargs: jax.device_get(jax.jit(lambda: f(*args, **kwargs))())


def test_padding_is_not_seen():
    valid = np.array([[True] * 4 + [False] * 2] * 2)
    y, variables = compiled(init(ATTEND))(KEY, X, None, 2, padding_mask=valid)
    short = compiled(apply(ATTEND))(variables, X[:, :4], None, 2)
    np.testing.assert_allclose(y[:, :4], short, rtol=1e-5, atol=1e-6)


def test_segments_do_not_see_each_other():
    segments = np.array([[0, 0, 0, 1, 1, 1]] * 2)
    y, variables = compiled(init(ATTEND))(KEY, X, None, 2, segmentation=segments)
    for part in (slice(0, 3), slice(3, 6)):
        alone = compiled(apply(ATTEND))(variables, X[:, part], None, 2)
        np.testing.assert_allclose(y[:, part], alone, rtol=1e-5, atol=1e-6)


def test_padding_of_the_keys_alone():
    keys = np.array([[True] * 4 + [False] * 2] * 2)
    y, variables = compiled(init(ATTEND))(KEY, X, None, 2, key_padding_mask=keys)
    expected = compiled(apply(ATTEND))(variables, X, X[:, :4], 2)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_several_axes_are_one_that_is_flattened():
    grid = X.reshape(2, 2, 3, 8)
    segments = np.array([[0, 1, 0, 1, 1, 0]] * 2)
    kwargs = {"causal_mask": True}
    y, variables = compiled(init(ATTEND))(
        KEY, grid, None, 2, segmentation=segments.reshape(2, 2, 3), **kwargs
    )
    flat = compiled(apply(ATTEND))(variables, X, None, 2, segmentation=segments, **kwargs)
    np.testing.assert_allclose(y.reshape(2, 6, 8), flat, rtol=1e-5, atol=1e-6)


def test_one_of_two_axes_is_attended_over():
    grid = X.reshape(2, 2, 3, 8)
    valid = np.array([[[1, 1, 0], [1, 0, 1]]] * 2, bool)
    y, variables = compiled(init(ATTEND))(KEY, grid, None, 2, attention_axis=2, padding_mask=valid)
    for i in range(2):
        row = compiled(apply(ATTEND))(variables, grid[:, i], None, 2, padding_mask=valid[:, i])
        np.testing.assert_allclose(y[:, i], row, rtol=1e-5, atol=1e-6)


def test_the_result_is_as_wide_as_the_probabilities():
    half = jnp.ones((1, 3, 2, 4), jnp.bfloat16)
    assert compiled(apply(dot_product_attention))({}, half, half, half).dtype == jnp.float32
    y = compiled(apply(dot_product_attention))({}, half, half, half, dtype=jnp.bfloat16)
    assert y.dtype == jnp.bfloat16


def test_bad_features_and_axes():
    with pytest.raises(ArgumentValueError, match="qkv_features=8 is not divisible by num_h"):
        compiled(init(ATTEND))(KEY, X, None, 3)
    for axis in (0, 2, -2, (1, 1)):
        with pytest.raises(ArgumentValueError, match=r"attention goes over different axes between"):
            compiled(init(ATTEND))(KEY, X, None, 2, attention_axis=axis)


def test_bad_shapes():
    q = np.ones((2, 5, 2, 4), np.float32)
    with pytest.raises(ArgumentShapeError, match="key and value must agree but in the last axis"):
        apply(dot_product_attention)({}, q, q, q[:, :3])
    with pytest.raises(ArgumentShapeError, match=r"bias has shape \(2, 5, 4\), .* \(2, 2, 5, 5\)"):
        apply(dot_product_attention)({}, q, q, q, bias=np.ones((2, 5, 4)))


def test_bad_caches():
    with pytest.raises(ArgumentValueError, match="cache=True without causal_mask=True"):
        compiled(init(ATTEND))(KEY, X, None, 2, cache=True)
    grid, kwargs = X.reshape(2, 2, 3, 8), {"causal_mask": True, "cache": True}
    with pytest.raises(ArgumentValueError, match=r"which are 1 to 2 here, .* is \(1,\)"):
        compiled(init(ATTEND))(KEY, grid, None, 2, attention_axis=1, **kwargs)
    _, variables = compiled(init(ATTEND))(KEY, X, None, 2, **kwargs)
    step = compiled(apply(ATTEND, mutable=["cache"]))
    with pytest.raises(ArgumentValueError, match="a step of decoding without key_segmentation"):
        step(variables, X[:, :1], None, 2, segmentation=np.ones((2, 1)), **kwargs)
