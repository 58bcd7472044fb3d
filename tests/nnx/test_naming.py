"""Errors about objects say which one is meant, where it was made and which call is open."""

import os

import jax
import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import TraceContextError
from weft.nnx.naming import path_of


class Layer(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones(3))


class Model(nnx.Module):
    def __init__(self) -> None:
        self.layers = [Layer(), Layer()]
        self.heads = {"a": Layer()}


def test_an_object_is_found_by_the_attributes_that_lead_to_it():
    model = Model()
    assert path_of(model.layers[1].w) == "Model.layers[1].w"
    assert path_of(model.heads["a"]) == "Model.heads.a"
    assert path_of(model) == path_of(nnx.Param(1)) == ""


def test_the_error_names_the_variable_its_line_and_the_open_transformation():
    model = Model()

    @nnx.vmap
    def write(x: jax.Array) -> jax.Array:
        model.layers[0].w[...] = x
        return x

    with pytest.raises(TraceContextError) as error:
        write(jnp.ones((2, 3)))
    text = str(error.value)
    assert "a Param of shape (3,) is changed inside of nnx.vmap(write)" in text
    assert "It is Model.layers[0].w and was made at" in text
    assert f"{os.path.relpath(__file__)}:16" in text


def test_also_a_module_and_also_inside_of_plain_jax():
    model = Model()
    with pytest.raises(TraceContextError, match=r"a Layer is changed inside of a JAX .* It is Mod"):
        jax.jit(lambda x: setattr(model.layers[1], "seen", x))(1.0)


def test_a_cycle_ends_the_search():
    a, b = Layer(), Layer()
    a.other, b.other = b, a
    assert path_of(a.w).endswith(".w")
