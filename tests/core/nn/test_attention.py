import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.core import apply, init
from weft.core.nn import dot_product_attention, multi_head_dot_product_attention
from weft.errors import ArgumentShapeError, ArgumentValueError

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (2, 6, 8))
ATTEND = multi_head_dot_product_attention


def test_decoding_gives_what_the_whole_sequence_gives():
    whole, variables = init(ATTEND)(KEY, X, None, 2, causal_mask=True, cache=True)
    params = {"params": variables["params"]}
    expected = apply(ATTEND)(params, X, None, 2, causal_mask=True)
    np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=1e-6)
    assert variables["cache"]["cached_key"].shape == (2, 6, 2, 4)
    step = jax.jit(
        lambda v, x: apply(ATTEND, mutable=["cache"])(v, x, None, 2, causal_mask=True, cache=True)
    )
    steps = []
    for i in range(6):
        y, changed = step(variables, X[:, i : i + 1])
        variables = {**params, **changed}
        steps.append(y)
    np.testing.assert_allclose(jnp.concatenate(steps, 1), expected, rtol=1e-4, atol=1e-5)
    assert variables["cache"]["cache_index"] == 6


def test_padding_is_not_seen():
    valid = jnp.array([[True] * 4 + [False] * 2] * 2)
    y, variables = init(ATTEND)(KEY, X, None, 2, padding_mask=valid)
    short = apply(ATTEND)(variables, X[:, :4], None, 2)
    np.testing.assert_allclose(y[:, :4], short, rtol=1e-5, atol=1e-6)


def test_segments_do_not_see_each_other():
    segments = jnp.array([[0, 0, 0, 1, 1, 1]] * 2)
    y, variables = init(ATTEND)(KEY, X, None, 2, segmentation=segments)
    for part in (slice(0, 3), slice(3, 6)):
        alone = apply(ATTEND)(variables, X[:, part], None, 2)
        np.testing.assert_allclose(y[:, part], alone, rtol=1e-5, atol=1e-6)


def test_bad_arguments():
    with pytest.raises(ArgumentValueError, match="qkv_features=8 cannot be shared out among num_h"):
        init(ATTEND)(KEY, X, None, 3)
    with pytest.raises(ArgumentValueError, match="axis=2: attention goes over axes between"):
        init(ATTEND)(KEY, X, None, 2, attention_axis=2)
    with pytest.raises(ArgumentValueError, match="cache=True decodes along one axis of time"):
        init(ATTEND)(KEY, X[:, None], None, 2, cache=True)
    _, variables = init(ATTEND)(KEY, X, None, 2, cache=True)
    with pytest.raises(ArgumentShapeError, match="give one position at a time"):
        apply(ATTEND, mutable=["cache"])(variables, X, None, 2, cache=True)
    q = jnp.ones((2, 5, 2, 4))
    with pytest.raises(ArgumentShapeError, match="key and value must agree but in the last axis"):
        apply(dot_product_attention)({}, q, q, q[:, :3])
