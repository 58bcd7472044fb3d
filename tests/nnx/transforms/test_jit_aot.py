import copy

import jax
import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import CompiledCallError


class Model(nnx.Module):
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


def test_a_compiled_function_writes_to_what_it_is_given():
    model, other = Model(), Model(10.0)
    compiled = step.lower(model, 3.0).compile()
    assert model.w[...] == 1
    assert compiled(model, 4.0) == 20 and model.w[...] == 5
    assert compiled(other, 1.0) == 11 and other.w[...] == 11 and model.w[...] == 5


def test_each_stage_has_what_that_of_jax_has():
    model = Model()
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


def test_methods_and_containers():
    model = Model()
    assert Model.__call__.lower(model, 1.0).compile()(model, 2.0) == 6
    f = nnx.jit(lambda models, x: models["a"].w + models["b"][0].w + x)
    compiled = f.lower({"a": model, "b": [Model()]}, 1.0).compile()
    assert compiled({"a": Model(), "b": [Model(5.0)]}, 2.0) == 8
    shared = nnx.jit(lambda a, b: (a is b, a.w.set_value(a.w + b.w))[1]).lower(model, model)
    shared.compile()(model, model)
    assert model.w[...] == 6


@pytest.mark.parametrize("static", [{"static_argnums": 1}, {"static_argnames": "k"}], ids=str)
def test_static_arguments_are_left_out(static):
    @nnx.jit(**static)
    def f(model, k, x):
        model.w[...] += k * x
        return model.w * x

    model = Model()
    assert f.lower(model, 3, 1.0).compile()(model, 2.0) == 14 and model.w[...] == 7
    assert f.lower(model, x=1.0, k=2).compile()(model, x=1.0) == 9


def test_what_changes_the_structure_and_new_objects():
    @nnx.jit
    def f(model):
        model.new, model.k = nnx.Param(model.w * 2), 3
        return Model(5.0), model

    model = Model()
    made, same = f.lower(model).compile()(model)
    assert same is model and model.new[...] == 2 and model.k == 3 and made.w[...] == 5


def test_donated_models():
    f = nnx.jit(lambda model: model.w * 2, donate_argnums=0)
    model = Model()
    before = model.w[...]
    assert f.lower(model).compile()(model) == 2
    assert before.is_deleted() and model.w[...] == 1


def changed(change):
    model = Model()
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
def test_objects_that_look_otherwise_are_refused(where):
    compiled = step.lower(Model(), 1.0).compile()
    model = changed(CHANGES[where])
    with pytest.raises(CompiledCallError, match=f"the new argument (differs at|has) {where};"):
        compiled(model, 1.0)
    with pytest.raises(CompiledCallError, match="objects unlike those it was compiled for"):
        compiled({"a": 1}, 1.0)
    assert model.w[...] == 1


def test_other_arguments_are_refused():
    compiled = step.lower(Model(), x=1.0).compile()
    text = r"compiled for 1 positional arguments and \['x'\] by name is called with 2 and \[\];"
    with pytest.raises(CompiledCallError, match=text):
        compiled(Model(), 1.0)
    with pytest.raises(TypeError, match="Argument types differ"):
        compiled(Model(), x=jnp.ones(3))


def test_a_function_that_sees_something_else_since():
    def make():
        k = 1.0

        def f(model):
            return model.w * k

        def put(value):
            nonlocal k
            k = value

        return nnx.jit(f), put

    (f, put), (g, _) = make(), make()
    assert f(Model()) == g(Model()) == 1
    put(5.0)
    assert f.lower(Model()).compile()(Model()) == 5
    assert g.lower(Model()).compile()(Model()) == 1
