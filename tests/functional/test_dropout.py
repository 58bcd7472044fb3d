import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ArgumentValueError
from weft.functional import (
    drop_tokens,
    dropout,
    get_dropout_mask,
    get_stochastic_depth_linear_rate,
    stochastic_depth,
)
from weft.functional.dropout import keep_mask

KEY = jax.random.key(0)


def test_dropout_zeros_a_fraction_and_keeps_the_mean():
    x = jnp.ones((100, 100))
    y = dropout(x, rate=0.3, prng_key=KEY)
    assert np.unique(y).tolist() == pytest.approx([0, 1 / 0.7])
    np.testing.assert_allclose((y == 0).mean(), 0.3, atol=0.02)
    np.testing.assert_allclose(y.mean(), 1, atol=0.02)


def test_mask_is_true_where_kept():
    mask = get_dropout_mask((4, 5), prng_key=KEY, rate=0.5)
    drawn = dropout(jnp.ones((4, 5)), rate=0.5, prng_key=KEY)
    given = dropout(jnp.ones((4, 5)), rate=0.5, mask=mask)
    np.testing.assert_array_equal(drawn, given)
    np.testing.assert_array_equal(given, 2.0 * mask)
    row = jnp.array([True, False, True, True, False])
    np.testing.assert_array_equal(dropout(jnp.ones((4, 5)), rate=0.5, mask=row)[2], 2.0 * row)


@pytest.mark.parametrize("rate", [1.0, -0.1, 2])
def test_rates_outside_zero_to_one_are_rejected(rate):
    with pytest.raises(ArgumentValueError, match=rf"rate={rate} must be in \[0, 1\)"):
        dropout(jnp.ones(3), rate=rate, prng_key=KEY)
    with pytest.raises(ArgumentValueError, match=rf"rate={rate} must be in \[0, 1\)"):
        get_stochastic_depth_linear_rate(rate, 1, 2)


def test_dropout_without_key_and_mask_is_rejected():
    with pytest.raises(ArgumentValueError, match="needs a prng_key to draw a mask, or the mask"):
        dropout(jnp.ones(3), rate=0.5)


@pytest.mark.parametrize("mode", ["row", "batch"])
def test_stochastic_depth_drops_whole_examples(mode):
    x = jnp.ones((200, 2, 3))
    draws = [
        np.array(stochastic_depth(x, rate=0.25, prng_key=jax.random.key(i), mode=mode))
        for i in range(8)
    ]
    for y in draws:
        per_row = y.reshape(200, -1)
        assert (per_row == per_row[:, :1]).all()
        assert np.unique(y).tolist() == pytest.approx(
            [0, 4 / 3] if mode == "row" else [y[0, 0, 0]], rel=1e-5
        )
    if mode == "row":
        np.testing.assert_allclose(np.mean(draws), 1, atol=0.1)


def test_unknown_mode_is_named():
    with pytest.raises(ArgumentValueError, match="mode='rows' must be 'row'"):
        stochastic_depth(jnp.ones((2, 2)), rate=0.5, prng_key=KEY, mode="rows")


def test_linear_rate_grows_to_the_peak():
    rates = [get_stochastic_depth_linear_rate(0.4, i, 4) for i in range(5)]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    assert get_stochastic_depth_linear_rate(None, 1, 4) is None
    with pytest.raises(ArgumentValueError, match="stage_order=5 of num_stages=4; expected a num"):
        get_stochastic_depth_linear_rate(0.4, 5, 4)


def test_drop_tokens_keeps_a_random_set_in_order():
    x = jnp.broadcast_to(jnp.arange(10.0)[None, :, None], (50, 10, 2))
    y = np.array(drop_tokens(x, rate=0.5, prng_key=KEY, num_cls_tokens=2))
    assert y.shape == (50, 6, 2)
    assert (y[:, :2, 0] == [0, 1]).all()
    assert (np.diff(y[..., 0], axis=1) > 0).all()
    assert set(np.unique(y)) == set(range(10))
    assert len({tuple(row) for row in y[..., 0].tolist()}) > 10


def test_drop_tokens_never_removes_all():
    assert drop_tokens(jnp.ones((1, 4, 2)), rate=0.99, prng_key=KEY).shape == (1, 1, 2)


def test_mask_along_axes():
    mask = keep_mask(KEY, 0.5, (40, 3, 5), broadcast_dims=(1, -1))
    assert mask.shape == (40, 1, 1) and 0 < mask.mean() < 1
    np.testing.assert_array_equal(keep_mask(KEY, 0.25, (9,)), jax.random.bernoulli(KEY, 0.75, (9,)))
    with pytest.raises(ArgumentValueError, match=r"broadcast_dims=\(3,\) .* shape \(40, 3, 5\)"):
        keep_mask(KEY, 0.5, (40, 3, 5), broadcast_dims=(3,))
