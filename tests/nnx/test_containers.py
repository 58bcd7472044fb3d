import copy
import pickle

import jax
import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import AttributeMarkError, GraphStructureError


def test_list_is_a_list_and_a_module():
    xs = nnx.List([1, 2])
    xs.append(3)
    xs.insert(0, 0)
    xs.extend([4, 5])
    xs += [6]
    xs[0] = 9
    del xs[1]
    xs.remove(3)
    xs.reverse()
    assert (
        list(xs) == [6, 5, 4, 2, 9] and xs.pop() == 9 and xs[1:3] == [5, 4] and xs == [6, 5, 4, 2]
    )
    xs.sort(key=lambda x: -x, reverse=True)
    assert xs == [2, 4, 5, 6] and xs.index(5) == 2 and 7 not in xs
    xs *= 2
    assert len(xs) == 8 and isinstance(xs, list | nnx.Module)
    with pytest.raises(TypeError, match="unhashable"):
        hash(xs)


def test_dict_is_a_dict_and_a_module_with_attributes():
    d = nnx.Dict({"a": 1}, b=2)
    d.c = 3
    d |= {"d": 4}
    del d.a
    assert d == {"b": 2, "c": 3, "d": 4} and d.c == 3 and d.pop("b") == 2
    assert d.setdefault("z", 8) == 8 and d.get("q") is None and isinstance(d, nnx.Module)
    with pytest.raises(AttributeError, match=r"the Dict has no 'q'; there are: 'c', 'd', 'z'"):
        d.q  # noqa: B018
    with pytest.raises(AttributeError, match="the Dict has no 'q' to delete"):
        del d.q
    assert not hasattr(nnx.Dict(), "__wrapped__")


def test_plain_lists_dicts_and_tuples_work_as_attributes():
    class Model(nnx.Module):
        def __init__(self):
            self.layers = [nnx.Param(1), {"a": nnx.Param(2)}]
            self.pair = (nnx.Param(3), [nnx.Param(4)])

    model = Model()
    model.layers[1]["b"] = [nnx.Param(5)]
    assert nnx.to_pure_dict(nnx.state(model)) == {
        "layers": {0: 1, 1: {"a": 2, "b": {0: 5}}},
        "pair": {0: 3, 1: {0: 4}},
    }
    assert type(model.layers[1]["b"]) is type(model.pair[1]) is nnx.List
    merged = nnx.merge(*nnx.split(model))
    assert type(merged.pair) is tuple and type(merged.layers[1]) is nnx.Dict


def test_marks_move_with_the_items():
    xs = nnx.List([nnx.data(3), 2, nnx.data(1)])
    assert jax.tree.leaves(xs) == [3, 1]
    xs.insert(0, 0)
    assert jax.tree.leaves(xs) == [3, 1]
    xs.sort()
    assert list(xs) == [0, 1, 2, 3] and jax.tree.leaves(xs) == [1, 3]
    assert xs.pop(1) == 1 and jax.tree.leaves(xs) == [3]
    d = nnx.Dict(a=nnx.data(1), b=2)
    assert jax.tree.leaves(d) == [1] and nnx.to_pure_dict(nnx.state(d)) == {"a": 1}
    d["a"] = "x"
    assert jax.tree.leaves(d) == []


def test_failed_change_leaves_them_unchanged():
    xs, d = nnx.List([nnx.data(1), 2]), nnx.Dict(a=nnx.data(1))
    for change in (
        lambda: xs.pop(9),
        lambda: xs.append((nnx.data(1),)),
        lambda: xs.extend([3, nnx.static(jnp.ones(1))]),
        lambda: xs.extend(1 // 0 for _ in range(2)),
        lambda: d.update(b=(nnx.data(1),)),
        lambda: d.update(b=nnx.static(nnx.Param(1))),
        lambda: d.pop("q"),
    ):
        with pytest.raises((IndexError, KeyError, AttributeMarkError, ZeroDivisionError)):
            change()
    assert xs == [1, 2] and d == {"a": 1} and jax.tree.leaves([xs, d]) == [1, 1]
    with pytest.raises(AttributeMarkError, match=r"List.2 is static, and was given a ArrayImpl"):
        xs.append(nnx.static(jnp.ones(1)))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_keep_cycles_and_marks(copied):
    xs = nnx.List([nnx.data(1), 2])
    d = nnx.Dict({"xs": xs, 3: nnx.data(4)})
    xs.append(d)
    xs.note = "n"
    new = copied(xs)
    assert new[2]["xs"] is new and new is not xs and new.note == "n"
    assert [v for _, v in nnx.flatten(new)[1]] == [1, 4]
    assert nnx.graphdef(new) == nnx.graphdef(xs)


def test_objects_in_non_pytree_list_are_rejected():
    class Layers(list):
        pass

    class Model(nnx.Module):
        def __init__(self):
            self.layers, self.sizes = Layers([nnx.Param(1.0)]), Layers([1, 2])

    text = r"the Layers at layers holds a Param, but is not a pytree to JAX; use nnx.List or"
    with pytest.raises(GraphStructureError, match=text):
        nnx.split(Model())


def test_static_container_stays_static():
    """Also where another item comes, and where another attribute is given it."""
    xs = nnx.Dict(a=nnx.static([1]), b=nnx.static((1, {"c": 2})))
    xs["d"] = nnx.Param(1.0)
    xs.e = nnx.static(xs.a)
    assert xs.e is xs.a == [1]
    assert jax.tree.leaves(xs) == [1.0]
    with pytest.raises(AttributeMarkError, match=r"Dict\.e is static"):
        xs.e = nnx.static(nnx.List([nnx.Param(1.0)]))
    with pytest.raises(AttributeMarkError, match=r"Dict\.e is static"):
        xs.e = nnx.static(nnx.List([nnx.data(1.0)]))
