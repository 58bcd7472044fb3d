import flax.core
import flax.linen
import flax.nnx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.interop.layers import KEY, X, normal
from weft import linen, nnx
from weft.core.filters import DenyList
from weft.core.logical import LogicallyPartitioned
from weft.core.meta import Partitioned
from weft.interop import as_linen
from weft.interop.flax import FlaxBox, FlaxLinenModel, FlaxNNXModel
from weft.interop.variables import NNXMeta
from weft.serialization import from_state_dict, to_state_dict


def test_values_match_flax():
    module = flax.linen.Dense(2)
    variables = FlaxLinenModel(module).init({"params": KEY}, X)
    jax.tree.map(np.testing.assert_array_equal, variables, module.init(KEY, X))
    made = FlaxNNXModel(flax.nnx.Linear, 3, 2).init({"params": KEY}, X)
    want = flax.nnx.Linear(3, 2, rngs=flax.nnx.Rngs(params=KEY))
    np.testing.assert_array_equal(made["params"]["kernel"], want.kernel[...])


def test_boxes_convert_between_weft_and_flax():
    seen = []

    class Boxed(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            for name, init in (
                ("a", flax.linen.with_partitioning(normal, ("x",))),
                ("b", flax.linen.with_logical_partitioning(normal, ("y",), rules=[("y", "x")])),
            ):
                seen.append(type(self.param(name, init, (3,), unbox=False)).__module__)
            return x

    model = FlaxLinenModel(Boxed())
    variables = model.init({"params": KEY}, X)
    a, b = variables["params"]["a"], variables["params"]["b"]
    assert isinstance(a, Partitioned)
    assert (type(b), b.names, b.rules) == (LogicallyPartitioned, ("y",), (("y", "x"),))
    model.apply(variables, X, rngs={}, mutable=False)
    assert len(seen) == 4
    assert all(module.startswith("flax") for module in seen)


class Odd(flax.struct.PyTreeNode, flax.core.meta.AxisMetadata):
    """A box of a user of Flax."""

    value: jax.Array
    axes: int = flax.struct.field(pytree_node=False, default=1)

    def unbox(self):
        return self.value

    def replace_boxed(self, val):
        return self.replace(value=val)

    def add_axis(self, index, params):
        return self.replace(axes=self.axes + 1)

    def remove_axis(self, index, params):
        return self.replace(axes=self.axes - 1)


def test_custom_boxes_follow_axes():
    class Own(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            return x * self.param("scale", lambda key: Odd(normal(key, (3,))))[None]

    class Stack(linen.Module):
        @linen.compact
        def __call__(self, x):
            stack = linen.vmap(
                lambda module, x: module(x),
                in_axes=None,
                axis_size=2,
                variable_axes={"params": 0},
                split_rngs={"params": True},
            )
            return stack(as_linen(Own(), name="own"), x)

    variables = Stack().init(KEY, X)
    box = variables["params"]["own"]["scale"]
    assert isinstance(box, FlaxBox)
    assert (box.box.axes, box.unbox().shape) == (2, (2, 3))
    assert to_state_dict(variables)["params"]["own"]["scale"]["value"].shape == (2, 3)
    back = from_state_dict(variables, to_state_dict(variables))
    assert back["params"]["own"]["scale"].box.axes == 2
    doubled = jax.jit(lambda v: jax.tree.map(lambda x: 2 * x, v))(variables)
    once, twice = Stack().apply(variables, X), Stack().apply(doubled, X)
    np.testing.assert_allclose(2 * once, twice, rtol=1e-6)


def test_filters_match_flax():
    model = FlaxLinenModel(flax.linen.BatchNorm(use_running_average=False))
    variables = model.init({"params": KEY}, X)
    _, changed = model.apply(variables, X, rngs={}, mutable=DenyList("params"))
    assert set(changed) == {"batch_stats"}
    assert model.apply(variables, X, rngs={}, mutable=["batch_stats"])[1].keys() == changed.keys()


@pytest.mark.filterwarnings("ignore:Using .Module.sow:DeprecationWarning")
def test_metadata_and_kinds_of_flax_nnx():
    class Counts(flax.nnx.Variable):
        pass

    class Net(flax.nnx.Module):
        def __init__(self, *, rngs):
            self.w = flax.nnx.Param(rngs.params.normal((3,)), names=("a",), tag="w")
            self.n = Counts(jnp.zeros(()))

        def __call__(self, x):
            self.n[...] += 1
            self.sow(flax.nnx.Intermediate, "seen", x.sum())
            return x * self.w[None]

    model = FlaxNNXModel(Net)
    variables = model.init({"params": KEY}, X)
    box = variables["params"]["w"]
    assert isinstance(box, NNXMeta)
    assert (box.var_type, box.metadata["tag"]) == (nnx.Param, "w")
    _, once = model.apply(variables, X, rngs={}, mutable=["Counts", "intermediates"])
    assert once["Counts"]["n"] == 1
    _, twice = model.apply({**variables, **once}, X, rngs={}, mutable=["Counts", "intermediates"])
    assert twice["Counts"]["n"] == 2
    assert len(twice["intermediates"]["seen"]) == 2
