"""Whatever is changed between the calls of a jitted function, it computes with what is there.

Whatever a jitted function changes, it sees itself, and it is seen outside.

Models that are changed at random, and called in between.

Threads that call a jitted function and change its models at the same time.
"""

import collections
import copy
import dataclasses
import pickle
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.nnx.transforms.object_changes import ARRAYS, CHANGES, Config, Layer, Model, WithArrays
from tests.nnx.transforms.object_snapshots import is_like_plain, look, same, work
from weft import nnx


@pytest.fixture(scope="module")
def jitted():
    """One function for many models: it is traced for what is new, and has programs of the rest."""
    return nnx.jit(work)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_between_calls(jitted, change):
    model = Model()
    jitted(model)
    jitted(model)
    change(model)
    is_like_plain(jitted, model)
    is_like_plain(jitted, model)


@pytest.mark.parametrize("change", ARRAYS.values(), ids=ARRAYS)
def test_changes_of_untracked_values(jitted, change):
    model = WithArrays()
    jitted(model)
    change(model)
    is_like_plain(jitted, model)
    is_like_plain(jitted, model)


def test_mutated_numpy_array():
    model, f = WithArrays(), nnx.jit(look)
    for value in (3.0, 4.0):
        same(f(model), look(model))
        model.numpy[0] = value
    same(f(model), look(model))


CALLS = {
    "one": lambda m, n: call(m, 1.0),
    "two": lambda m, n: call(m, n),
    "turned": lambda m, n: call(n, m),
    "itself twice": lambda m, n: call(m, m),
    "a part of it": lambda m, n: call(m, m.a),
    "a part first": lambda m, n: call(m.layers, m),
    "its variable": lambda m, n: call(m, m.w),
    "a variable alone": lambda m, n: call(m.w, 1.0),
    "later": lambda m, n: call(1.0, m),
    "None": lambda m, n: call(None, m),
    "None later": lambda m, n: call(m, None),
    "no object": lambda m, n: call(1.0, 2.0),
    "by name": lambda m, n: call(x=m),
    "mixed": lambda m, n: call(m, x=n),
    "mixed, turned": lambda m, n: call(n, x=m),
    "an array by name": lambda m, n: call(m, x=2.0),
    "fewer": lambda m, n: call(m),
    "none at all": lambda m, n: call(),
    "in a dict": lambda m, n: call({"m": m, "x": 1.0}),
    "next to one in a list": lambda m, n: call(m, [n, m]),
    "in a list by name": lambda m, n: call(m, x=[n]),
    "a state": lambda m, n: call(m, nnx.state(n)),
    "its own state": lambda m, n: call(m, nnx.state(m)),
    "more": lambda m, n: call(m, n, 1.0, m),
}


def call(*args, **kwargs):
    return args, kwargs


def two_models():
    m, n = Layer(1.0), Layer(2.0)
    m.w.set_metadata(k=1)
    m.a, m.layers = Layer(3.0), [Layer(4.0)]
    return m, n


def test_writes_at_other_arguments():
    m, n = two_models()
    f = nnx.jit(work)
    for make in (*CALLS.values(), *reversed(CALLS.values())):
        args, kwargs = make(m, n)
        is_like_plain(f, *args, **kwargs)


def test_non_pytree_class_arguments():
    class Hidden(nnx.Module, pytree=False):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(1))

    f, m, n = nnx.jit(work), Hidden(), Hidden()
    is_like_plain(f, m, 1.0)
    is_like_plain(f, m, n)
    is_like_plain(f, m, 1.0)
    is_like_plain(f, m, x=n)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, nnx.clone, lambda m: pickle.loads(pickle.dumps(m)), copy.copy],
    ids=["deepcopy", "clone", "pickle", "copy"],
)
def test_copies_of_a_known_model(copied):
    model, f = Model(), nnx.jit(work)
    is_like_plain(f, model)
    other = copied(model)
    is_like_plain(f, other)
    other.scale = 5.0
    is_like_plain(f, other)
    is_like_plain(f, model)
    model.a = Layer(8.0)
    is_like_plain(f, model)
    is_like_plain(f, other)
    is_like_plain(f, model, other)


def test_new_model_at_a_reused_address():
    f = nnx.jit(work)
    for i in range(40):
        model = Layer(i)
        model.k = i % 2
        is_like_plain(f, model)
        del model


def test_none_in_place_of_deleted_model():
    f, model = nnx.jit(work), Layer()
    is_like_plain(f, model, 1.0)
    del model
    is_like_plain(f, None, 1.0)


def test_untracked_writes_are_seen_at_the_next_tracked_change():
    model = Layer(1.0)
    model.k = 1
    f = nnx.jit(lambda m: m.w * m.k)
    assert f(model) == 1
    vars(model)["k"] = 2
    object.__setattr__(model, "w", nnx.Param(jnp.float32(3.0)))
    assert f(model) == 1  # an untracked change
    model.deterministic = True
    assert f(model) == 6


def test_identity_compared_values_count_as_unchanged():
    class Scale:
        k = 1

    model = Layer(1.0)
    model.scale = Scale()
    f = nnx.jit(lambda m: m.w * m.scale.k)
    assert f(model) == 1
    model.scale.k = 2
    assert f(model) == 1  # as a static argument of jax.jit
    model.scale = Scale()
    model.scale.k = 2
    assert f(model) == 2


def test_error_leaves_state_unchanged():
    @nnx.jit
    def f(m, early, late):
        if early is None:
            raise KeyError("early")
        m.w[...] = m.w * 2
        m.a = Layer(5.0)
        m.layers.append(1)
        m.w.set_metadata(tag="z")
        if late is None:
            raise KeyError("late")

    model = Model()
    for args in [(None, 1), (1, None)]:
        before = look(model)
        with pytest.raises(KeyError):
            f(model, *args)
        same(look(model), before)
    f(model, 1, 1)
    after = look(model)
    for args in [(None, 1), (1, None)]:
        with pytest.raises(KeyError):
            f(model, *args)
        same(look(model), after)


def test_errors_between_calls_of_one_function():
    f = nnx.jit(work)
    model = Layer()
    is_like_plain(f, model)
    with pytest.raises(TypeError):
        f(model, "a text")
    model.w.set_value("a text")
    with pytest.raises(TypeError):
        f(model)
    model.w.set_value(jnp.ones(1))
    is_like_plain(f, model)


class Settings:
    """A mutable value with its own way to compare, and without a hash."""

    def __init__(self, *values):
        self.values = list(values)

    def __getitem__(self, i):
        return self.values[i]

    def __setitem__(self, i, value):
        self.values[i] = value

    def __eq__(self, other):
        return self.values == other.values


@pytest.mark.parametrize("make", [Settings, lambda *xs: bytearray(xs), lambda *xs: list(xs)])
@pytest.mark.parametrize("compile_", [nnx.jit, jax.jit, lambda f: nnx.jit(nnx.jit(f))])
def test_changed_static_value_is_seen(make, compile_):
    class Scaled(nnx.Module):
        def __init__(self):
            self.by, self.w = nnx.static(make(2, 3)), nnx.Param(jnp.ones(()))

    model, run = Scaled(), compile_(lambda model: model.w[...] * model.by[0])
    for value in (2, 5, 5, 7, 2):
        model.by[0] = value
        assert run(model) == value


@pytest.mark.parametrize("calls", ["one more", "in its place", "in a list", "in a dict of tuples"])
def test_cyclic_later_argument(calls):
    # JAX never returns from such an object, and a limit of recursion that it has used up stays so.
    model, other = Layer(1.0), Layer(2.0)
    other.me = other
    before, later = {
        "one more": ((model,), (model, other)),
        "in its place": ((model, 1.0), (model, other)),
        "in a list": ((model, [1.0]), (model, [other])),
        "in a dict of tuples": ((model, {"a": (1.0,)}), (model, {"a": (1.0, other)})),
    }[calls]
    f = nnx.jit(work)
    is_like_plain(f, *before)
    is_like_plain(f, *before)
    is_like_plain(f, *later)
    is_like_plain(f, *before)


@pytest.mark.parametrize(
    "nested", [nnx.jit, lambda f: nnx.jit(nnx.jit(f)), nnx.remat], ids=["jit", "jits", "remat"]
)
def test_static_values_are_not_shared_by_cache(nested):
    """Programs are kept by value; the value that one was made for may have changed since."""

    class Scaled(nnx.Module):
        def __init__(self, w):
            self.config, self.w = Config(1.0), nnx.Param(jnp.asarray(w))

    def scaled(m):
        m.kept = m.config
        return m.config.scale * m.w[...]

    f = nested(scaled)
    first = Scaled(1.0)
    assert f(first) == 1
    first.config.scale = 16.0
    for w in (1.0, [1.0, 1.0]):  # known values and others
        second = Scaled(w)
        np.testing.assert_array_equal(f(second), w)
        assert second.config.scale == 1 and second.kept is second.config
    assert f(first) == 16


# Each is written back in another way.
SEEN_LATER = ["a static value", "an attribute deleted", "another variable", "another module"]
SEEN_LATER += ["an alias of a variable", "another shape", "metadata", "a hook", "data, then static"]
SEEN_LATER += ["append", "an item", "a key", "another order of keys", "deep inside", "sow"]


@pytest.mark.parametrize("name", CHANGES)
def test_changes_in_the_function(name):
    check(CHANGES[name], Model(), n_calls=2 if name in SEEN_LATER else 1)


@pytest.mark.parametrize("change", ARRAYS.values(), ids=ARRAYS)
def test_changes_of_arrays_and_containers_inside(change):
    check(change, WithArrays())


def check(change, model, n_calls=2):
    def f(m):
        before = look(m)
        change(m)
        return before, look(m)

    jitted = nnx.jit(f)
    for _ in range(n_calls):
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
    return x.value if type(x).__name__ == "MarkedValue" else x


def nested_jit(f):
    return nnx.jit(nnx.remat(f))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("transform", "kind"),
    [*((nnx.jit, kind) for kind in CHANGING), (nested_jit, "a list"), (nested_jit, "in a tuple")],
)
def test_each_call_returns_new_objects(transform, kind, way):
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


def test_sharing_is_preserved_in_results():
    def make(m):
        x = Config(1.0)
        return nnx.Dict(a=x, b=(x, m.config))

    jitted, model = nnx.jit(make), nnx.Dict(config=Config(2.0))
    for _ in range(2):
        made = jitted(model)
        assert made.a is made.b[0]
        assert made.b[1] is model.config


def test_identity_compared_values_are_shared():
    known = object()
    make = nnx.jit(lambda: nnx.Dict(a=known, b=Config(1.0, [known])))
    for _ in range(2):
        made = make()
        assert made.a is made.b.names[0] is known


def test_uncopyable_values_are_shared():
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


def test_static_value_change_is_applied_per_call():
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


def test_static_value_moved_to_other_object():
    a, b = nnx.Dict(config=Config(1.0)), nnx.Dict(config=Config(1.0))
    nnx.jit(lambda a, b: setattr(a, "config", b.config))(a, b)
    assert a.config is b.config


def held(model):
    return model.x[1] if isinstance(model.x, tuple) else model.x


@pytest.mark.parametrize(
    "make", [lambda: [1], lambda: {"a": 1}, lambda: (1, [2])], ids=["list", "dict", "in a tuple"]
)
def test_static_container_passed_twice_stays_one(make):
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


def test_change_of_unhashable_callable_is_detected():
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


def test_bool_replacing_a_variable_stays_data():
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


def in_threads(*functions):
    """Runs functions at the same time, switching between them as often as can be."""
    errors = []

    def run(fn):
        try:
            fn()
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run, args=(fn,)) for fn in functions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    for error in errors:
        raise error


def test_change_is_seen_during_calls_in_other_threads():
    f, model, is_done = nnx.jit(lambda m: m.w * m.k), Layer(1.0), threading.Event()
    model.k = 0

    def change():
        try:
            for i in range(150):
                model.k = i % 3
                assert f(model) == i % 3
                model.w = nnx.Param(jnp.float32(2.0))
                assert f(model) == i % 3 * 2
                model.w = nnx.Param(jnp.float32(1.0))
        finally:
            is_done.set()

    def call():
        while not is_done.is_set():
            assert f(model) in (0, 1, 2, 4)

    in_threads(change, call, call)


def test_threads_updating_one_model():
    @nnx.jit
    def f(m):
        m.k = 1 - m.k
        m.w[...] = m.w * 1
        m.layers[0].w[...] = m.layers[0].w + 0
        return m.w + m.k

    model = Layer(1.0)
    model.k, model.layers = 0, [Layer(5.0)]

    def run():
        for _ in range(100):
            assert f(model) in (1, 2)

    in_threads(run, run)
    assert model.w[...] == 1 and model.layers[0].w[...] == 5 and model.k in (0, 1)
