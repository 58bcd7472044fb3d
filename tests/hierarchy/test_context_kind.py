import jax
import numpy as np
import pytest

from weft.errors import AxisSizeError, OutputConflictError
from weft.hierarchy.context import InvocationContext, current_context, set_current_context
from weft.hierarchy.context_kind import ContextKind, fork_key
from weft.hierarchy.transforms import in_context
from weft.lifting import FORK, Roles, jit, vmap

KIND = ContextKind()


def context(**kwargs):
    fields = {"name": "c", "parent": None, "state": {"w": np.arange(3.0)}, "is_training": True}
    return InvocationContext(**{**fields, "module": None, "prng_key": None, **kwargs})


def test_keys_are_split_sequentially():
    key = jax.random.PRNGKey(3)
    expected = []
    for _ in range(4):
        key, child = jax.random.split(key)
        expected.append(child)
    np.testing.assert_array_equal(fork_key(jax.random.PRNGKey(3), 4), expected)
    assert ContextKind().fork({"prng_key": None}, 4) == {"prng_key": None}


def test_entries_have_separate_roles():
    ctx = context(prng_key=jax.random.key(0))

    def fn(x):
        inner = current_context()
        inner.add_summary("w", inner.state["w"])
        inner.add_state_update("w", inner.state["w"] + 1)
        return jax.random.uniform(inner.prng_key) + x

    roles = Roles((("state", 0), ("prng_key", FORK), (("summaries", "state_updates"), 0)))
    drawn = vmap(KIND, in_context(fn), in_axes=(roles, None))(ctx, 1.0)
    assert len(set(drawn.tolist())) == 3
    np.testing.assert_array_equal(ctx.get_summaries()["w"], np.arange(3.0))
    np.testing.assert_array_equal(ctx.get_state_updates()["w"], np.arange(3.0) + 1)


def test_conflicting_outputs_write_nothing():
    ctx = context()
    ctx.add_summary("x", 1)

    def fn():
        current_context().add_state_update("y", 1)
        current_context().add_summary("x", 2)

    with pytest.raises(OutputConflictError, match=r"\['x'\] are added twice to the summaries of c"):
        jit(KIND, in_context(fn))(ctx)
    assert ctx.get_state_updates() == {}


def test_context_as_result_fails():
    with pytest.raises(TypeError, match="returned the context c; return arrays"):
        jit(KIND, lambda c: c)(context())


def test_outer_context_is_hidden():
    outer = context()
    with set_current_context(outer):
        jit(KIND, in_context(lambda: current_context().state.clear()))(outer)
    assert "w" in outer.state


def test_errors_name_module_and_context_paths():
    outer = context(state={"w": np.ones((2, 3, 4))})
    of_state = Roles((("state", 0), (("summaries", "state_updates"), 0)))

    def sizes(x):
        return x

    def between(x):
        return vmap(KIND, in_context(sizes), in_axes=(of_state, 0))(current_context(), x)

    with pytest.raises(AxisSizeError, match=r"'state/w' of the module 'c': 3, input 1: 5"):
        vmap(KIND, in_context(between), in_axes=(of_state, None))(outer, np.ones(5))

    def conflicting(x):
        inner = context(name="inner", parent=current_context())
        inner.add_summary("x", x)
        inner.add_summary("x", x)

    below = context(name="middle", parent=context())
    with pytest.raises(OutputConflictError, match=r"c\.middle\.inner"):
        vmap(KIND, in_context(conflicting), in_axes=(of_state, None))(below, 1.0)
