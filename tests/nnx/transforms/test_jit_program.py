"""Traced, lowered and compiled calls, abstract results and checked errors."""

import copy

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

from weft import nnx
from weft.errors import CompiledCallError, TransformArgumentError
from weft.nnx.transforms.jit_program import has_objects, object_arguments


class Model(nnx.Module):
    def __init__(self, k=0):
        self.a, self.b = nnx.Param(jnp.ones(2)), nnx.BatchStat(jnp.zeros(2))
        self.k = k


def test_unchanged_values_are_not_returned():
    @nnx.jit
    def f(m, x):
        m.a[...] = m.a + 0 * x
        m.b[...] = m.b[...]
        return x

    m = Model()
    before = m.a[...], m.b[...]
    f(m, 1.0)
    assert m.a[...] is not before[0] and m.b[...] is before[1]
    text = f.lower(m, 1.0).as_text()
    assert text.count("jax.result_info") == 2


class CompiledModel(nnx.Module):
    def __init__(self, w=1.0):
        self.w, self.layers = nnx.Param(jnp.asarray(w)), [nnx.Param(jnp.float32(2.0))]

    @nnx.jit
    def __call__(self, x):
        self.w[...] += x
        return self.w * 2


@nnx.jit
def step(model, x):
    model.w[...] += x
    return model.w * x


def test_stages_match_those_of_jax():
    model = CompiledModel()
    traced = step.trace(model, 3.0)
    lowered = traced.lower(lowering_platforms=("cpu",))
    compiled = lowered.compile(compiler_options={"xla_embed_ir_in_executable": True})
    assert isinstance(traced.jaxpr, jax.extend.core.ClosedJaxpr)
    assert "stablehlo" in lowered.as_text() and "HloModule" in compiled.as_text()
    assert compiled.cost_analysis() and compiled(model, 1.0) == 2
    assert repr(lowered).startswith("Lowered(") and repr(compiled).startswith("Compiled(")
    assert copy.copy(compiled)(model, 1.0) == 3
    with pytest.raises(AttributeError):
        lowered.nothing  # noqa: B018


def changed(change):
    model = CompiledModel()
    change(model)
    return model


CHANGES = {
    "object 0.k": lambda m: setattr(m, "k", 1),
    r"object 0.layers\[1\]": lambda m: m.layers.append(1),
    r"object 0.layers\[0\]": lambda m: m.layers.__setitem__(0, 1),
    "object 0.w": lambda m: setattr(m, "w", nnx.BatchStat(1.0)),
    "other variables or other metadata": lambda m: m.w.set_metadata(tag="a"),
}


@pytest.mark.parametrize("where", CHANGES, ids=lambda x: x.replace("\\", ""))
def test_mismatched_objects_are_rejected(where):
    compiled = step.lower(CompiledModel(), 1.0).compile()
    model = changed(CHANGES[where])
    with pytest.raises(CompiledCallError, match=f"the new argument (differs at|has) {where};"):
        compiled(model, 1.0)
    with pytest.raises(CompiledCallError, match="objects unlike those it was compiled for"):
        compiled({"a": 1}, 1.0)
    assert model.w[...] == 1


def test_argument_mismatch_fails():
    compiled = step.lower(CompiledModel(), x=1.0).compile()
    text = r"compiled for 1 positional arguments and \['x'\] by name is called with 2 and \[\];"
    with pytest.raises(CompiledCallError, match=text):
        compiled(CompiledModel(), 1.0)
    with pytest.raises(TypeError, match="Argument types differ"):
        compiled(CompiledModel(), x=jnp.ones(3))


class AbstractModel(nnx.Module):
    def __init__(self, n: int = 3) -> None:
        self.b = nnx.BatchStat(jnp.zeros(()))
        self.w = nnx.Param(jnp.ones((2, n)), tag="kernel")

    def __call__(self, x: jax.Array) -> jax.Array:
        self.b[...] += 1
        return x @ self.w


def test_jaxpr_has_named_inputs_and_only_the_result():
    model = AbstractModel()
    jaxpr = nnx.make_jaxpr(lambda m, x: m(x))(model, jnp.ones((5, 2)))
    assert [str(v.aval) for v in jaxpr.jaxpr.invars] == [
        "float32[]",
        "float32[2,3]",
        "float32[5,2]",
    ]
    assert [str(v.aval) for v in jaxpr.jaxpr.outvars] == ["float32[5,3]"]
    assert float(model.b) == 0


def test_jaxpr_with_static_arguments():
    jaxpr = nnx.make_jaxpr(lambda m, n: m.b * n, static_argnums=1)(AbstractModel(), 3)
    assert len(jaxpr.jaxpr.invars) == 2 and "3.0" in str(jaxpr)


def test_failed_check_is_returned_and_writes_persist():
    def positive(m: AbstractModel) -> None:
        m.b[...] -= 1
        checkify.check(m.b > 0, "b is not positive")

    model = AbstractModel()
    error, result = nnx.checkify(nnx.jit(positive))(model)
    assert "b is not positive" in str(error.get()) and result is None
    assert float(model.b) == -1
    model.b[...] = 5
    assert nnx.checkify(positive)(model)[0].get() is None


def test_which_errors_are_checked():
    divide = nnx.checkify(lambda m: 1 / m.b, errors=checkify.float_checks)
    assert "division by zero" in str(divide(AbstractModel())[0].get())


def options(**kwargs):
    return nnx.jit(lambda *args, **kwargs: None, **kwargs)._options


def test_objects_among_the_arguments():
    m, n = Model(), Model()
    objects, rest, named = object_arguments(options(), (1.0, m, [n]), {"z": n, "a": m, "b": 2})
    assert objects == {1: m, "a": m, "z": n} and rest == [1.0, [n]] and named == {"b": 2}
    assert has_objects([1, {"a": m}]) and has_objects(m.a) and not has_objects([1, None])
    with pytest.raises(TransformArgumentError, match="remove the argument there"):
        object_arguments(options(static_argnums=0), (m,), {})
