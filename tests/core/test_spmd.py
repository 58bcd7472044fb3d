import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from weft.core import spmd
from weft.errors import LogicalAxisError, MeshError, NoMeshError

RULES = (("a", "data"), ("b", "model"), ("c", None))


def a_mesh(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)


def test_the_mesh_of_a_sharding():
    mesh = a_mesh()
    assert spmd.get_mesh(NamedSharding(mesh, P("data"))) == mesh
    assert spmd.get_mesh(P("data")) is None
    assert spmd.get_mesh(None) is None


def test_a_function_of_each_entry():
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


def test_the_last_rule_for_a_name_holds():
    assert spmd.from_sharding_rules(("a",), (*RULES, ("a", "model"))) == ("model",)


def test_rules_of_the_context_come_too():
    with spmd.logical_axis_rules(RULES):
        assert spmd.get_pspec(("a", "d"), [("d", "model")]) == P("data", "model")
        assert spmd.from_sharding_rules(("a", "d"), [("d", "model")]) == ("a", "model")
        with pytest.raises(LogicalAxisError, match="conflict for the logical axis 'a'"):
            spmd.get_pspec(("a",), [("a", "model")])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_value_is_laid_out(kind, compiled):
    mesh = a_mesh(kind)

    def f(x):
        return spmd.shard_value(x, ("a", "b"), RULES, None)

    with jax.set_mesh(mesh):
        assert (jax.jit(f) if compiled else f)(jnp.ones((4, 8))).sharding.spec == P("data", "model")


def test_the_mesh_is_the_one_given_or_that_of_the_sharding():
    x = jnp.ones((4, 8))
    mesh = a_mesh()
    assert spmd.shard_value(x, ("a", "b"), RULES, mesh).sharding.spec == P("data", "model")
    own = NamedSharding(mesh, P("model"))
    assert spmd.shard_value(x, own, None, None).sharding == own
    tree = spmd.shard_value({"x": x, "y": np.ones(8)}, ("a",), RULES, mesh)
    assert {y.sharding.spec[0] for y in tree.values()} == {"data"}


def test_a_value_without_a_layout_stays():
    x = jnp.ones((4, 8))
    for layout in (None, (), P(), x.sharding):
        assert spmd.shard_value(x, layout, RULES, a_mesh()) is x


def test_a_layout_without_a_mesh():
    with pytest.raises(NoMeshError, match=r"to be laid out as .*'data'.*jax.set_mesh"):
        spmd.shard_value(jnp.ones(4), ("a",), RULES, None)


def test_a_name_that_is_neither_logical_nor_in_the_mesh():
    with pytest.raises(MeshError, match=r"'nobody', and the mesh has .* or give rules"):
        spmd.shard_value(jnp.ones(4), ("nobody",), RULES, a_mesh())
