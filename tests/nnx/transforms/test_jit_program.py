import jax
import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import TransformArgumentError
from weft.nnx.transforms import jit_program
from weft.nnx.transforms.jit_program import (
    Hole,
    Written,
    found_anywhere,
    found_at_top,
    has_objects,
    objects_at_top,
)


class Model(nnx.Module):
    def __init__(self, k=0):
        self.a, self.b = nnx.Param(jnp.ones(2)), nnx.BatchStat(jnp.zeros(2))
        self.k = k


def options(**kwargs):
    return nnx.jit(lambda *args, **kwargs: None, **kwargs)._options


def test_what_stands_for_objects_and_for_what_is_written_is_compared_by_value():
    assert Hole(1) == Hole(1) != Hole(2) and hash(Hole(1)) == hash(Hole(1))
    assert Written((1,), True) == Written((1,), True) != Written((1,), False)
    assert jax.tree.structure([Hole(1)]) == jax.tree.structure([Hole(1)])
    assert jax.tree.leaves([Hole(1), Written((), True)]) == []


def test_objects_among_the_arguments():
    m, n = Model(), Model()
    at, names = objects_at_top(options(), (1.0, m, [n]), {"z": n, "a": m, "b": 2})
    assert at == [(1, m)] and [name for name, _ in names] == ["a", "z"]
    assert has_objects([1, {"a": m}]) and has_objects(m.a) and not has_objects([1, None])
    with pytest.raises(TransformArgumentError, match="remove the argument there"):
        objects_at_top(options(static_argnums=0), (m,), {})


def test_models_that_look_alike_have_one_layout():
    def layout(*args, **kwargs):
        return found_at_top(options(donate_argnums=0), args, kwargs).layout

    m, n = Model(), Model()
    assert layout(m, 1.0) == layout(n, 2.0) and hash(layout(m, 1.0)) == hash(layout(n, 2.0))
    assert layout(m, n) != layout(m, m)
    assert layout(m) != layout(m, 1.0) != layout(1.0, m) != layout(m, x=1.0) != layout(x=m)
    assert layout(m) != layout(Model(k=1)) and layout(Model(k=1)) != layout(Model(k=True))
    before = layout(m)
    m.a.set_metadata(tag="t")
    assert layout(m) != before
    m.a.del_metadata("tag")
    assert layout(m) == before
    m.b = m.a
    assert layout(m) != before


def test_a_call_taken_apart():
    m, n = Model(), Model()
    found = found_at_top(options(), (m, 1.0), {"n": n, "x": 2.0})
    assert found.rest == [1.0] and found.named == {"x": 2.0}
    assert found.layout.at == (0,) and found.layout.names == ("n",)
    assert found.flat.leaves[0] is m.a and found.flat.leaves[2] is n.a
    assert found.can_be_planned
    found = found_anywhere(options(), ({"m": m}, 1.0), {"n": n})
    assert found.rest == [{"m": Hole(0)}, 1.0] and found.named == {"n": Hole(1)}
    assert found.layout.at == () and found.layout.names == ()


def test_what_cannot_be_planned():
    def can(*args):
        return found_at_top(options(), args, {}).can_be_planned

    m = Model()
    assert can(m) and can() and not can(m.a)
    m.k = jnp.ones(1)
    assert not can(m)
    m.k = object()
    assert not can(m)
    m.k = (1, "a", jnp.float32, jax.nn.relu, jax.sharding.PartitionSpec("x"))
    assert can(m)
    m.a.set_metadata(xs=[1])
    assert not can(m)


def test_values_that_have_not_changed_do_not_come_back():
    @nnx.jit
    def f(m, x):
        m.a[...] = m.a + 0 * x
        m.b[...] = m.b[...]
        return x

    m = Model()
    before = m.a[...], m.b[...]
    f(m, 1.0)
    assert m.a[...] is not before[0] and m.b[...] is before[1]
    text = f.lower(m, 1.0).as_text()
    assert text.count("jax.result_info") == 2


def test_an_object_in_a_container_is_found_in_the_trace_alone(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "weft.nnx.transforms.jit.found_anywhere",
        lambda *args: calls.append(1) or jit_program.found_anywhere(*args),
    )
    f, m, n = nnx.jit(lambda m, x: m.a + jax.tree.leaves(x)[0]), Model(), Model()
    assert f(m, 1.0).tolist() == [2, 2] and f(m, 1.0).tolist() == [2, 2] and not calls
    assert f(m, [n]).tolist() == [2, 2] and calls == [1]
    assert f(m, 1.0).tolist() == [2, 2] and calls == [1]


def test_a_model_is_looked_at_once_for_each_structure(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "weft.nnx.transforms.jit.found_at_top",
        lambda *args: calls.append(1) or jit_program.found_at_top(*args),
    )
    f, m = nnx.jit(lambda m, x: m.a * x), nnx.List([Model() for _ in range(10)])
    g = nnx.jit(lambda m, x: m[0].a * x)
    for _ in range(3):
        g(m, 1.0)
        g(m, x=1.0)
    assert len(calls) == 3  # the first time to watch it, then once for each way to give it
    m[3].k = 2
    for _ in range(3):
        g(m, 1.0)
    assert len(calls) == 4
    with pytest.raises(AttributeError):
        f(m, 1.0)
