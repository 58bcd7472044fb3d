"""Axes that come and go in metadata alone."""

import jax
import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import PartitionNameError


def param(*shape: int, names: tuple[str | None, ...]) -> nnx.Param:
    return nnx.Param(jnp.ones(shape), out_sharding=names, eager_sharding=False)


@pytest.mark.parametrize("graph", [True, False])
def test_a_function_under_vmap_names_the_axis(graph: bool):
    seen = []

    def f(w: nnx.Param) -> nnx.Param:
        seen.append(w.out_sharding)
        return param(4, names=("out",))

    w = param(3, 2, names=("layers", "in"))
    named = nnx.transform_metadata(f, partition="layers", graph=graph)
    made = nnx.vmap(named, graph=graph)(w)
    assert seen == [("in",)]
    assert w.out_sharding == ("layers", "in") and made.out_sharding == ("layers", "out")
    assert made.shape == (3, 4)


def test_a_function_under_plain_jax():
    @jax.vmap
    @nnx.transform_metadata(partition="layers")
    def create(x: jax.Array) -> nnx.Param:
        return nnx.Param(x, out_sharding=("in",), eager_sharding=False)

    assert create(jnp.ones((3, 2))).out_sharding == ("layers", "in")


def test_axes_of_arguments_and_results():
    def f(shared: nnx.Param, own: nnx.Param) -> nnx.Param:
        assert (shared.out_sharding, own.out_sharding) == (("a",), ("b",))
        return param(2, names=("c",))

    named = nnx.transform_metadata(f, in_axes=(None, 1), out_axes=1, partition="n")
    mapped = nnx.vmap(named, in_axes=(None, 1), out_axes=1)
    made = mapped(param(4, names=("a",)), param(5, 3, names=("b", "n")))
    assert made.out_sharding == ("c", "n") and made.shape == (2, 3)


def test_the_name_has_to_be_that_of_the_axis():
    w = param(3, names=("layers",))
    with pytest.raises(PartitionNameError, match="layers"):
        jax.vmap(nnx.transform_metadata(lambda w: w[...], partition="heads"))(w)


@pytest.mark.parametrize("nested", [False, True])
def test_an_error_about_an_axis_of_a_model_says_of_which_variable(nested):
    model = nnx.Dict(layers=[nnx.Dict(w=param(3, names=("layers",)))])

    @nnx.vmap(in_axes=0, transform_metadata={nnx.PARTITION_NAME: "heads"})
    def f(model):
        return model.layers[0].w[...]

    with pytest.raises(PartitionNameError) as caught:
        (nnx.jit(lambda model: f(model)) if nested else f)(model)
    assert caught.value.path == "model.layers[0].w"
