import copy
import dataclasses
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import AttributeMarkError, TraceContextError


class Box(nnx.Pytree):
    def __init__(self, **attributes):
        for name, value in attributes.items():
            setattr(self, name, value)


def leaves(**attributes):
    return jax.tree.leaves(Box(**attributes))


def test_explicit_marks():
    assert leaves(a=nnx.data(1), b=nnx.static("x"), c=2) == [1]
    assert leaves(a=nnx.data(None), b=nnx.data((1, 2))) == [1, 2]
    box = Box(a=nnx.data(1), b=nnx.Param(1), c=jnp.ones(1), d=nnx.static(1))
    box.a, box.b, box.c, box.d = 5, 6, 7, 8
    assert jax.tree.leaves(box) == [5, 6, 7] and nnx.to_pure_dict(nnx.state(box))["b"] == 6
    box.b = "text"
    del box.a
    box.a = 1
    assert jax.tree.leaves(box) == ["text", 7]


def test_invalid_marks():
    with pytest.raises(AttributeMarkError, match=r"Box.a is static, and was given a ArrayImpl"):
        Box(a=nnx.static(jnp.ones(1)))
    box = Box(a=nnx.static(1))
    with pytest.raises(AttributeMarkError, match=r"remove nnx.static"):
        box.a = [nnx.Param(1)]
    assert box.a == 1
    with pytest.raises(AttributeMarkError, match=r"nnx.data\(1\) is inside a tuple"):
        Box(a=(nnx.data(1),))


def test_fields_and_annotations():
    @nnx.dataclass
    class A(nnx.Pytree):
        a: int = nnx.data()
        b: int = nnx.static(default=3)
        c: int = 4

    @dataclasses.dataclass
    class B(A):
        d: float = nnx.data(default=5.0)

    class C(nnx.Pytree):
        a: nnx.Data[int]
        b: "nnx.Data[float]"
        c: nnx.Static[Any]

        def __init__(self):
            self.a, self.b, self.c = 1, 2.0, 3

    assert jax.tree.leaves(A(1)) == [1] and A(1) == A(1) and A(1) != A(2) and A(1).b == 3
    assert jax.tree.leaves(B(1)) == [1, 5.0] and jax.tree.leaves(C()) == [1, 2.0]
    with pytest.raises(AttributeMarkError, match=r"A.b is static"):
        A(1, b=jnp.ones(1))  # pyright: ignore[reportArgumentType]
    assert repr(A(1)).startswith("A(\n  a=1")

    @nnx.dataclass(frozen=False, eq=False)
    class D(nnx.Pytree):
        a: int = 0

    assert D() != D()


def test_data_attribute_stays_data():
    box = Box(a=jnp.ones(1), b=nnx.Param(1), c=2)
    numbers = jax.tree.map(lambda x: 0, box)
    assert jax.tree.leaves(numbers) == [0, 0]
    assert jax.tree.structure(numbers) == jax.tree.structure(box)
    assert jax.vmap(lambda box: box.a * box.b, in_axes=(numbers,))(
        Box(a=jnp.ones(2), b=nnx.Param(jnp.ones(2)), c=2)
    ).shape == (2,)


def test_each_trace_has_its_own_objects():
    box = Box(w=nnx.Param(jnp.ones(2)))

    @jax.jit
    def step(box, x):
        box.w[...] = box.w + x
        box.last = x
        return box

    new = step(box, 1.0)
    assert new.w[...].tolist() == [2, 2] and new.last == 1 and not hasattr(box, "last")
    grads = jax.grad(lambda box: jnp.sum(box.w**2))(box)
    assert type(grads) is Box and grads.w[...].tolist() == [2, 2]
    with pytest.raises(TraceContextError, match="a Box is changed inside of a JAX transformation"):
        jax.jit(lambda x: setattr(box, "y", x))(1.0)
    assert list(vars(box)) == ["_info", "w"]


def test_pytree_false():
    class Opaque(nnx.Pytree, pytree=False):
        def __init__(self):
            self.w = nnx.Param(1)

    opaque = Opaque()
    assert jax.tree.leaves(opaque) == [opaque]
    assert nnx.to_pure_dict(nnx.state(opaque)) == {"w": 1}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_keep_references_marks_and_cycles(copied):
    box = Box(a=nnx.data(1), w=nnx.Param(2), xs=[1])
    box.same, box.me = box.w, box
    new = copied(box)
    assert new.same is new.w is not box.w and new.me is new and new.xs is not box.xs
    new.a = 5
    assert nnx.flatten(new)[1].leaves[0] == 5


def test_properties_and_slots_of_subclasses_work():
    class Scaled(nnx.Pytree):
        def __init__(self):
            self._w = nnx.Param(1)

        @property
        def w(self):
            return self._w

        @w.setter
        def w(self, value):
            self._w = value

    scaled = Scaled()
    scaled.w = nnx.Param(2)
    assert nnx.to_pure_dict(nnx.state(scaled)) == {"_w": 2}


def test_similar_trees_differ():
    def tree(**attributes):
        module = nnx.Module()
        for name, value in attributes.items():
            setattr(module, name, value)
        return jax.tree.structure(module)

    assert tree(a=1, w=nnx.Param(1)) == tree(w=nnx.Param(2), a=1)
    trees = [tree(a=1), tree(a=True), tree(a=1.0), tree(a=nnx.data(1)), tree(b=1), tree(a=(1,))]
    trees += [jax.tree.structure(nnx.Dict({key: 1})) for key in (1, True, "1")]
    for i, a in enumerate(trees):
        for j, b in enumerate(trees):
            assert (a == b) == (i == j), (a, b)
            assert i != j or hash(a) == hash(b)
