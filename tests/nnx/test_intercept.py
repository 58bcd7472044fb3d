import functools

import jax.numpy as jnp
import pytest

from weft import nnx
from weft.nnx.intercept import (
    intercept_calls,
    original_class,
    stop_intercepting,
    visit_model,
    visiting,
)
from weft.nnx.transforms.jit import jit

SEEN = []


@pytest.fixture(autouse=True)
def no_calls():
    SEEN.clear()


def note(x, name, method, args, kwargs):
    SEEN.append((original_class(x).__name__, name, len(args), sorted(kwargs)))
    return method(*args, **kwargs)


class Base(nnx.Module):
    """Methods of each sort."""

    scale = functools.partialmethod(lambda self, n, x: n * x, 2)

    def __init__(self):
        self.w = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        return self.enc(x)

    def enc(self, x, *, flag=False):
        return x + self._own()

    def _own(self):
        return 1

    @staticmethod
    def still(x):
        return x

    @classmethod
    def of_class(cls):
        return cls.__name__

    @property
    def size(self):
        return 3


class Derived(Base):
    """Overrides a method, and compiles one."""

    def enc(self, x, *, flag=True):
        return super().enc(x) * 2

    @jit
    def compiled(self, x):
        self.w[...] += 1
        return self.enc(x)


def test_calls_of_methods_are_seen():
    x = Derived()
    intercept_calls(x, note)
    assert type(x).__name__ == "Derived" and isinstance(x, Derived) and original_class(x) is Derived
    assert (x(1), x.enc(1, flag=True), x.still(5), x.of_class(), x.size) == (4, 4, 5, "Derived", 3)
    assert SEEN == [
        ("Derived", "__call__", 1, []), ("Derived", "enc", 1, []), ("Derived", "enc", 1, ["flag"]),
    ]  # fmt: skip
    stop_intercepting(x)
    assert type(x) is Derived and x(1) == 4 and len(SEEN) == 3
    stop_intercepting(x)
    assert type(x) is Derived


def test_calls_in_transformations_are_seen():
    x = Derived()
    intercept_calls(x, note)
    assert x.compiled(1.0) == 4 and x.w[...] == 2
    assert [name for _, name, *_ in SEEN] == ["compiled", "enc"]
    stop_intercepting(x)
    SEEN.clear()
    assert x.compiled(1.0) == 4 and not SEEN


def test_observed_function_is_recompiled():
    x = Derived()

    @jit
    def f(x):
        return x.enc(1.0)

    f(x)
    intercept_calls(x, note)
    f(x)
    assert len(SEEN) == 1
    stop_intercepting(x)
    f(x)
    assert len(SEEN) == 1 and type(x) is Derived


def pass_on(x, name, method, args, kwargs):
    return method(*args, **kwargs)


def test_nested_observers_end_in_order():
    x = Derived()
    intercept_calls(x, note)
    intercept_calls(x, pass_on)
    assert original_class(x) is Derived and x.enc(1) == 4 and len(SEEN) == 1
    stop_intercepting(x)
    assert type(x) is not Derived and x.enc(1) == 4 and len(SEEN) == 2
    stop_intercepting(x)
    assert type(x) is Derived and x.enc(1) == 4 and len(SEEN) == 2


def test_models_are_visited_only_in_context():
    seen, x = [], Derived()
    visit_model(x)
    with visiting(seen.append), visiting(lambda x: intercept_calls(x, note)):
        visit_model(x)
    visit_model(x)
    assert seen == [x] and x.enc(1) == 4 and len(SEEN) == 1
