import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import AttributeMarkError, ObjectArgumentError
from weft.nnx.checks import check_pytree


class Node(nnx.Module):
    """Anything."""


def test_objects_whose_attributes_are_what_was_said():
    node = Node()
    node.a, node.b, node.c = 1, nnx.static((1, 2)), nnx.data(3)
    node.w, node.xs = nnx.Param(jnp.ones(1)), nnx.List([jnp.ones(1)])
    check_pytree(node)


def test_data_that_came_into_a_static_attribute():
    node, outer = Node(), Node()
    node.options = nnx.static({"a": 1})
    outer.below = nnx.List([node])
    check_pytree(outer)
    node.options["b"] = jnp.ones(1)
    with pytest.raises(
        AttributeMarkError, match="Node has a Dict with data in it at 'below/0/options'"
    ):
        check_pytree(outer)


def test_what_is_no_object():
    with pytest.raises(ObjectArgumentError, match="check_pytree was given a dict"):
        check_pytree({"a": 1})
