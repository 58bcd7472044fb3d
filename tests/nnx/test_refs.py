import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft import nnx
from weft.errors import RoleError, TraceContextError, VariableArgumentError, VariableShapeError
from weft.nnx.refs import var_defaults
from weft.nnx.transforms.jit import jit

NAMES = pytest.mark.parametrize("name", ["ref", "hijax"])


def is_held(variable):
    return isinstance(variable.get_raw_value(), jax.Ref)


def test_writes_of_a_compiled_function_that_closes_over_it_are_kept():
    variables = [nnx.Variable(jnp.zeros(()), hijax=True), nnx.Variable(jnp.zeros(()), ref=True)]
    for name in ("hijax", "ref"):
        with var_defaults(**{name: True}):
            variables.append(nnx.Variable(jnp.zeros(())))
    variables.append(nnx.Dict(v=nnx.Variable(jnp.zeros(()), hijax=True)).v)

    @jax.jit
    def write(x):
        for v in variables:
            v[...] += x
            jax.jit(lambda v=v: v.set_value(v + x))()
            jax.lax.scan(lambda c, y, v=v: (c, v.set_value(v + y)), 0, jnp.arange(3.0))
            jax.lax.cond(x > 1, lambda v=v: v.set_value(v * 10), lambda: None)
        return variables[0] * 1

    assert float(write(1.0)) == 5
    assert float(write(2.0)) == (5 + 2 + 2 + 3) * 10
    assert [float(v[...]) for v in variables] == [120] * 5


@NAMES
def test_it_reads_and_writes_like_any_variable(name):
    w = nnx.Param(jnp.array([1.0, 2.0]), **{name: True})
    assert is_held(w) and getattr(w, name) and w.get_metadata(name) is True
    assert w.ref is (name == "ref") and w.hijax is (name == "hijax")
    w[0] = 5
    w[...] = w * 2
    assert w[...].tolist() == [10, 4] and w[1] == 4 and w.sum() == 14 and jnp.sum(w) == 14
    assert np.asarray(w).tolist() == [10, 4] and w.shape == (2,) and w.dtype == jnp.float32
    w[...] = 3
    w.set_value(1, index=0)
    held = w.get_raw_value()
    w.set_value(np.array([1, 2]))
    w.set_raw_value(w + 1)
    assert w[...].tolist() == [2, 3] and w.get_raw_value() is held
    assert float(nnx.Param(1.5, **{name: True})) == 1.5
    key = nnx.Variable(jax.random.key(0), **{name: True})
    key[...] = jax.random.key(1)
    assert jax.random.key_data(key[...]).tolist() == [0, 1]


def test_jax_transformed_functions_write_to_it():
    w = nnx.Param(jnp.zeros(2), ref=True)

    @jax.jit
    def captured():
        w[...] += 1

    @jax.jit
    def given(w):
        w[0] = 7

    def body(carry, x):
        w[...] = w[...] + x
        return carry, None

    captured()
    captured()
    given(w)
    jax.lax.scan(body, 0, jnp.arange(3.0))
    assert w[...].tolist() == [10, 5]
    assert jax.grad(lambda x: (w[...] * x).sum())(jnp.ones(2)).tolist() == [10, 5]
    with pytest.raises(TraceContextError, match="Param of shape"):
        jax.jit(lambda: w.set_metadata(a=1))()


class Counter(nnx.Module):
    """A count in a `jax.Ref`, and a factor."""

    def __init__(self):
        self.n, self.factor = nnx.Variable(jnp.array(1.0), ref=True), nnx.Param(jnp.array(2.0))

    def step(self):
        self.n[...] += 10
        return self.factor * 1


def scan(body, model):
    step = nnx.scan(lambda m, x: (m, body(m)), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    return step(model, jnp.ones(3))[1].sum()


def fori_loop(body, model, upper=3):
    return nnx.fori_loop(0, upper, lambda _, c: (c[0], c[1] + body(c[0])), (model, 0.0))[1]


@pytest.mark.parametrize("jits", [False, True])
@pytest.mark.parametrize(
    ("run", "result", "count"),
    [
        (lambda m: nnx.cond(m.n[...] > 0, Counter.step, lambda m: m.factor * 3, m), 2, 11),
        (lambda m: nnx.cond(m.n[...] > 5, Counter.step, lambda m: m.factor * 3, m), 6, 1),
        (lambda m: nnx.switch(1, [lambda m: m.factor * 3, Counter.step], m), 2, 11),
        (lambda m: scan(Counter.step, m), 6, 31),
        (lambda m: fori_loop(Counter.step, m), 6, 31),
        (lambda m: fori_loop(Counter.step, m, jnp.array(3)), 6, 31),
        (lambda m: scan(lambda m: fori_loop(Counter.step, m, 2), m), 12, 61),
    ],
    ids=["taken", "not taken", "switch", "scan", "fori", "unknown length", "nested"],
)
def test_loops_and_branches_write_to_it(run, result, count, jits):
    for model in (Counter(), Counter()):
        assert (nnx.jit(run) if jits else run)(model) == result and model.n[...] == count


def test_gradients_through_loops_that_write_to_it():
    model = Counter()
    loss = lambda m: fori_loop(Counter.step, m)  # noqa: E731
    assert nnx.grad(loss, argnums=nnx.DiffState(0, nnx.Param))(model)["factor"][...] == 3
    assert model.n[...] == 31


def test_condition_of_a_loop_does_not_read_it():
    with pytest.raises(RoleError, match=r"while_loop: the condition reads a jax.Ref"):
        nnx.while_loop(lambda m: m.n[...] < 25, lambda m: (m.step(), m)[1], Counter())


def test_pytrees_have_a_reference_for_each_array():
    w = nnx.Param({"a": jnp.zeros(2), "b": (1, 2.0)}, hijax=True)
    held = jax.tree.leaves(w.get_raw_value())

    @jax.jit
    def step(w):
        w["a"] = w["a"] + 1
        w.set_value({**w.get_value(), "b": (5, w["b"][1] * 3)})
        return w["b"][0]

    assert int(step(w)) == 5 and int(jit(step)(w)) == 5
    assert w["a"].tolist() == [2, 2] and [*map(float, w.get_value()["b"])] == [5, 18]
    assert all(a is b for a, b in zip(held, jax.tree.leaves(w.get_raw_value()), strict=True))
    copied = w.copy()
    w["a"] = jnp.zeros(2)
    assert copied["a"].tolist() == [2, 2] and float(w.copy(hijax=False)["b"][1]) == 18


def test_values_are_written_to_reference():
    w = nnx.Param(jnp.ones(2), ref=True)
    held, model = w.get_raw_value(), nnx.Dict(w=w)
    w.copy_from(nnx.Param(jnp.zeros(2), tag="a"))
    assert w[...].tolist() == [0, 0] and w.get_metadata("ref") is True
    assert w.get_metadata(exclude_required=True) == {"tag": "a"}
    nnx.update(model, {"w": jnp.ones(2)})
    nnx.update(model, nnx.State({"w": nnx.Param(w * 3)}))
    assert w[...].tolist() == [3, 3] and w.get_raw_value() is held and w.ref
    plain = nnx.Param(jnp.zeros(2))
    plain.copy_from(w)
    assert not is_held(plain) and plain.get_metadata(exclude_required=True) == {}


def test_variable_defaults():
    assert dict(var_defaults()) == {"hijax": False, "ref": False} and len(var_defaults()) == 2
    plain = nnx.Param(jnp.ones(2))
    with var_defaults(ref=True):
        assert var_defaults().ref and is_held(nnx.Param(jnp.ones(2)))
        assert not is_held(nnx.Param(jnp.ones(2), ref=False))
        assert not is_held(nnx.Param(jnp.ones(2), **plain.get_metadata()))
        with var_defaults(hijax=True):
            assert not is_held(nnx.Param(jnp.ones(2), hijax=False, ref=False))
            assert dict(var_defaults()) == {"hijax": True, "ref": True}
        names = nnx.Variable(("a", "b"))
        assert names[0] == "a" and not names.ref
    assert not is_held(nnx.Param(jnp.ones(2)))

    @var_defaults(hijax=True)
    def make():
        return nnx.Param(jnp.ones(2))

    assert make().hijax and not var_defaults().hijax


def test_invalid_reference_values():
    w = nnx.Param(jnp.ones(2), ref=True)
    with pytest.raises(
        VariableShapeError, match=r"Param of shape \(2,\).*\(3,\); give one of shape"
    ):
        w.set_value(jnp.ones(3))
    pair = nnx.Param({"a": jnp.ones(2), "b": (1, 2.0)}, ref=True)
    for other in ({"a": jnp.ones(2)}, {"a": jnp.ones(3), "b": (1, 2)}):
        with pytest.raises(VariableShapeError, match=r"give one of shape .'a': \(2,\), 'b': \(\("):
            pair.set_value(other)
    with pytest.raises(VariableArgumentError, match="Param with ref=True was given a str"):
        nnx.Param({"a": jnp.ones(2), "b": "c"}, ref=True)
    with pytest.raises(VariableArgumentError, match=r"given a jax\.Ref; give it the array"):
        nnx.Param(w.get_raw_value(), tag="a")
    with pytest.raises(VariableArgumentError, match=r"given a jax\.Ref; give it the array"):
        nnx.Param(w.get_raw_value())
