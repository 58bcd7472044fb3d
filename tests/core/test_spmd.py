import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from weft.core import spmd
from weft.core.spmd import constrain, get_global_mesh, uneven_rows
from weft.errors import MeshError, NoMeshError, ShardingWarning


def mesh_of(kind, other=None):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, other or kind))


def spec_of(x):
    """Returns the layout without the trailing axes that are not split."""
    entries = list(x.sharding.spec)
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)


AUTO = functools.partial(mesh_of, AxisType.Auto)
EXPLICIT = functools.partial(mesh_of, AxisType.Explicit)


@pytest.mark.parametrize("compile_", [lambda f: f, jax.jit])
def test_mesh_of_a_with_statement_is_seen(compile_):
    x = jnp.ones((8, 4))
    with pytest.deprecated_call(), AUTO() as mesh:
        assert get_global_mesh() is mesh
        found = compile_(lambda x: constrain(x, P("data")))(x)
        with pytest.raises(MeshError, match="'nothing'"):
            constrain(x, P("nothing"))
        other = jax.make_mesh((8,), ("other",), axis_types=(AxisType.Auto,))
        with jax.set_mesh(other):
            assert get_global_mesh().axis_names == ("other",)
    assert spec_of(found) == ("data",)
    assert get_global_mesh() is None


def test_no_mesh_returns_the_value():
    x = jnp.ones(3)
    assert constrain(x, P("nothing")) is x


def test_unconstrained_axis_keeps_explicit_sharding():
    with jax.set_mesh(EXPLICIT()):
        x = constrain(jnp.ones((4, 8)), P("data", None))
        y = constrain(x, P(P.UNCONSTRAINED, "model"))
    assert spec_of(y) == ("data", "model")


@pytest.mark.parametrize("given", [False, True])
def test_axes_of_shard_map_are_ignored(given):
    mesh = AUTO()

    def body(x):
        return constrain(x, P("data", "model"), mesh if given else None) * 2

    with jax.set_mesh(mesh):
        whole = jax.shard_map(body, in_specs=P("data"), out_specs=P("data"))
        part = jax.shard_map(body, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        np.testing.assert_array_equal(whole(jnp.ones((4, 8))), 2)
        np.testing.assert_array_equal(jax.jit(part)(jnp.ones((4, 8))), 2)


def test_only_arrays_of_a_tree():
    tree = {"a": jnp.ones((8, 2)), "b": np.ones(8), "shape": jax.ShapeDtypeStruct((8,), int)}
    out = constrain(tree, P("data"), AUTO())
    assert spec_of(out["a"]) == spec_of(out["b"]) == ("data",)
    assert out["shape"] is tree["shape"]


def test_vmap_constrains_each_example():
    with jax.set_mesh(AUTO()):
        y = jax.jit(jax.vmap(lambda x: constrain(x, P("data"))))(jnp.ones((3, 8)))
    assert y.sharding.spec[1] == "data"


def test_indivisible_axis_warns_and_is_replicated():
    with pytest.warns(ShardingWarning, match=r"axis 0 of a value of shape \(6, 8\).*4 equal parts"):
        y = constrain(jnp.ones((6, 8)), P("data", "model"), AUTO())
    assert spec_of(y) == (None, "model")


def test_rows_may_be_split_unevenly_in_compiled_functions():
    x = jnp.arange(12.0).reshape(6, 2)

    @jax.jit
    def row_sums(x):
        return constrain(constrain(x, P("data")) @ jnp.ones((2, 2)), P("data")).sum()

    with warnings.catch_warnings(action="error"), jax.set_mesh(AUTO()), uneven_rows():
        compiled = row_sums.lower(x).compile()
        assert compiled(x) == 2 * 66
    assert "f32[2,2]" in compiled.as_text()  # two rows of a device, of six in all
    with uneven_rows(), pytest.warns(ShardingWarning, match="cannot be split into 4 equal"):
        constrain(x, P("data"), AUTO())


def test_unknown_mesh_axis():
    with pytest.raises(MeshError, match=r"axis 1 .*over 'heads', and the mesh has the axes 'data'"):
        constrain(jnp.ones((4, 8)), P(None, "heads"), AUTO())


def test_more_names_than_axes():
    with pytest.raises(MeshError, match=r"has 1 axes, and the layout \('data', 'model'\) names 2"):
        constrain(jnp.ones(4), P("data", "model"), AUTO())


def test_duplicate_mesh_axis():
    with pytest.raises(MeshError, match=r"names 'data' more than once.*write None at the others"):
        constrain(jnp.ones((4, 8)), P("data", ("model", "data")), AUTO())


def test_keys_are_sharded_like_arrays():
    keys = constrain(jax.random.split(jax.random.key(0), 8), P("data"), AUTO())
    assert spec_of(keys) == ("data",)


def test_gradient_is_unchanged():
    with jax.set_mesh(AUTO()):
        g = jax.jit(jax.grad(lambda x: constrain(x, P("data")).sum()))(jnp.ones(4))
    np.testing.assert_array_equal(g, 1)


RULES = (("a", "data"), ("b", "model"), ("c", None))


def a_mesh(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)


def test_mesh_is_given_or_from_the_sharding():
    x = jnp.ones((4, 8))
    mesh = a_mesh()
    assert spmd.shard_value(x, ("a", "b"), RULES, mesh).sharding.spec == P("data", "model")
    own = NamedSharding(mesh, P("model"))
    assert spmd.shard_value(x, own, None, None).sharding == own
    tree = spmd.shard_value({"x": x, "y": np.ones(8)}, ("a",), RULES, mesh)
    assert {y.sharding.spec[0] for y in tree.values()} == {"data"}


def test_layout_without_a_mesh():
    with pytest.raises(NoMeshError, match=r"to be laid out as .*'data'.*jax.set_mesh"):
        spmd.shard_value(jnp.ones(4), ("a",), RULES, None)


def test_unknown_axis_name():
    with pytest.raises(MeshError, match=r"'nobody', and the mesh has .* or give rules"):
        spmd.shard_value(jnp.ones(4), ("nobody",), RULES, a_mesh())
