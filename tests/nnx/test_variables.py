import copy
import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft import nnx
from weft.errors import (
    ImmutableVariableError,
    TraceContextError,
    VariableArgumentError,
    VariableAttributeError,
    VariableMetadataError,
    VariableOperationError,
    VariableTypeError,
)


@pytest.mark.parametrize("factor", [np.float64(3), np.full(2, 3.0)], ids=["scalar", "array"])
def test_operators_of_numpy_values_leave_the_work_to_variables(factor):
    x = nnx.Param(jnp.ones(2))
    for product in (factor * x, jax.jit(lambda x: factor * x)(x)):
        assert isinstance(product, jax.Array) and product.dtype == jnp.float32
        assert product.tolist() == [3, 3]


def test_integers_and_single_values():
    n = nnx.Variable(jnp.array(6))
    assert [int(x) for x in (n & 3, 3 | n, n ^ 2, 1 << n, n >> 1, ~n, -n, +n, abs(n))] == [
        2, 7, 4, 64, 3, -7, -6, 6, 6,
    ]  # fmt: skip
    assert int(n) == 6 and float(n) == 6.0 and complex(n) == 6 and bool(n) and range(9)[n] == 6
    assert round(nnx.Variable(1.26), 1) == 1.3
    assert nnx.Variable(lambda x: x + 1)(2) == 3


def test_non_array_values():
    d = nnx.Variable({"a": 1})
    held = d[...]
    d["b"] = 2
    del d["a"]
    assert d[...] == {"b": 2} and held == {"a": 1} and "b" in d
    xs = nnx.Variable([1, 2])
    xs[0] = 5
    assert xs[...] == [5, 2]
    n = nnx.Variable(np.ones(2))
    n[...] = 4
    assert isinstance(n[...], np.ndarray) and n[...].tolist() == [4, 4]
    k = nnx.Variable(1)
    k[...] = "x"
    assert k[...] == "x"


class Doubled(nnx.Param):
    """Gives twice what it holds, and holds the absolute value of what it is given."""

    def get_value(self, **kwargs):
        return super().get_value(**kwargs) * 2

    def set_value(self, value, **kwargs):
        super().set_value(abs(value), **kwargs)


READS = {
    "v[...]": lambda v: v[...],
    "v[:]": lambda v: v[:],
    "v[0]": lambda v: jnp.stack([v[0], v[1]]),
    "v.value": lambda v: v.value,
    "get_value": lambda v: v.get_value(),
    "index": lambda v: v.get_value(index=...),
    "v + 0": lambda v: v + 0,
    "0 + v": lambda v: 0 + v,
    "+v": lambda v: +v,
    "v.T": lambda v: v.T,
    "array": lambda v: jnp.asarray(v),
    "numpy": lambda v: np.asarray(v) if isinstance(v.get_raw_value(), jax.Array) else v[...],
    "iter": lambda v: jnp.stack(list(v)),
    "@": lambda v: v @ jnp.eye(2),
}
PLACES = {
    "eager": lambda read, v: read(v),
    "jit": lambda read, v: nnx.jit(read)(v),
    "remat": lambda read, v: nnx.remat(read)(v),
    "cond": lambda read, v: nnx.cond(True, read, lambda v: jnp.zeros(2), v),
    "vmap": lambda read, v: nnx.vmap(lambda v, x: x + read(v), in_axes=(None, 0))(v, X)[0],
    "split": lambda read, v: read(nnx.merge(*nnx.split(v))),
    "state": lambda read, v: read(nnx.state(nnx.Dict(v=v))["v"]),
    "clone": lambda read, v: read(nnx.clone(v)),
    "held": lambda read, v: read(Doubled(v.get_raw_value(), ref=True)),
    "hooked": lambda read, v: read(Doubled(v.get_raw_value(), on_get_value=lambda v, x: x)),
}
X = jnp.zeros((1, 2))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("read", READS)
def test_every_read_uses_the_class_getter(read, place):
    if read == "numpy" and place in ("jit", "remat", "cond", "vmap"):
        read = "array"  # NumPy takes no tracer
    v = Doubled(jnp.array([1.0, 3.0]))
    np.testing.assert_array_equal(PLACES[place](READS[read], v), [2, 6])
    np.testing.assert_array_equal(v.get_raw_value(), [1, 3])


WRITES = {
    "v[...]": lambda v, x: v.__setitem__(..., x),
    "v[:]": lambda v, x: v.__setitem__(slice(None), x),
    "v.value": lambda v, x: setattr(v, "value", x),
    "set_value": lambda v, x: v.set_value(x),
    "index": lambda v, x: v.set_value(x, index=...),
}


@pytest.mark.parametrize("transform", [lambda f: f, nnx.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("write", WRITES)
def test_every_write_uses_the_class_setter(write, transform):
    v = Doubled(jnp.array([1.0, 3.0]))
    transform(WRITES[write])(v, jnp.array([-5.0, 4.0]))
    np.testing.assert_array_equal(v.get_raw_value(), [5, 4])
    np.testing.assert_array_equal(v[...], [10, 8])


def test_number_fills_variable_with_class_setter():
    v = Doubled(jnp.array([1.0, 3.0]))
    v[...] = -7
    np.testing.assert_array_equal(v.get_raw_value(), [7, 7])
    v[...] += 1  # of what it gives
    np.testing.assert_array_equal(v.get_raw_value(), [15, 15])
    assert v.get_raw_value().dtype == jnp.float32


def test_gradients_use_the_class_getter():
    grads = nnx.grad(lambda v: (v[...] * jnp.array([1.0, 10.0])).sum())(Doubled(jnp.ones(2)))
    np.testing.assert_array_equal(grads.get_raw_value(), [2, 20])


def test_metadata():
    w = nnx.Param(1, a=2, tag="t")
    assert w.a == 2 and w.get_metadata("a") == 2 and w.get_metadata("b", 7) == 7
    w.set_metadata(b=3)
    w.set_metadata("c", 4)
    w.del_metadata("a")
    assert w.get_metadata(exclude_required=True) == {"tag": "t", "b": 3, "c": 4}
    assert w.get_metadata() == {
        "tag": "t",
        "b": 3,
        "c": 4,
        "hijax": False,
        "ref": False,
        "eager_sharding": True,
    }
    assert not w.has_metadata("a")
    w.set_metadata({"z": 1})
    assert w.get_metadata(exclude_required=True) == {"z": 1}
    with pytest.raises(VariableMetadataError, match=r"^Param has no metadata 'q'; it has: z.$"):
        w.get_metadata("q")
    with pytest.raises(VariableMetadataError, match="Param has no metadata 'q'"):
        w.del_metadata("q")
    with pytest.raises(
        VariableArgumentError, match=r"set_metadata was given \('x',\) and {}; give"
    ):
        w.set_metadata("x")
    with pytest.raises(AttributeError, match="has no metadata 'q', and its value has no such"):
        w.q  # noqa: B018
    with pytest.raises(VariableAttributeError, match=r"with variable.set_metadata\(q=...\)"):
        w.q = 1


def test_metadata_with_defaults_makes_equal_variables():
    w = nnx.Param(jnp.zeros(2), tag="a")
    metadata = w.get_metadata()
    changed = nnx.Param(jnp.zeros(2))
    changed.set_metadata(metadata)
    copies = [
        nnx.Param(w[...], **metadata),
        nnx.Param.from_metadata(w[...], metadata),
        w.copy(**metadata),
        changed,
    ]
    for equal in copies:
        assert nnx.graphdef(equal) == nnx.graphdef(w) and equal.get_metadata() == metadata
        assert jax.tree.structure(equal) == jax.tree.structure(w)


@pytest.mark.parametrize("op", [operator.iadd, operator.imul, operator.ior, operator.imatmul])
def test_is_not_replaced_by_its_value(op):
    with pytest.raises(VariableOperationError, match=r"write variable\[...\] .= x to change"):
        op(nnx.Param(jnp.ones(1)), 1)
    with pytest.raises(TypeError, match="unhashable"):
        hash(nnx.Param(1))


@pytest.mark.parametrize(
    "write",
    [
        lambda w, x: w.set_value(x),
        lambda w, x: w.set_raw_value(x),
        lambda w, x: w.__setitem__(..., x),
        lambda w, x: w.__setitem__(0, x[0]),
        lambda w, x: w.copy_from(nnx.Param(x)),
        lambda w, x: w.update_from_state(nnx.Param(x)),
        lambda w, x: w.set_metadata(a=x),
    ],
    ids=range(7),
)
@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.checkpoint])
def test_outer_variable_is_not_written_in_a_trace(transform, write):
    w = nnx.Param(jnp.ones(2), on_set_value=lambda v, x: pytest.fail("the hook was called"))

    def f(x):
        write(w, x)
        return jnp.sum(x)

    with pytest.raises(TraceContextError, match=r"a Param of shape \(2,\) is changed inside of a"):
        transform(f)(jnp.zeros(2))
    assert w.get_raw_value().tolist() == [1, 1] and list(w.get_metadata(exclude_required=True)) == [
        "on_set_value"
    ]


def test_pytree_leaf_is_the_value():
    w = nnx.Param({"a": jnp.ones(1)}, tag="t")
    doubled = jax.tree.map(lambda x: 2 * x, w)
    assert doubled.tag == "t" and doubled["a"] == 2 and type(doubled) is nnx.Param
    assert jax.tree.structure(w) == jax.tree.structure(doubled)
    assert jax.tree.structure(w) != jax.tree.structure(nnx.Param({"a": 1}))
    [(path, _)] = jax.tree_util.tree_leaves_with_path(w)
    assert jax.tree_util.keystr(path) == ".value['a']"

    @jax.jit
    def step(w):
        w["a"] = w["a"] + 1
        return w

    assert step(w)["a"] == 2 and w["a"] == 1


def test_immutable_variable_keeps_its_value():
    frozen = nnx.Param(jnp.ones(2), mutable=False)
    for write in (
        lambda: frozen.set_value(jnp.zeros(2)),
        lambda: frozen.__setitem__(0, 3.0),
        lambda: frozen.copy_from(nnx.Param(jnp.zeros(2))),
    ):
        with pytest.raises(
            ImmutableVariableError, match=r"Param of shape \(2,\) is written to.*mutab"
        ):
            write()
    np.testing.assert_array_equal(frozen.get_value(), jnp.ones(2))
    frozen.set_metadata(mutable=True)
    frozen[0] = 3.0
    assert frozen[0] == 3.0


def test_new_names_and_kinds():
    made = nnx.variable_type_from_name("seen_tokens", base=nnx.Cache, allow_register=True)
    assert issubclass(made, nnx.Cache) and made.__name__ == "seen_tokens"
    assert nnx.variable_type_from_name("seen_tokens") is made

    class Mine(nnx.Variable):
        pass

    assert nnx.register_variable_name("mine", Mine) is Mine
    assert nnx.register_variable_name("mine", nnx.Param, overwrite=True) is nnx.Param

    class Other(nnx.Variable):
        pass

    assert nnx.variable_name_from_type(Other, allow_register=True) == "Other"
    assert nnx.variable_type_from_name("Other") is Other


def test_errors_about_names():
    class Unknown(nnx.Variable):
        pass

    with pytest.raises(VariableTypeError, match=r"has no name; give it one with nnx.register_var"):
        nnx.variable_name_from_type(Unknown)
    with pytest.raises(VariableTypeError, match="3 is not a kind of variable, but a int; give a"):
        nnx.variable_name_from_type(3)
    with pytest.raises(
        VariableTypeError, match="no kind of variable has the name 'nothing'; known"
    ):
        nnx.variable_type_from_name("nothing")
    with pytest.raises(VariableTypeError, match="'params' is already the name of Param"):
        nnx.register_variable_name("params", Unknown)


def test_copies():
    w = nnx.Param(1, a=2)
    assert w.copy(5, a=3).a == 3 and w.replace(4)[...] == 4 and w.to_state().a == 2
    assert type(w.copy()) is w.type is w.var_type is nnx.Param
    w.copy_from(nnx.Param(6, b=1))
    assert w[...] == 6 and w.get_metadata(exclude_required=True) == {"b": 1}
    w.update_from_state(nnx.Param(7, c=1))
    assert w[...] == 7 and w.get_metadata(exclude_required=True) == {"c": 1}
    with pytest.raises(
        VariableTypeError, match="Param cannot copy from a Cache; give a variable of its"
    ):
        w.copy_from(nnx.Cache(1))
    for copied in (copy.deepcopy(w), pickle.loads(pickle.dumps(w)), copy.copy(w)):
        assert type(copied) is nnx.Param and copied[...] == 7 and copied.c == 1 and copied is not w
    assert nnx.Param.from_metadata(3, {"a": 1}).a == 1
