import threading

import jax
import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import SharedObjectError
from weft.nnx.settings import Setting


class level(Setting, default=0):
    """A number."""


def test_set_globally_or_as_context():
    assert level.current() == level.get_default() == 0 and level.get_stack() == []
    with level(1):
        assert level.current() == 1
        with level(2):
            level(3)
            assert level.current() == 3 and level.get_stack() == [1, 3]
        assert level.current() == 1
    assert level.get_stack() == []


def test_thread_local():
    seen = []
    with level(6):
        thread = threading.Thread(target=lambda: seen.append(level.current()))
        thread.start()
        thread.join()
    assert seen == [0]


def test_function_is_compiled_for_each_value():
    traces = []

    @jax.jit
    def f():
        traces.append(level.current())
        return level.current()

    with level(1):
        first = f(), f()
    with level(2):
        second = f()
    assert first == (1, 1) and second == 2 and traces == [1, 2]


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.array(1.0))


def change(m):
    m.w[...] += 1
    m.made = nnx.Param(jnp.array(5.0))
    m.kind = "new"


def changes(**mode):
    """Returns the observed changes: the value and the new attribute."""
    m = Model()
    nnx.remat(change, **mode)(m)
    return float(m.w[...]), hasattr(m, "made"), hasattr(m, "kind")


ALL, VALUES = (2.0, True, True), (2.0, False, False)


def test_sharing_needs_graph_mode():
    m = Model()
    is_same = []
    f = lambda a, b: is_same.append(a is b)  # noqa: E731
    nnx.remat(f)(m, m)
    nnx.remat(f, graph_updates=False)(m, m)
    assert is_same == [True, True]
    with pytest.raises(
        SharedObjectError, match=r"nnx\.remat.* is at a\S* and at b\S*; .* plain pytree"
    ):
        nnx.remat(f, graph=False)(m, m)
    with pytest.raises(
        SharedObjectError, match=r"the same Param of shape \(\) is at m\.w and at the result\.w"
    ):
        nnx.remat(lambda m: m, graph_updates=False)(m)
    with pytest.raises(
        SharedObjectError, match=r"the same Param of shape \(\) is at the result\[0\] and"
    ):
        nnx.remat(lambda: (made := nnx.Param(jnp.array(1.0)), made), graph=False)()


def test_cycles_are_for_graphs():
    m = Model()
    m.me = m
    nnx.remat(change)(m)
    assert m.me is m and m.kind == "new"
    nnx.remat(change, graph_updates=False)(m)
    assert float(m.w[...]) == 3
    with pytest.raises(SharedObjectError, match=r"the same Model is at m and at m\.me"):
        nnx.remat(change, graph=False)(m)


def test_settings_are_read_at_transform_time():
    with nnx.set_graph_mode(False):
        f = nnx.remat(change)
    m = Model()
    f(m)
    assert not hasattr(m, "made")
    g = nnx.remat(change)
    with nnx.set_graph_mode(False):
        g(m)
    assert hasattr(m, "made")


def test_settings_are_thread_local_and_restored():
    seen = []
    with nnx.set_graph_mode(False):
        thread = threading.Thread(target=lambda: seen.append(changes()))
        thread.start()
        thread.join()
    assert seen == [ALL]
    with pytest.raises(KeyError), nnx.set_graph_updates(False):
        raise KeyError
    assert nnx.set_graph_updates.current_value() is True
