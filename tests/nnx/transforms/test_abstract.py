"""What a call would return, do, or go wrong with."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

from weft import nnx
from weft.errors import TraceContextError


class Model(nnx.Module):
    def __init__(self, n: int = 3) -> None:
        self.b = nnx.BatchStat(jnp.zeros(()))
        self.w = nnx.Param(jnp.ones((2, n)), tag="kernel")

    def __call__(self, x: jax.Array) -> jax.Array:
        self.b[...] += 1
        return x @ self.w


def test_shapes_of_a_new_model_and_of_a_call():
    model = nnx.eval_shape(lambda: Model(4))
    assert type(model) is Model and model.w[...] == jax.ShapeDtypeStruct((2, 4), jnp.float32)
    assert model.w.tag == "kernel"
    out = nnx.eval_shape(lambda m, x: m(x), model, jax.ShapeDtypeStruct((5, 2), jnp.float32))
    assert (out.shape, out.dtype) == ((5, 4), jnp.float32)


def test_arguments_stay_as_they_are():
    model = Model()
    out = nnx.eval_shape(lambda m, *, x: (m(x), m), model, x=jnp.ones((5, 2)))
    assert out[0].shape == (5, 3)
    assert out[1] is not model and float(model.b) == 0


def test_sharing_is_kept_in_what_is_returned():
    def make() -> tuple[Model, Model]:
        model = Model()
        return model, model

    a, b = nnx.eval_shape(make)
    assert a is b


def test_a_captured_object_is_not_changed():
    model = Model()
    with pytest.raises(TraceContextError, match=r"inside of nnx.eval_shape\(<lambda>\)"):
        nnx.eval_shape(lambda: model(jnp.ones((1, 2))))


def test_a_jaxpr_takes_values_by_name_and_gives_the_result_alone():
    model = Model()
    jaxpr = nnx.make_jaxpr(lambda m, x: m(x))(model, jnp.ones((5, 2)))
    assert [str(v.aval) for v in jaxpr.jaxpr.invars] == [
        "float32[]",
        "float32[2,3]",
        "float32[5,2]",
    ]
    assert [str(v.aval) for v in jaxpr.jaxpr.outvars] == ["float32[5,3]"]
    assert float(model.b) == 0


def test_a_jaxpr_with_static_arguments():
    jaxpr = nnx.make_jaxpr(lambda m, n: m.b * n, static_argnums=1)(Model(), 3)
    assert len(jaxpr.jaxpr.invars) == 2 and "3.0" in str(jaxpr)


def test_a_failed_check_is_returned_and_what_was_written_stays():
    def positive(m: Model) -> None:
        m.b[...] -= 1
        checkify.check(m.b > 0, "b is not positive")

    model = Model()
    error, result = nnx.checkify(nnx.jit(positive))(model)
    assert "b is not positive" in str(error.get()) and result is None
    assert float(model.b) == -1
    model.b[...] = 5
    assert nnx.checkify(positive)(model)[0].get() is None


def test_which_errors_are_checked():
    divide = nnx.checkify(lambda m: 1 / m.b, errors=checkify.float_checks)
    assert "division by zero" in str(divide(Model())[0].get())
