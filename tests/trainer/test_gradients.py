import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from weft.config import config_for_function
from weft.errors import (
    GradientAccumulationError,
    NoContextError,
    UntrainableParameterError,
)
from weft.hierarchy.metrics import WeightedScalar
from weft.hierarchy.module import (
    InvocationContext,
    functional,
    new_output_collection,
    set_current_context,
)
from weft.hierarchy.parameter_spec import ParameterSpec
from weft.struct import VDict
from weft.trainer.gradients import (
    forward_and_gradients,
    num_microbatches,
    with_gradient_layouts,
    with_minibatch_steps,
)
from weft.trainer.learner import Learner, UpdateType
from weft.trainer.optimizers import sgd_optimizer
from weft.trainer.optimizers.base import OptParam
from weft.trainer.update_transformation import ForwardOutputs

MODEL_PARAMS = {"a": VDict(w=jnp.array([1.0, 2.0])), "b": jnp.array([3.0, 4.0])}
X = jnp.array([0.5, -1.0])


def fn(*, model_params, inputs):
    loss = jnp.sum(inputs["x"] * model_params["a"]["w"] ** 2 * model_params["b"])
    return ForwardOutputs(loss, {"double": 2 * loss}, new_output_collection())


def differentiate(fn=fn, params=MODEL_PARAMS, trainable=None):
    context = InvocationContext(
        "root", parent=None, module=None, state={}, is_training=True, prng_key=None
    )
    with set_current_context(context):
        results = forward_and_gradients(
            fn,
            inputs={"x": X},
            opt_params=jax.tree.map(OptParam, params),
            trainable=trainable or jax.tree.map(lambda _: True, params),
        )
    return *results, context


def test_only_gradients_with_own_layout_are_constrained():
    specs = {"w": ParameterSpec((2,), jnp.float32, ("data",))}
    params = {"w": jnp.ones(2)}

    def loss(params, of_gradients):
        return jnp.sum(with_gradient_layouts(params, specs, of_gradients)["w"])

    # Without constraints, forward-mode differentiation works, too.
    assert jax.jvp(lambda p: loss(p, specs), (params,), (params,))[1] == 2.0
    elsewhere = {"w": ParameterSpec((2,), jnp.float32, (None,))}
    assert "custom_vjp" in str(jax.make_jaxpr(lambda p: loss(p, elsewhere))(params))
    assert "custom_vjp" not in str(jax.make_jaxpr(lambda p: loss(p, specs))(params))


def test_frozen_parameters_have_no_gradient():
    _, grads, _ = differentiate(trainable={"a": VDict(w=False), "b": True})
    assert grads["a"] == VDict(w=optax.MaskedNode())
    np.testing.assert_allclose(grads["b"], X * MODEL_PARAMS["a"]["w"] ** 2)


def test_only_floats_can_be_trained():
    with pytest.raises(UntrainableParameterError, match=r"'b' of dtype int32.*\('b', UpdateType"):
        differentiate(params={**MODEL_PARAMS, "b": jnp.arange(2)})


def test_requires_an_invocation():
    with pytest.raises(NoContextError, match="differentiation belongs to an invocation"):
        forward_and_gradients(fn, inputs={}, opt_params={}, trainable={})


ROWS, DIM = 8, 3
PARAMS = {
    "linear": {"w": np.linspace(-1, 1, DIM, dtype=np.float32)},
    "norm": {"mean": np.zeros(())},
}


def batch_of(live):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, DIM)).astype(np.float32)
    return {"x": x, "y": rng.normal(size=ROWS).astype(np.float32), "live": np.float32(live)}


ALL = batch_of(np.ones(ROWS))
# Of the two microbatches, one has three rows that count and the other one.
SOME = batch_of([1, 0, 1, 1, 1, 0, 0, 0])


def forward(*, model_params, inputs):
    """Returns the mean of squares over the rows that count."""
    batch = inputs["input_batch"]
    errors = batch["x"] @ model_params["linear"]["w"] - batch["y"]
    weight = jnp.sum(batch["live"])
    loss = jnp.sum(errors**2 * batch["live"]) / jnp.maximum(weight, 1)
    collection = new_output_collection()
    collection.summaries.update(
        loss=WeightedScalar(loss, weight),
        mean_of_x=jnp.mean(batch["x"]),
        noise=jax.random.normal(inputs["forward_key"]),
    )
    mean = model_params["norm"]["mean"]
    collection.add_child("linear")
    collection.add_child("norm").state_updates["mean"] = 0.5 * mean + 0.5 * jnp.mean(batch["x"])
    return ForwardOutputs(loss, {"errors": errors, "loss": loss}, collection)


def inputs_of(batch):
    return {"input_batch": batch, "forward_key": jax.random.key(1), "noise_key": jax.random.key(2)}


def learner_of(**kwargs):
    optimizer = config_for_function(sgd_optimizer).set(
        learning_rate=0.1, decouple_weight_decay=True
    )
    cfg = Learner.default_config().set(name="learner", optimizer=optimizer, **kwargs)
    return cfg.instantiate(parent=None)


def step(batch, steps, fn=forward, **kwargs):
    """Returns the parameters, the outputs and the summaries after a step of a learner."""
    transformation = config_for_function(with_minibatch_steps).set(steps=steps, **kwargs)
    learner = learner_of(
        forward_fn_transformation=transformation,
        update_rules=[("norm/.*", UpdateType.STATE_UPDATES)],
    )
    opt_params = jax.tree.map(lambda x: OptParam(jnp.asarray(x, jnp.float32)), PARAMS)

    @jax.jit
    def run(inputs):
        results, _ = functional(
            learner,
            prng_key=None,
            state=learner.init(opt_params),
            inputs={"fn": fn, "inputs": inputs, "opt_params": opt_params},
            method="forward_and_backward",
            is_training=True,
        )
        outputs = results.forward_outputs
        return (
            results.backward_outputs.updated_params,
            outputs.loss,
            outputs.aux,
            outputs.output_collection.summaries,
        )

    return run(inputs_of(batch))


def test_state_is_updated_once_per_step():
    params, *_ = step(ALL, 4)
    # Each of the microbatches starts from 0.
    np.testing.assert_allclose(params["norm"]["mean"], 0.5 * np.mean(ALL["x"]), rtol=1e-5)

    def counting(*, model_params, inputs):
        count = model_params["count"]
        collection = new_output_collection()
        collection.state_updates["count"] = count + 1
        mean = jnp.mean(inputs["input_batch"]["x"])
        collection.summaries["loss"] = WeightedScalar(mean, 1.0)
        # All of the rows of two microbatches count, none of the others'.
        is_first = inputs["input_batch"]["rows"][0] < 2
        aux = {"count": count, "num_targets": jnp.where(is_first, 2, 0), "is_first": is_first}
        return ForwardOutputs(mean, aux, collection)

    rows = jnp.arange(len(ALL["x"]))
    outputs = with_minibatch_steps(steps=4)(counting)(
        model_params={"count": jnp.array(7)}, inputs=inputs_of({**ALL, "rows": rows})
    )
    assert outputs.output_collection.state_updates["count"] == 8
    assert outputs.aux == {"count": 7, "num_targets": 1, "is_first": 0.5}


def test_microbatches_have_separate_noise_and_their_mean_aux():
    _, loss, aux, summaries = step(SOME, 2)
    keys = jax.random.split(jax.random.key(1))
    noises = [jax.random.normal(key) for key in keys]
    assert noises[0] != noises[1]
    np.testing.assert_allclose(summaries["noise"], np.mean(noises), rtol=1e-6)
    errors = SOME["x"] @ PARAMS["linear"]["w"] - SOME["y"]
    # Three rows of the first microbatch count, and one of the second.
    expected = 0.75 * errors[0::2] + 0.25 * errors[1::2]
    np.testing.assert_allclose(aux["errors"], expected, rtol=1e-4)
    np.testing.assert_allclose(aux["loss"], loss, rtol=1e-6)


def loss_in_parts(params, batch, steps, grad_dtype=None):
    fn = with_minibatch_steps(steps=steps, grad_dtype=grad_dtype)(forward)
    return fn(model_params=params, inputs=inputs_of(batch)).loss


def test_loss_is_differentiable():
    params = jax.tree.map(jnp.float32, PARAMS)

    @jax.jit
    def grads_in_parts(params):
        return [
            jax.grad(lambda p, n=n: 3 * loss_in_parts(p, SOME, n), allow_int=True)(params)
            for n in (2, 1)
        ]

    grads, of_one = grads_in_parts(params)
    np.testing.assert_allclose(grads["linear"]["w"], of_one["linear"]["w"], rtol=1e-5)
    with pytest.raises(GradientAccumulationError, match=r"aux/errors of a forward pass over micro"):
        fn = with_minibatch_steps(steps=2)(forward)
        jax.grad(lambda p: fn(model_params=p, inputs=inputs_of(ALL)).aux["errors"].sum())(params)


def test_accumulation_dtype_is_configurable():
    def linear(*, model_params, inputs):
        loss = model_params["w"] * jnp.mean(inputs["input_batch"]["x"]).astype(jnp.float16)
        collection = new_output_collection()
        collection.summaries["loss"] = WeightedScalar(loss, 1)
        return ForwardOutputs(loss, {}, collection)

    inputs = {"input_batch": {"x": np.float32([2048] + [1] * 7)}, "forward_key": None}
    grads = []
    for dtype in (None, jnp.float16, jnp.float32):
        fn = with_minibatch_steps(steps=8, grad_dtype=dtype)(linear)
        params = {"w": jnp.float16(1)}
        grads.append(jax.grad(lambda p, f=fn: f(model_params=p, inputs=inputs).loss)(params)["w"])
    # Half precision has no number between 2048 and 2050.
    assert [float(g) for g in grads] == [257.0, 256.0, 257.0]
    assert {g.dtype for g in grads} == {jnp.dtype(jnp.float16)}


def test_batch_is_not_moved_and_one_microbatch_is_live():
    if jax.device_count() < 2:
        pytest.skip(f"needs 2 devices; WEFT_TEST_DEVICES gives {jax.device_count()}")
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    rows, dim, depth = 1024, 8, 4

    def deep(*, model_params, inputs):
        x = inputs["input_batch"]["x"]
        for w in model_params["w"]:
            x = jnp.tanh(x @ w)
        collection = new_output_collection()
        collection.summaries["loss"] = WeightedScalar(jnp.mean(x**2), len(x))
        return ForwardOutputs(jnp.mean(x**2), {}, collection)

    def compiled(steps):
        fn = with_minibatch_steps(steps=steps)(deep)

        def loss(params, x):
            inputs = {"input_batch": {"x": x}, "forward_key": jax.random.key(0)}
            return fn(model_params=params, inputs=inputs).loss

        rows_over_data = NamedSharding(mesh, PartitionSpec("data"))
        params = {"w": jax.ShapeDtypeStruct((depth, dim, dim), jnp.float32)}
        x = jax.ShapeDtypeStruct((rows, dim), jnp.float32, sharding=rows_over_data)
        return jax.jit(jax.grad(loss)).lower(params, x).compile()

    whole, parts = compiled(1), compiled(8)
    moved = r"= \S+ (all-gather|all-to-all|collective-permute)"
    assert not re.search(moved, parts.as_text())
    saved = whole.memory_analysis().temp_size_in_bytes - parts.memory_analysis().temp_size_in_bytes
    # On each device: an eighth of the activations of all layers remains.
    assert saved > 0.5 * depth * rows // 2 * dim * 4


def test_indivisible_batch_is_named():
    with pytest.raises(GradientAccumulationError, match=r"steps=0; expected 1 or more"):
        with_minibatch_steps(steps=0)
    with pytest.raises(
        GradientAccumulationError, match=r"input_batch/live has 8 rows.*steps=3.*divi"
    ):
        loss_in_parts(PARAMS, ALL, 3)
    with pytest.raises(GradientAccumulationError, match=r"without an 'input_batch'"):
        with_minibatch_steps(steps=2)(forward)(model_params=PARAMS, inputs={"x": 1})


def test_fewer_devices_have_more_microbatches():
    def numbers(num_devices, steps=1, rows=12):
        with jax.set_mesh(jax.make_mesh((num_devices,), ("data",))):
            return num_microbatches(rows, steps, 3, "data")

    assert [numbers(n) for n in (4, 3, 2, 1)] == [1, 2, 2, 4]
    assert numbers(3, rows=8) == 1 and numbers(2, rows=8) == 2
    assert numbers(4, steps=2) == 2 and numbers(1, steps=2) == 4
    with pytest.raises(GradientAccumulationError, match=r"max_rows_per_device=0; expected 1"):
        with_minibatch_steps(steps=1, max_rows_per_device=0)
