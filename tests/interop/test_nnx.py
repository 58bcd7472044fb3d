import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.interop.layers import DENSE, KEY, RANDOM, STATEFUL, X, normal
from weft import linen, nnx
from weft import linen as nn
from weft.core.meta import Partitioned, unbox
from weft.errors import (
    InvalidRngError,
    LayerVariablesError,
    ScopeCollectionNotFound,
    TransformArgumentError,
)
from weft.hierarchy.module import functional
from weft.interop import InNNX, as_hierarchy, as_linen, as_nnx
from weft.interop.nnx import NNXModel, ToNNX, lazy_init
from weft.nnx import bridge


def over(cases):
    return pytest.mark.parametrize("make", cases.values(), ids=cases)


def made(guest, seed=0, **kwargs):
    """Returns a layer in NNX with its variables."""
    layer = as_nnx(*guest, **({} if isinstance(guest[0], nnx.Module) else {"rngs": nnx.Rngs(seed)}))
    return layer.lazy_init(X, **kwargs) if isinstance(layer, InNNX) else layer


@over(DENSE)
def test_layer_of_any_library_is_trained_in_nnx(make):
    layer = made(make())
    optimizer = nnx.Optimizer(layer, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(layer, optimizer):
        loss, grads = nnx.value_and_grad(lambda layer: (layer(X) ** 2).mean())(layer)
        optimizer.update(layer, grads)
        return loss

    first, second = step(layer, optimizer), step(layer, optimizer)
    assert 0 < second < first


@over({k: DENSE[k] for k in ("linen", "hierarchy", "flax-linen", "equinox-class", "haiku-class")})
def test_batch_of_layers_is_mapped(make):
    layers = nnx.vmap(lambda key: as_nnx(*make(), rngs=nnx.Rngs(key)).lazy_init(X))(
        jax.random.split(KEY, 3)
    )
    assert all(x.shape[0] == 3 for x in jax.tree.leaves(nnx.state(layers, nnx.Param)))
    y = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(layers, X)
    assert y.shape == (3, 4, 2)
    assert not jnp.allclose(y[0], y[1])


@pytest.mark.parametrize("case", STATEFUL.values(), ids=STATEFUL)
def test_state_changes_only_in_training_under_jit_and_scan(case):
    layer = made(case[0](), training=True) if "nnx" not in str(case) else made(case[0]())
    if isinstance(layer, InNNX) and not nnx.state(layer, nnx.Param):
        layer.lazy_init(X, training=True)

    def stats():
        return jax.tree.leaves(nnx.state(layer, nnx.Not(nnx.Any(nnx.Param, nnx.RngState))))

    def equal(before):
        return all(jnp.array_equal(a, b) for a, b in zip(before, stats(), strict=True))

    call = nnx.jit(lambda layer, x: layer(x))
    layer.eval()
    before = stats()
    assert before
    call(layer, X)
    assert equal(before)
    layer.train()
    twin = nnx.clone(layer)
    call(layer, X)
    call(layer, 2 * X)
    assert not equal(before)
    after = stats()

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def scan(layer, x):
        layer(x)
        return layer

    layer = twin
    scan(layer, jnp.stack([X, 2 * X]))
    for a, b in zip(after, stats(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@over(RANDOM)
def test_keys_come_from_the_streams(make):
    layer = made(make(), training=True) if not isinstance(make()[0], nnx.Module) else make()[0]
    layer.train()
    a, b = layer(X), layer(X)
    assert not jnp.array_equal(a, b)
    layer.eval()
    np.testing.assert_allclose(layer(X), X, rtol=1e-6)


def test_layouts_are_metadata():
    kernel_init = linen.with_partitioning(normal, (None, "model"))
    with nnx.use_eager_sharding(False):
        layer = as_nnx(linen.Dense(2, kernel_init=kernel_init), rngs=nnx.Rngs(0)).lazy_init(X)
        assert layer.kernel.out_sharding == (None, "model")
        assert layer.kernel.linen_meta_type is Partitioned

        def make(key):
            return as_nnx(linen.Dense(2, kernel_init=kernel_init), rngs=nnx.Rngs(key)).lazy_init(X)

        layers = nnx.vmap(make, transform_metadata={nnx.PARTITION_NAME: "layers"})(
            jax.random.split(KEY, 3)
        )
    assert layers.kernel.out_sharding == ("layers", None, "model")
    y = nnx.vmap(
        lambda layer, x: layer(x),
        in_axes=(0, None),
        transform_metadata={nnx.PARTITION_NAME: "layers"},
    )(layers, X)
    assert y.shape == (3, 4, 2)
    assert layers.kernel.out_sharding == ("layers", None, "model")


def test_model_of_many_libraries_is_created():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = [
                as_nnx(*DENSE[name](), rngs=rngs) for name in ("flax-linen", "equinox-class")
            ]
            self.own = nnx.Linear(2, 3, rngs=rngs)

        def __call__(self, x):
            for layer in self.layers:
                x = self.own(layer(x))
            return x

    model = bridge.lazy_init(Model(nnx.Rngs(0)), X)
    assert nnx.state(model.layers[1]).inner.weight.shape == (2, 3)
    assert model(X).shape == (4, 3)


def test_equal_layers_are_traced_once():
    traces = []

    @nnx.jit
    def call(layer, x):
        traces.append(1)
        return layer(x)

    for seed in range(3):
        call(made((linen.Dense(2),), seed), X)
    for seed in range(3):
        call(made(DENSE["equinox-class"](), seed), X)
    assert len(traces) == 2


def test_nnx_module_is_returned_unchanged():
    linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    assert as_nnx(linear) is linear
    assert as_nnx(nnx.Linear, 3, 2, rngs=nnx.Rngs(0)).kernel.shape == (3, 2)


# NNX modules as models of other libraries.


class Net(nnx.Module):
    def __init__(self, *, rngs):
        self.first = nnx.Linear(3, 3, rngs=rngs)
        self.again = self.first
        self.noise = rngs.noise.fork()
        self.offset = jnp.ones(3)

    def __call__(self, x, noisy=False):
        x = self.again(self.first(x)) + jnp.broadcast_to(self.offset, x.shape)
        return x + self.noise.normal(x.shape) if noisy else x


def test_shared_modules_and_plain_arrays_are_kept_once():
    model = NNXModel(Net)
    variables = model.init({"params": KEY, "noise": KEY}, X)
    shapes = jax.tree.map(jnp.shape, variables)
    assert shapes == {
        "params": {"again": {"bias": (3,), "kernel": (3, 3)}},
        "arrays": {"offset": (3,)},
    }
    doubled = jax.tree.map(lambda x: 2 * x, variables)
    y, changed = model.apply(doubled, X, rngs={}, mutable=True)
    kernel = 2 * variables["params"]["again"]["kernel"]
    np.testing.assert_allclose(y, X @ kernel @ kernel + 2, rtol=1e-4)
    assert changed == {}


def test_initial_values_are_not_computed_by_apply():
    model = NNXModel(Net)
    variables = model.init({"params": KEY, "noise": KEY}, X)
    jaxpr = jax.make_jaxpr(lambda v: model.apply(v, X, rngs={}, mutable=False)[0])(variables)
    assert "random" not in str(jaxpr)


def test_drawing_from_a_missing_stream_fails():
    model = NNXModel(Net)
    variables = model.init({"params": KEY, "noise": KEY}, X)
    noisy, _ = model.apply(variables, X, rngs={"noise": KEY}, mutable=False, noisy=True)
    assert noisy.shape == (4, 3)
    with pytest.raises(InvalidRngError, match=r"Net draws a key .* it was given: 'other'. Give"):
        model.apply(variables, X, rngs={"other": KEY}, mutable=False, noisy=True)


def test_wrong_parameter_shape_is_named():
    model = NNXModel(nnx.Linear, 3, 2)
    variables = model.init({"params": KEY}, X)
    variables["params"]["kernel"] = jnp.ones((4, 2))
    with pytest.raises(LayerVariablesError, match=r"params/kernel' of Linear .*\(4, 2\); expected"):
        model.apply(variables, X, rngs={}, mutable=False)


def test_unmatched_variables_are_named():
    model = NNXModel(nnx.Linear, 3, 2)
    variables = model.init({"params": KEY}, X)
    variables["params"]["other"] = {"kernel": jnp.ones(2)}
    with pytest.warns(UserWarning, match="Linear .* no place for: params/other/kernel"):
        model.apply(variables, X, rngs={}, mutable=False)


def test_created_variables_are_reused():
    class Remembers(nnx.Module):
        def __init__(self, *, rngs):
            pass

        def __call__(self, x):
            self.sow(nnx.Intermediate, "seen", x.sum())
            return x

    model = NNXModel(Remembers)
    _, once = model.apply({}, X, rngs={}, mutable=["intermediates"])
    _, twice = model.apply(once, X, rngs={}, mutable=["intermediates"])
    assert len(once["intermediates"]["seen"]) == 1
    assert len(twice["intermediates"]["seen"]) == 2


class Normed(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.BatchNorm(use_running_average=True)(linen.Dense(4)(x))


class Around(nnx.Module):
    """Layers of Linen, whose variables follow from an input, among others."""

    def __init__(self, rngs):
        self.first = nnx.Linear(3, 3, rngs=rngs)
        self.nested = [bridge.ToNNX(Normed(), rngs), as_nnx(linen.Dense(2), rngs=rngs)]
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        self.sow(nnx.Intermediate, "seen", x)
        for layer in (self.first, *self.nested):
            x = layer(x)
        return x


class Within(linen.Module):
    @linen.compact
    def __call__(self, x):
        return as_linen(Around)(x)


PLACES = {
    "linen": lambda: as_linen(Around),
    "to_linen": lambda: bridge.to_linen(Around),
    "in linen": lambda: Within(),
    "function": lambda: bridge.to_linen(lambda rngs: Around(rngs)),
}


def _made_manually():
    return bridge.lazy_init(Around(nnx.Rngs(0)), jnp.ones((2, 3)))


@pytest.mark.parametrize("make", PLACES.values(), ids=PLACES)
def test_linen_in_nnx_in_linen_is_initialized_by_inputs(make):
    module, x = make(), jnp.ones((2, 3))
    variables = unbox(module.init(jax.random.key(0), x))
    (y, changed) = module.apply(variables, x, mutable=["batch_stats"])
    assert y.shape == (2, 2) and "intermediates" not in variables
    inner = {col: v.get("InLinen_0", v) for col, v in variables.items()}
    shapes = jax.tree.map(jnp.shape, inner["params"]["nested"])
    by_hand = nnx.to_pure_dict(nnx.state(_made_manually(), nnx.Param))["nested"]
    assert {str(k): v for k, v in shapes.items()} == jax.tree.map(
        jnp.shape, {str(k): v for k, v in by_hand.items()}
    )
    assert inner["batch_stats"]["calls"] == 0
    after = changed["batch_stats"]
    assert after.get("InLinen_0", after)["calls"] == 1
    # apply uses the given variables.
    zeros = jax.tree.map(jnp.zeros_like, variables)
    assert not module.apply(zeros, x, mutable=["batch_stats"])[0].any()


def test_linen_in_nnx_in_hierarchy_is_initialized_by_inputs():
    x = jnp.ones((2, 3))
    cfg = as_hierarchy(Around, inputs=(jax.ShapeDtypeStruct((2, 3), "float32"),))
    layer = cfg.set(name="layer").instantiate(parent=None)
    state = layer.initialize_parameters_recursively(jax.random.key(0))
    assert state["params"]["nested"]["0"]["Dense_0"]["kernel"].shape == (3, 4)
    out, side = functional(layer, jax.random.key(1), state, (x,), is_training=False)
    assert out.shape == (2, 2)
    assert side.state_updates["batch_stats"]["calls"] == 1
    assert state["batch_stats"]["calls"] == 0


class Block(nn.Module):
    train: bool = True

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(3)(x)
        x = nn.BatchNorm(use_running_average=not self.train)(x)
        self.sow("intermediates", "normal", x)
        return nn.Dropout(0.5, deterministic=not self.train)(x)

    @nn.compact
    def encode(self, x):
        return nn.Dense(3)(x)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.block = ToNNX(Block(), rngs)
        self.head = ToNNX(nn.Dense(2), rngs)

    def __call__(self, x):
        return self.head(self.block(self.block(x)))

    def encode(self, x):
        return self.block(x)


def test_model_is_created():
    model = Model(nnx.Rngs(0))
    assert lazy_init(model, X) is model
    assert model.head.kernel.shape == (3, 2)
    assert int(model.head.rngs.default.count[...]) == 1
    model = Model(nnx.Rngs(0))
    lazy_init(model.encode, X)
    assert hasattr(model.block, "Dense_0")
    assert not hasattr(model.head, "kernel")


def test_lazy_init_is_thread_local_and_ends_on_error():
    model, seen = Model(nnx.Rngs(0)), []

    def other():
        try:
            Model(nnx.Rngs(0)).encode(X)
        except ScopeCollectionNotFound:
            seen.append("not initialized")

    class Starts(nnx.Module):
        def __call__(self, x):
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        lazy_init(Starts(), X)
    assert seen == ["not initialized"]
    with pytest.raises(ScopeCollectionNotFound):
        model(X)


def test_mismatch_is_named():
    with pytest.raises(TransformArgumentError, match="give a module of NNX that can be called"):
        lazy_init(lambda x: x, X)
    with pytest.raises(InvalidRngError, match="params"):
        ToNNX(nn.Dense(2)).lazy_init(X)
    dense = ToNNX(nn.Dense(2), nnx.Rngs(0)).lazy_init(X)
    dense.other = jnp.ones(2)
    with pytest.raises(LayerVariablesError, match="ToNNX of Dense has the attribute 'other'"):
        dense(X)

    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.variable("state", "w", lambda: 1.0)
            self.param("w", normal, (2,))

    with pytest.raises(LayerVariablesError, match="'w' in the collections 'state' and 'params'"):
        ToNNX(Twice(), nnx.Rngs(0)).lazy_init(X)


def test_methods_and_functions():
    block = ToNNX(Block(), nnx.Rngs(0)).lazy_init(X, method="encode")
    assert set(nnx.state(block, nnx.Param)) == {"Dense_0"}
    a = block(X, method="encode")
    b = block(X, method=Block.encode)
    c = block(X, method=lambda module, x: module.encode(x))
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(a, c)


def test_variables_are_attributes():
    block = ToNNX(Block(), nnx.Rngs(0))
    assert block.lazy_init(X) is block
    assert type(block.BatchNorm_0["mean"]) is nnx.BatchStat
    assert block.Dense_0["kernel"].shape == (3, 3)
    assert (block.module, block.rngs) == (block.to_nnx__module, block.to_nnx__rngs)


def test_each_call_draws_one_key_of_each_stream():
    rngs = nnx.Rngs(0, dropout=1)
    block = ToNNX(Block(), rngs).lazy_init(X)
    assert int(rngs.dropout.count[...]) == 1
    a, b = (block(X, mutable="batch_stats") for _ in range(2))
    assert not jnp.array_equal(a, b)
    assert int(block.rngs.dropout.count[...]) == int(block.rngs.default.count[...]) == 3
    by_key = [block(X, rngs=KEY, mutable=True) for _ in range(2)]
    np.testing.assert_array_equal(*by_key)
    by_dict = [block(X, rngs={"dropout": KEY}, mutable=True) for _ in range(2)]
    np.testing.assert_array_equal(*by_dict)
