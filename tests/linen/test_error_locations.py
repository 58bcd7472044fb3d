"""Errors inside of lifted modules name variables by their full path, from the root on."""

import jax
import jax.numpy as jnp
import pytest

from weft import linen as nn
from weft.errors import (
    AxisSizeError,
    CarryStructureError,
    PartitionNameError,
    RoleError,
    VariableAxisError,
)


class Cell(nn.Module):
    change: str = "none"

    @nn.compact
    def __call__(self, c, _):
        n = self.variable("st", "n", lambda: jnp.zeros(()))
        if self.change == "sum":
            n.value = n.value + jnp.sum(c)
        if self.change == "stack":
            n.value = jnp.stack([n.value, n.value])
        kernel_init = nn.with_partitioning(nn.initializers.ones_init(), (None, "model"))
        return nn.Dense(2, kernel_init=kernel_init, name="dense")(c), None


class Layers(nn.Module):
    way: str
    change: str
    axes: tuple
    axis_name: str

    @nn.compact
    def __call__(self, x):
        options = {
            "variable_axes": {col: axis for col, axis in self.axes if axis != "carry"},
            "split_rngs": {"params": True},
            "metadata_params": {"partition_name": self.axis_name},
        }
        if self.way == "vmap":
            layers = nn.vmap(Cell, **options, in_axes=(0, None))
            return layers(self.change, name="cells")(x, None)[0]
        carried = [col for col, axis in self.axes if axis == "carry"]
        layers = nn.scan(Cell, **options, variable_carry=carried, length=3)
        return layers(self.change, name="cells")(x, None)[0]


class Net(nn.Module):
    around: str
    way: str = "scan"
    change: str = "none"
    axes: tuple = (("params", 0), ("st", 0))
    axis_name: str = "layers"

    @nn.compact
    def __call__(self, x):
        made = Layers
        if self.around == "jit":
            made = nn.jit(Layers)
        if self.around == "vmap":
            made = nn.vmap(
                Layers,
                variable_axes={"params": 0, "st": 0},
                split_rngs={"params": True},
                metadata_params={"partition_name": None},
            )
        return made(self.way, self.change, self.axes, self.axis_name, name="layers")(x)


AROUND = pytest.mark.parametrize("around", ["nothing", "jit", "vmap"])
PARAMS, ST = "params/layers/cells/dense", "st/layers/cells/n"


def x_and_variables(around):
    x = jnp.ones((2, 3, 2) if around == "vmap" else (3, 2))
    return x, Net(around).init(jax.random.key(0), x)


@AROUND
@pytest.mark.parametrize("way", ["scan", "vmap"])
def test_names_of_axes(around, way):
    x, variables = x_and_variables(around)
    with pytest.raises(PartitionNameError) as caught:
        Net(around, way, axis_name="stages").apply(variables, x)
    assert caught.value.path == f"{PARAMS}/kernel"


@AROUND
def test_sizes_of_axes(around):
    x, variables = x_and_variables(around)
    variables = nn.unbox(variables)
    leading = (2,) if around == "vmap" else ()
    variables["params"]["layers"]["cells"]["dense"]["bias"] = jnp.ones((*leading, 7, 2))
    with pytest.raises(AxisSizeError, match=f"'{PARAMS}/bias': 7, '{PARAMS}/kernel': 3"):
        Net(around).apply(variables, x)


@AROUND
@pytest.mark.parametrize(
    ("way", "change", "axis", "error"),
    [
        ("scan", "sum", None, RoleError),
        ("scan", "stack", "carry", CarryStructureError),
        ("vmap", "sum", None, VariableAxisError),
    ],
)
def test_changed_carry(around, way, change, axis, error):
    x, variables = x_and_variables(around)
    st = jnp.zeros((2,) if around == "vmap" else ())
    variables = {**nn.unbox(variables), "st": {"layers": {"cells": {"n": st}}}}
    net = Net(around, way, change, (("params", 0), ("st", axis)))
    with pytest.raises(error, match=f"'{ST}'"):
        net.apply(variables, x, mutable=["st"])
