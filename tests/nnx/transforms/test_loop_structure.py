"""Structure of objects in loops: carried and shared ones keep it, mapped ones may change it."""

from typing import NamedTuple

import jax.numpy as jnp
import pytest

from tests.nnx.transforms.test_loops import fori, scan, while_
from weft import nnx
from weft.errors import LoopStructureError


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.float32(2.0))
        self.total = nnx.Variable(jnp.float32(0.0))
        self.items, self.table = nnx.List([]), nnx.Dict()
        self.name, self.x = "old", jnp.zeros(2)


def replace_variable(m, i):
    m.cache = nnx.BatchStat(m.w[...] * (i + 1))
    m.total[...] += m.cache[...]


def test_carried_variable_may_be_replaced():
    m = Model()
    m.cache = before = nnx.BatchStat(jnp.float32(7.0))
    fori(replace_variable, m, 2)
    assert m.cache is not before and (float(m.cache), float(before)) == (4, 7)
    assert float(m.total) == 6


def replace_part(m, i):
    m.part = Model()


@pytest.mark.parametrize(
    ("replace", "message"),
    [
        (replace_variable, r"nnx\.while_loop.*replaces the variable at \S+\.cache.*and write to"),
        (replace_part, r"nnx\.while_loop.*changes a reference or static value at \S+\.part"),
    ],
)
def test_while_loop_keeps_the_objects_of_its_carry(replace, message):
    m = Model()
    m.cache, m.part = nnx.BatchStat(jnp.float32(7.0)), Model()
    with pytest.raises(LoopStructureError, match=message):
        while_(replace, m, 2)


def test_mapped_objects_may_gain_parts():
    @nnx.scan(in_axes=(0, 0), out_axes=0)
    def body(m, i):
        m.part = nnx.Dict(b=nnx.Variable(m.w[...] * i), size=3)
        m.sow(nnx.Intermediate, "h", i)
        return i

    m = nnx.Dict(w=nnx.Param(jnp.ones(3)))
    body(m, jnp.arange(3.0))
    assert m.part.b[...].tolist() == [0, 1, 2] and m.part.size == 3
    assert m.h[...][0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(("before", "after"), [("none", "part"), ("part", "none")])
def test_slices_replace_static_values_by_objects(before, after):
    values = {"none": lambda w: "none", "part": lambda w: nnx.Dict(w=nnx.Param(w))}
    m = nnx.Dict(x=nnx.Param(jnp.arange(3.0)), child=values[before](jnp.ones(3)))

    @nnx.scan(in_axes=0, out_axes=0)
    def replace(m):
        m.child = values[after](m.x + 1)
        return 2 * m.x

    assert replace(m).tolist() == [0, 2, 4]
    assert m.child == "none" if after == "none" else m.child.w.tolist() == [1, 2, 3]


def static_value(m, i):
    m.name = "new"


def attribute(m, i):
    m.cache = nnx.Variable(m.w[...])


def array(m, i):
    m.y = jnp.zeros(2)


def item(m, i):
    m.items.append(nnx.Variable(m.w[...]))


def item_of_dict(m, i):
    m.table["a"] = jnp.zeros(2)


def sow(m, i):
    m.sow(nnx.Intermediate, "h", m.w[...] * i)


def alias(m, i):
    m.old = m.w


def swap(m, i):
    m.w, m.total = m.total, m.w


def other_class(m, i):
    m.total = nnx.Param(1.0)


def removed(m, i):
    del m.x


REFUSED = {
    static_value: r"changes a reference or static value at \S+\.name",
    attribute: r"makes an attribute at \S+\.cache.*Create the attribute before the loop",
    array: r"makes an attribute at \S+\.y",
    item: r"makes an attribute at \S+\.items\[0\]",
    item_of_dict: r"makes an attribute at \S+\.table\.a",
    sow: r"makes an attribute at \S+\.h",
    alias: r"makes an attribute at \S+\.old",
    swap: r"replaces the variable at \S+\.total",
    other_class: r"replaces the variable at \S+\.total",
    removed: r"removes the attribute at \S+\.x",
}


@pytest.mark.parametrize("loop", [fori, while_, scan])
@pytest.mark.parametrize("change", REFUSED)
def test_carried_objects_keep_their_structure(change, loop):
    m = Model()
    before = nnx.graphdef(m)
    with pytest.raises(LoopStructureError, match=REFUSED[change]):
        loop(change, m, 3)
    assert nnx.graphdef(m) == before


def test_container_of_another_class_is_refused():
    class Pair(NamedTuple):
        first: object

    def body(_, m):
        m.x = Pair(*m.x)
        return m

    with pytest.raises(LoopStructureError, match=r"at m\.x"):
        nnx.fori_loop(0, 2, body, nnx.Dict(x=nnx.data((nnx.Param(jnp.ones(2)),))))
