import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from weft import nnx
from weft.errors import (
    GradientStructureError,
    ImmutableVariableError,
    NoMeshError,
    OptimizerCallError,
    OptimizerStateError,
    OptimizerWarning,
    TraceContextError,
    TransformationTypeError,
)
from weft.nnx.optimizer import (
    OptArray,
    Optimizer,
    OptState,
    OptVariable,
    TrainState,
    from_state_dict,
    gradients_like,
    raw_value,
    to_state_dict,
    zip_state_dict,
)


class Model(nnx.Module):
    def __init__(self):
        names = {"out_sharding": ("in", "out"), "eager_sharding": False}
        self.kernel = nnx.Param(jnp.arange(6.0).reshape(2, 3), tag="kernel", **names)
        self.layers = [nnx.Dict(bias=nnx.Param(jnp.ones(3)))]
        self.mean = nnx.BatchStat(jnp.zeros(3))

    def __call__(self, x):
        return x @ self.kernel + self.layers[0].bias[None]


def ones_like(model, wrt=nnx.Param):
    return jax.tree.map(jnp.ones_like, nnx.state(model, wrt))


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def values(x, *filters):
    return nnx.to_pure_dict(nnx.state(x, *filters))


def test_state_keeps_parameter_metadata():
    model = Model()
    optimizer = Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    count, mu = optimizer.opt_state[0].count, optimizer.opt_state[0].mu
    assert type(count) is OptArray and type(mu.kernel) is OptVariable
    assert issubclass(OptVariable, OptState) and issubclass(OptArray, OptState)
    assert mu.kernel.get_metadata() == model.kernel.get_metadata()
    assert mu["layers"][0]["bias"].get_metadata(exclude_required=True) == {}
    optimizer.update(model, ones_like(model))
    assert optimizer.opt_state[0].mu.kernel is mu.kernel and mu.kernel[0, 0] == pytest.approx(0.1)
    moments = nnx.state(optimizer, OptVariable)
    assert {path[:3] for path, _ in nnx.to_flat_state(moments)} == {
        ("opt_state", 0, "mu"),
        ("opt_state", 0, "nu"),
    }


def test_axis_names_are_kept_for_equal_shapes():
    model = Model()
    factored = Optimizer(model, optax.adafactor(0.1), wrt=nnx.Param).opt_state[0]
    assert factored.v.kernel.out_sharding == ("in", "out")
    assert (
        factored.v_row.kernel.get_metadata("out_sharding", None) is None
        and factored.v_row.kernel.tag == "kernel"
    )
    memory = Optimizer(model, optax.lbfgs(memory_size=4), wrt=nnx.Param).opt_state[0]
    assert memory.params.kernel.out_sharding == ("in", "out")
    assert memory.diff_params_memory.kernel.shape == (4, 2, 3)
    assert memory.diff_params_memory.kernel.out_sharding == (None, "in", "out")


def test_state_has_parameter_sharding():
    mesh = jax.make_mesh((2, 1), ("in", "out"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        model = Model()
        sharding = NamedSharding(mesh, PartitionSpec("in", "out"))
        model.kernel.set_value(jax.device_put(model.kernel[...], sharding))
        optimizer = Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
        assert optimizer.opt_state[0].mu.kernel.get_value().sharding == sharding
        optimizer.update(model, ones_like(model))
        assert optimizer.opt_state[0].nu.kernel.get_value().sharding.is_equivalent_to(sharding, 2)


def test_hyperparameters_are_variables_that_can_be_set():
    model = nnx.Dict(w=nnx.Param(jnp.ones(2)))
    optimizer = Optimizer(model, optax.inject_hyperparams(optax.sgd)(0.5), wrt=nnx.Param)
    optimizer.opt_state.hyperparams["learning_rate"][...] = 0.25
    optimizer.update(model, {"w": jnp.ones(2)})
    assert model.w[0] == 0.75


def test_optimizers_of_one_transformation_share_a_program():
    traces = []

    @nnx.jit
    def step(model, optimizer):
        traces.append(1)
        grads = nnx.grad(lambda model: jnp.sum(model(jnp.eye(2)) ** 2))(model)
        optimizer.update(model, grads)

    tx = optax.adam(optax.constant_schedule(0.1))
    for _ in range(20):
        model = Model()
        optimizer = Optimizer(model, tx, wrt=nnx.Param)
        step(model, optimizer)
    step(model, optimizer)
    assert len(traces) == 1 and int(optimizer.step) == 2
    assert optimizer.opt_state[0].mu.kernel.out_sharding == ("in", "out")


def test_optimizer_of_another_trace_is_rejected():
    model = Model()
    optimizer = Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    with pytest.raises(TraceContextError, match="is changed inside of a JAX transformation"):
        jax.jit(lambda grads: optimizer.update(model, grads) and None)(ones_like(model))
    assert int(optimizer.step) == 0
    same(values(model), values(Model()))


@settings(deadline=None, max_examples=10)
@given(
    st.recursive(
        st.lists(st.integers(1, 3), max_size=2),
        lambda inner: st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=2),
        max_leaves=4,
    )
)
def test_any_nesting_matches_plain_arrays(shapes):
    def build(x):
        if isinstance(x, dict):
            return {name: build(value) for name, value in x.items()}
        return nnx.Param(jnp.full(x, 2.0))

    model = nnx.Dict(root=build(shapes))
    tx = optax.sgd(0.5, momentum=0.5)
    params = values(model)
    updates, _ = tx.update(params, tx.init(params), params)
    Optimizer(model, tx, wrt=nnx.Param).update(model, nnx.state(model))
    same(values(model), optax.apply_updates(params, updates))


# Mismatches.


def test_optimizer_without_a_filter_or_a_transformation():
    with pytest.raises(OptimizerCallError, match=r"nnx.Optimizer\(model, tx, wrt=nnx.Param\)"):
        Optimizer(Model(), optax.adam(0.1))
    with pytest.raises(TransformationTypeError, match=r"tx is 0.1, which has no init and update"):
        Optimizer(Model(), 0.1, wrt=nnx.Param)  # pyright: ignore[reportArgumentType]


def test_update_without_gradients():
    model = Model()
    with pytest.raises(OptimizerCallError, match=r"one argument; give the model and the gradients"):
        Optimizer(model, optax.adam(0.1), wrt=nnx.Param).update(ones_like(model))


def test_unmatched_filter_warns():
    model = Model()
    message = r"wrt=<class .*Cache'> matches nothing in Model; .* are BatchStat, Param"
    with pytest.warns(OptimizerWarning, match=message):
        optimizer = Optimizer(model, optax.adam(0.1), wrt=nnx.Cache)
    before = nnx.to_pure_dict(nnx.state(nnx.clone(model)))
    with pytest.warns(OptimizerWarning, match=message):
        updates = optimizer.update(model, nnx.state(model))
    assert not jax.tree.leaves(updates) and int(optimizer.step) == 1
    jax.tree.map(np.testing.assert_array_equal, before, nnx.to_pure_dict(nnx.state(model)))
    with pytest.warns(OptimizerWarning, match=r"kinds of its variables are \(none\)"):
        optimizer.update({}, {})
    moving = Optimizer(Model(), optax.adam(0.1), wrt=nnx.Param)
    other = nnx.Dict(w=nnx.BatchStat(jnp.ones(1)))
    with (
        pytest.warns(
            OptimizerWarning, match=r"matches nothing in Dict.*kinds of its variables are BatchStat"
        ),
        pytest.raises(OptimizerStateError, match="does not; make the optimizer for the model"),
    ):
        moving.update(other, nnx.state(other))


KINDS = [AxisType.Auto, AxisType.Explicit]


@pytest.mark.parametrize("transform", [lambda f: f, nnx.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("kind", KINDS, ids=["auto", "explicit"])
def test_state_may_have_another_sharding(kind, transform):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
    layouts = {"out_sharding": (None, "model"), "optimizer_sharding": ["rows", "model"]}
    rules = (("rows", "data"),)

    @transform
    def step(model, optimizer):
        grads = nnx.grad(lambda model: (model.w[...] ** 2).sum())(model)
        optimizer.update(model, grads)

    with jax.set_mesh(mesh):
        model = nnx.Dict(w=nnx.Param(jnp.ones((4, 8)), sharding_rules=rules, **layouts))
        optimizer = Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
        kept = optimizer.opt_state[0].mu.w
        assert kept.out_sharding == ("rows", "model")
        assert not kept.has_metadata("optimizer_sharding")
        for _ in range(2):
            for x in (optimizer.opt_state[0].mu.w, optimizer.opt_state[0].nu.w):
                assert tuple(x.sharding.spec) == ("data", "model")
            assert tuple(model.w.sharding.spec) == (None, "model")
            step(model, optimizer)
    np.testing.assert_allclose(model.w[...], 0.8, atol=1e-3)


def test_state_sharding_needs_a_mesh():
    model = nnx.Dict(w=nnx.Param(jnp.ones((4, 8)), optimizer_sharding=("data", None)))
    with pytest.raises(NoMeshError, match=r"a OptVariable has the layout \('data', None\)"):
        Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    with nnx.use_eager_sharding(False):
        optimizer = Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    assert optimizer.opt_state[0].mu.w.out_sharding == ("data", None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: g.pop("kernel"), r"no gradient for 'kernel', a parameter that the filter Param"),
        (lambda g: g["layers"][0].pop("bias"), r"no gradient for 'layers/0/bias'"),
        (lambda g: g.update(kernel=None), r"no gradient for 'kernel'"),
        (lambda g: g.update(kernel=jnp.ones(3)), r"'kernel' has shape \(3,\), and .* \(2, 3\)"),
        (lambda g: g.update(other=nnx.Param(1.0)), r"gradient for 'other', but no parameter there"),
    ],
    ids=["missing", "missing below", "None", "shape", "extra"],
)
def test_mismatched_gradients_change_nothing(change, message):
    model = Model()
    optimizer = Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    grads = nnx.to_pure_dict(ones_like(model))
    change(grads)
    before = values((model, optimizer))
    with pytest.raises(GradientStructureError, match=message):
        optimizer.update(model, grads)
    same(values((model, optimizer)), before)


def test_immutable_parameter():
    model = Model()
    optimizer = Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    model.layers[0].bias.set_metadata(mutable=False)
    before = values((model, optimizer))
    with pytest.raises(ImmutableVariableError, match="Param at 'layers/0/bias' is written to"):
        optimizer.update(model, ones_like(model))
    same(values((model, optimizer)), before)
    frozen = Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    model.layers[0].bias.set_metadata(mutable=True)
    frozen.update(model, ones_like(model))


def test_mismatched_model():
    optimizer = Optimizer(Model(), optax.adam(0.1), wrt=nnx.Param)
    larger = Model()
    larger.extra = nnx.Param(jnp.ones(1))
    with pytest.raises(
        OptimizerStateError, match=r"the model has 'extra' .* the optimizer does no"
    ):
        optimizer.update(larger, ones_like(larger))
    smaller = nnx.Dict(kernel=nnx.Param(jnp.ones((2, 3))))
    message = r"the optimizer has 'layers/0/bias' among the parameters and the model does not"
    with pytest.raises(OptimizerStateError, match=message):
        optimizer.update(smaller, ones_like(smaller))


def test_transformation_errors_propagate():
    def update(updates, state, params=None):
        raise ValueError("of my own")

    model = Model()
    tx = optax.GradientTransformation(lambda params: (), update)
    with pytest.raises(ValueError, match="of my own"):
        Optimizer(model, tx, wrt=nnx.Param).update(model, ones_like(model))


def test_inconsistent_state_structure():
    def update(updates, state, params=None):
        return updates, ({"a": 0},)

    tx = optax.GradientTransformation(lambda params: ({"count": jnp.zeros(())},), update)
    model = Model()
    optimizer = Optimizer(model, tx, wrt=nnx.Param)
    message = r"the state of the optimizer has count at '0', but .* returned a for it"
    with pytest.raises(OptimizerStateError, match=message):
        optimizer.update(model, ones_like(model))
    same(values(model), values(Model()))


PARAMETERS = {("a", 0): nnx.Param(jnp.ones(2)), ("b",): nnx.Param(None), ("c",): jnp.ones(3)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"no gradient for 'a/0', .* filter Param selects; .*argnums=nnx.DiffState\(0, Param"),
        ({"a": [1.0, 2.0]}, r"no gradient for 'c'"),
        ({"a": [jnp.ones(1)]}, r"'a/0' has shape \(1,\), and the parameter \(2,\); give the grad"),
        ({"a": [1.0], "c": 1.0, "d": nnx.Param(1)}, r"gradient for 'd', but no parameter there"),
    ],
    ids=["none", "one missing", "shape", "extra"],
)
def test_gradients_like_checks_structure(given, message):
    with pytest.raises(GradientStructureError, match=message):
        gradients_like(PARAMETERS, given, nnx.Param)


Pair = collections.namedtuple("Pair", ["a", "b"])


def tree():
    state = nnx.State({"l": {"w": nnx.Param(jnp.ones(2))}, 0: nnx.Param(1.0)})
    return Pair(({"n": 3}, state), [None, 2.0, ()])


class Linear(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2), tag="w")
        self.calls = nnx.BatchStat(jnp.array(0))

    def __call__(self, x):
        self.calls[...] += 1
        return x @ self.w


class WithStats(TrainState):
    stats: nnx.State


def make():
    graphdef, params, stats = nnx.split(Linear(), nnx.Param, ...)
    return WithStats.create(graphdef, params=params, tx=optax.adam(0.1), stats=stats, step=2)


@jax.jit
def step(state, x):
    def loss(params):
        y, (_, new) = state.apply(params, "stats")(x)
        return y.sum(), nnx.filter_state(new, nnx.BatchStat)

    grads, stats = jax.grad(loss, has_aux=True)(state.params)
    return state.apply_gradients(grads, stats=stats)


def test_mismatched_gradients():
    with pytest.raises(GradientStructureError, match="there is no gradient for 'w'"):
        make().apply_gradients(nnx.State({}))
    with pytest.raises(GradientStructureError, match=r"'w' has shape \(3,\)"):
        make().apply_gradients(nnx.State({"w": jnp.ones(3)}))


def variable(path, x):
    return nnx.Variable(raw_value(x), path=path)


def test_values_find_their_variables():
    there = to_state_dict(tree(), variable)
    new = jax.tree.map(lambda x: x + 1, from_state_dict(there))
    assert [float(jnp.sum(v)) for _, v in zip_state_dict(there, new)] == [4.0, 2.0, 4.0, 3.0]
    with pytest.raises(OptimizerStateError, match=r"has a, b at 'its root', but .* returned 0, 1"):
        list(zip_state_dict(there, tuple(new)))
    with pytest.raises(OptimizerStateError, match=r"has n at 'a/0', .* returned \{\} for it; an"):
        list(zip_state_dict(there, new._replace(a=({}, new.a[1]))))


def test_extra_arguments_are_passed():
    model = nnx.Dict(w=nnx.Param(jnp.array([2.0])))
    optimizer = Optimizer(model, optax.lbfgs(), wrt=nnx.Param)

    def loss(params):
        return jnp.sum(params["w"] ** 2)

    grads = nnx.State({"w": nnx.Param(2 * model.w[...])})
    optimizer.update(model, grads, grad=grads, value=loss(values(model)), value_fn=loss)
    assert abs(float(model.w[0])) < 2
    scale = Optimizer(model, optax.contrib.reduce_on_plateau(), wrt=nnx.Param)
    scale.update(model, grads, value=1.0)
    assert scale.opt_state.best_value[...] == 1
