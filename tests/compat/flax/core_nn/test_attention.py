import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.jaxprs import largest_array
from tests.keys import quick_key
from weft import functional
from weft.core import apply, init
from weft.core.nn import dot_product_attention, multi_head_dot_product_attention
from weft.core.nn.attention import CacheEntry, PositionValues, pairwise
from weft.errors import ArgumentShapeError, ArgumentValueError, ModifyScopeVariableError
from weft.functional import AttentionMask

KEY = quick_key(0)
X = np.random.default_rng(0).normal(size=(2, 6, 8)).astype(np.float32)
ATTEND = multi_head_dot_product_attention


def compiled(f):
    """Compiles into one program, since leak checking recompiles each eager operation."""
    return lambda *args, **kwargs: jax.device_get(jax.jit(lambda: f(*args, **kwargs))())


def test_attended_axes_may_be_in_any_order():
    grid = X.reshape(2, 2, 3, 8)
    valid = np.array([[[1, 1, 0], [1, 0, 1]]] * 2, bool)
    y, variables = compiled(init(ATTEND))(KEY, grid, None, 2, padding_mask=valid)
    other = compiled(apply(ATTEND))(
        variables, grid, None, 2, padding_mask=valid, attention_axis=(2, 1)
    )
    np.testing.assert_allclose(y, other, rtol=1e-5, atol=1e-6)


def test_bad_features_and_axes():
    with pytest.raises(
        ArgumentValueError, match=r"attention has 8 features .* divisible by num_heads=3"
    ):
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


HEADS = jnp.zeros((1, 3, 2, 4))
IDS = jnp.array([[1, 1, 2]])


def same(query=HEADS, key=HEADS, axes=(1,), **named):
    (name, of_queries), (key_name, of_keys) = named.items()
    values = PositionValues(name, of_queries, key_name, of_keys)
    return pairwise(jnp.equal, values, query, key, axes)


def test_segment_ids_must_match_positions():
    with pytest.raises(ArgumentShapeError, match=r"^ids has shape \(1, 2\); expected \(1, 3\)"):
        same(ids=IDS[:, :2], key_ids=None)
    with pytest.raises(ArgumentShapeError, match=r"as there is no key_ids, .* expected \(1, 2\)"):
        same(ids=IDS, key_ids=None, key=HEADS[:, :2])
    with pytest.raises(ArgumentValueError, match="key_ids was given without ids: give both"):
        same(ids=None, key_ids=IDS)


def attend(scope, x, **kwargs):
    return multi_head_dot_product_attention(scope, x, None, 2, causal_mask=True, **kwargs)


@pytest.fixture(scope="module")
def whole():
    return started(X)


def started(x):
    """Initializes in one program, since leak checking recompiles each eager operation."""
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


def test_full_cache_is_refused_and_marked_when_compiled(whole):
    _, variables = whole
    variables = {**variables, "cache": {"entry": variables["cache"]["entry"]((2, 4))}}
    outputs, entry = decoded(variables, np.split(X, 6, axis=1))
    assert [bool(np.isnan(y).all()) for y in outputs] == [False] * 4 + [True] * 2
    assert not any(np.isnan(y).any() for y in outputs[:4]) and entry.i == 4
    one, full = X[:, :1], {**variables, "cache": {"entry": entry}}
    expected = "decodes position 4, counted from 0, and its cache has room for 4 positions"
    with pytest.raises(ArgumentValueError, match=expected):
        apply(attend, mutable=["cache"])(full, one, cache=True)


def test_padding_in_the_cache_is_masked(whole):
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


def test_long_sequences_have_no_array_of_all_pairs():
    length, ids = 4096, jnp.zeros((1, 4096), jnp.int32)
    x = jax.ShapeDtypeStruct((1, length, 8), jnp.float32)

    def attend(scope, x):
        known = {"segmentation": ids, "padding_mask": ids == 0, "causal_mask": True}
        return multi_head_dot_product_attention(scope, x, None, 1, **known)

    variables = jax.eval_shape(lambda x: init(attend)(jax.random.key(0), x)[1], x)

    def loss(variables, x):
        return apply(attend)(variables, x).sum()

    assert largest_array(jax.grad(loss, (0, 1)), variables, x) < length**2 / 16


def test_blocks_compute_the_same():
    q, mask = jnp.asarray(X).reshape(2, 6, 2, 4), AttentionMask(functional.causal_mask)
    attend = functools.partial(apply(dot_product_attention), {}, q, q, q, mask=mask)
    plain, blocks = (attend(implementation=name) for name in ("plain", "blockwise"))
    np.testing.assert_allclose(blocks, plain, atol=1e-5)
