import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft import struct
from weft.errors import AbstractPyTreeNodeError, StructDefinitionError


class Point(struct.PyTreeNode):
    x: jax.Array
    name: str = struct.field(pytree_node=False, default="p")


class Point3(Point):
    z: float = 0.0


@struct.dataclass
class Decorated:
    x: int

    def replace(self, **kwargs):
        return "own"


def test_fields_are_children_unless_they_say_otherwise():
    p = Point(jnp.ones(2), name="q")
    doubled = jax.jit(lambda p: jax.tree.map(lambda x: 2 * x, p))(p)
    np.testing.assert_array_equal(doubled.x, [2, 2])
    assert doubled.name == "q"
    assert jax.tree.structure(p) != jax.tree.structure(p.replace(name="r"))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(p)]
    assert paths == [".x"]


def test_subclasses_are_nodes_of_their_own():
    assert jax.tree.leaves(Point3(1.0, z=2.0)) == [1.0, 2.0]


def test_they_are_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Point(1.0).x = 2.0
    assert Point(1.0).replace(x=3.0) == Point(3.0)


def test_a_class_keeps_its_own_replace_and_is_made_once():
    assert Decorated(1).replace() == "own"
    assert struct.dataclass(Decorated) is Decorated


def test_fields_without_init_are_made_anew():
    class Scaled(struct.PyTreeNode):
        x: float
        double: float = struct.field(init=False, default=0.0)

        def __post_init__(self):
            object.__setattr__(self, "double", 2 * self.x)

    made = jax.tree.map(lambda x: x + 1, Scaled(1.0))
    assert jax.tree.leaves(made) == [2.0]
    assert made.double == made.replace(x=2.0).double == 4.0


def test_only_classes_are_made_structs():
    with pytest.raises(StructDefinitionError, match=r"struct\.dataclass was given 3, which is not"):
        struct.dataclass(3)


def test_the_base_class_has_no_instances():
    with pytest.raises(AbstractPyTreeNodeError, match="PyTreeNode has no fields to be made from"):
        struct.PyTreeNode()


def test_classes_with_equal_fields_are_not_mixed_up_by_jit():
    def a_class():
        class Box(struct.PyTreeNode):
            value: jax.Array

        return Box

    # JAX compares structures by a part of their hash first, so it takes many to see it.
    for _ in range(100):
        one, other = a_class(), a_class()
        assert jax.tree.structure(one(1.0)) != jax.tree.structure(other(1.0))
        same = jax.jit(lambda tree: tree)
        same(one(jnp.ones(1)))
        assert type(same(other(jnp.ones(1)))) is other
