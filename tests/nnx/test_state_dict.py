import collections

import jax
import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import OptimizerStateError
from weft.nnx.graph import take_apart
from weft.nnx.state_dict import StateDict, kept, leaves_of, matched, raw, values_of

Pair = collections.namedtuple("Pair", ["a", "b"])


def variable(path, x):
    return nnx.Variable(raw(x), path=path)


def tree():
    state = nnx.State({"l": {"w": nnx.Param(jnp.ones(2))}, 0: nnx.Param(1.0)})
    return Pair(({"n": 3}, state), [None, 2.0, ()])


def test_a_pytree_is_kept_in_variables_and_given_back():
    there = kept(tree(), variable)
    assert type(there) is Pair and type(there.a[1]) is StateDict and type(there.b) is nnx.List
    assert there.b[0] is None and there.b[2] == () and there.a[0].n[...] == 3
    assert there.a[1]["l"]["w"].path == ("l", "w") and there.a[0].n.path == (0, 0, "n")
    back = values_of(there)
    assert type(back.a[1]) is nnx.State and type(back.a[0]) is dict and back.b == [None, 2.0, ()]
    assert jax.tree.structure(back) == jax.tree.structure(
        jax.tree.map(raw, tree(), is_leaf=lambda x: isinstance(x, nnx.Variable))
    )


def test_what_is_kept_notices_changes():
    class Holder(nnx.Module):
        def __init__(self):
            self.kept = kept(nnx.state(nnx.Dict(w=nnx.Param(1.0))), variable)

    assert take_apart(Holder()).is_sure
    graphdef = nnx.graphdef(holder := Holder())
    holder.kept["v"] = nnx.Param(2.0)
    assert nnx.graphdef(holder) != graphdef


def test_a_state_dict_stands_for_a_state():
    model = nnx.Dict(a=nnx.Dict(w=nnx.Param(1.0)))
    there = StateDict({"a": {"w": nnx.Param(2.0)}})
    assert nnx.to_flat_state(there).paths == (("a", "w"),)
    nnx.update(model, there)
    assert model.a.w[...] == 2.0
    assert nnx.merge(nnx.graphdef(model), there).a.w is there.a.w


def test_values_find_their_variables():
    there = kept(tree(), variable)
    new = jax.tree.map(lambda x: x + 1, values_of(there))
    assert [float(jnp.sum(v)) for _, v in matched(there, new)] == [4.0, 2.0, 4.0, 3.0]
    with pytest.raises(OptimizerStateError, match=r"has a, b at 'its root', but .* returned 0, 1"):
        list(matched(there, tuple(new)))
    with pytest.raises(OptimizerStateError, match=r"has n at 'a/0', .* returned \{\} for it; an"):
        list(matched(there, new._replace(a=({}, new.a[1]))))


def test_leaves_by_path():
    model = nnx.Dict(a=[nnx.Param(1), jnp.ones(1)], b=None)
    model.c = model.a[0]
    model.me = nnx.data(model)
    assert list(leaves_of(model)) == [("a", 0), ("a", 1)]
    assert list(leaves_of(nnx.state(model))) == [("a", 0), ("a", 1)]
    shared = nnx.Param(1)
    tree = {"a": [shared, {}, ()], "b": shared, "c": None}
    assert list(leaves_of(tree)) == [("a", 0), ("b",)]
    assert list(leaves_of(tree, once=True)) == [("a", 0)]
    assert leaves_of(3) == {(): 3}


def test_raw_values():
    assert raw(nnx.Param(1, on_get_value=lambda v, x: x + 1)) == 1 and raw(2) == 2
    assert isinstance(raw(nnx.Param(jnp.ones(1), ref=True)), jax.Array)
