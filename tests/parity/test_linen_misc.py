"""Activations, dropout, pooling and containers of Linen: the same programs on Flax and on Weft."""

import jax
import jax.numpy as jnp
import pytest

from tests.keys import draw
from tests.parity.linen import KEY, named, same_compiled, same_error

X, IMAGE = draw(1, 2, 3, 4), draw(2, 2, 6, 6, 3)


ACTIVATIONS = [
    "celu", "elu", "gelu", "glu", "hard_sigmoid", "hard_silu", "hard_swish",
    "hard_tanh", "leaky_relu", "log_sigmoid", "log_softmax", "logsumexp", "normalize",
    "relu", "relu6", "selu", "sigmoid", "silu", "soft_sign", "softmax", "softplus",
    "standardize", "swish", "tanh",
]  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    same_compiled(lambda nn: (getattr(nn, name)(X), {}))


def test_activations_with_options():
    same_compiled(lambda nn: (nn.normalize(X, axis=1, epsilon=0.1), {}))
    same_compiled(lambda nn: (nn.normalize(X, mean=X, variance=X**2), {}))
    same_compiled(lambda nn: (nn.logsumexp(X, axis=0, keepdims=True), {}))
    same_compiled(lambda nn: (nn.gelu(X, approximate=False), {}))
    same_compiled(lambda nn: (nn.one_hot(jnp.array([0, 2, 5]), 3, dtype=jnp.int32), {}))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@named([{}, {"param_dtype": jnp.bfloat16}, {"negative_slope_init": 0.3}])
def test_prelu(dtype, kwargs):
    same_compiled(lambda nn: nn.PReLU(**kwargs).init_with_output(KEY, X.astype(dtype)))


@named(
    [
        {"rate": 0.3},
        {"rate": 1.0},
        {"rate": 0.0},
        {"rate": 0.5, "broadcast_dims": (1,)},
        {"rate": 0.5, "broadcast_dims": (0, -1)},
        {"rate": 0.5, "deterministic": True},
        {"rate": 0.5, "rng_collection": "noise"},
    ]
)
def test_dropout(kwargs):
    def program(nn):
        class Twice(nn.Module):
            @nn.compact
            def __call__(self, x):
                given = {} if "deterministic" in kwargs else {"deterministic": False}
                first, second = nn.Dropout(**kwargs), nn.Dropout(**kwargs)
                once, again = first(x, **given), first(x, **given)
                return once, again, second(x, **given), first(x, rng=KEY, **given)

        rngs = {"dropout": KEY, "noise": jax.random.key(3)}
        half = Twice().apply({}, X.astype(jnp.bfloat16), rngs=rngs)
        return (Twice().apply({}, X, rngs=rngs), half), {}

    same_compiled(program)


def test_deterministic_dropout_draws_no_key():
    def program(nn):
        class Between(nn.Module):
            @nn.compact
            def __call__(self, x):
                first = self.make_rng("dropout")
                x = nn.Dropout(0.0)(nn.Dropout(1.0)(x, False), False)
                return first, self.make_rng("dropout"), nn.Dropout(0.5, deterministic=True)(x)

        return Between().apply({}, X, rngs={"dropout": KEY}), {}

    same_compiled(program)


def test_dropout_without_a_key():
    same_error(lambda nn: nn.Dropout(0.5, deterministic=False).apply({}, X))


@pytest.mark.parametrize(("here", "there"), [(None, None), (True, False), (False, False)])
def test_deterministic_set_twice(here, there):
    assert "deterministic" in same_error(
        lambda nn: nn.Dropout(0.5, deterministic=here).apply({}, X, there, rngs={"dropout": KEY})
    )


def sequential(nn, layers, *args, **kwargs):
    return nn.Sequential(layers).init_with_output(KEY, *args, **kwargs)


def test_sequential():
    same_compiled(lambda nn: sequential(nn, [nn.Dense(3), nn.relu, nn.Dense(2)], X))
    same_compiled(lambda nn: sequential(nn, (nn.Dense(3), nn.relu), X))
    same_compiled(lambda nn: sequential(nn, [nn.Dense(3, name="mine"), nn.Dense(2)], X))
    same_compiled(lambda nn: sequential(nn, [nn.Sequential([nn.Dense(3)]), nn.Dense(2)], X))
    same_compiled(lambda nn: sequential(nn, [lambda x, y: (x, y), lambda a, b: a + b], X, y=2 * X))
    same_compiled(
        lambda nn: sequential(nn, [lambda x: {"a": x, "b": X}, lambda b, a: a - 2 * b], X)
    )
    same_compiled(lambda nn: sequential(nn, [lambda x: [x, X], lambda xs: xs[1]], X))
    same_compiled(lambda nn: sequential(nn, [lambda x: nn.Dense(2)(x), nn.Dense(2)], X))


def test_sequential_of_one_layer_twice():
    def program(nn):
        layer = nn.Dense(4)
        return sequential(nn, [layer, nn.tanh, layer], X)

    same_compiled(program)


def test_sequential_in_a_compact_method():
    def program(nn):
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                x = nn.Sequential([nn.Dense(2, name="a"), nn.Dense(4), nn.Dropout(0.2)])
                return nn.Sequential([nn.Dense(3), nn.relu])(X) + len(x.layers)

        return Model().init_with_output(KEY, X)

    same_compiled(program)


def test_sequential_in_setup():
    def program(nn):
        class Model(nn.Module):
            def setup(self):
                self.net = nn.Sequential([nn.Dense(2), nn.relu, nn.Dense(4)])
                self.nets = [nn.Sequential([nn.Dense(3)]) for _ in range(2)]

            def __call__(self, x):
                return [net(self.net(x)) for net in self.nets]

        return Model().init_with_output(KEY, X)

    same_compiled(program)


def test_sequential_rejects():
    same_error(lambda nn: nn.Sequential([]).apply({}, X))
    same_error(lambda nn: nn.Sequential(nn.Dense(3)).apply({}, X))
    same_error(lambda nn: nn.Sequential([3]).apply({}, X))


@pytest.mark.parametrize("num_dims", [1, 2, 3])
def test_batch_apply(num_dims):
    def program(nn):
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x, y, bias):
                def f(x, y, bias):
                    return {"x": nn.Dense(2)(x) if x.ndim > 1 else x, "y": (y["y"], -x)}

                return nn.BatchApply(f, num_dims)(x, {"y": y}, bias=bias)

        return Model().init_with_output(KEY, X, 2 * X, jnp.ones(()))

    same_compiled(program)


def test_batch_apply_rejects():
    same_error(lambda nn: nn.BatchApply(lambda x: x, num_dims=4)(X))


POOLS = [
    {},
    {"strides": (2, 2)},
    {"padding": "SAME"},
    {"padding": "SAME", "strides": (2, 3)},
    {"padding": "SAME_LOWER", "strides": (3, 2)},
    {"padding": ((1, 0), (0, 1))},
]


@named(POOLS)
def test_pooling(kwargs):
    same_compiled(lambda nn: (nn.max_pool(IMAGE, (3, 3), **kwargs), {}))
    same_compiled(lambda nn: (nn.avg_pool(IMAGE, (3, 2), **kwargs), {}))
    same_compiled(lambda nn: (nn.avg_pool(IMAGE, (3, 3), count_include_pad=False, **kwargs), {}))


@pytest.mark.parametrize("shape", [(6, 6, 3), (1, 2, 6, 6, 3), (0, 6, 6, 3)])
def test_pooling_of_any_batch_axes(shape):
    x = draw(3, *shape)
    same_compiled(lambda nn: (nn.max_pool(x, (2, 3)), {}))
    same_compiled(lambda nn: (nn.avg_pool(x, (2, 3)), {}))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int32])
def test_pooling_of_dtypes(dtype):
    x = (8 * IMAGE).astype(dtype)
    same_compiled(lambda nn: (nn.max_pool(x, (3, 3), padding="SAME"), {}))
    for count in (True, False):
        averaged = {"padding": "SAME", "count_include_pad": count}
        same_compiled(lambda nn, kwargs=averaged: (nn.avg_pool(x, (3, 3), **kwargs), {}), 2e-2)


@named([{"strides": None, "padding": "VALID"}, {"strides": (2, 1), "padding": ((1, 1), (0, 2))}])
def test_pooling_with_custom_function(kwargs):
    same_compiled(lambda nn: (nn.pool(IMAGE, 1.0, jax.lax.mul, (2, 2), **kwargs), {}))
    same_compiled(lambda nn: (nn.pool(IMAGE[0], 0.0, jax.lax.add, (2, 2), **kwargs), {}))
