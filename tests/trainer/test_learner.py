import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from weft.config import REQUIRED, Required, config_class, config_for_function
from weft.errors import (
    InplaceUpdateError,
    LossScaleError,
    LossWeightWarning,
    RequiredFieldMissingError,
    UntrainableParameterError,
    UpdateRuleError,
    VariableStatError,
)
from weft.hierarchy.base_layer import BaseLayer, ParameterSpec
from weft.hierarchy.module import functional, new_output_collection
from weft.hierarchy.param_init import ConstantInitializer
from weft.trainer import learner as learners
from weft.trainer import optimizers, schedule
from weft.trainer.gradients import with_minibatch_steps
from weft.trainer.learner import (
    BaseLearner,
    CompositeLearner,
    DynamicLossScale,
    Learner,
    UpdateType,
    variable_stat,
)
from weft.trainer.optimizers import adam_optimizer
from weft.trainer.optimizers.base import OptParam
from weft.trainer.optimizers.clipping import skip_and_clip_by_global_norm
from weft.trainer.update_transformation import (
    ConditionalUpdateTransformation,
    ForwardOutputs,
    Updates,
)

PARAMS = {
    "linear": {"w": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "b": jnp.array([0.1, -0.2])},
    "norm": {"scale": jnp.array([1.0, 2.0]), "mean": jnp.array([0.0, 0.0])},
}
X = jnp.array([[1.0, 2.0], [3.0, -1.0], [0.5, 0.5]])
SGD = config_for_function(optimizers.sgd_optimizer).set(
    learning_rate=0.1, decouple_weight_decay=True, momentum=0.9
)


def loss_of(params, x):
    y = (x - params["norm"]["mean"][None]) * params["norm"]["scale"][None]
    return jnp.mean(jnp.square(y @ params["linear"]["w"] + params["linear"]["b"][None] - 1.0))


def forward(*, model_params, inputs):
    """Returns a model whose "norm/mean" is a moving average, updated in place."""
    collection = new_output_collection()
    collection.add_child("linear")
    mean = 0.9 * model_params["norm"]["mean"] + 0.1 * jnp.mean(inputs["x"], axis=0)
    collection.add_child("norm").state_updates["mean"] = mean
    return ForwardOutputs(loss_of(model_params, inputs["x"]), {"x": 1}, collection)


def opt_params(values, weight_decay_scale=None):
    return jax.tree.map(
        lambda value: OptParam(jnp.asarray(value), weight_decay_scale=weight_decay_scale), values
    )


def make(cls=Learner, **kwargs):
    if cls is Learner:
        kwargs = {"optimizer": SGD, **kwargs}
    return cls.default_config().set(name="learner", **kwargs).instantiate(parent=None)


def step(learner, state, params, fn=forward, x=X):
    results, collection = functional(
        learner,
        prng_key=None,
        state=state,
        inputs={"fn": fn, "inputs": {"x": x}, "opt_params": opt_params(params)},
        method="forward_and_backward",
        is_training=True,
    )
    return results.backward_outputs.updated_params, results.forward_outputs, collection


def run(learner, num_steps, params=PARAMS, fn=forward, xs=X):
    """Parameters, state and summaries after some steps, in one compiled function."""

    @jax.jit
    def jitted(state, params, x):
        params, outputs, collection = step(learner, state, params, fn, x)
        return params, collection.state_updates, outputs.loss, collection.summaries

    state, summaries = learner.init(opt_params(params)), {}
    for i in range(num_steps):
        x = xs if xs is X else xs[i]
        params, state, _, summaries = jitted(state, params, x)
    return params, state, summaries


@functools.cache
def plain(num_steps):
    """Returns the result of `run` for a default learner."""
    return run(make(), num_steps)


def assert_same(a, b, **kwargs):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **{"rtol": 1e-5, **kwargs}), a, b)


class TestLearner:
    def test_steps_agree_with_optax(self):
        learner = make(optimizer=config_for_function(optax.adamw).set(learning_rate=0.1))
        params, state, _ = run(learner, 3)
        expected, tx = PARAMS, optax.adamw(0.1)
        optax_state = tx.init(PARAMS)
        for _ in range(3):
            mean = 0.9 * expected["norm"]["mean"] + 0.1 * jnp.mean(X, axis=0)
            updates, optax_state = tx.update(jax.grad(loss_of)(expected, X), optax_state, expected)
            expected = optax.apply_updates(expected, updates)
            expected["norm"]["mean"] = mean
        assert_same(params, expected)
        assert_same(state, {"optimizer": optax_state})

    def test_the_state_keeps_its_structure(self):
        learner = make(
            ema=config_for_function(optimizers.param_ema).set(decay=0.9),
            update_rules=[("linear/b", UpdateType.NO_UPDATE)],
            ignore_undefined_loss=True,
        )
        before = learner.init(opt_params(PARAMS))
        _, after, _ = run(learner, 1)
        assert jax.tree.structure(before) == jax.tree.structure(after)
        specs = jax.tree.map(lambda x: ParameterSpec(x.shape, x.dtype, (None,) * x.ndim), PARAMS)
        laid_out = learner.create_state_partition_specs(specs)
        assert jax.tree.structure(laid_out) == jax.tree.structure(before)
        for spec, leaf in zip(jax.tree.leaves(laid_out), jax.tree.leaves(before), strict=True):
            assert (tuple(spec.shape), spec.dtype) == (leaf.shape, leaf.dtype)

    def test_summaries_of_each_parameter(self):
        _, _, summaries = run(make(enable_per_variable_summaries=True), 1)
        np.testing.assert_allclose(
            summaries["param_rms/linear/b"], np.sqrt(np.mean(PARAMS["linear"]["b"] ** 2)), rtol=1e-5
        )
        grad = jax.grad(loss_of)(PARAMS, X)["linear"]["w"]
        np.testing.assert_allclose(
            summaries["grad_rms/linear/w"], np.sqrt(np.mean(grad**2)), rtol=1e-5
        )
        _, _, some = run(make(enable_per_variable_summaries=["linear/.*"]), 1)
        assert {k for k in some if "rms" in k} == {
            f"{kind}_rms/linear/{name}" for kind in ("param", "grad") for name in ("w", "b")
        }

    def test_statistics_of_each_parameter_are_chosen_by_name(self):
        learner = make(
            enable_per_variable_summaries=["linear/b"], per_variable_stats=["norm", "histogram"]
        )
        _, _, summaries = run(learner, 1)
        b, grad = PARAMS["linear"]["b"], jax.grad(loss_of)(PARAMS, X)["linear"]["b"]
        np.testing.assert_allclose(summaries["param_norm/linear/b"], np.linalg.norm(b), rtol=1e-5)
        np.testing.assert_allclose(summaries["grad_histogram/linear/b"], grad, rtol=1e-5)
        assert not any("rms" in name for name in summaries)

    def test_optimizer_is_required(self):
        with pytest.raises(RequiredFieldMissingError, match="optimizer"):
            Learner.default_config().set(name="learner").instantiate(parent=None)


class TestUpdateRules:
    def test_update_types(self):
        assert [learners.should_update_with_optimizers(t) for t in (*UpdateType, None)] == [
            False,
            True,
            False,
            True,
            False,
        ]
        assert [learners.should_apply_state_updates(t) for t in (*UpdateType, None)] == [
            False,
            False,
            True,
            True,
            False,
        ]

    @pytest.mark.parametrize("frozen", [UpdateType.NO_UPDATE, None])
    def test_frozen_parameters_stay_and_have_no_state(self, frozen):
        learner = make(update_rules=[("linear/.*", frozen)])
        params, state, _ = run(learner, 3)
        assert_same(params["linear"], PARAMS["linear"])
        assert state["optimizer"][0].trace["linear"] == {
            "w": optax.MaskedNode(),
            "b": optax.MaskedNode(),
        }
        assert np.any(params["norm"]["scale"] != PARAMS["norm"]["scale"])
        assert learner.should_update_with_optimizers(opt_params(PARAMS)) == {
            "linear": {"w": False, "b": False},
            "norm": {"scale": True, "mean": True},
        }

    def test_no_gradient_is_computed_for_frozen_parameters(self):
        learner = make(update_rules=[("linear/.*", UpdateType.NO_UPDATE)])

        def check(model_params, inputs):
            # Fails if it is differentiated.
            no_gradient = jax.pure_callback(
                lambda x: x, jax.ShapeDtypeStruct((), jnp.float32), model_params["linear"]["b"][0]
            )
            outputs = forward(model_params=model_params, inputs=inputs)
            return outputs.replace(loss=outputs.loss + no_gradient)

        params, _, _ = run(learner, 1, fn=check)
        assert np.all(np.isfinite(params["norm"]["scale"]))

    @pytest.mark.parametrize("update_type", list(UpdateType))
    def test_updates_of_a_moving_average_by_type(self, update_type):
        params, _, _ = run(make(update_rules=[("norm/mean", update_type)]), 1)
        mean = params["norm"]["mean"]
        if learners.should_apply_state_updates(update_type):
            np.testing.assert_allclose(mean, 0.1 * np.mean(X, axis=0), rtol=1e-6)
        elif learners.should_update_with_optimizers(update_type):
            np.testing.assert_allclose(
                mean, -0.1 * jax.grad(loss_of)(PARAMS, X)["norm"]["mean"], rtol=1e-5
            )
        else:
            np.testing.assert_array_equal(mean, [0.0, 0.0])

    def test_integers_can_be_parameters_that_are_not_trained(self):
        params = {**PARAMS, "table": jnp.arange(3)}
        rules = [("table", UpdateType.STATE_UPDATES)]
        updated, _, _ = run(make(update_rules=rules), 1, params=params)
        np.testing.assert_array_equal(updated["table"], [0, 1, 2])
        with pytest.raises(
            UntrainableParameterError,
            match=r"'table' of dtype int32 has no gradients.*update_rules=\[\('table', UpdateType",
        ):
            run(make(), 1, params=params)

    def test_layer_state_is_not_trained_or_averaged(self):
        ema = config_for_function(optimizers.param_ema).set(decay=0.5)
        learner = make(ema=ema, enable_per_variable_summaries=True)
        state_of = {"calls": jnp.int32(3), "key": jax.random.key(0)}
        params = {
            "linear": opt_params(PARAMS["linear"], 1.0),
            "norm": opt_params(PARAMS["norm"]),
            "cache": jax.tree.map(lambda x: OptParam(x, is_state=True), state_of),
        }
        params["norm"]["mean"] = OptParam(jnp.zeros(2), is_state=True)

        def counting(model_params, inputs):
            outputs = forward(model_params=model_params, inputs=inputs)
            updates = outputs.output_collection.add_child("cache").state_updates
            updates["calls"] = model_params["cache"]["calls"] + 1
            updates["key"] = jax.random.fold_in(model_params["cache"]["key"], 1)
            return outputs

        @jax.jit
        def run_step(state):
            return functional(
                learner,
                prng_key=None,
                state=state,
                inputs={"fn": counting, "inputs": {"x": X}, "opt_params": params},
                method="forward_and_backward",
                is_training=True,
            )

        state = learner.init(params)
        assert state["optimizer"][0].trace["cache"]["calls"] == optax.MaskedNode()
        results, collection = run_step(state)
        new = results.backward_outputs.updated_params
        average = collection.state_updates["ema"].ema
        for tree in (new, average):
            np.testing.assert_allclose(tree["norm"]["mean"], 0.1 * np.mean(X, axis=0), rtol=1e-6)
            assert int(tree["cache"]["calls"]) == 4
            assert tree["cache"]["key"] == jax.random.fold_in(jax.random.key(0), 1)
        np.testing.assert_allclose(average["linear"]["w"], new["linear"]["w"] / 2, rtol=1e-6)

    def test_state_updates_must_match_parameters(self):
        def outputs(name, value, model_params, inputs):
            result = forward(model_params=model_params, inputs=inputs)
            result.output_collection.state_updates["norm"][name] = value
            return result

        with pytest.raises(InplaceUpdateError, match=r"'norm/variance' is not for a parameter"):
            run(make(), 1, fn=lambda **kwargs: outputs("variance", jnp.ones(2), **kwargs))
        with pytest.raises(
            InplaceUpdateError, match=r"'norm/mean' has shape \(3,\), but .* \(2,\)"
        ):
            run(make(), 1, fn=lambda **kwargs: outputs("mean", jnp.ones(3), **kwargs))


class TestEma:
    def test_it_averages_the_new_parameters(self):
        decay = config_for_function(schedule.ema_schedule).set(decay=0.5, warmup_steps=2)
        learner = make(ema=config_for_function(optimizers.param_ema).set(decay=decay))
        first, state, _ = run(learner, 1)
        assert_same(state["ema"].ema, first)
        second, state, _ = run(learner, 2)
        assert_same(state["ema"].ema, jax.tree.map(lambda x, y: (x + y) / 2, first, second))

    def test_includes_frozen_parameters(self):
        learner = make(
            ema=config_for_function(optimizers.param_ema).set(decay=0.9),
            update_rules=[(".*", UpdateType.NO_UPDATE)],
        )
        _, state, _ = run(learner, 1)
        assert_same(state["ema"].ema, jax.tree.map(lambda x: 0.1 * x, PARAMS))


class TestUndefinedLoss:
    XS = (X, X.at[0, 0].set(jnp.nan), X, X.at[0, 0].set(jnp.inf))

    def test_undefined_steps_are_skipped_and_counted(self):
        ema = config_for_function(optimizers.param_ema).set(decay=0.9)
        learner = make(ignore_undefined_loss=True, ema=ema)
        params, state, summaries = run(learner, 4, xs=self.XS)
        expected, expected_state, _ = run(make(ema=ema), 2)
        assert_same(params, expected)
        assert int(state.pop("undefined_loss_count")) == 2
        assert_same(state, expected_state)
        assert int(summaries["undefined_loss_count"]) == 2

    def test_undefined_gradient_only(self):
        def fn(*, model_params, inputs):
            outputs = forward(model_params=model_params, inputs=inputs)
            zero = jnp.sqrt(jnp.sum(0.0 * model_params["linear"]["b"]))
            return outputs.replace(loss=outputs.loss + zero)

        learner = make(ignore_undefined_loss=True)
        params, state, _ = run(learner, 1, fn=fn)
        assert_same(params, PARAMS)
        assert int(state["undefined_loss_count"]) == 1

    def test_handles_undefined(self):
        assert not make().handles_undefined_loss()
        assert make(ignore_undefined_loss=True).handles_undefined_loss()


class TestForwardFnTransformation:
    def test_it_wraps_the_forward_pass(self):
        def doubled(fn):
            def wrapped(*, model_params, inputs):
                outputs = fn(model_params=model_params, inputs=inputs)
                return outputs.replace(loss=2 * outputs.loss)

            return wrapped

        def transformation():
            return doubled

        expected, _, _ = run(make(optimizer=SGD.clone(learning_rate=0.2)), 2)
        for value in (doubled, config_for_function(transformation)):
            params, _, _ = run(make(forward_fn_transformation=value), 2)
            assert_same(params, expected)


class TestCompositeLearner:
    ADAM = config_for_function(optimizers.adamw_optimizer).set(
        learning_rate=0.01, b1=0.9, b2=0.99, eps=1e-8
    )

    def config(self, **kwargs):
        return {
            "cls": CompositeLearner,
            "learners": {
                "body": Learner.default_config().set(optimizer=SGD),
                "head": Learner.default_config().set(
                    optimizer=self.ADAM, update_rules=[(".*/b", UpdateType.NO_UPDATE)]
                ),
            },
            "rules": [("linear/.*", "head"), (".*", "body")],
            **kwargs,
        }

    def test_each_learner_updates_its_part(self):
        params, state, summaries = run(make(**self.config()), 1)
        body, _, _ = plain(1)
        head, _, _ = run(make(optimizer=self.ADAM), 1)
        assert_same(params["norm"], body["norm"])
        assert_same(params["linear"], {"w": head["linear"]["w"], "b": PARAMS["linear"]["b"]})
        assert set(state) == {"body", "head"}
        assert state["body"]["optimizer"][0].trace["linear"]["w"] == optax.MaskedNode()
        rates = {name: s["optimizer"]["learning_rate"] for name, s in summaries.items()}
        np.testing.assert_allclose([rates["body"], rates["head"]], [0.1, 0.01], rtol=1e-6)

    def test_undefined_gradients_are_handled_per_learner(self):
        def handled(cfg):
            learner, params = make(**cfg), opt_params(PARAMS)
            return jax.tree.leaves(
                learner.handles_undefined_gradients(learner.init(params), params)
            )

        cfg = self.config()
        assert handled(cfg) == [False] * 4
        first, second = cfg["learners"].values()
        first.ignore_undefined_loss = True
        of_first = handled(cfg)
        assert True in of_first and False in of_first
        second.optimizer = config_for_function(skip_and_clip_by_global_norm).set(
            inner=second.optimizer
        )
        assert handled(cfg) == [True] * 4
        with_scale = {"loss_scale": DynamicLossScale.default_config()}
        assert handled(with_scale) == [True] * 4 and handled({}) == [False] * 4

    def test_undefined_losses_are_handled_if_all_learners_do(self):
        cfg = self.config()
        assert not make(**cfg).handles_undefined_loss()
        for learner in cfg["learners"].values():
            learner.ignore_undefined_loss = True
        learner = make(**cfg)
        assert learner.handles_undefined_loss()
        params, state, _ = run(learner, 2, xs=TestUndefinedLoss.XS)
        expected, _, _ = run(make(**self.config()), 1)
        assert_same(params, expected)
        assert int(state["head"]["undefined_loss_count"]) == 1

    def test_one_transformation_of_the_forward_pass_for_all(self):
        def doubled(fn):
            return lambda **kwargs: fn(**kwargs).replace(loss=2 * fn(**kwargs).loss)

        params, _, _ = run(make(**self.config(forward_fn_transformation=doubled)), 1)
        expected, _, _ = run(make(optimizer=SGD.clone(learning_rate=0.2)), 1)
        assert_same(params["norm"], expected["norm"])
        cfg = self.config()
        cfg["learners"]["body"].forward_fn_transformation = doubled
        with pytest.raises(
            UpdateRuleError, match="'body' has a forward_fn_transformation, but all"
        ):
            make(**cfg)

    def test_loss_scale_of_one_learner_is_rejected(self):
        cfg = self.config()
        cfg["learners"]["head"].loss_scale = DynamicLossScale.default_config()
        with pytest.raises(UpdateRuleError, match="'head' has a loss_scale, but all learners of"):
            make(**cfg)

    def test_rules_must_match_parameters_and_learners(self):
        with pytest.raises(UpdateRuleError, match=r"\('.\*', 'bdy'\) names no learner .*'body'"):
            make(**self.config(rules=[(".*", "bdy")]))
        learner = make(**self.config(rules=[("linear/.*", "head")]))
        with pytest.raises(
            UpdateRuleError, match=r"matches the parameter 'norm/mean', .*Add a last"
        ):
            learner.init(opt_params(PARAMS))
        cfg = self.config(rules=[(".*", "ema")])
        cfg["learners"]["ema"] = Learner.default_config().set(optimizer=SGD)
        with pytest.raises(UpdateRuleError, match="a learner cannot be named 'ema'"):
            make(**cfg)


class TestWithAModel:
    class Model(BaseLayer):
        """A layer with a weight and a counter that it updates in place."""

        @config_class
        class Config(BaseLayer.Config):
            dim: Required[int] = REQUIRED

        def _create_layer_parameter_specs(self):
            one = ConstantInitializer.default_config().set(value=1.0).instantiate()
            return {
                "weight": ParameterSpec((self.config.dim,), jnp.float32, initializer=one),
                "calls": ParameterSpec((), jnp.float32, initializer=one, weight_decay_scale=0.0),
            }

        def forward(self, x):
            self.add_state_update("calls", self.parameters["calls"] + 1)
            self.add_summary("mean", jnp.mean(x))
            return jnp.sum(self.parameters["weight"] * x)

    def test_state_updates_of_layers_are_applied(self):
        model = self.Model.default_config().set(name="model", dim=2).instantiate(parent=None)
        params = model.initialize_parameters_recursively(jax.random.key(0))

        def fn(*, model_params, inputs):
            loss, collection = functional(
                model,
                prng_key=None,
                state=model_params,
                inputs=(inputs["x"],),
                is_training=True,
            )
            return ForwardOutputs(loss=loss, aux=None, output_collection=collection)

        updated, _, _ = run(make(), 2, params=params, fn=fn, xs=[jnp.array([1.0, 2.0])] * 2)
        np.testing.assert_allclose(updated["weight"], [1 - 0.29, 1 - 0.58], rtol=1e-6)
        np.testing.assert_allclose(updated["calls"], 3.0)


def test_update_can_be_called_with_gradients():
    learner = make(update_rules=[("linear/.*", UpdateType.NO_UPDATE)])
    grads = jax.grad(loss_of)(PARAMS, X)
    updated, collection = functional(
        learner,
        prng_key=None,
        state=learner.init(opt_params(PARAMS)),
        inputs={"updates": Updates(opt_params=opt_params(PARAMS), delta_updates=grads)},
        method="update",
        is_training=True,
    )
    np.testing.assert_allclose(
        updated["norm"]["scale"], PARAMS["norm"]["scale"] - 0.1 * grads["norm"]["scale"], rtol=1e-6
    )
    assert_same(updated["linear"], PARAMS["linear"])
    assert set(collection.state_updates) == {"optimizer"}


def test_conditional_transformation_is_an_optimizer():
    conditional = ConditionalUpdateTransformation.default_config().set(
        inner=SGD, update_schedule=lambda step: step % 2 == 0
    )
    params, state, _ = run(make(optimizer=conditional), 3, xs=[X, 100 * X, X])
    expected, expected_state, _ = plain(1)
    after_two, _, _ = run(make(optimizer=conditional), 2, xs=[X, 100 * X])
    assert_same(after_two["linear"], expected["linear"])
    assert int(state["optimizer"]["step"]) == 3
    assert int(state["optimizer"]["inner"][2].count) == 2
    assert jax.tree.structure(state["optimizer"]["inner"]) == jax.tree.structure(
        expected_state["optimizer"]
    )
    assert np.any(params["linear"]["w"] != after_two["linear"]["w"])


def test_abstract_methods_are_named():
    learner = make(cls=BaseLearner)
    for method, kwargs in {
        "forward_and_backward": {"fn": forward, "inputs": X, "opt_params": {}},
        "update": {"updates": None},
        "should_update_with_optimizers": {"model_params": {}},
        "init": {"model_params": {}},
        "create_state_partition_specs": {"model_param_specs": {}},
    }.items():
        with pytest.raises(NotImplementedError, match=f"BaseLearner must define `{method}`"):
            getattr(learner, method)(**kwargs)
    assert not learner.handles_undefined_loss()


SMALL = 2.0**-13  # its square is too small for half precision
ADAM = config_for_function(adam_optimizer).set(learning_rate=0.1, b1=0.9, b2=0.99, eps=1e-12)


def scaled_forward(*, model_params, inputs):
    """Returns a loss in half precision, whose gradient is the square of `factor`."""
    factor = jnp.mean(inputs["input_batch"]["factor"]).astype(jnp.float16)
    loss = factor * (factor * model_params["w"].astype(jnp.float16))
    return ForwardOutputs(loss.astype(jnp.float32), {}, new_output_collection())


def train(factors, **kwargs):
    """Returns the parameter, the scale and the summaries after each step."""
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
                "fn": scaled_forward,
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


def test_loss_scale_prevents_underflow():
    (lost, *_), (kept, _, summaries, _) = (
        train([SMALL])[-1],
        train([SMALL], loss_scale=scaled())[-1],
    )
    assert lost == 1.0
    np.testing.assert_allclose(kept, 0.9, rtol=1e-3)  # Adam's first step is the learning rate
    np.testing.assert_allclose(summaries["loss"], SMALL**2, atol=6e-8)
    assert float(summaries["loss_scale"]) == 2**12


def test_scale_adapts_and_nonfinite_steps_are_skipped():
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
    with pytest.warns(LossWeightWarning):
        history = train([SMALL], loss_scale=scaled(), forward_fn_transformation=transformation)
    np.testing.assert_allclose(history[-1][0], 0.9, rtol=1e-3)


def test_loss_scale_state_matches_its_specs():
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
def test_invalid_loss_scales_are_named(field, value, expected):
    with pytest.raises(
        LossScaleError, match=rf"loss_scale\.{field}={value:g}; expected {expected}"
    ):
        DynamicLossScale.default_config().set(**{field: value}).instantiate()


def test_learners_sharing_a_loss_reject_loss_scales():
    part = Learner.default_config().set(optimizer=ADAM, loss_scale=scaled())
    cfg = CompositeLearner.default_config().set(name="l", rules=[(".*", "a")], learners={"a": part})
    with pytest.raises(UpdateRuleError, match=r"'a' has a loss_scale.*train with one Learner"):
        cfg.instantiate(parent=None)


VALUES = np.array([[3.0, -4.0], [0.0, 0.0]], np.float32)


def test_histogram_is_of_a_bounded_number_of_values():
    np.testing.assert_array_equal(
        variable_stat("histogram")(jnp.asarray(VALUES)), VALUES.reshape(-1)
    )
    values = variable_stat("histogram")(jnp.arange(10_000.0))
    assert 512 <= values.size <= 1024
    assert len(set(np.diff(values))) == 1


def test_unknown_statistics_are_named():
    with pytest.raises(VariableStatError, match=r"names 'norms', which is not a statistic.*'?norm"):
        variable_stat("norms")
