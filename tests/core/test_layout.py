import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from weft.core.layout import constrain, get_global_mesh, global_mesh_defined
from weft.errors import MeshError, ShardingWarning


def mesh_of(kind, other=None):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, other or kind))


def spec_of(x):
    """The layout without the trailing axes that are not split."""
    entries = list(x.sharding.spec)
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)


AUTO = functools.partial(mesh_of, AxisType.Auto)
EXPLICIT = functools.partial(mesh_of, AxisType.Explicit)
MIXED = functools.partial(mesh_of, AxisType.Explicit, AxisType.Auto)


def test_the_mesh_is_that_of_the_context():
    assert get_global_mesh() is None
    assert not global_mesh_defined()
    with jax.set_mesh(AUTO()):
        assert global_mesh_defined()
        assert get_global_mesh().axis_names == ("data", "model")
    assert not global_mesh_defined()


def test_without_a_mesh_the_value_comes_back():
    x = jnp.ones(3)
    assert constrain(x, P("nothing")) is x


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT, MIXED])
def test_a_value_lies_over_the_mesh_of_the_context(mesh, compiled):
    f = functools.partial(constrain, spec=P("data", "model"))
    with jax.set_mesh(mesh()):
        y = (jax.jit(f) if compiled else f)(jnp.ones((4, 8)))
    assert spec_of(y) == ("data", "model")


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT, MIXED])
def test_a_value_lies_over_a_mesh_that_it_is_given(mesh):
    y = constrain(jnp.ones((4, 8)), P(None, ("data", "model")), mesh())
    if mesh is MIXED:  # JAX keeps no order among axes of two types
        assert set(y.sharding.spec[1]) == {"data", "model"}
    else:
        assert spec_of(y) == (None, ("data", "model"))


def test_a_given_mesh_inside_of_a_compiled_function():
    y = jax.jit(lambda x: constrain(x, P("model"), AUTO()))(jnp.ones((4, 8)))
    assert y.sharding.is_equivalent_to(NamedSharding(AUTO(), P("model")), 2)


def test_an_unconstrained_axis_keeps_its_layout_over_explicit_axes():
    with jax.set_mesh(EXPLICIT()):
        x = constrain(jnp.ones((4, 8)), P("data", None))
        y = constrain(x, P(P.UNCONSTRAINED, "model"))
    assert spec_of(y) == ("data", "model")


@pytest.mark.parametrize("given", [False, True])
def test_axes_that_shard_map_has_taken_are_left_alone(given):
    mesh = AUTO()

    def body(x):
        return constrain(x, P("data", "model"), mesh if given else None) * 2

    with jax.set_mesh(mesh):
        whole = jax.shard_map(body, in_specs=P("data"), out_specs=P("data"))
        part = jax.shard_map(body, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        np.testing.assert_array_equal(whole(jnp.ones((4, 8))), 2)
        np.testing.assert_array_equal(jax.jit(part)(jnp.ones((4, 8))), 2)


def test_every_array_of_a_tree_and_nothing_else():
    tree = {"a": jnp.ones((8, 2)), "b": np.ones(8), "shape": jax.ShapeDtypeStruct((8,), int)}
    out = constrain(tree, P("data"), AUTO())
    assert spec_of(out["a"]) == spec_of(out["b"]) == ("data",)
    assert out["shape"] is tree["shape"]


def test_under_vmap_the_layout_is_that_of_one_example():
    with jax.set_mesh(AUTO()):
        y = jax.jit(jax.vmap(lambda x: constrain(x, P("data"))))(jnp.ones((3, 8)))
    assert y.sharding.spec[1] == "data"


def test_an_axis_that_does_not_divide_is_said_and_not_split():
    with pytest.warns(ShardingWarning, match=r"axis 0 of a value of shape \(6, 8\).*4 equal parts"):
        y = constrain(jnp.ones((6, 8)), P("data", "model"), AUTO())
    assert spec_of(y) == (None, "model")


def test_a_name_that_the_mesh_does_not_have():
    with pytest.raises(MeshError, match=r"axis 1 .*over 'heads', and the mesh has the axes 'data'"):
        constrain(jnp.ones((4, 8)), P(None, "heads"), AUTO())


def test_more_names_than_axes():
    with pytest.raises(MeshError, match=r"has 1 axes, and the layout \('data', 'model'\) names 2"):
        constrain(jnp.ones(4), P("data", "model"), AUTO())


def test_a_mesh_axis_that_is_named_twice():
    with pytest.raises(MeshError, match=r"names 'data' more than once.*write None at the others"):
        constrain(jnp.ones((4, 8)), P("data", ("model", "data")), AUTO())


def test_keys_are_laid_out_as_other_arrays():
    keys = constrain(jax.random.split(jax.random.key(0), 8), P("data"), AUTO())
    assert spec_of(keys) == ("data",)


def test_the_gradient_goes_through():
    with jax.set_mesh(AUTO()):
        g = jax.jit(jax.grad(lambda x: constrain(x, P("data")).sum()))(jnp.ones(4))
    np.testing.assert_array_equal(g, 1)
