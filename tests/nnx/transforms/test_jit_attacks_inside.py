"""Whatever a jitted function changes, it sees itself, and it is seen outside."""

import collections
import copy
import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest

from tests.nnx.transforms.changes import ARRAYS, CHANGES, Config, Layer, Model, WithArrays
from tests.nnx.transforms.looks import look, same
from weft import nnx


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_inside_of_the_function(change):
    check(change, Model())


@pytest.mark.parametrize("change", ARRAYS.values(), ids=ARRAYS)
def test_changes_of_arrays_and_containers_inside(change):
    check(change, WithArrays())


def check(change, model):
    def f(m):
        before = look(m)
        change(m)
        return before, look(m)

    jitted = nnx.jit(f)
    for _ in range(2):
        plain = copy.deepcopy(model)
        try:
            expected = f(plain)
        except Exception as error:
            with pytest.raises(type(error)):
                jitted(model)
        else:
            same(jitted(model), expected)
        same(look(model), look(plain))


CHANGING = {
    "a list": (lambda: nnx.static([1]), lambda x: x.append(2)),
    "a dict": (lambda: nnx.static({"a": 1}), lambda x: x.update(b=2)),
    "a set": (lambda: nnx.static({"a"}), lambda x: x.add("b")),
    "a dataclass": (lambda: Config(1.0, ["a"]), lambda x: x.names.append("b")),
    "a namespace": (lambda: types.SimpleNamespace(k=1), lambda x: setattr(x, "k", 2)),
    "a queue": (lambda: collections.deque([1]), lambda x: x.append(2)),
    "bytes": (lambda: bytearray(b"a"), lambda x: x.append(2)),
    "in a tuple": (lambda: nnx.static((1, {"a"})), lambda x: x[1].add("b")),
}
WAYS = {
    "an object": (lambda make: lambda m: nnx.Dict(x=make()), lambda m, made: made.x),
    "an attribute": (lambda make: lambda m: setattr(m, "x", make()), lambda m, made: m.x),
    "metadata": (
        lambda make: lambda m: m.w.set_metadata(x=plain_value(make())),
        lambda m, made: m.w.get_metadata("x"),
    ),
    "metadata of a new variable": (
        lambda make: lambda m: nnx.Param(jnp.ones(1), x=plain_value(make())),
        lambda m, made: made.get_metadata("x"),
    ),
}


def plain_value(x):
    return x.value if type(x).__name__ == "Marked" else x


@pytest.mark.parametrize("kind", CHANGING)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "transform", [nnx.jit, lambda f: nnx.jit(nnx.remat(f))], ids=["jit", "nested"]
)
def test_each_caller_has_its_own_of_what_the_function_makes(transform, way, kind):
    """What one caller does to it is not seen by another, as in plain Python."""
    make, change = CHANGING[kind]
    fn, found = WAYS[way]
    jitted, right = transform(fn(make)), plain_value(make())
    first, second = Layer(), Layer()
    a = found(first, jitted(first))
    assert a == right
    change(a)
    b = found(second, jitted(second))
    assert a != right == b
    assert type(a) is type(b)


def test_what_is_shared_inside_is_shared_outside():
    def make(m):
        x = Config(1.0)
        return nnx.Dict(a=x, b=(x, m.config))

    jitted, model = nnx.jit(make), nnx.Dict(config=Config(2.0))
    for _ in range(2):
        made = jitted(model)
        assert made.a is made.b[0]
        assert made.b[1] is model.config


def test_what_is_compared_by_identity_is_the_same_for_all():
    known = object()
    make = nnx.jit(lambda: nnx.Dict(a=known, b=Config(1.0, [known])))
    for _ in range(2):
        made = make()
        assert made.a is made.b.names[0] is known


def test_what_cannot_be_copied_is_shared():
    class Unwritten:
        __hash__ = None

        def __eq__(self, other):
            return self is other

        def __reduce_ex__(self, protocol):
            raise TypeError("no")

    make = nnx.jit(lambda: nnx.Dict(a=Unwritten(), b=Config(1.0)))
    first, second = make(), make()
    assert first.a is second.a
    assert first.b is not second.b


def test_a_change_of_a_static_value_comes_out_of_each_call():
    @nnx.jit
    def count(m):
        m.config.scale += 1
        return m.config.scale

    model = nnx.Dict(config=Config(0.0))
    first = model.config
    assert [float(count(model)) for _ in range(2)] == [1.0, 2.0]
    # One that was seen before, as it was then.
    first.scale, model.config = 0.0, first
    assert float(count(model)) == 1.0
    assert model.config.scale == 1.0


def test_a_static_value_that_becomes_anothers():
    a, b = nnx.Dict(config=Config(1.0)), nnx.Dict(config=Config(1.0))
    nnx.jit(lambda a, b: setattr(a, "config", b.config))(a, b)
    assert a.config is b.config


def held(model):
    return model.x[1] if isinstance(model.x, tuple) else model.x


@pytest.mark.parametrize(
    "make", [lambda: [1], lambda: {"a": 1}, lambda: (1, [2])], ids=["list", "dict", "in a tuple"]
)
def test_a_static_container_that_is_an_argument_as_well_is_one(make):
    """Or a change of the one would not be seen in the other."""

    def f(container, model):
        assert container is held(model)
        container.pop("a", None) if isinstance(container, dict) else container.append(3)
        return look(container, model)

    jitted, model = nnx.jit(f), nnx.Dict(x=nnx.static(make()), w=nnx.Param(jnp.ones(1)))
    plain = copy.deepcopy(model)
    for _ in range(2):
        same(jitted(held(model), model), f(held(plain), plain))
        same(look(model), look(plain))


def test_a_change_of_a_callable_object_without_a_hash_is_seen():
    @dataclasses.dataclass
    class Scale:
        k: float

        def __call__(self, x):
            return self.k * x

    model = nnx.Dict(f=Scale(2.0), w=nnx.Param(jnp.ones(1)))
    call = nnx.jit(lambda m: m.f(m.w[...]))
    assert call(model) == 2.0
    model.f.k = 3.0
    assert call(model) == 3.0


def test_a_bool_in_place_of_a_variable_is_data_in_each_call():
    model, types = WithArrays(), []
    model.w = False

    @nnx.jit
    def f(model):
        types.append(type(model.w))

    for _ in range(3):
        f(model)
    assert len(types) == 1 and types[0] is not bool
    graphdef, state = nnx.split(model)
    for again in (model, nnx.merge(graphdef, state), nnx.clone(model)):
        assert len(jax.tree.leaves(nnx.state(again))) == len(jax.tree.leaves(state))
