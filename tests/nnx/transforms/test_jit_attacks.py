"""Whatever is changed between the calls of a jitted function, it computes with what is there."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.nnx.transforms.changes import ARRAYS, CHANGES, Config, Layer, Model, WithArrays
from tests.nnx.transforms.looks import is_like_plain, look, same, work
from weft import nnx


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_between_calls(change):
    model, f = Model(), nnx.jit(work)
    is_like_plain(f, model)
    is_like_plain(f, model)
    change(model)
    is_like_plain(f, model)
    is_like_plain(f, model)


@pytest.mark.parametrize("change", ARRAYS.values(), ids=ARRAYS)
def test_changes_of_what_does_not_tell(change):
    model, f = WithArrays(), nnx.jit(work)
    is_like_plain(f, model)
    change(model)
    is_like_plain(f, model)
    is_like_plain(f, model)


def test_an_array_of_numpy_that_is_written_to():
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


@pytest.mark.parametrize("first", CALLS.values(), ids=CALLS)
def test_objects_at_other_places_of_the_next_call(first):
    m, n = two_models()
    f = nnx.jit(look)
    for second in CALLS.values():
        for args, kwargs in (first(m, n), second(m, n)):
            same(f(*args, **kwargs), look(*args, **kwargs))


def test_writes_to_objects_at_other_places():
    m, n = two_models()
    f = nnx.jit(work)
    for make in (*CALLS.values(), *reversed(CALLS.values())):
        args, kwargs = make(m, n)
        is_like_plain(f, *args, **kwargs)


def test_places_of_a_class_that_is_no_pytree():
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
def test_copies_of_a_model_that_was_met(copied):
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


def test_a_new_model_at_the_address_of_one_that_is_gone():
    f = nnx.jit(work)
    for i in range(40):
        model = Layer(i)
        model.k = i % 2
        is_like_plain(f, model)
        del model


def test_none_in_the_place_of_a_model_that_is_gone():
    f, model = nnx.jit(work), Layer()
    is_like_plain(f, model, 1.0)
    del model
    is_like_plain(f, None, 1.0)


def test_what_python_writes_past_the_object_is_seen_when_something_else_changes():
    model = Layer(1.0)
    model.k = 1
    f = nnx.jit(lambda m: m.w * m.k)
    assert f(model) == 1
    vars(model)["k"] = 2
    object.__setattr__(model, "w", nnx.Param(jnp.float32(3.0)))
    assert f(model) == 1  # nothing has told of it
    model.deterministic = True
    assert f(model) == 6


def test_what_is_compared_by_identity_counts_as_unchanged():
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


def test_an_error_leaves_everything_as_it_was():
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
def test_a_value_that_changes_inside_is_seen(make, compile_):
    class Scaled(nnx.Module):
        def __init__(self):
            self.by, self.w = nnx.static(make(2, 3)), nnx.Param(jnp.ones(()))

    model, run = Scaled(), compile_(lambda model: model.w[...] * model.by[0])
    for value in (2, 5, 5, 7, 2):
        model.by[0] = value
        assert run(model) == value


@pytest.mark.parametrize("calls", ["one more", "in its place", "in a list", "in a dict of tuples"])
def test_a_later_argument_that_holds_itself(calls):
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
def test_a_static_value_of_another_object_is_not_met(nested):
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
