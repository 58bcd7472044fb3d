from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import (
    AttributeMarkError,
    GraphStructureError,
    ObjectArgumentError,
    TraceContextError,
)
from weft.nnx.graph import build_graph, check_pytree, flatten_graph


class Pair(NamedTuple):
    a: object
    b: object


class Node(nnx.Module):
    def __init__(self, w=0.0, **attributes):
        self.w = nnx.Param(w)
        for name, value in attributes.items():
            setattr(self, name, value)


def test_graphdef_compares_by_value():
    def make(**changes):
        return nnx.graphdef(Node(**{"w": jnp.ones(1), "n": 1, "f": jax.nn.relu, **changes}))

    assert make() == make() and hash(make()) == hash(make()) and make() == make(w=jnp.zeros(3))
    assert make() != make(n=2) and make() != make(n=1.0) and make() != make(f=jax.nn.gelu)
    assert make() != make(more=jnp.ones(1)) and make() != 1
    assert make(n=nnx.data(1)) == make(n=nnx.data(2)) != make(n=1)
    shared = nnx.Param(1)
    assert make(a=shared, b=shared) != make(a=nnx.Param(1), b=nnx.Param(1))
    assert make(a=nnx.Param(1)) != make(a=nnx.Cache(1)) != make(a=nnx.Cache(1, tag="t"))
    assert make().num_leaves == 1 and make().paths == (("w",),)
    assert repr(make()) == "GraphDef(Node, 2 nodes, 1 leaves)"
    assert [node.type for node in make().nodes] == [Node, nnx.Param]
    assert [name for name, _ in make().attributes] == ["f", "n", "w"]


def test_number_replacing_data_keeps_the_graphdef():
    node = Node(buffer=jnp.zeros(()))
    before = nnx.graphdef(node)
    node.buffer = jnp.ones(())
    assert nnx.graphdef(node) == before
    node.buffer = 1.0
    merged = nnx.merge(*nnx.split(node))
    assert merged.buffer == 1.0 and nnx.state(merged)["buffer"] == 1.0


def test_sharing_and_cycles_are_kept():
    leaf = Node(2.0)
    root = Node(1.0, a=leaf, b=[leaf, leaf.w], pair=Pair(leaf, {"w": leaf.w}))
    leaf.parent = root
    graphdef, state = nnx.split(root)
    new = nnx.merge(graphdef, state, copy=True)
    assert new.a is new.b[0] is new.pair.a and new.b[1] is new.a.w is new.pair.b["w"]
    assert new.a.parent is new and new.a.w is not leaf.w and type(new.pair) is Pair
    assert nnx.to_pure_dict(state) == {"a": {"w": 2.0}, "w": 1.0}


class Counter(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.zeros(()))
        self.name = "new"


def test_value_count_must_match():
    flat = flatten_graph(Counter())
    for values in ([], [1, 2]):
        with pytest.raises(
            GraphStructureError, match=f"has 1 values, and {len(values)} were given"
        ):
            build_graph(flat.graphdef, values)
    node, objects = build_graph(flat.graphdef, [5])
    assert node.w[...] == 5 and objects == [node, objects[1]] and objects[1] is node.w


def test_existing_objects_are_updated():
    before, after = Counter(), nnx.List([Counter()])
    after[0].name = "other"
    made, _ = build_graph(flatten_graph(after).graphdef, [7], existing={1: before})
    assert made[0] is before and before.name == "other"


@pytest.mark.parametrize("transform", [nnx.vmap, nnx.jit], ids=["vmap", "jit"])
def test_rejected_call_changes_nothing(transform):
    outside = Counter()

    @jax.jit
    def refused(x):
        inside = Counter()
        kwargs = {"in_axes": (0, None, None)} if transform is nnx.vmap else {}

        @(lambda fn: transform(fn, **kwargs))
        def change(x, first, second):
            first.name = second.name = "changed"
            return x

        with pytest.raises(TraceContextError, match="created outside"):
            change(x, inside, outside)
        assert (inside.name, outside.name) == ("new", "new")
        return x

    refused(jnp.ones(2))


class Checked(nnx.Module):
    """Anything."""


def test_consistent_attributes_pass():
    node = Checked()
    node.a, node.b, node.c = 1, nnx.static((1, 2)), nnx.data(3)
    node.w, node.xs = nnx.Param(jnp.ones(1)), nnx.List([jnp.ones(1)])
    check_pytree(node)


def test_data_added_to_static_attribute():
    node, outer = Checked(), Checked()
    node.options = nnx.static({"a": 1})
    outer.below = nnx.List([node])
    check_pytree(outer)
    node.options["b"] = jnp.ones(1)
    with pytest.raises(
        AttributeMarkError, match="Checked has a Dict with data in it at 'below/0/options'"
    ):
        check_pytree(outer)


def test_non_object():
    with pytest.raises(ObjectArgumentError, match="check_pytree was given a dict"):
        check_pytree({"a": 1})
