import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import quick_key
from weft import linen
from weft.errors import (
    ArgumentShapeError,
    ArgumentValueError,
    InvalidRngError,
    ParameterGivenTwiceError,
)
from weft.linen.layers import BatchApply, Dropout, PReLU, Sequential
from weft.linen.linear import Dense
from weft.linen.methods import compact
from weft.linen.module import Module

X = jnp.array([-2.0, 3.0])


def test_activations_match_jax():
    assert linen.relu is jax.nn.relu
    x = jnp.array([1.0, 3.0])
    np.testing.assert_allclose(linen.normalize(x), [-1, 1], rtol=1e-4)


def test_slope_of_prelu_is_learned():
    layer = PReLU(negative_slope_init=0.5)
    variables = layer.init(jax.random.key(0), X)
    assert layer.apply(variables, X).tolist() == [-1, 3]
    grads = jax.grad(lambda v: layer.apply(v, X).sum())(variables)
    assert grads["params"]["negative_slope"] == -2


def test_prelu_keeps_the_dtype_of_its_input():
    y, _ = PReLU().init_with_output(jax.random.key(0), X.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16


RNGS = {"dropout": jax.random.key(0)}
ONES = jnp.ones((40, 50))


def test_mean_is_kept():
    y = Dropout(0.25, deterministic=False).apply({}, ONES, rngs=RNGS)
    np.testing.assert_allclose(sorted(set(np.ravel(y).tolist())), [0, 4 / 3], rtol=1e-6)
    assert y.mean() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_broadcast_dropout_axes(axis):
    y = Dropout(0.5, (axis,), deterministic=False).apply({}, ONES, rngs=RNGS)
    assert (y == jnp.take(y, jnp.array([0]), axis)).all()
    assert 0 < y.mean() < 2


def test_deterministic_dropout_is_identity():
    assert Dropout(0.5).apply({}, ONES, deterministic=True) is ONES
    assert Dropout(0.5).apply({}, ONES, True, rngs=RNGS) is ONES
    assert Dropout(0.0).apply({}, ONES, False) is ONES


def test_rate_one_drops_all():
    assert not Dropout(1.0, deterministic=False).apply({}, ONES).any()


def test_explicit_key():
    layer = Dropout(0.5, deterministic=False)
    one, same, other = (
        layer.apply({}, ONES, rng=jax.random.key(seed), rngs=RNGS) for seed in (1, 1, 2)
    )
    assert (one == same).all()
    assert (one != other).any()


def test_custom_stream():
    layer = Dropout(0.5, deterministic=False, rng_collection="noise")
    layer.apply({}, ONES, rngs={"noise": jax.random.key(0)})
    with pytest.raises(InvalidRngError, match="noise"):
        layer.apply({}, ONES, rngs=RNGS)


def test_deterministic_set_twice():
    with pytest.raises(ParameterGivenTwiceError, match="'deterministic' was given"):
        Dropout(0.5).apply({}, ONES, rngs=RNGS)
    with pytest.raises(ParameterGivenTwiceError, match="'deterministic' was given twice"):
        Dropout(0.5, deterministic=True).apply({}, ONES, False)


@pytest.mark.parametrize("rate", [-0.1, 1.5])
def test_invalid_rate(rate):
    with pytest.raises(ArgumentValueError, match=f"rate={rate} must be in"):
        Dropout(rate, deterministic=False).apply({}, ONES, rngs=RNGS)


KEY = quick_key(0)
INPUTS = jnp.arange(24.0).reshape(2, 3, 4)


def test_layers_are_applied_in_order():
    assert Sequential([lambda x: x + 1, lambda x: 2 * x]).apply({}, 3) == 8


def test_modules_are_named_by_position():
    params = Sequential([Dense(3), jnp.tanh, Dense(2)]).init(KEY, INPUTS)["params"]
    assert jax.tree.map(jnp.shape, params) == {
        "layers_0": {"kernel": (4, 3), "bias": (3,)},
        "layers_2": {"kernel": (3, 2), "bias": (2,)},
    }


def test_tuples_and_dicts_become_arguments():
    assert Sequential([lambda x, y: (x, y), lambda a, b: a - b]).apply({}, 5, y=3) == 2
    assert Sequential([lambda x: {"b": x, "a": 1}, lambda a, b: a - b]).apply({}, 5) == -4
    assert Sequential([lambda x: [x, x], len]).apply({}, 5) == 2


def test_layers_are_a_sequence():
    with pytest.raises(ArgumentValueError, match=r"layers=Dense\(...\); expected a list"):
        Sequential(Dense(3))


class Model(Module):
    net: Module

    @compact
    def __call__(self, x):
        return self.net(x)


def test_no_layers():
    with pytest.raises(ArgumentValueError, match="Sequential net has no layers"):
        Model(Sequential([])).apply({}, INPUTS)
    with pytest.raises(ArgumentValueError, match=r"\(the outermost module\) has no layers"):
        Sequential([]).apply({}, INPUTS)


def test_batch_axes_are_merged_and_restored():
    seen = []

    def f(x, scale, *, more):
        seen.append((x.shape, scale, more["y"].shape))
        return {"x": x * scale, "first": more["y"][:, 0]}

    y = BatchApply(f)(INPUTS, 2.0, more={"y": INPUTS})
    assert seen == [((6, 4), 2.0, (6, 4))]
    np.testing.assert_array_equal(y["x"], 2 * INPUTS)
    np.testing.assert_array_equal(y["first"], INPUTS[..., 0])


def test_batch_apply_of_a_module():
    class Model(Module):
        @compact
        def __call__(self, x):
            return BatchApply(Dense(5), num_dims=2)(x)

    y, variables = Model().init_with_output(KEY, INPUTS)
    assert y.shape == (2, 3, 5)
    assert list(variables["params"]) == ["Dense_0"]


def test_too_many_batch_axes():
    with pytest.raises(ArgumentShapeError, match=r"merges 4 axes.*shapes are \[\(2, 3, 4\)\]"):
        BatchApply(lambda x: x, num_dims=4)(INPUTS)


def test_result_without_the_batch_axis():
    with pytest.raises(ArgumentShapeError, match=r"shape \(2, 4\); expected its first .* size 6"):
        BatchApply(lambda x: x[:2])(INPUTS)
