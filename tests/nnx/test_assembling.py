import jax
import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import GraphStructureError, TraceContextError
from weft.nnx.assembling import put_together
from weft.nnx.graph import take_apart


class Counter(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.zeros(()))
        self.name = "new"


def test_values_have_to_be_as_many_as_described():
    flat = take_apart(Counter())
    for values in ([], [1, 2]):
        with pytest.raises(
            GraphStructureError, match=f"has 1 values, and {len(values)} were given"
        ):
            put_together(flat.graphdef, values)
    node, objects = put_together(flat.graphdef, [5])
    assert node.w[...] == 5 and objects == [node, objects[1]] and objects[1] is node.w


def test_what_exists_becomes_what_is_described():
    before, after = Counter(), nnx.List([Counter()])
    after[0].name = "other"
    made, _ = put_together(take_apart(after).graphdef, [7], existing={1: before})
    assert made[0] is before and before.name == "other"


@pytest.mark.parametrize("transform", [nnx.vmap, nnx.jit], ids=["vmap", "jit"])
def test_a_call_that_is_refused_has_changed_nothing(transform):
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
