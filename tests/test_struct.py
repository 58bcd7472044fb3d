import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft import struct
from weft.errors import AbstractPyTreeNodeError, StructDefinitionError
from weft.struct import VDict, map_blocks


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


def test_fields_are_pytree_nodes_by_default():
    p = Point(jnp.ones(2), name="q")
    doubled = jax.jit(lambda p: jax.tree.map(lambda x: 2 * x, p))(p)
    np.testing.assert_array_equal(doubled.x, [2, 2])
    assert doubled.name == "q"
    assert jax.tree.structure(p) != jax.tree.structure(p.replace(name="r"))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(p)]
    assert paths == [".x"]


def test_subclasses_are_separate_nodes():
    assert jax.tree.leaves(Point3(1.0, z=2.0)) == [1.0, 2.0]


def test_are_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Point(1.0).x = 2.0
    assert Point(1.0).replace(x=3.0) == Point(3.0)


def test_custom_replace_and_repeated_decoration():
    assert Decorated(1).replace() == "own"
    assert struct.dataclass(Decorated) is Decorated


def test_fields_without_init_are_recomputed():
    class Scaled(struct.PyTreeNode):
        x: float
        double: float = struct.field(init=False, default=0.0)

        def __post_init__(self):
            object.__setattr__(self, "double", 2 * self.x)

    made = jax.tree.map(lambda x: x + 1, Scaled(1.0))
    assert jax.tree.leaves(made) == [2.0]
    assert made.double == made.replace(x=2.0).double == 4.0


def test_non_classes_are_rejected():
    with pytest.raises(StructDefinitionError, match=r"struct\.dataclass was given 3, which is not"):
        struct.dataclass(3)


def test_base_class_has_no_instances():
    with pytest.raises(AbstractPyTreeNodeError, match="PyTreeNode has no fields to be made from"):
        struct.PyTreeNode()


def test_jit_distinguishes_classes_with_equal_fields():
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


RNG = np.random.default_rng(0)


def rms(x, y):
    return jnp.sqrt(jnp.mean(x * y))


def test_pytree_paths_match_dict():
    tree = {"a": VDict(w=1, b=2)}
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    assert [jax.tree_util.keystr(path) for path in paths] == ["['a']['b']", "['a']['w']"]
    doubled = jax.tree.map(lambda x: 2 * x, tree)["a"]
    assert doubled == VDict(w=2, b=4)
    assert type(doubled) is VDict
    assert repr(VDict(w=1)) == "VDict({'w': 1})"


def test_blocks_are_layers_of_stacked_trees():
    plain, stacked, twice = (RNG.normal(size=s) for s in ((3, 4), (2, 3, 4), (5, 2, 3, 4)))
    tree = {"a": plain, "b": VDict(c={"w": stacked}), "d": VDict(e=VDict(w=twice))}
    out = map_blocks(rms, tree, tree)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    np.testing.assert_allclose(out["a"], np.sqrt(np.mean(plain**2)), rtol=1e-6)
    np.testing.assert_allclose(out["b"]["c"]["w"], np.sqrt(np.mean(stacked**2, (1, 2))), rtol=1e-6)
    np.testing.assert_allclose(out["d"]["e"]["w"], np.sqrt(np.mean(twice**2, (2, 3))), rtol=1e-6)


def test_blocks_without_arrays_stay_as_they_are():
    assert map_blocks(rms, {"a": VDict(w=None)}, {"a": VDict(w=None)}) == {"a": VDict(w=None)}


def test_works_in_transformations():
    tree = VDict(w=jnp.arange(3.0))
    grads = jax.jit(jax.grad(lambda t: jnp.sum(t["w"] ** 2)))(tree)
    assert type(grads) is VDict
    np.testing.assert_array_equal(grads["w"], [0.0, 2.0, 4.0])
