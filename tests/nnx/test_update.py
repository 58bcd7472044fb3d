import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import GraphStructureError, StateFilterError, StatePathError


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(1.0, tag="a")
        self.x = jnp.zeros(2)
        self.n = 1
        self.bias = None
        self.pair = (jnp.zeros(1), nnx.Param(2.0))
        self.layers = [nnx.Param(3.0), nnx.Cache(4.0)]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"w": 9.0, "q": {"a": 1}}, "Model has nothing at 'q', which the state has; it has:"),
        ({"w": 9.0, "layers": {5: 1}}, "List has nothing at 'layers/5'"),
        (
            {"w": 9.0, "layers": 1.0},
            "the object has a List at 'layers', and the state a float there",
        ),
        ({"w": 9.0, "n": {"a": 1}}, "the object has 1 at 'n', and the state leads through it to"),
    ],
)
def test_mismatched_state_changes_nothing(state, message):
    model = Model()
    with pytest.raises(StatePathError, match=message):
        nnx.update(model, state)
    assert model.w[...] == 1.0
    with pytest.raises(StatePathError, match="a tuple cannot take the values at 1"):
        nnx.update((1, 2), {1: 5})
    with pytest.raises(StatePathError, match="a Model cannot be updated from a list; give a state"):
        nnx.update(model, [9.0])


def test_variables_are_popped_everywhere():
    model = Model()
    model.again = model.layers[1]
    model.layers.append(model.layers[1])
    taken = nnx.pop(model, nnx.Cache)
    assert nnx.to_pure_dict(taken) == {"again": 4.0}
    assert len(model.layers) == 1 and not hasattr(model, "again")
    layers = nnx.List([nnx.Param(1)])
    layers.kind = nnx.Cache(2)
    assert nnx.to_pure_dict(nnx.pop(layers, nnx.Cache)) == {"kind": 2} and len(layers) == 1
    params, rest = nnx.pop(nnx.Dict(a=nnx.Param(1), b=nnx.Cache(2)), nnx.Param, nnx.Cache)
    assert nnx.to_pure_dict(params) == {"a": 1} and nnx.to_pure_dict(rest) == {"b": 2}
    with pytest.raises(StateFilterError, match=r"pop needs a filter, such as nnx.pop"):
        nnx.pop(model)
    with pytest.raises(GraphStructureError, match="the variable at 'pair/1' is in a tuple, which"):
        nnx.pop(model, nnx.Param)
    assert model.w[...] == 1.0 and len(model.layers) == 1


def test_items_are_added():
    layers, tree = nnx.List([nnx.Param(1)]), {"a": nnx.Param(1)}
    nnx.update(layers, {1: nnx.Param(2), 2: nnx.Param(3)})
    nnx.update(tree, {"b": 4})
    assert [x[...] for x in layers] == [1, 2, 3] and tree["b"] == 4
