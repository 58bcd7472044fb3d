import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.config import config_for_function
from weft.errors import LossScaleError, UpdateRuleError
from weft.hierarchy.module import functional, new_output_collection
from weft.trainer.gradient_accumulation import with_minibatch_steps
from weft.trainer.learner import CompositeLearner, Learner
from weft.trainer.loss_scale import DynamicLossScale
from weft.trainer.optimizer_base import OptParam
from weft.trainer.optimizers import adam_optimizer
from weft.trainer.update_transformation import ForwardOutputs

SMALL = 2.0**-13  # its square is too small for half precision
ADAM = config_for_function(adam_optimizer).set(learning_rate=0.1, b1=0.9, b2=0.99, eps=1e-12)


def forward(*, model_params, inputs):
    """A loss in half precision, whose gradient is the square of `factor`."""
    factor = jnp.mean(inputs["input_batch"]["factor"]).astype(jnp.float16)
    loss = factor * (factor * model_params["w"].astype(jnp.float16))
    return ForwardOutputs(loss.astype(jnp.float32), {}, new_output_collection())


def train(factors, **kwargs):
    """The parameter, the scale and the summaries after each step."""
    cfg = Learner.default_config().set(name="learner", optimizer=ADAM, **kwargs)
    learner = cfg.instantiate(parent=None)
    params = {"w": jnp.array(1.0)}
    state = learner.init({"w": OptParam(params["w"])})

    @jax.jit
    def step(state, params, factor):
        results, collection = functional(
            learner,
            prng_key=None,
            state=state,
            inputs={
                "fn": forward,
                "inputs": {"input_batch": {"factor": factor}, "forward_key": None},
                "opt_params": {"w": OptParam(params["w"])},
            },
            method="forward_and_backward",
            is_training=True,
        )
        summaries = {**collection.summaries, "loss": results.forward_outputs.loss}
        return collection.state_updates, results.backward_outputs.updated_params, summaries

    history = []
    for factor in factors:
        state, params, summaries = step(state, params, np.full(2, factor, np.float32))
        scale = state.get("loss_scale", {}).get("scale")
        history.append((float(params["w"]), scale, summaries, state))
    return history


def scaled(**kwargs):
    return DynamicLossScale.default_config().set(
        **{"initial_scale": 2.0**12, "growth_interval": 2, **kwargs}
    )


def test_gradients_that_would_vanish_do_not():
    (lost, *_), (kept, _, summaries, _) = (
        train([SMALL])[-1],
        train([SMALL], loss_scale=scaled())[-1],
    )
    assert lost == 1.0
    np.testing.assert_allclose(kept, 0.9, rtol=1e-3)  # Adam's first step is the learning rate
    np.testing.assert_allclose(summaries["loss"], SMALL**2, atol=6e-8)
    assert float(summaries["loss_scale"]) == 2**12


def test_the_scale_grows_falls_and_skips_steps_that_are_not_finite():
    factors = [SMALL] * 3 + [np.inf] + [SMALL] * 2
    history = train(factors, loss_scale=scaled())
    assert [float(scale) / 2**12 for _, scale, *_ in history] == [1, 2, 2, 1, 1, 2]
    assert history[3][0] == history[2][0]
    before, after = (
        {name: value for name, value in history[i][3].items() if name != "loss_scale"}
        for i in (2, 3)
    )
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert history[4][0] < history[3][0]
    assert "undefined_loss_count" not in history[3][3]


def test_microbatches_are_scaled_before_they_are_differentiated():
    transformation = config_for_function(with_minibatch_steps).set(steps=2)
    history = train([SMALL], loss_scale=scaled(), forward_fn_transformation=transformation)
    np.testing.assert_allclose(history[-1][0], 0.9, rtol=1e-3)


def test_its_state_is_laid_out_as_it_is_made():
    loss_scale = scaled().instantiate()
    specs = loss_scale.partition()
    for name, value in loss_scale.init().items():
        assert (value.shape, value.dtype) == (specs[name].shape, specs[name].dtype)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("growth_factor", 1.0, "a factor above 1"),
        ("backoff_factor", 2.0, "a factor between 0 and 1"),
        ("growth_interval", 0, "1 or more steps"),
        ("minimum_scale", 0.0, "a scale above 0"),
        ("initial_scale", 0.5, "at least minimum_scale=1"),
    ],
)
def test_numbers_that_do_not_make_a_scale_are_named(field, value, expected):
    with pytest.raises(
        LossScaleError, match=rf"loss_scale\.{field}={value:g}; expected {expected}"
    ):
        DynamicLossScale.default_config().set(**{field: value}).instantiate()


def test_learners_that_share_a_loss_have_no_scales_of_their_own():
    part = Learner.default_config().set(optimizer=ADAM, loss_scale=scaled())
    cfg = CompositeLearner.default_config().set(name="l", rules=[(".*", "a")], learners={"a": part})
    with pytest.raises(UpdateRuleError, match=r"'a' has a loss_scale.*train with one Learner"):
        cfg.instantiate(parent=None)
