import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.interop.layers import KEY, X, normal
from weft import linen as nn
from weft import nnx
from weft.core.logical import LogicallyPartitioned
from weft.core.meta import Partitioned
from weft.errors import (
    InvalidRngError,
    LayerVariablesError,
    ModifyScopeVariableError,
    ScopeCollectionNotFound,
    TransformArgumentError,
)
from weft.interop.bridge.to_nnx import ToNNX, lazy_init


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


def test_changes_are_put_into_the_variables_that_are_there():
    block = ToNNX(Block(), nnx.Rngs(0)).lazy_init(X)
    mean = block.BatchNorm_0["mean"]
    with pytest.raises(ModifyScopeVariableError, match="batch_stats"):
        block(X)
    for graph in (True, False):
        before = mean[...]
        nnx.jit(lambda b, x: b(x, mutable=["batch_stats"]), graph=graph)(block, X)
        assert block.BatchNorm_0["mean"] is mean
        assert not jnp.array_equal(mean[...], before)
    block(X, mutable=True)
    assert type(block.normal) is nnx.Intermediate
    assert len(block.normal.get_value()) == 1


def test_it_is_made_anew():
    dense = ToNNX(nn.Dense(2), nnx.Rngs(0)).lazy_init(X)
    kernel, before = dense.kernel, dense.kernel[...]
    dense.lazy_init(X)
    assert dense.kernel is kernel
    assert not jnp.array_equal(dense.kernel[...], before)


def test_layers_are_mapped_and_scanned():
    @nnx.split_rngs(splits=3)
    @nnx.jit
    @nnx.vmap
    def make(rngs):
        return ToNNX(Block(), rngs).lazy_init(X)

    blocks = make(nnx.Rngs(0, dropout=1))
    assert blocks.Dense_0["kernel"].shape == (3, 3, 3)

    @nnx.jit
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def forward(block, x):
        return block(x, mutable=["batch_stats"])

    before = blocks.BatchNorm_0["mean"][...]
    assert forward(blocks, X).shape == X.shape
    assert not jnp.array_equal(blocks.BatchNorm_0["mean"][...], before)


@pytest.mark.parametrize("kind", [Partitioned, LogicallyPartitioned], ids=["names", "logical"])
def test_boxes_are_metadata(kind):
    class Boxed(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = lambda key: kind(normal(key, (3, 2)), ("a", "b"))  # noqa: E731
            kernel = self.param("kernel", init, unbox=False)
            assert isinstance(kernel, kind)
            assert kernel.names == ("a", "b")
            return x @ kernel.value

    with nnx.use_eager_sharding(False):
        layer = ToNNX(Boxed(), nnx.Rngs(0)).lazy_init(X)
    assert layer.kernel.sharding_names == ("a", "b")
    assert layer.kernel.linen_meta_type is kind
    assert layer(X).shape == (4, 2)
    mesh = jax.make_mesh((3, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        layer = ToNNX(Boxed(), nnx.Rngs(0)).lazy_init(X)
    assert layer.kernel[...].sharding.spec == jax.sharding.PartitionSpec("a", "b")


def test_methods_and_functions():
    block = ToNNX(Block(), nnx.Rngs(0)).lazy_init(X, method="encode")
    assert set(nnx.state(block, nnx.Param)) == {"Dense_0"}
    a = block(X, method="encode")
    b = block(X, method=Block.encode)
    c = block(X, method=lambda module, x: module.encode(x))
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(a, c)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.block = ToNNX(Block(), rngs)
        self.head = ToNNX(nn.Dense(2), rngs)

    def __call__(self, x):
        return self.head(self.block(self.block(x)))

    def encode(self, x):
        return self.block(x)


def test_a_model_is_made_at_once():
    model = Model(nnx.Rngs(0))
    assert lazy_init(model, X) is model
    assert model.head.kernel.shape == (3, 2)
    assert int(model.head.rngs.default.count[...]) == 1
    model = Model(nnx.Rngs(0))
    lazy_init(model.encode, X)
    assert hasattr(model.block, "Dense_0")
    assert not hasattr(model.head, "kernel")


def test_lazy_init_is_of_one_thread_and_ends_with_an_error():
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


def test_what_does_not_fit_is_named():
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
