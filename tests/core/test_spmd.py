import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from weft.core import spmd
from weft.core.spmd import constrain, get_global_mesh, global_mesh_defined
from weft.errors import LogicalAxisError, MeshError, NoMeshError, ShardingWarning


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
MIXED = functools.partial(mesh_of, AxisType.Explicit, AxisType.Auto)


def test_mesh_from_context():
    assert get_global_mesh() is None
    assert not global_mesh_defined()
    with jax.set_mesh(AUTO()):
        assert global_mesh_defined()
        assert get_global_mesh().axis_names == ("data", "model")
    assert not global_mesh_defined()


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


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT, MIXED])
def test_value_is_sharded_over_context_mesh(mesh, compiled):
    f = functools.partial(constrain, spec=P("data", "model"))
    with jax.set_mesh(mesh()):
        y = (jax.jit(f) if compiled else f)(jnp.ones((4, 8)))
    assert spec_of(y) == ("data", "model")


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT, MIXED])
def test_value_is_sharded_over_given_mesh(mesh):
    y = constrain(jnp.ones((4, 8)), P(None, ("data", "model")), mesh())
    if mesh is MIXED:  # JAX keeps no order among axes of two types
        assert set(y.sharding.spec[1]) == {"data", "model"}
    else:
        assert spec_of(y) == (None, ("data", "model"))


def test_given_mesh_in_jit():
    y = jax.jit(lambda x: constrain(x, P("model"), AUTO()))(jnp.ones((4, 8)))
    assert y.sharding.is_equivalent_to(NamedSharding(AUTO(), P("model")), 2)


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


def test_mesh_of_a_sharding():
    mesh = a_mesh()
    assert spmd.get_mesh(NamedSharding(mesh, P("data"))) == mesh
    assert spmd.get_mesh(P("data")) is None
    assert spmd.get_mesh(None) is None


def test_function_of_each_entry():
    def upper(entry):
        return entry and entry.upper()

    assert spmd.map_sharding(upper, ("a", None)) == P("A", None)
    assert spmd.map_sharding(upper, P("a")) == P("A")
    mesh = a_mesh()
    swapped = spmd.map_sharding({"data": "model"}.get, NamedSharding(mesh, P("data", None)))
    assert swapped == NamedSharding(mesh, P("model", None))
    assert spmd.map_sharding(upper, None) is None


def test_names_become_mesh_axes():
    names = ("a", None, ("data", "model"), P.UNCONSTRAINED, "other", "c")
    axes = ("data", None, ("data", "model"), P.UNCONSTRAINED, "other", None)
    assert spmd.from_sharding_rules(names, RULES) == axes
    assert spmd.apply_rules(names, RULES) == P(*axes)
    assert spmd.get_pspec(names, RULES) == P(*axes)
    assert spmd.get_pspec(P(*names), RULES) == P(*axes)
    assert spmd.get_pspec(NamedSharding(a_mesh(), P("data"))) == P("data")
    assert spmd.get_pspec(jnp.ones(1).sharding) is None


def test_last_rule_for_a_name_wins():
    assert spmd.from_sharding_rules(("a",), (*RULES, ("a", "model"))) == ("model",)


def test_context_rules_are_added():
    with spmd.logical_axis_rules(RULES):
        assert spmd.get_pspec(("a", "d"), [("d", "model")]) == P("data", "model")
        assert spmd.from_sharding_rules(("a", "d"), [("d", "model")]) == ("a", "model")
        with pytest.raises(LogicalAxisError, match="conflict for the logical axis 'a'"):
            spmd.get_pspec(("a",), [("a", "model")])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("compiled", [False, True])
def test_value_is_sharded(kind, compiled):
    mesh = a_mesh(kind)

    def f(x):
        return spmd.shard_value(x, ("a", "b"), RULES, None)

    with jax.set_mesh(mesh):
        assert (jax.jit(f) if compiled else f)(jnp.ones((4, 8))).sharding.spec == P("data", "model")


def test_mesh_is_given_or_from_the_sharding():
    x = jnp.ones((4, 8))
    mesh = a_mesh()
    assert spmd.shard_value(x, ("a", "b"), RULES, mesh).sharding.spec == P("data", "model")
    own = NamedSharding(mesh, P("model"))
    assert spmd.shard_value(x, own, None, None).sharding == own
    tree = spmd.shard_value({"x": x, "y": np.ones(8)}, ("a",), RULES, mesh)
    assert {y.sharding.spec[0] for y in tree.values()} == {"data"}


def test_value_without_spec_is_kept():
    x = jnp.ones((4, 8))
    for layout in (None, (), P(), x.sharding):
        assert spmd.shard_value(x, layout, RULES, a_mesh()) is x


def test_layout_without_a_mesh():
    with pytest.raises(NoMeshError, match=r"to be laid out as .*'data'.*jax.set_mesh"):
        spmd.shard_value(jnp.ones(4), ("a",), RULES, None)


def test_unknown_axis_name():
    with pytest.raises(MeshError, match=r"'nobody', and the mesh has .* or give rules"):
        spmd.shard_value(jnp.ones(4), ("nobody",), RULES, a_mesh())
