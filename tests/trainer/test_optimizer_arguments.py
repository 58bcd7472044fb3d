"""Optimizers of optax that need more than gradients take the same steps as in a loop of optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import weft
from weft import linen as nn
from weft.cli.trained_models import restore_model
from weft.config import config_for_function
from weft.errors import OptimizerArgumentError
from weft.trainer import (
    CompositeLearner,
    DynamicLossScale,
    InferenceRunner,
    Learner,
    UpdateType,
    with_minibatch_steps,
)
from weft.trainer.optimizers import chain, named_chain, param_ema, skip_and_clip_by_global_norm
from weft.trainer.optimizers.base import as_partitioned

pytestmark = pytest.mark.usefixtures("one_device")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 4)).astype(np.float32)
Y = X @ RNG.normal(size=(4, 1)).astype(np.float32) + 1
STEPS = 5
MODEL = nn.Dense(1)


def plateau():
    return optax.chain(optax.sgd(0.4, momentum=0.9), optax.contrib.reduce_on_plateau(patience=1))


def sam():
    ascent = optax.chain(optax.contrib.normalize(), optax.sgd(0.1))
    return optax.contrib.sam(optax.sgd(0.2), ascent, opaque_mode=True)


def loss_of(params):
    return jnp.mean((MODEL.apply({"params": params}, X) - Y) ** 2)


def start():
    result = weft.fit(MODEL, (X, Y), "mse", steps=1, batch_size=16, optimizer=optax.sgd(0.0))
    return result.config, result.last.variables["params"]


@pytest.fixture(scope="module")
def first():
    """The config of a run, and the parameters before its first step."""
    return start()


def loop(optimizer, params, steps=STEPS, loss_of=loss_of):
    """Returns the parameters after steps of a plain loop, and those to evaluate after each."""
    state, evaluated = optimizer.init(params), []

    @jax.jit
    def step(params, state):
        value, grad = jax.value_and_grad(loss_of)(params)
        extra = {"value": value, "grad": grad, "value_fn": loss_of}
        if isinstance(state[0], optax.contrib.SophiaState):
            extra = {"obj_fn": loss_of}
        if isinstance(state, optax.contrib.SAMState):
            extra = {"grad_fn": jax.grad(lambda params, step: loss_of(params))}
        updates, state = optimizer.update(grad, state, params, **extra)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
        if isinstance(state, optax.contrib.ScheduleFreeState):
            evaluated.append(optax.contrib.schedule_free_eval_params(state, params))
    return params, evaluated


@pytest.fixture(scope="module")
def searched(first):
    """The parameters after steps of a line search."""
    return loop(optax.lbfgs(), first[1])[0]


def train(first, directory, optimizer, **learner):
    cfg = first[0].clone(dir=str(directory), max_step=STEPS)
    cfg.learner = Learner.default_config().set(optimizer=optimizer, **learner)
    trainer = cfg.instantiate(parent=None)
    trainer.run(progress=False)
    return trainer.trainer_state.model["model"]


def close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), a, b)


@pytest.mark.parametrize(
    "make",
    [
        plateau,
        optax.polyak_sgd,
        lambda: optax.MultiSteps(plateau(), every_k_schedule=2),
        lambda: optax.contrib.momo(0.5),
        lambda: optax.contrib.sophia(0.1),
        sam,
    ],
    ids=["reduce_on_plateau", "polyak_sgd", "MultiSteps", "momo", "sophia", "sam"],
)
def test_fit_takes_the_steps_of_optax(first, make):
    close(fitted(make()), loop(make(), first[1])[0])


def test_fit_searches_along_a_line(searched):
    close(fitted(optax.lbfgs()), searched)


def fitted(optimizer):
    kwargs = {"steps": STEPS, "batch_size": 16, "progress": False}
    result = weft.fit(MODEL, (X, Y), "mse", optimizer=optimizer, **kwargs)
    return result.last.variables["params"]


def in_transformations():
    """In a chain of Weft, inside of a transformation that wraps another."""
    search = config_for_function(as_partitioned).set(transformation=optax.lbfgs())
    clipped = config_for_function(skip_and_clip_by_global_norm).set(inner=search, drop_norm=1e6)
    return config_for_function(chain).set(
        args=(config_for_function(named_chain).set(kwargs={"a": clipped}),)
    )


SEARCH = config_for_function(as_partitioned).set(transformation=optax.lbfgs())


@pytest.mark.parametrize(
    ("optimizer", "learner"),
    [
        (
            SEARCH,
            {
                "loss_scale": DynamicLossScale.default_config(),
                "forward_fn_transformation": config_for_function(with_minibatch_steps).set(steps=4),
            },
        ),
        (in_transformations(), {"precision": "float32"}),
    ],
    ids=["loss scale and accumulation", "transformations and precision"],
)
def test_a_line_search_sees_the_loss_of_the_whole_batch(
    first, searched, tmp_path, optimizer, learner
):
    close(train(first, tmp_path, optimizer, **learner)["params"], searched)


def test_a_line_search_over_some_parameters(first, tmp_path):
    rules = [(".*/bias", UpdateType.NO_UPDATE)]
    trained = train(first, tmp_path, SEARCH, update_rules=rules)["params"]
    bias = first[1]["bias"]
    only = {"kernel": first[1]["kernel"]}
    wanted, _ = loop(optax.lbfgs(), only, loss_of=lambda params: loss_of({**params, "bias": bias}))
    close(trained, {**wanted, "bias": bias})


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, training: bool):
        return nn.Dense(1)(nn.BatchNorm(use_running_average=not training, momentum=0.5)(x))


def test_state_is_updated_once_in_a_step_with_a_search():
    result = weft.fit(Normed(), (X, Y), "mse", steps=1, batch_size=16, optimizer=optax.lbfgs())
    statistics = result.last.variables["batch_stats"]["BatchNorm_0"]
    np.testing.assert_allclose(statistics["mean"], 0.5 * X.mean(0), rtol=1e-4)


def test_schedule_free_parameters_are_evaluated_and_kept(first, tmp_path):
    """The validation data is the opposite, so that the best step is not the last."""
    optimizer = optax.contrib.schedule_free_sgd(0.3)
    _, evaluated = loop(optimizer, first[1])
    held_out = X[:4], -Y[:4]
    result = weft.fit(
        MODEL,
        (X, Y),
        "mse",
        steps=STEPS,
        batch_size=16,
        optimizer=optimizer,
        validation=held_out,
        dir=str(tmp_path),
        progress=False,
    )

    def loss(params):
        return np.mean((MODEL.apply({"params": params}, held_out[0]) - held_out[1]) ** 2)

    losses = [loss(params) for params in evaluated]
    np.testing.assert_allclose(result.history.validation["loss"], losses, rtol=1e-4)
    best = int(np.argmin(losses))
    assert best + 1 == result.best.step < STEPS
    close(result.best.variables["params"], evaluated[best])
    close(result.last.variables["params"], evaluated[-1])
    runner = InferenceRunner.config_from_trainer(result.config).set(name="runner")
    (output,) = runner.instantiate(parent=None).run([{"x": X, "y": Y}], method="predict")
    close(output.output_batch, MODEL.apply({"params": evaluated[-1]}, X))
    _, params = restore_model(result.config)
    close(params["model"]["params"], evaluated[-1])


def test_schedule_free_learners_of_some_parameters(first, tmp_path):
    optimizer = config_for_function(optax.contrib.schedule_free_sgd).set(learning_rate=0.3)
    parts = {name: Learner.default_config().set(optimizer=optimizer) for name in ("a", "b")}
    cfg = first[0].clone(dir=str(tmp_path), max_step=STEPS)
    cfg.learner = CompositeLearner.default_config().set(
        rules=[(".*/bias", "a"), (".*", "b")],
        learners=parts,
        ema=config_for_function(param_ema).set(decay="schedule_free"),
    )
    trainer = cfg.instantiate(parent=None)
    trainer.run(progress=False)
    _, evaluated = loop(optax.contrib.schedule_free_sgd(0.3), first[1])
    close(trainer.model_params_for_eval()["model"]["params"], evaluated[-1])


@pytest.mark.parametrize(
    ("optimizer", "decay", "message"),
    [
        (optax.contrib.schedule_free_sgd, None, r"Set ema.decay='schedule_free' of the learner"),
        (optax.contrib.schedule_free_sgd, 0.9, r"ema.decay=0.9; such an optimizer trains at other"),
        (optax.sgd, "schedule_free", r"but no schedule-free optimizer.*Set ema.decay to a number"),
    ],
)
def test_averages_that_do_not_fit_the_optimizer(first, tmp_path, optimizer, decay, message):
    cfg = first[0].clone(dir=str(tmp_path))
    cfg.learner = Learner.default_config().set(
        optimizer=config_for_function(optimizer).set(learning_rate=0.1),
        ema=config_for_function(param_ema).set(decay=decay),
    )
    with pytest.raises(OptimizerArgumentError, match=message):
        cfg.instantiate(parent=None)
