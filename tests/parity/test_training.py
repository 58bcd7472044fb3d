"""Parts of training loops, on Flax and on Weft."""

import flax.training.common_utils
import flax.training.dynamic_scale
import flax.training.early_stopping
import flax.training.prefetch_iterator
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import weft.training.common_utils
import weft.training.train_state

X = jnp.arange(6.0).reshape(2, 3)
OVERWRITE = "_overwrite_with_gradient"


def both(program):
    """Runs a program of `training` on both; it returns arrays and numbers."""
    theirs, ours = program(flax.training), program(weft.training)
    assert jax.tree.structure(theirs) == jax.tree.structure(ours)
    for a, b in zip(jax.tree.leaves(theirs), jax.tree.leaves(ours), strict=True):
        assert jnp.result_type(a) == jnp.result_type(b)
        np.testing.assert_array_equal(a, b)


def fields(state, *names):
    return [getattr(state, name) for name in names]


@pytest.mark.parametrize(
    "tx", [optax.sgd(0.1, momentum=0.9), optax.adamw(0.1)], ids=["sgd", "adam"]
)
@pytest.mark.parametrize("jit", [False, True])
def test_train_state(tx, jit):
    def program(training):
        state = training.train_state.TrainState.create(
            apply_fn=lambda params, x: x @ params["w"], params={"w": jnp.ones(3)}, tx=tx
        )

        def step(state):
            grads = jax.grad(lambda p: state.apply_fn(p, X).sum() ** 2)(state.params)
            return state.apply_gradients(grads=grads)

        step = jax.jit(step) if jit else step
        states = [state, step(state), step(step(state))]
        return [fields(s, "step", "params", "opt_state") for s in states]

    both(program)


def test_overwritten_with_gradient():
    params = {"params": {"w": jnp.ones(3)}, OVERWRITE: {"scale": jnp.zeros(2)}}
    grads = {"params": {"w": jnp.ones(3)}, OVERWRITE: {"scale": jnp.full(2, 7.0)}}

    def program(training):
        create = training.train_state.TrainState.create
        state = create(apply_fn=None, params=params, tx=optax.adam(0.1))
        return fields(state.apply_gradients(grads=grads), "step", "params", "opt_state")

    both(program)


@pytest.mark.parametrize("min_delta, patience", [(0, 0), (0.1, 2), (0.05, 1)])
def test_early_stopping(min_delta, patience):
    def program(training):
        stopping = training.early_stopping.EarlyStopping(min_delta=min_delta, patience=patience)
        states = []
        for metric in (1.0, 0.95, 0.8, 0.79, 0.78, 0.77, 0.1, float("nan"), 0.2):
            stopping = stopping.update(metric)
            states.append(jax.tree.leaves(stopping))
        return states, jax.tree.leaves(stopping.reset())

    both(program)


def loss(x, y):
    return (x**2).sum() * y


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"growth_interval": 2, "scale": 4.0},
        {"growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 1, "fin_steps": 1},
        {"scale": 1.0, "minimum_scale": 0.75},
        {"scale": 1.0, "minimum_scale": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dynamic_scale(kwargs, dtype):
    def program(training):
        dynamic, results = training.dynamic_scale.DynamicScale(**kwargs), []
        step = jax.jit(lambda d, x: d.value_and_grad(loss, argnums=(0, 1))(x, 2.0))
        for i in range(5):
            result = step(dynamic, (X * (jnp.inf if i == 3 else 1)).astype(dtype))
            dynamic = result.dynamic_scale
            state = fields(dynamic, "fin_steps", "scale")
            results.append([state, *fields(result, "finite", "aux", "grad")])
        return results

    both(program)


def test_dynamic_scale_over_an_axis_and_with_aux():
    def program(training):
        dynamic = training.dynamic_scale.DynamicScale(scale=8.0)

        def step(x):
            grad_fn = dynamic.value_and_grad(
                lambda x: (loss(x, 1.0), x), has_aux=True, axis_name="i"
            )
            result = grad_fn(x)
            scale = result.dynamic_scale.scale
            return scale, *fields(result, "finite", "aux", "grad")

        run = jax.vmap(step, axis_name="i")
        return run(X), run(X.at[0].set(jnp.nan))

    both(program)


def test_common_utils():
    n = jax.local_device_count()

    def program(training):
        utils = training.common_utils
        return [
            utils.shard({"a": np.arange(4 * n).reshape(2 * n, 2)}),
            utils.shard_prng_key(jax.random.PRNGKey(0)),
            utils.stack_forest([{"a": 1, "b": X}, {"a": 2, "b": 2 * X}]),
            utils.onehot(jnp.array([[0, 3], [-1, 1]]), 3),
            utils.onehot(jnp.array([1]), 2, 2, 1),
        ]

    both(program)


def test_metrics_of_replicated_steps():
    metrics = [jax.pmap(lambda x: {"x": x[0], "y": x})(jnp.full((8, 2), i)) for i in range(3)]
    both(lambda training: training.common_utils.get_metrics(metrics))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_prefetch_iterator():
    def program(training):
        return list(training.prefetch_iterator.PrefetchIterator(iter(range(9)), 2))

    both(program)
