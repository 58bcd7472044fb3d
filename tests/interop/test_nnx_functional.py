import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.interop.layers import KEY, X, normal
from weft import linen as nn
from weft import nnx
from weft.errors import (
    GraphStructureError,
    InvalidRngError,
    LayerVariablesError,
    RngStreamNotFoundError,
)
from weft.interop.nnx_functional import functional, to_linen

RNGS = {"params": KEY, "dropout": jax.random.key(1)}


class Block(nnx.Module):
    def __init__(self, n=3, *, rngs):
        self.linear = nnx.Linear(
            n, n, kernel_init=nnx.with_partitioning(normal, ("a", "b")), rngs=rngs
        )
        self.norm = nnx.BatchNorm(n, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.norm(self.linear(x)))

    def encode(self, x):
        return self.linear(x)


@functools.cache
def block_variables():
    return jax.jit(to_linen(Block).init)(RNGS, X)


@pytest.fixture(autouse=True)
def no_mesh():
    with nnx.use_eager_sharding(False):
        yield


def test_variables_are_collections_with_boxes():
    variables = block_variables()
    assert set(variables) == {"params", "batch_stats"}
    assert variables["params"]["linear"]["kernel"].metadata["out_sharding"] == ("a", "b")
    assert nn.get_partition_spec(variables)["params"]["linear"]["kernel"] == P("a", "b")
    plain = jax.eval_shape(to_linen(Block, metadata_fn=None).init, RNGS, X)
    assert isinstance(plain["params"]["linear"]["kernel"], jax.ShapeDtypeStruct)


def test_updates_require_mutable_collections():
    model, variables = to_linen(Block), block_variables()
    call = jax.jit(lambda v: model.apply(v, X, rngs=RNGS, mutable=["batch_stats"]))
    _, changed = call(variables)
    assert set(changed) == {"batch_stats"}
    assert jnp.any(changed["batch_stats"]["norm"]["mean"])
    assert model.apply(variables, X, rngs=RNGS).shape == X.shape


def test_layers_are_scanned_with_names_of_axes():
    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(
                lambda block, x, _: (block(x), None),
                variable_axes={"params": 0, "batch_stats": 0},
                split_rngs={"params": True, "dropout": True},
                length=3,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            return scan(to_linen(Block, name="block"), x, None)[0]

    variables = jax.jit(Stack().init)(RNGS, X)
    kernel = variables["params"]["block"]["linear"]["kernel"]
    assert kernel.value.shape == (3, 3, 3)
    assert not jnp.array_equal(kernel.value[0], kernel.value[1])
    assert kernel.metadata["out_sharding"] == ("layers", "a", "b")
    y, changed = jax.jit(lambda v: Stack().apply(v, X, rngs=RNGS, mutable=["batch_stats"]))(
        variables
    )
    assert y.shape == X.shape
    assert changed["batch_stats"]["block"]["norm"]["mean"].shape == (3, 3)


def test_class_that_takes_no_streams():
    class Scale(nnx.Module):
        def __init__(self, by):
            self.by = nnx.Param(jnp.array(by))

        def __call__(self, x):
            return self.by * x

    model = to_linen(Scale, 2.0, skip_rng=True)
    assert model.apply(model.init(KEY, X), 3.0) == 6.0
    with pytest.raises(TypeError, match="rngs"):
        to_linen(Scale, 2.0).init(KEY, X)


def test_initial_values_need_mutable():
    model, variables = to_linen(Block), block_variables()
    params = {"params": variables["params"]}
    _, made = model.apply(params, X, rngs=RNGS, mutable=["batch_stats"])
    assert set(made["batch_stats"]["norm"]) == {"mean", "var"}
    with pytest.raises(LayerVariablesError, match="Block has a variable 'batch_stats/norm/mean'"):
        model.apply(params, X, rngs=RNGS)


def test_missing_streams_are_named():
    with pytest.raises(RngStreamNotFoundError) as error:
        to_linen(Block).init(KEY, X)
    assert "'dropout'" in str(error.value)
    assert "init({'params': key, 'dropout': other_key}" in error.value.__notes__[-1]
    variables = block_variables()
    with pytest.raises(InvalidRngError, match="Block draws a key from a PRNG stream"):
        to_linen(Block).apply(variables, X)


class Counter(nnx.Module):
    def __init__(self, start, *, rngs):
        self.linear = nnx.Linear(3, 2, rngs=rngs)
        self.count = nnx.BatchStat(jnp.array(start))

    def __call__(self, x):
        self.count[...] += 1
        return self.linear(x)


def test_apply_before_init_is_rejected():
    with pytest.raises(GraphStructureError, match="Counter is known after `init` was called"):
        functional(Counter)(4).apply({})


def test_states_in_and_out():
    made = functional(Counter)(4)
    assert (made.module_type, made.graphdef, made.args, made.kwargs) == (Counter, None, (4,), {})
    state = made.init(rngs=nnx.Rngs(0))
    params, rest = nnx.split_state(state, nnx.Param, ...)
    y, (_, after) = made.apply(params, rest)(jnp.ones((1, 3)))
    assert y.shape == (1, 2)
    assert after["count"][...] == 5
    assert state["count"][...] == 4
    z, _ = made.apply(state).linear(jnp.ones((1, 3)))
    assert (y == z).all()


def test_initial_values_can_be_computed():
    model, variables = to_linen(Block, abstract_init=False), block_variables()
    a = model.apply(variables, X, rngs=RNGS)
    b = to_linen(Block).apply(variables, X, rngs=RNGS)
    np.testing.assert_array_equal(a, b)
