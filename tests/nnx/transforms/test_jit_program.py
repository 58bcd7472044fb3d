"""Traced, lowered and compiled calls, abstract results and checked errors."""

import copy

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

from weft import nnx
from weft.errors import CompiledCallError, TraceContextError, TransformArgumentError
from weft.nnx.transforms import jit_program
from weft.nnx.transforms.jit_program import (
    ObjectRef,
    WrittenValues,
    has_objects,
    object_arguments,
    split_nested_objects,
    split_object_arguments,
)


class Model(nnx.Module):
    def __init__(self, k=0):
        self.a, self.b = nnx.Param(jnp.ones(2)), nnx.BatchStat(jnp.zeros(2))
        self.k = k


def options(**kwargs):
    return nnx.jit(lambda *args, **kwargs: None, **kwargs)._options


def test_object_refs_and_written_values_compare_by_value():
    assert ObjectRef(1) == ObjectRef(1) != ObjectRef(2) and hash(ObjectRef(1)) == hash(ObjectRef(1))
    assert WrittenValues((1,), (2,)) == WrittenValues((1,), (2,)) != WrittenValues((1,))
    assert jax.tree.structure([ObjectRef(1)]) == jax.tree.structure([ObjectRef(1)])
    assert jax.tree.leaves([ObjectRef(1), WrittenValues(())]) == []


def test_objects_among_the_arguments():
    m, n = Model(), Model()
    at, rest, named = object_arguments(options(), (1.0, m, [n]), {"z": n, "a": m, "b": 2})
    assert at == [(1, m), ("a", m), ("z", n)] and rest == [1.0, [n]] and named == {"b": 2}
    assert has_objects([1, {"a": m}]) and has_objects(m.a) and not has_objects([1, None])
    with pytest.raises(TransformArgumentError, match="remove the argument there"):
        object_arguments(options(static_argnums=0), (m,), {})


def test_similar_models_share_a_layout():
    def layout(*args, **kwargs):
        return split_object_arguments(options(donate_argnums=0), args, kwargs).layout

    m, n = Model(), Model()
    assert layout(m, 1.0) == layout(n, 2.0) and hash(layout(m, 1.0)) == hash(layout(n, 2.0))
    assert layout(m, n) != layout(m, m)
    assert layout(m) != layout(m, 1.0) != layout(1.0, m) != layout(m, x=1.0) != layout(x=m)
    assert layout(m) != layout(Model(k=1)) and layout(Model(k=1)) != layout(Model(k=True))
    before = layout(m)
    m.a.set_metadata(tag="t")
    assert layout(m) != before
    m.a.del_metadata("tag")
    assert layout(m) == before
    m.b = m.a
    assert layout(m) != before


def test_split_call():
    m, n = Model(), Model()
    found = split_object_arguments(options(), (m, 1.0), {"n": n, "x": 2.0})
    assert found.rest == [1.0] and found.named == {"x": 2.0}
    assert found.layout.at == (0, "n")
    assert found.flat.leaves[0] is m.a and found.flat.leaves[2] is n.a
    assert found.is_cacheable
    found = split_nested_objects(options(), ({"m": m}, 1.0), {"n": n})
    assert found.rest == [{"m": ObjectRef(0)}, 1.0] and found.named == {"n": ObjectRef(1)}
    assert found.layout.at == ()


def test_uncacheable_calls():
    def can(*args):
        return split_object_arguments(options(), args, {}).is_cacheable

    m = Model()
    assert can(m) and can() and not can(m.a)
    m.k = jnp.ones(1)
    assert not can(m)
    m.k = object()
    assert not can(m)
    m.k = (1, "a", jnp.float32, jax.nn.relu, jax.sharding.PartitionSpec("x"))
    assert can(m)
    m.a.set_metadata(xs=[1])
    assert not can(m)


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


def test_object_in_container_is_found_only_in_trace(monkeypatch):
    calls, split = [], split_nested_objects
    monkeypatch.setattr(
        jit_program, "split_nested_objects", lambda *args: calls.append(1) or split(*args)
    )
    f, m, n = nnx.jit(lambda m, x: m.a + jax.tree.leaves(x)[0]), Model(), Model()
    assert f(m, 1.0).tolist() == [2, 2] and f(m, 1.0).tolist() == [2, 2] and not calls
    assert f(m, [n]).tolist() == [2, 2] and calls == [1]
    assert f(m, 1.0).tolist() == [2, 2] and calls == [1]


def test_model_is_flattened_once_per_structure(monkeypatch):
    calls, split = [], split_object_arguments
    monkeypatch.setattr(
        jit_program, "split_object_arguments", lambda *args: calls.append(1) or split(*args)
    )
    f, m = nnx.jit(lambda m, x: m.a * x), nnx.List([Model() for _ in range(10)])
    g = nnx.jit(lambda m, x: m[0].a * x)
    for _ in range(3):
        g(m, 1.0)
        g(m, x=1.0)
    assert len(calls) == 3  # the first time to watch it, then once for each way to give it
    m[3].k = 2
    for _ in range(3):
        g(m, 1.0)
    assert len(calls) == 4
    with pytest.raises(AttributeError):
        f(m, 1.0)


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


def test_compiled_function_updates_its_arguments():
    model, other = CompiledModel(), CompiledModel(10.0)
    compiled = step.lower(model, 3.0).compile()
    assert model.w[...] == 1
    assert compiled(model, 4.0) == 20 and model.w[...] == 5
    assert compiled(other, 1.0) == 11 and other.w[...] == 11 and model.w[...] == 5


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


def test_methods_and_containers():
    model = CompiledModel()
    assert CompiledModel.__call__.lower(model, 1.0).compile()(model, 2.0) == 6
    f = nnx.jit(lambda models, x: models["a"].w + models["b"][0].w + x)
    compiled = f.lower({"a": model, "b": [CompiledModel()]}, 1.0).compile()
    assert compiled({"a": CompiledModel(), "b": [CompiledModel(5.0)]}, 2.0) == 8
    shared = nnx.jit(lambda a, b: (a is b, a.w.set_value(a.w + b.w))[1]).lower(model, model)
    shared.compile()(model, model)
    assert model.w[...] == 6


@pytest.mark.parametrize("static", [{"static_argnums": 1}, {"static_argnames": "k"}], ids=str)
def test_static_arguments_are_omitted(static):
    @nnx.jit(**static)
    def f(model, k, x):
        model.w[...] += k * x
        return model.w * x

    model = CompiledModel()
    assert f.lower(model, 3, 1.0).compile()(model, 2.0) == 14 and model.w[...] == 7
    assert f.lower(model, x=1.0, k=2).compile()(model, x=1.0) == 9


def test_structure_changes_and_new_objects():
    @nnx.jit
    def f(model):
        model.new, model.k = nnx.Param(model.w * 2), 3
        return CompiledModel(5.0), model

    model = CompiledModel()
    made, same = f.lower(model).compile()(model)
    assert same is model and model.new[...] == 2 and model.k == 3 and made.w[...] == 5


def test_donated_models():
    f = nnx.jit(lambda model: model.w * 2, donate_argnums=0)
    model = CompiledModel()
    before = model.w[...]
    assert f.lower(model).compile()(model) == 2
    assert before.is_deleted() and model.w[...] == 1


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


def test_shapes_of_a_new_model_and_of_a_call():
    model = nnx.eval_shape(lambda: AbstractModel(4))
    assert type(model) is AbstractModel and model.w[...] == jax.ShapeDtypeStruct(
        (2, 4), jnp.float32
    )
    assert model.w.tag == "kernel"
    out = nnx.eval_shape(lambda m, x: m(x), model, jax.ShapeDtypeStruct((5, 2), jnp.float32))
    assert (out.shape, out.dtype) == ((5, 4), jnp.float32)


def test_arguments_are_unchanged():
    model = AbstractModel()
    out = nnx.eval_shape(lambda m, *, x: (m(x), m), model, x=jnp.ones((5, 2)))
    assert out[0].shape == (5, 3)
    assert out[1] is not model and float(model.b) == 0


def test_sharing_is_preserved_in_results():
    def make() -> tuple[AbstractModel, AbstractModel]:
        model = AbstractModel()
        return model, model

    a, b = nnx.eval_shape(make)
    assert a is b


def test_captured_object_is_not_changed():
    model = AbstractModel()
    with pytest.raises(TraceContextError, match=r"inside of nnx.eval_shape\(<lambda>\)"):
        nnx.eval_shape(lambda: model(jnp.ones((1, 2))))


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
