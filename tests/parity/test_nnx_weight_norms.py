"""Norms of weights of NNX: the same programs on Flax and on Weft."""

import re

import jax
import jax.numpy as jnp
import pytest

from tests.keys import draw
from tests.parity.objects import named, normal, same, same_error, same_signature

X = draw(3, 4, 3)


def model(nnx):
    """Layers inside of layers, one of them twice, and a matrix that is not a parameter."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(3, 3, rngs=rngs)
            self.layers = nnx.List([self.first, nnx.LinearGeneral(3, (2, 2), rngs=rngs)])
            self.stat = nnx.BatchStat(jnp.ones((2, 2)))

        def __call__(self, x):
            return self.layers[1](self.first(x))

    return Model(nnx.Rngs(0))


def called(wrapper, layer, calls=({}, {}), **kwargs):
    """Returns a program that wraps a layer and calls it, whose results are weights and statistics
    too.
    """

    def program(nnx):
        rngs = nnx.Rngs(1)
        wrapped = getattr(nnx, wrapper)(layer(nnx), rngs=rngs, **of(nnx, kwargs))
        made = pure(nnx, wrapped)
        out = [wrapped(X, **call) for call in calls]
        return [out, made, pure(nnx, wrapped), rngs.params.count[...]], []

    return program


def of(nnx, kwargs):
    return {k: v(nnx) if k == "variable_filter" else v for k, v in kwargs.items()}


def pure(nnx, x):
    """Returns the state, where paths are texts: some have tuples in them."""
    flat = nnx.to_flat_state(nnx.state(x))
    return {str(path): v[...] if hasattr(v, "get_value") else v for path, v in flat}


def linear(nnx):
    return nnx.Linear(3, 2, rngs=nnx.Rngs(0))


# Flax writes statistics of float32 in an array of another dtype.
@pytest.mark.filterwarnings("ignore:scatter inputs:FutureWarning")
@pytest.mark.parametrize("layer", [linear, model], ids=["linear", "model"])
@named(
    [
        {},
        {"n_steps": 3},
        {"epsilon": 1e-3},
        {"dtype": jnp.bfloat16},
        {"param_dtype": jnp.bfloat16},
        {"update_stats": False},
        {"n_steps": 0},
    ]
)
def test_spectral_norm(kwargs, layer):
    rough = kwargs.keys() & {"dtype", "param_dtype"}
    same(called("SpectralNorm", layer, **kwargs), 5e-2 if rough else 1e-5)


@named([{"update_stats": True}, {"update_stats": False}])
@pytest.mark.parametrize("made_with", [True, False])
def test_call_arguments_take_precedence(kwargs, made_with):
    same(called("SpectralNorm", linear, [kwargs], update_stats=made_with))


def test_modes():
    def program(nnx):
        layer = nnx.SpectralNorm(linear(nnx), update_stats=False, rngs=nnx.Rngs(0))
        seen = [layer.use_running_average]
        layer.train()
        seen.append(layer.use_running_average)
        layer.eval()
        before = layer.batch_stats["kernel", "u"][...]
        layer(X)
        return [before, layer.batch_stats["kernel", "u"][...]], [*seen, layer.use_running_average]

    same(program)


@pytest.mark.parametrize("layer", [linear, model], ids=["linear", "model"])
@named(
    [
        {},
        {"feature_axes": None},
        {"feature_axes": 0},
        {"feature_axes": (0, -1)},
        {"use_scale": False},
        {"epsilon": 1e-3},
        {"scale_init": lambda key, shape, dtype=jnp.float32: jnp.full(shape, 2, dtype)},
        {"variable_filter": lambda nnx: nnx.Param},
        {"variable_filter": lambda nnx: nnx.PathContains("first")},
        {"variable_filter": lambda nnx: None},
    ]
)
def test_weight_norm(kwargs, layer):
    if kwargs.get("feature_axes") == (0, -1) or "variable_filter" in kwargs:
        layer = linear
    program = called("WeightNorm", layer, **kwargs)
    if "scale_init" not in kwargs:
        return same(program)

    # Flax gives an initializer no key: that Weft draws one is seen in the count alone.
    def without_count(nnx):
        results, objects = program(nnx)
        return results[:-1], objects

    same(without_count)


def test_weights_are_rounded_to_a_dtype():
    def program(nnx):
        layer = nnx.WeightNorm(linear(nnx), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        return [layer(X), layer.layer_instance.kernel[...].astype(jnp.float32)], []

    same(program, 1e-2)


def test_gradients():
    def program(nnx):
        grads = []
        for wrapper in (nnx.SpectralNorm, nnx.WeightNorm):
            layer = wrapper(linear(nnx), rngs=nnx.Rngs(0))
            graphdef, params, rest = nnx.split(layer.layer_instance, nnx.Param, ...)

            def loss(params, graphdef=graphdef, rest=rest, layer=layer):
                copy = nnx.clone(layer)
                copy.layer_instance = nnx.merge(graphdef, params, rest)
                return (copy(X) ** 2).sum()

            grads.append(nnx.to_pure_dict(jax.grad(loss)(params)))
        return grads, []

    same(program, 1e-3)


def test_further_arguments_go_to_the_layer():
    def program(nnx):
        norm = nnx.BatchNorm(3, scale_init=normal, rngs=nnx.Rngs(0))
        scales = nnx.PathContains("scale")
        layer = nnx.WeightNorm(norm, variable_filter=scales, rngs=nnx.Rngs(0))
        return [layer(X, True), layer(X, use_running_average=False)], []

    same(program)


@pytest.mark.parametrize("call", ["__init__", "__call__"])
@pytest.mark.parametrize("name", ["SpectralNorm", "WeightNorm"])
def test_signatures(name, call):
    if (name, call) != ("WeightNorm", "__init__"):
        same_signature(name, call)


def test_errors():
    def no_matrix(nnx):
        nnx.SpectralNorm(model(nnx), error_on_non_matrix=True, rngs=nnx.Rngs(0))(X)

    assert re.search(
        r"the parameter layers/1/kernel of the Model .*\(3, 2, 2\)", same_error(no_matrix)
    )
