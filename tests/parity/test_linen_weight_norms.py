"""Norms of weights of Linen: the same programs on Flax and on Weft."""

import jax
import jax.numpy as jnp
import pytest

from tests.keys import draw
from tests.parity.linen import KEY, named, same, same_error

X = draw(1, 2, 5, 3)
NORMAL = jax.nn.initializers.normal()


def steps(layer, *collections, **kwargs):
    """Returns the outputs of an initialized layer, with updates and without."""
    variables = layer.init(KEY, X, **kwargs)
    first = layer.apply(variables, X, mutable=list(collections), **kwargs)
    again = layer.apply({**variables, **first[1]}, X, mutable=list(collections), **kwargs)
    return (variables, first, again), {}


@pytest.mark.parametrize("update", [True, False])
@named(
    [
        {},
        {"n_steps": 3, "epsilon": 0.5},
        {"n_steps": 0, "error_on_non_matrix": True},
        {"dtype": jnp.bfloat16, "collection_name": "spectra"},
        {"param_dtype": jnp.bfloat16},
    ]
)
def test_spectral_norm(kwargs, update):
    def program(nn):
        layer = nn.SpectralNorm(nn.Dense(4), **kwargs)
        return steps(layer, "batch_stats", "spectra", update_stats=update)

    low = {"dtype", "param_dtype"} & set(kwargs)
    same(program, 3e-2 if low else 1e-5)


@named(
    [
        {},
        {"epsilon": 0.5, "use_scale": False},
        {"dtype": jnp.bfloat16},
        {"param_dtype": jnp.bfloat16},
        {"feature_axes": (0, 1), "scale_init": NORMAL},
        {"feature_axes": 0, "scale_init": NORMAL},
        {"variable_filter": None},
        {"variable_filter": {"bias"}, "feature_axes": None},
        {"variable_filter": ["instance/k"]},
    ]
)
def test_weight_norm(kwargs):
    def program(nn):
        return steps(nn.WeightNorm(nn.Dense(4, bias_init=NORMAL), **kwargs))

    same(program, 3e-2 if {"dtype", "param_dtype"} & set(kwargs) else 1e-5)


@pytest.mark.parametrize("name", ["SpectralNorm", "WeightNorm"])
def test_layers_of_several_parameters(name):
    given = {"update_stats": True} if name == "SpectralNorm" else {}

    def program(nn):
        layer = getattr(nn, name)(nn.MultiHeadDotProductAttention(1))
        return steps(layer, "batch_stats", **given)

    same(program)


@pytest.mark.parametrize("name", ["SpectralNorm", "WeightNorm"])
def test_names(name):
    given = {"update_stats": True} if name == "SpectralNorm" else {}

    def program(nn):
        norm = getattr(nn, name)

        class Compact(nn.Module):
            @nn.compact
            def __call__(self, x, **kwargs):
                x = norm(nn.Conv(4, (3,)))(x, **kwargs)
                twice = norm(nn.Dense(4, name="dense"), name="norm")
                return twice(twice(x, **kwargs), **kwargs)

        class Setup(nn.Module):
            def setup(self):
                self.dense = nn.Dense(4)
                self.norm = norm(self.dense)

            def __call__(self, x, **kwargs):
                return self.norm(x, **kwargs)

        results = [steps(module(), "batch_stats", **given)[0] for module in (Compact, Setup)]
        return results, {}

    same(program)


def test_gradients():
    def program(nn):
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                x = nn.SpectralNorm(nn.Dense(4))(x, update_stats=False)
                return nn.WeightNorm(nn.Dense(2))(x)

        variables = Model().init(KEY, X)
        loss = lambda v: jnp.sum(jnp.cos(Model().apply(v, X)))  # noqa: E731
        return (variables, jax.jit(jax.grad(loss))(variables)), {}

    same(program)


@pytest.mark.parametrize(
    "program",
    [
        lambda nn: nn.SpectralNorm(nn.Dense(4)).init(KEY, X),
        lambda nn: nn.SpectralNorm(nn.Conv(4, (3,)), error_on_non_matrix=True).init(
            KEY, X, update_stats=True
        ),
        lambda nn: nn.SpectralNorm(nn.Dense(4)).apply(
            nn.SpectralNorm(nn.Dense(4)).init(KEY, X, update_stats=True), X, update_stats=True
        ),
    ],
)
def test_errors(program):
    assert same_error(program)
