import jax
import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import GraphStructureError, ImmutableVariableError, VariableArgumentError
from weft.nnx.holding import vars_as, with_vars


class Node(nnx.Module):
    """Variables, one of them shared, and a value that is none."""

    def __init__(self):
        self.w, self.n = nnx.Param(jnp.ones(2)), nnx.BatchStat(jnp.zeros(()))
        self.name = "node"


def is_held(variable):
    return isinstance(variable.get_raw_value(), jax.Ref)


@pytest.mark.parametrize("name", ["ref", "hijax"])
def test_values_in_references_and_back(name):
    node = Node()
    held = vars_as(node, **{name: True})
    assert held is not node and is_held(held.w) and is_held(held.n) and not is_held(node.w)
    assert held.name == "node" and held.w.get_metadata() == {name: True}

    @jax.jit
    def step(node):
        node.w[...] += 1

    step(held)
    step(held)
    back = vars_as(held, **{name: False})
    assert back.w[...].tolist() == [3, 3] and not is_held(back.w) and back.w.get_metadata() == {}
    assert node.w[...].tolist() == [1, 1]


def test_only_some_of_them_and_those_that_are_so_already():
    node = Node()
    held = vars_as(node, ref=True, only=nnx.Param)
    assert is_held(held.w) and held.n is node.n
    assert vars_as(held, ref=True, only=nnx.Param).w is held.w
    assert vars_as(node).w is node.w and vars_as(3, ref=True) == 3
    assert is_held(vars_as({"a": [nnx.Param(1.0)]}, ref=True)["a"][0])
    assert with_vars is vars_as


def test_values_that_stay():
    node = vars_as(Node(), mutable=False)
    with pytest.raises(ImmutableVariableError, match="Param of shape"):
        node.w[...] = 0
    again = vars_as(node, mutable=True)
    again.w[...] = 0
    assert again.w.get_metadata() == {} and node.w[0] == 1


def test_variables_that_are_there_twice():
    node = Node()
    node.again = node.w
    with pytest.raises(GraphStructureError, match="the variable at 'again' is also at 'w'"):
        vars_as(node, ref=True)
    held = vars_as(node, ref=True, allow_duplicates=True)
    assert held.w is held.again and is_held(held.w)
    assert is_held(vars_as(node, ref=True, only=nnx.BatchStat).n)
    assert vars_as(node).again is node.w


def test_values_that_a_reference_cannot_hold():
    with pytest.raises(VariableArgumentError, match="Cache with ref=True was given a tuple"):
        vars_as([nnx.Cache((1, 2))], ref=True)
