import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

from tests.nnx.transforms.object_changes import Model
from weft import nnx
from weft.errors import (
    CapturedObjectError,
    InconsistentAliasError,
    StateFilterError,
    TraceContextError,
)
from weft.nnx.transforms.kind import ObjectKind


class Pair(nnx.Module):
    def __init__(self, w=2.0, n=0.0):
        self.w = nnx.Param(jnp.asarray(w))
        self.n = nnx.BatchStat(jnp.asarray(n))


def through(f, *args, **mode):
    """Runs a function through all stages of a transformation, without further computation."""
    return nnx.remat(f, **mode)(*args)


def test_captured_objects_are_rejected():
    m, other = Pair(), Pair()
    with pytest.raises(
        CapturedObjectError, match=r"the result\['m'\] is a Pair that was created outs"
    ):
        through(lambda x: {"m": other}, 1.0)
    with pytest.raises(
        CapturedObjectError, match=r"m\.w is a Param of shape \(\) that was created"
    ):
        through(lambda m: setattr(m, "w", other.w), m)
    with pytest.raises(CapturedObjectError, match=r"the result\.inner\.w is a Param"):
        through(lambda x: nnx.Dict(inner=nnx.Dict(w=other.w)), 1.0)
    copy = through(lambda x: nnx.clone(other), 1.0)
    assert copy is not other and float(copy.w) == 2
    assert m.w is not other.w


def test_captured_objects_are_read_only():
    m = Pair()
    assert float(through(lambda x: x * m.w, 3.0)) == 6
    for change in (
        lambda x: m.n.set_value(x),
        lambda x: setattr(m, "new", 1),
        lambda x: delattr(m, "w"),
        lambda x: m.w.set_metadata(note=1),
    ):
        with pytest.raises(TraceContextError, match=r"nnx\.remat\(<lambda>\)"):
            through(change, 1.0)
    assert float(m.n) == 0 and not hasattr(m, "new")


def test_leaked_objects_are_not_written():
    m, leaked = Pair(), []

    def outer(m):
        leaked.append(m)
        return m.w * 1

    nnx.jit(outer)(m)
    with pytest.raises((TraceContextError, jax.errors.UnexpectedTracerError)):
        through(lambda m: m.n.set_value(1.0), leaked[0])


def test_conflicting_roles_fail():
    m = Pair(jnp.ones((2, 2)), jnp.ones((2, 2)))
    axes = nnx.StateAxes({nnx.Param: 0, ...: 1})
    nnx.vmap(lambda a, b: None, in_axes=(axes, axes))(m, m)
    # The same value may be spoken of in other words.
    nnx.vmap(lambda a, b: None, in_axes=(axes, (0,)))(m, (m.w,))
    with pytest.raises(
        InconsistentAliasError, match=r"0 to a\.w, and in_axes gives 1 to b\[0\]\. "
    ):
        nnx.vmap(lambda a, b: None, in_axes=(axes, (1,)))(m, (m.w,))
    with pytest.raises(
        InconsistentAliasError, match=r"in_axes gives 1 to m\.n, and in_axes gives 0 to m\.z"
    ):
        m.z = m.n
        by_path = nnx.StateAxes({nnx.PathContains("z"): 0, nnx.Param: 0, ...: 1})
        nnx.vmap(lambda m: None, in_axes=(by_path,))(m)


def test_new_attribute_needs_a_filter():
    m = Pair(jnp.ones(2), jnp.ones(2))
    axes = nnx.StateAxes({nnx.Param: 0, nnx.BatchStat: 0})
    with pytest.raises(
        StateFilterError, match=r"in_axes has no filter for m\.c, a Cache; its filters"
    ):
        nnx.vmap(lambda m: setattr(m, "c", nnx.Cache(1.0)), in_axes=axes)(m)
    assert not hasattr(m, "c")


def seen(kind, *objects, of=...):
    """Returns all that a kind finds of objects."""
    flat, static, groups = kind.split(objects, [((of, 0), (..., None))] * len(objects))
    groups = [[{n: id(x) for n, x in group.items()} for group in of_one] for of_one in groups]
    owners = [owner and (id(owner[0]), owner[1]) for owner in flat.owners]
    objects = [*map(id, flat.objects)]
    return static, groups, [*map(id, flat.leaves)], owners, objects, flat.repeated, flat.is_tracked


def test_filter_on_variables_is_evaluated_each_call():
    kind, models = ObjectKind("vmap"), [Model(), Model()]
    models[1].w.set_metadata(tag="b")
    for of in ("a", lambda path, x: x is models[0].w):
        assert [len(seen(kind, model, of=of)[1][0][0]) for model in models] == [1, 0]


def test_call_leaks_no_objects():
    m = Pair()
    inside = []

    def f(m):
        inside.append(weakref.ref(m))
        return m.w * 2

    through(f, m)
    outer = weakref.ref(m)
    del m
    gc.collect()
    assert outer() is None and inside[0]() is None
