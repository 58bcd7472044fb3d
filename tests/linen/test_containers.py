import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.linen.containers import BatchApply, Sequential
from weft.linen.linear import Dense
from weft.linen.methods import compact
from weft.linen.module import Module

KEY = jax.random.key(0)
X = jnp.arange(24.0).reshape(2, 3, 4)


def test_layers_are_applied_in_order():
    assert Sequential([lambda x: x + 1, lambda x: 2 * x]).apply({}, 3) == 8


def test_modules_are_named_by_their_places():
    params = Sequential([Dense(3), jnp.tanh, Dense(2)]).init(KEY, X)["params"]
    assert jax.tree.map(jnp.shape, params) == {
        "layers_0": {"kernel": (4, 3), "bias": (3,)},
        "layers_2": {"kernel": (3, 2), "bias": (2,)},
    }


def test_tuples_and_dicts_are_the_next_layers_arguments():
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
        Model(Sequential([])).apply({}, X)
    with pytest.raises(ArgumentValueError, match=r"\(the outermost module\) has no layers"):
        Sequential([]).apply({}, X)


def test_batch_axes_become_one_and_several_again():
    seen = []

    def f(x, scale, *, more):
        seen.append((x.shape, scale, more["y"].shape))
        return {"x": x * scale, "first": more["y"][:, 0]}

    y = BatchApply(f)(X, 2.0, more={"y": X})
    assert seen == [((6, 4), 2.0, (6, 4))]
    np.testing.assert_array_equal(y["x"], 2 * X)
    np.testing.assert_array_equal(y["first"], X[..., 0])


def test_batch_apply_of_a_module():
    class Model(Module):
        @compact
        def __call__(self, x):
            return BatchApply(Dense(5), num_dims=2)(x)

    y, variables = Model().init_with_output(KEY, X)
    assert y.shape == (2, 3, 5)
    assert list(variables["params"]) == ["Dense_0"]


def test_batch_axes_that_nothing_has():
    with pytest.raises(ArgumentShapeError, match=r"merges 4 axes.*shapes are \[\(2, 3, 4\)\]"):
        BatchApply(lambda x: x, num_dims=4)(X)


def test_a_result_without_the_batch_axis():
    with pytest.raises(ArgumentShapeError, match=r"shape \(2, 4\); expected its first .* size 6"):
        BatchApply(lambda x: x[:2])(X)
