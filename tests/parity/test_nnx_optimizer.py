"""Optimizers, moving averages and train states of NNX: the same programs on Flax and on Weft."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.keys import draw
from tests.parity.objects import OF_FLAX, same_arrays, same_error

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

X = draw(1, 3, 2)
NAMES = {"out_sharding": ("in", "out"), "eager_sharding": False}


def make(nnx):
    class Model(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.arange(6.0).reshape(2, 3), tag="kernel", **NAMES)
            self.layers = nnx.List([nnx.Dict(bias=nnx.Param(jnp.ones(3)))])
            self.mean = nnx.BatchStat(jnp.zeros(3))

        def __call__(self, x):
            return x @ self.kernel[...] + self.layers[0].bias[None]

    return Model()


def loss(model):
    return (model(X) ** 2).mean()


def contents(nnx, x):
    """Paths, classes and metadata of the variables of an object; and their values."""
    shown, values = [], []
    for path, v in nnx.to_flat_state(nnx.state(x)):
        metadata = v.get_metadata() if isinstance(v, nnx.Variable) else {}
        kept = {k: m for k, m in metadata.items() if k not in OF_FLAX}
        shown.append((path, type(v).__name__, kept))
        values.append(v.get_raw_value() if isinstance(v, nnx.Variable) else v)
    return shown, [x for x in values if isinstance(x, jax.Array | np.ndarray)]


def same(program):
    """Runs `program(nnx)`, which gives results and objects, on both libraries."""
    import flax.nnx

    import weft.nnx

    (of_flax, theirs), (of_weft, ours) = program(flax.nnx), program(weft.nnx)
    same_arrays(of_flax, of_weft)
    for a, b in zip(theirs, ours, strict=True):
        (shown, values), (our_shown, our_values) = contents(flax.nnx, a), contents(weft.nnx, b)
        assert shown == our_shown
        same_arrays(values, our_values)


def of_key_paths(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, x: "b" if "bias" in jax.tree_util.keystr(path) else "a", params
    )


TRANSFORMATIONS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.1),
    "adamw": lambda: optax.adamw(0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    "lion": lambda: optax.lion(0.1),
    "lamb": lambda: optax.lamb(0.1),
    "rmsprop": lambda: optax.rmsprop(0.1),
    "schedule": lambda: optax.adam(optax.linear_schedule(1.0, 0.1, 10)),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "named chain": lambda: optax.named_chain(("a", optax.adam(0.1)), ("b", optax.scale(0.5))),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.adam)(0.1),
    "steps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "partition": lambda: optax.multi_transform(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1)}, of_key_paths
    ),
    "finite": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
    "average": lambda: optax.chain(optax.sgd(0.1), optax.ema(0.9)),
    "identity": optax.identity,
    "noise": lambda: optax.add_noise(0.1, 0.1, jax.random.key(0)),
    "bfloat16": lambda: optax.adam(0.1, mu_dtype=jnp.bfloat16),
}


@pytest.mark.parametrize("make_tx", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
def test_transformations(make_tx):
    def program(nnx):
        model = make(nnx)
        optimizer = nnx.Optimizer(model, make_tx(), wrt=nnx.Param)
        updates = [optimizer.update(model, nnx.grad(loss)(model)) for _ in range(3)]
        objects = [model] if make_tx is TRANSFORMATIONS["noise"] else [model, optimizer]
        return [nnx.to_pure_dict(u) for u in updates], objects

    same(program)


@pytest.mark.parametrize(
    "wrt",
    [
        lambda nnx: nnx.PathContains("bias"),
        lambda nnx: "kernel",
        lambda nnx: nnx.Not(nnx.BatchStat),
        lambda nnx: (nnx.Param, nnx.BatchStat),
        lambda nnx: lambda path, x: path[-1] == "kernel",
        lambda nnx: ...,
    ],
    ids=["path", "tag", "not", "tuple", "function", "all"],
)
def test_filters(wrt):
    def program(nnx):
        model = make(nnx)
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=wrt(nnx))
        grads = nnx.grad(loss, argnums=nnx.DiffState(0, wrt(nnx)))(model)
        return nnx.to_pure_dict(optimizer.update(model, grads)), [model, optimizer]

    same(program)


def test_further_arguments():
    def program(nnx):
        model = make(nnx)
        optimizer = nnx.Optimizer(model, optax.contrib.reduce_on_plateau(), wrt=nnx.Param)
        optimizer.update(model, nnx.grad(loss)(model), value=loss(model))
        return (), [model, optimizer]

    same(program)


def test_optimizer_that_holds_the_model():
    def program(nnx):
        both = nnx.ModelAndOptimizer(make(nnx), optax.adam(0.1))
        updates = both.update(nnx.grad(loss)(both.model))
        assert both.wrt is nnx.Param
        return nnx.to_pure_dict(updates), [both]

    same(program)


def test_in_jit():
    def program(nnx):
        model = make(nnx)
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer):
            value, grads = nnx.value_and_grad(loss)(model)
            optimizer.update(model, grads)
            return value

        return [step(model, optimizer) for _ in range(3)], [model, optimizer]

    same(program)


def test_models_that_are_states_dicts_or_share():
    def program(nnx):
        state = nnx.state(make(nnx), nnx.Param)
        tree = {"a": nnx.Param(jnp.ones(2)), "b": [nnx.Param(jnp.ones(1))]}
        weight = nnx.Param(jnp.ones(2))
        models = [state, tree, nnx.List([weight, weight])]
        optimizers = [nnx.Optimizer(m, optax.adam(0.1), wrt=nnx.Param) for m in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.update(model, nnx.state(model))
        return (), [*models, *optimizers]

    same(program)


def test_values_of_low_precision():
    def program(nnx):
        model = nnx.Dict(w=nnx.Param(jnp.ones(2, jnp.bfloat16)))
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
        optimizer.update(model, nnx.State({"w": nnx.Param(jnp.ones(2))}))
        return (), [model, optimizer]

    same(program)


@pytest.mark.parametrize("only", [lambda nnx: ..., lambda nnx: nnx.Param], ids=["all", "params"])
@pytest.mark.parametrize("decay", [0.9, jnp.array(0.5)], ids=["number", "array"])
def test_moving_averages(only, decay):
    def program(nnx):
        model = make(nnx)
        model.tied = model.kernel
        ema = nnx.EMA(model, decay, only=only(nnx))
        for i in range(3):
            model.kernel[...] = model.kernel[...] * 0.5 + i
            ema.update(model)
        averaged = ema.apply_to(model)
        assert averaged.mean is model.mean or only(nnx) is ...
        assert averaged.tied is averaged.kernel
        return (), [model, averaged, ema]

    same(program)


def test_train_state():
    def program(nnx):
        graphdef, params, rest = nnx.split(make(nnx), nnx.Param, ...)

        class State(nnx.TrainState):
            rest: nnx.State

        state = State.create(graphdef, params=params, tx=optax.adam(0.1), rest=rest, step=3)
        grads = jax.tree.map(jnp.ones_like, params)
        new = state.apply_gradients(grads, rest=rest).replace(step=7)
        y = new.apply("params", "rest")(X)[0], new.apply(new.params, rest).layers[0].items
        moments = jax.tree.leaves(new.opt_state)
        return (y[0], state.step, moments), [new.params]

    same(program)


@pytest.mark.parametrize(
    "program",
    [
        lambda nnx: nnx.Optimizer(make(nnx), optax.adam(0.1)),
        lambda nnx: nnx.Optimizer(make(nnx), optax.adam(0.1), wrt=nnx.Param).update(
            nnx.state(make(nnx))
        ),
        lambda nnx: nnx.Optimizer(make(nnx), optax.adam(0.1), wrt=nnx.Param).update(
            make(nnx), nnx.State({})
        ),
        lambda nnx: nnx.Optimizer(make(nnx), optax.adam(0.1), wrt=nnx.Param).update(
            make(nnx), nnx.State({"kernel": nnx.Param(jnp.ones((2, 3)))})
        ),
        lambda nnx: nnx.Optimizer(make(nnx), optax.adam(0.1), wrt=nnx.BatchStat).update(
            nnx.Dict(a=nnx.BatchStat(1.0)), nnx.State({"a": nnx.BatchStat(1.0)})
        ),
        lambda nnx: nnx.EMA(nnx.Dict(a=jnp.ones(1)), 0.5),
        lambda nnx: nnx.EMA(make(nnx), 0.5).update({}),
        lambda nnx: nnx.EMA(make(nnx), 0.5).update(nnx.state(make(nnx), nnx.Param)),
        lambda nnx: nnx.EMA(nnx.state(make(nnx), nnx.Param), 0.5).update(make(nnx)),
    ],
    ids=[
        "no filter",
        "no gradients",
        "empty gradients",
        "a gradient missing",
        "another model",
        "average of an array",
        "no values",
        "a value missing",
        "a value too many",
    ],
)
def test_errors(program):
    same_error(program)
