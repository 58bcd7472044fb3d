import jax
import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import ObjectArgumentError, StateFilterError
from weft.nnx.prefixes import prefix
from weft.nnx.transforms.symbols import StateAxes


class Node(nnx.Module):
    """Anything, with a name and variables."""

    def __init__(self):
        self.w, self.n = nnx.Param(jnp.ones((3, 2))), nnx.BatchStat(jnp.ones(()))
        self.name, self.xs = "node", nnx.List([nnx.Cache(jnp.ones((2, 3)))])


AXES = {nnx.Param: 0, nnx.PathContains("xs"): 1, ...: None}


@pytest.mark.parametrize("axes", [AXES, StateAxes(AXES)], ids=["dict", "StateAxes"])
def test_it_stands_where_jax_takes_a_prefix(axes):
    node = Node()
    made = prefix(node, axes)
    assert (made.w, made.n, made.xs[0], made.name) == (0, None, 1, "node")
    f = jax.vmap(lambda m, x: m.w.sum() + m.xs[0].sum() + m.n * x, in_axes=(made, None))
    assert f(node, 2.0).tolist() == [6, 6, 6]


def test_states_values_and_functions():
    tree = [nnx.state(Node()), {"a": jnp.ones(1), "b": 3}]
    by_filter = prefix(tree, {nnx.Param: "p", ...: "x"})
    assert by_filter[0].w == "p" and by_filter[1] == {"a": "x", "b": "x"}
    paths = prefix(tree, lambda path, x: (path, type(x).__name__))
    assert paths[0].xs[0] == ((0, "xs", 0), "Cache") and paths[1]["b"] == ((1, "b"), "int")


def test_what_no_filter_matches():
    with pytest.raises(StateFilterError, match="'n', a BatchStat; the filters are Param; add"):
        prefix(Node(), {nnx.Param: 0})
    with pytest.raises(ObjectArgumentError, match="prefix was given 3; give a dict from filters"):
        prefix(Node(), 3)
