import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import quick_key
from weft.core import apply, init
from weft.core.nn import multi_head_dot_product_attention
from weft.core.nn.decoding import CacheEntry
from weft.errors import ArgumentShapeError, ArgumentValueError, ModifyScopeVariableError

KEY = quick_key(0)
X = np.random.default_rng(0).normal(size=(2, 6, 8)).astype(np.float32)


def attend(scope, x, **kwargs):
    return multi_head_dot_product_attention(scope, x, None, 2, causal_mask=True, **kwargs)


@pytest.fixture(scope="module")
def whole():
    return started(X)


def started(x):
    """One program: leaks are looked for, so JAX would compile each operation at each use."""
    return jax.device_get(jax.jit(lambda: init(attend)(KEY, x, cache=True))())


@jax.jit
def outputs_of_all(params, x):
    return apply(attend)(params, x)


@jax.jit
def step(variables, x):
    y, changed = apply(attend, mutable=["cache"])(variables, x, cache=True)
    return y, {**variables, **changed}


def decoded(variables, positions):
    outputs = []
    for x in positions:
        y, variables = step(variables, x)
        outputs.append(np.asarray(y))
    return outputs, variables["cache"]["entry"]


def test_steps_give_what_the_whole_sequence_gives(whole):
    y, variables = whole
    params = {"params": variables["params"]}
    np.testing.assert_allclose(y, outputs_of_all(params, X), rtol=1e-5, atol=1e-6)
    outputs, entry = decoded(variables, np.split(X, 6, axis=1))
    np.testing.assert_allclose(np.concatenate(outputs, 1), y, rtol=1e-4, atol=1e-5)
    assert (entry.i, entry.key.shape) == (6, (2, 6, 2, 4))


def test_a_cache_may_be_of_another_size_than_the_first_call(whole):
    y, variables = whole
    empty = jax.tree.map(lambda entry: entry((1, 9)), variables["cache"], is_leaf=callable)
    outputs, entry = decoded({**variables, "cache": empty}, np.split(X[:1], 6, axis=1))
    np.testing.assert_allclose(np.concatenate(outputs, 1), y[:1], rtol=1e-4, atol=1e-5)
    assert (np.asarray(entry.key)[:, 6:] == 0).all()


def test_past_the_end_the_last_positions_are_seen(whole):
    _, variables = whole
    empty = {"entry": variables["cache"]["entry"]((2, 4))}
    outputs, _ = decoded({**variables, "cache": empty}, np.split(X, 6, axis=1))
    params = {"params": variables["params"]}
    window = outputs_of_all(params, X[:, 2:])
    np.testing.assert_allclose(outputs[-1], np.asarray(window)[:, -1:], rtol=1e-4, atol=1e-5)


def test_positions_of_several_axes_come_in_order():
    grid = X.reshape(2, 2, 3, 8)
    y, variables = started(grid)
    positions = [grid[:, i : i + 1, j : j + 1] for i in range(2) for j in range(3)]
    outputs, _ = decoded(variables, positions)
    outputs = np.stack(outputs, 1).reshape(y.shape)
    np.testing.assert_allclose(outputs, y, rtol=1e-4, atol=1e-5)


def test_padding_in_the_cache_is_not_seen(whole):
    _, variables = whole
    valid = np.array([[False, False, True, True, True, True]] * 2)

    @jax.jit
    def step(variables, x, valid_here):
        y, changed = apply(attend, mutable=["cache"])(
            variables, x, cache=True, padding_mask=valid_here, key_padding_mask=valid
        )
        return y, {**variables, **changed}

    for i in range(6):
        y, variables = step(variables, X[:, i : i + 1], valid[:, i : i + 1])
    expected = outputs_of_all({"params": variables["params"]}, X[:, 2:])
    np.testing.assert_allclose(y, np.asarray(expected)[:, -1:], rtol=1e-4, atol=1e-5)


def test_half_precision_is_cached_as_such():
    half = jax.jit(lambda: init(attend)(KEY, X, dtype=jnp.bfloat16, cache=True))
    entry = half()[1]["cache"]["entry"]
    assert entry.key.dtype == entry.value.dtype == jnp.bfloat16
    assert entry((1, 2), jnp.float32).key.dtype == jnp.float32


def test_a_cache_is_made_under_jit_and_vmap():
    made = jax.jit(lambda x: init(attend)(KEY, x, cache=True)[1]["cache"]["entry"])(X)
    assert (made.key.shape, made.i) == ((2, 6, 2, 4), 0)
    each = jax.jit(jax.vmap(lambda x: init(attend)(KEY, x[None], cache=True)[1]["cache"]["entry"]))(
        X
    )
    assert each.key.shape == (2, 1, 6, 2, 4)


def test_bad_steps(whole):
    _, variables = whole
    one = X[:, :1]

    def wrong(variables, x, **kwargs):
        step = apply(attend, mutable=["cache"])
        return jax.eval_shape(lambda: step(variables, x, **kwargs))

    with pytest.raises(ArgumentShapeError, match=r"\(2, 2, 2, 4\).* one position at a time"):
        wrong(variables, X[:, :2], cache=True)
    with pytest.raises(ArgumentShapeError, match=r"\(1, 1, 2, 4\), .* expects \(2, 1, 2, 4\)"):
        wrong(variables, one[:1], cache=True)
    with pytest.raises(ArgumentValueError, match="the cache of '/' has a dict as its entry"):
        wrong({**variables, "cache": {"entry": {"key": one}}}, one, cache=True)
    with pytest.raises(ModifyScopeVariableError, match=r"mutable=\['cache'\]"):
        apply(attend)(variables, one, cache=True)
    entry = variables["cache"]["entry"]
    assert isinstance(entry, CacheEntry)
    with pytest.raises(ArgumentShapeError, match=r"cache of shape \(2, 5, 5\) .* and 1 length"):
        entry((2, 5, 5))
