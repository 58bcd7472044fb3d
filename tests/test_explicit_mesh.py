"""Layers on a mesh of Explicit axes, as `jax.make_mesh` makes: inputs sharded along each axis.

Every layer of the three ways of writing is traced with its gradient; JAX refuses an operation whose
result has no sharding while it traces. Where a layer moves data between devices, values and
gradients are those on one device. So are the parameters that an optimizer updates.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests import layer_table
from tests.layer_table import IDS, IMAGES, LAYERS, TOKENS, Layer
from weft import functional, nnx
from weft.compat.flax.training.train_state import TrainState
from weft.config import config_for_function
from weft.hierarchy.module import functional as run_module
from weft.trainer import Learner
from weft.trainer.optimizers.base import OptParam, as_partitioned
from weft.trainer.update_transformation import Updates

RNG = np.random.default_rng(1)
WEIGHT = RNG.normal(size=(8, 8)).astype(np.float32)
KERNEL = RNG.normal(size=(3, 3, 4, 2)).astype(np.float32)


def of_fn(fn: Callable[[jax.Array], jax.Array], *inputs: np.ndarray) -> Layer:
    return Layer(lambda: {}, lambda variables, inputs: fn(*inputs), inputs)


FUNCTIONS = {
    "cross_entropy": of_fn(lambda x: functional.cross_entropy(x, jnp.array(IDS))[0], TOKENS),
    "linear_cross_entropy": of_fn(
        lambda x, weight: functional.linear_cross_entropy(x, weight, jnp.array(IDS), chunk_size=3)[
            0
        ],
        TOKENS,
        WEIGHT,
    ),
    # The largest of overlapping windows.
    "max_pool": of_fn(lambda x: functional.max_pool(x, (3, 3)), IMAGES),
    # Three outputs of eight positions.
    "conv": of_fn(lambda x: functional.conv(x, KERNEL, strides=2), IMAGES),
    "conv, circular": of_fn(
        lambda x: nnx.Conv(4, 2, (3, 3), padding="CIRCULAR", rngs=nnx.Rngs(0))(x), IMAGES
    ),
    "moments": of_fn(lambda x: functional.moments(x, axis=(0, 1, 2))[1], TOKENS),
    "masked": of_fn(
        lambda x: nnx.BatchNorm(8, rngs=nnx.Rngs(0))(x, mask=TOKENS[..., :1] < 1), TOKENS
    ),
}
CASES = LAYERS | FUNCTIONS

# Layers that index, gather or reshape along axes of their inputs.
COMPARED = [
    *FUNCTIONS,
    "BatchNorm",
    "Embedding",
    "KVCache",
    "KmeansVectorQuantizer",
    "LSTMCell",
    "LastNTokenPooling",
    "MultiheadAttention",
    "PagedKVCache",
    "SlidingWindowKVCache",
    "StackOverTime",
    "TransformerFeedForwardDropFreeMoE",
    "TransformerFeedForwardMoE",
    "nn.Fp8DirectDotGeneralOp",
    "nn.LayerNorm",
    "nn.RNN",
    "nnx.MultiHeadAttention",
]


@functools.cache
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])


def num_axes(name: str) -> int:
    return max(np.ndim(x) for x in jax.tree.leaves(CASES[name].inputs))


def along(x: Any, axis: int | None) -> NamedSharding:
    """The sharding of an array along an axis, if it has it."""
    if axis is None or axis >= np.ndim(x):
        return NamedSharding(mesh(), PartitionSpec())
    return NamedSharding(mesh(), PartitionSpec(*[None] * axis, "data"))


def value_and_gradients(case: Layer, variables: Any, inputs: Any) -> Any:
    """Returns the sum of sines of the results, and the gradients of all that has one."""
    leaves, tree = jax.tree.flatten((variables, inputs))
    trained = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]

    def loss(values: list[jax.Array]) -> jax.Array:
        replaced = dict(enumerate(leaves)) | dict(zip(trained, values, strict=True))
        results = case.apply(*jax.tree.unflatten(tree, replaced.values()))
        total = jnp.zeros(())
        for y in jax.tree.leaves(results):
            if jnp.issubdtype(y.dtype, jnp.floating):
                total += jnp.sum(jnp.sin(y))
        return total

    return jax.value_and_grad(loss)([leaves[i] for i in trained])


def test_every_public_layer_is_in_the_table():
    assert layer_table.missing() == []


@pytest.mark.filterwarnings("ignore:.*Fp8DotGeneralOp is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", [name for name in LAYERS if name not in COMPARED])
def test_layers_and_gradients_have_a_sharding(name):
    case = CASES[name]

    def abstract(x: Any, axis: int | None = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x), sharding=along(x, axis))

    variables = jax.tree.map(abstract, jax.eval_shape(case.init))
    step = jax.jit(functools.partial(value_and_gradients, case))
    for axis in range(num_axes(name)):
        inputs = jax.tree.map(functools.partial(abstract, axis=axis), case.inputs)
        with jax.set_mesh(mesh()):
            loss, _ = step.trace(variables, inputs).out_info
        assert loss.shape == ()


SHARDED = [(name, axis) for name in COMPARED for axis in range(num_axes(name))]


@functools.cache
def results() -> tuple[dict[str, Any], dict[tuple[str, int], Any]]:
    """The results on one device, and those on the mesh, each of one program."""

    def all_results(arguments: dict[Any, Any]) -> dict[Any, Any]:
        return {
            key: value_and_gradients(CASES[key if isinstance(key, str) else key[0]], *both)
            for key, both in arguments.items()
        }

    variables = jax.jit(lambda: {name: CASES[name].init() for name in COMPARED})()
    alone = {name: (variables[name], CASES[name].inputs) for name in COMPARED}
    on_mesh = {}
    for name, axis in SHARDED:
        inputs = jax.tree.map(
            lambda x, axis=axis: jax.device_put(x, along(x, axis)), alone[name][1]
        )
        on_mesh[name, axis] = jax.device_put(variables[name], along(0, None)), inputs
    expected = jax.jit(all_results)(alone)
    with jax.set_mesh(mesh()):
        values = jax.jit(all_results)(on_mesh)
    return jax.device_get((expected, values))


@pytest.mark.parametrize(("name", "axis"), SHARDED)
def test_values_and_gradients_are_those_on_one_device(name, axis):
    alone, on_mesh = results()
    assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(assert_close, on_mesh[name, axis], alone[name])


PARAMS = {"kernel": WEIGHT, "bias": WEIGHT[0]}
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
STEPS = 2


def loss_of(params: dict[str, jax.Array]) -> jax.Array:
    return sum(jnp.sum(jnp.sin(x)) for x in params.values())


def with_optimizer(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    model = nnx.Dict(**{name: nnx.Param(x) for name, x in params.items()})
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
    for _ in range(STEPS):
        grads = nnx.grad(lambda model: loss_of({name: model[name][...] for name in params}))(model)
        optimizer.update(model, grads)
    return {name: model[name][...] for name in params}


def with_train_state(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    state = TrainState.create(apply_fn=None, params=params, tx=OPTIMIZER)
    for _ in range(STEPS):
        state = state.apply_gradients(grads=jax.grad(loss_of)(state.params))
    return state.params


def with_learner(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    optimizer = config_for_function(as_partitioned).set(transformation=OPTIMIZER)
    cfg = Learner.default_config().set(name="learner", optimizer=optimizer)
    learner = cfg.instantiate(parent=None)
    state = learner.init(jax.tree.map(OptParam, params))
    for _ in range(STEPS):
        updates = Updates(jax.tree.map(OptParam, params), jax.grad(loss_of)(params))
        params, outputs = run_module(
            learner,
            prng_key=None,
            state=state,
            inputs=(updates,),
            method="update",
            is_training=True,
        )
        state = outputs.state_updates
    return params


@functools.cache
def params_of_optax() -> dict[str, jax.Array]:
    """Parameters after the steps on one device."""
    params = jax.tree.map(jnp.asarray, PARAMS)
    state = OPTIMIZER.init(params)
    for _ in range(STEPS):
        updates, state = OPTIMIZER.update(jax.grad(loss_of)(params), state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("train", [with_optimizer, with_train_state, with_learner])
def test_optimizers_update_parameters_that_are_sharded(train):
    params = jax.tree.map(lambda x: jax.device_put(x, along(x, 0)), PARAMS)
    with jax.set_mesh(mesh()):
        updated = jax.jit(train)(params)
    for name, expected in params_of_optax().items():
        assert updated[name].sharding.is_equivalent_to(params[name].sharding, expected.ndim)
        np.testing.assert_allclose(updated[name], expected, rtol=1e-5, atol=1e-6)
