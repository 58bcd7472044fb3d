import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from weft.errors import NoContextError, UntrainableParameterError
from weft.hierarchy.module import (
    InvocationContext,
    current_context,
    new_output_collection,
    set_current_context,
)
from weft.hierarchy.parameter_spec import ParameterSpec
from weft.trainer.gradients import forward_and_gradients, with_gradient_layouts
from weft.trainer.optimizer_base import OptParam
from weft.trainer.update_transformation import ForwardOutputs
from weft.vdict import VDict

PARAMS = {"a": VDict(w=jnp.array([1.0, 2.0])), "b": jnp.array([3.0, 4.0])}
X = jnp.array([0.5, -1.0])


def fn(*, model_params, inputs):
    loss = jnp.sum(inputs["x"] * model_params["a"]["w"] ** 2 * model_params["b"])
    return ForwardOutputs(loss, {"double": 2 * loss}, new_output_collection())


def differentiate(fn=fn, params=PARAMS, trainable=None):
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


def test_only_gradients_that_lie_elsewhere_than_their_parameters_are_laid_out():
    specs = {"w": ParameterSpec((2,), jnp.float32, ("data",))}
    params = {"w": jnp.ones(2)}

    def loss(params, of_gradients):
        return jnp.sum(with_gradient_layouts(params, specs, of_gradients)["w"])

    # What needs no word can be differentiated forwards as well.
    assert jax.jvp(lambda p: loss(p, specs), (params,), (params,))[1] == 2.0
    elsewhere = {"w": ParameterSpec((2,), jnp.float32, (None,))}
    assert "custom_vjp" in str(jax.make_jaxpr(lambda p: loss(p, elsewhere))(params))
    assert "custom_vjp" not in str(jax.make_jaxpr(lambda p: loss(p, specs))(params))


def test_gradients_agree_with_jax():
    forward_pass, grads, _ = differentiate()
    expected = jax.grad(lambda p: fn(model_params=p, inputs={"x": X}).loss)(PARAMS)
    assert jax.tree.structure(grads) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_allclose, grads, expected)
    np.testing.assert_allclose(forward_pass.outputs.aux["double"], 2 * forward_pass.outputs.loss)
    again = forward_pass.forward_fn(
        model_params=forward_pass.model_params, inputs=forward_pass.inputs
    )
    np.testing.assert_array_equal(again.loss, forward_pass.outputs.loss)


def test_what_is_not_trained_has_no_gradient():
    _, grads, _ = differentiate(trainable={"a": VDict(w=False), "b": True})
    assert grads["a"] == VDict(w=optax.MaskedNode())
    np.testing.assert_allclose(grads["b"], X * PARAMS["a"]["w"] ** 2)


def test_nothing_may_be_trained():
    forward_pass, grads, _ = differentiate(trainable={"a": VDict(w=False), "b": False})
    assert jax.tree.leaves(grads) == []
    assert np.isfinite(forward_pass.outputs.loss)


def test_what_the_forward_pass_adds_to_the_context_gets_out():
    def reporting(**kwargs):
        outputs = fn(**kwargs)
        current_context().add_summary("twice", 2 * outputs.loss)
        return outputs

    forward_pass, _, context = differentiate(reporting)
    np.testing.assert_allclose(
        context.get_summaries()["twice"], 2 * forward_pass.outputs.loss, rtol=1e-6
    )


def test_only_numbers_with_gradients_can_be_trained():
    with pytest.raises(UntrainableParameterError, match=r"'b' of dtype int32.*\('b', UpdateType"):
        differentiate(params={**PARAMS, "b": jnp.arange(2)})


def test_it_belongs_to_an_invocation():
    with pytest.raises(NoContextError, match="differentiation belongs to an invocation"):
        forward_and_gradients(fn, inputs={}, opt_params={}, trainable={})
