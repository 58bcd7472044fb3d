"""Changes of structure are noticed, and errors about objects say which one is meant."""

import functools
import os

import jax
import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import TraceContextError
from weft.nnx.graph import flatten_graph
from weft.nnx.versions import STRUCTURE_VERSION


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2), tag="a")
        self.layers = [nnx.Param(1.0), nnx.data(2)]
        self.heads = {"a": nnx.Param(1.0)}
        self.nested = ({"deep": [1]},)
        self.scale = 1.0
        self.count = nnx.data(0)
        self.buffer = jnp.zeros(2)


def watched() -> Model:
    """Returns a model as a call leaves it that remembers how it looks."""
    model = Model()
    for x in flatten_graph(model).objects:
        if isinstance(x, nnx.Variable):
            object.__setattr__(x, "_watched", True)
        else:
            x._info.watched = True
    return model


CHANGES = {
    "a new attribute": lambda m: setattr(m, "new", 1),
    "another static value": lambda m: setattr(m, "scale", 2.0),
    "another array": lambda m: setattr(m, "buffer", jnp.ones(2)),
    "another variable": lambda m: setattr(m, "w", nnx.Param(jnp.ones(2))),
    "an attribute deleted": lambda m: delattr(m, "scale"),
    "a mark": lambda m: setattr(m, "scale", nnx.data(1.0)),
    "metadata": lambda m: m.w.set_metadata(tag="b"),
    "metadata deleted": lambda m: m.w.del_metadata("tag"),
    "metadata of another variable": lambda m: m.w.copy_from(nnx.Param(jnp.ones(2))),
    "metadata of a state": lambda m: nnx.update(m, {"w": nnx.Param(jnp.ones(2), tag="c")}),
    "append": lambda m: m.layers.append(1),
    "extend": lambda m: m.layers.extend([1]),
    "insert": lambda m: m.layers.insert(0, 1),
    "pop": lambda m: m.layers.pop(),
    "remove": lambda m: m.layers.remove(2),
    "clear": lambda m: m.layers.clear(),
    "reverse": lambda m: m.layers.reverse(),
    "sort": lambda m: m.layers.sort(key=str),
    "an item": lambda m: m.layers.__setitem__(0, 1),
    "a slice": lambda m: m.layers.__setitem__(slice(0, 1), []),
    "an item deleted": lambda m: m.layers.__delitem__(0),
    "+=": lambda m: m.layers.__iadd__([1]),
    "*=": lambda m: m.layers.__imul__(2),
    "a key": lambda m: m.heads.__setitem__("b", 1),
    "a key as attribute": lambda m: setattr(m.heads, "b", 1),
    "a key deleted": lambda m: m.heads.__delitem__("a"),
    "a key deleted as attribute": lambda m: delattr(m.heads, "a"),
    "update": lambda m: m.heads.update(b=1),
    "|=": lambda m: m.heads.__ior__({"b": 1}),
    "setdefault": lambda m: m.heads.setdefault("b", 1),
    "dict.pop": lambda m: m.heads.pop("a"),
    "popitem": lambda m: m.heads.popitem(),
    "dict.clear": lambda m: m.heads.clear(),
    "deep inside": lambda m: m.nested[0]["deep"].append(2),
    "sow": lambda m: m.sow(nnx.Intermediate, "h", 1),
    "a mode": lambda m: m.set_attributes(scale=3.0),
    "variables taken out": lambda m: nnx.pop(m, "a"),
    "an array from a state": lambda m: nnx.update(m, {"buffer": jnp.ones(2)}),
}


@pytest.mark.parametrize(
    "change", [*CHANGES.values(), lambda m: m.w.set_value(0)], ids=[*CHANGES, "value"]
)
def test_outer_objects_are_immutable_in_a_trace(change):
    model = watched()
    before, version = repr(model), STRUCTURE_VERSION.now

    @jax.jit
    def f(x):
        change(model)
        return x

    with pytest.raises(
        TraceContextError, match="was created outside of it, so a tracer would leak"
    ):
        f(1.0)
    assert repr(model) == before and STRUCTURE_VERSION.now is version


class Layer(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones(3))  # the line in the message


class NestedModel(nnx.Module):
    def __init__(self) -> None:
        self.layers = [Layer(), Layer()]
        self.heads = {"a": Layer()}


def test_error_names_variable_line_and_transformation():
    model = NestedModel()

    @nnx.vmap
    def write(x: jax.Array) -> jax.Array:
        model.layers[0].w[...] = x
        return x

    with pytest.raises(TraceContextError) as error:
        write(jnp.ones((2, 3)))
    text = str(error.value)
    assert "a Param of shape (3,) is changed inside of nnx.vmap(write)" in text
    assert "It was made at" in text
    with open(__file__, encoding="utf-8") as file:
        line = next(n for n, text in enumerate(file, 1) if "the line in the message" in text)
    assert f"{os.path.relpath(__file__)}:{line}" in text


def test_modules_in_plain_jax():
    model = NestedModel()
    with pytest.raises(
        TraceContextError, match=r"a Layer is changed inside of a JAX .* It was made at"
    ):
        jax.jit(lambda x: setattr(model.layers[1], "seen", x))(1.0)


@pytest.mark.parametrize(
    "transform",
    [jax.jit, jax.vmap, jax.checkpoint, functools.wraps, lambda f: jax.jit(jax.vmap(f))],
    ids=str.split("jit vmap checkpoint wraps both"),
)
def test_a_model_itself_in_plain_jax(transform):
    model = nnx.Sequential(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    if transform is functools.wraps:  # whose wrapper has the attributes of the model
        transformed = jax.jit(functools.wraps(model)(lambda x: model(x)))
    else:
        transformed = transform(model)
    said = r"a RngCount of shape \(\) is changed .* It was made at \S+test_versions.py:"
    with pytest.raises(TraceContextError, match=said):
        transformed(jnp.ones((2, 3)))
