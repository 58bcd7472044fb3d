import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from weft import nnx
from weft.errors import AxisMetadataError, LogicalAxisError, MeshError, NoMeshError, ShardingWarning
from weft.nnx.eager_sharding import use_eager_sharding, using_eager_sharding
from weft.nnx.spmd import logical_axis_rules

KINDS = pytest.mark.parametrize(
    "kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)


def mesh_of(kind):
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))


def is_laid(variable, *spec):
    value = variable.get_raw_value()
    wanted = NamedSharding(value.sharding.mesh, P(*spec))
    return value.sharding.is_equivalent_to(wanted, value.ndim)


@KINDS
@pytest.mark.parametrize("name", ["sharding", "sharding_names", "out_sharding"])
def test_a_new_variable_is_laid_out_under_a_mesh(kind, name):
    with jax.set_mesh(mesh_of(kind)):
        for layout in (("data", "model"), ["data", "model"], P("data", "model")):
            w = nnx.Param(jnp.ones((4, 8)), **{name: layout})
            assert is_laid(w, "data", "model") and tuple(w.sharding_names) == ("data", "model")
            assert list(w.get_metadata()) == ["out_sharding"]
        assert is_laid(nnx.Param(jnp.ones((4, 8))))
        assert is_laid(nnx.Param(np.ones((4, 8)), **{name: ("data",)}), "data")


@KINDS
def test_the_mesh_of_the_variable_or_of_its_layout(kind):
    mesh = mesh_of(kind)
    assert is_laid(nnx.Param(jnp.ones((4, 8)), out_sharding=("data",), mesh=mesh), "data")
    assert is_laid(nnx.Param(jnp.ones(4), out_sharding=NamedSharding(mesh, P("data"))), "data")
    both = nnx.Param((jnp.ones(4), {"a": jnp.ones((4, 2))}), out_sharding=("model",), mesh=mesh)
    assert all(x.sharding.spec[0] == "model" for x in jax.tree.leaves(both.get_value()))


@KINDS
def test_rules_say_what_names_stand_for(kind):
    rules = (("embed", "model"),)
    with jax.set_mesh(mesh_of(kind)):
        assert is_laid(
            nnx.Param(jnp.ones((4, 8)), out_sharding=("embed",), sharding_rules=rules), "model"
        )
        with logical_axis_rules(rules):
            assert is_laid(nnx.Param(jnp.ones((4, 8)), out_sharding=(None, "embed")), None, "model")
            with pytest.raises(LogicalAxisError, match="fight over the logical axis 'embed'"):
                nnx.Param(jnp.ones(4), out_sharding=("embed",), sharding_rules=(("embed", "data"),))


def test_it_can_be_turned_off():
    assert using_eager_sharding() and use_eager_sharding.get_default()
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        assert is_laid(nnx.Param(jnp.ones(4), out_sharding=("data",), eager_sharding=False))
        with use_eager_sharding(False):
            assert not using_eager_sharding()
            assert is_laid(nnx.Param(jnp.ones(4), out_sharding=("data",)))
            w = nnx.Param(jnp.ones(4), out_sharding=("data",), eager_sharding=True)
            assert is_laid(w, "data")
    assert nnx.Param(jnp.ones(4), out_sharding=("data",), eager_sharding=False).shape == (4,)


@KINDS
def test_inside_of_jit_and_without_values(kind):
    with jax.set_mesh(mesh_of(kind)):

        def make():
            return nnx.Param(jnp.ones((4, 8)), out_sharding=("data", "model"))

        assert is_laid(jax.jit(make)(), "data", "model")
        assert jax.eval_shape(make).shape == (4, 8)
        abstract = nnx.Param(jax.ShapeDtypeStruct((4,), jnp.float32), out_sharding=("data",))
        assert abstract.get_value().sharding is None
    doubled = jax.vmap(lambda x: nnx.Param(x, out_sharding=("model",), mesh=mesh_of(kind)))
    assert doubled(jnp.ones((2, 4))).shape == (2, 4)


def test_hooks_come_before_and_later_values_stay_as_they_are():
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        w = nnx.Param(jnp.ones(4), out_sharding=("data",), on_create_value=lambda _, x: x + 1)
        assert w[0] == 2 and is_laid(w, "data")
        w.set_value(jnp.zeros(4))
        assert is_laid(w)


def test_what_cannot_be_laid_out():
    mesh = mesh_of(AxisType.Auto)
    with pytest.raises(NoMeshError, match=r"a Param is to be laid out as \('data',\).*no mesh"):
        nnx.Param(jnp.ones(4), out_sharding=("data",))
    with pytest.raises(MeshError, match=r"'nope'.*the mesh has the axes 'data', 'model'") as caught:
        nnx.Param(jnp.ones((4, 8)), out_sharding=("nope",), mesh=mesh)
    assert "This is about a Param" in caught.value.__notes__[0]
    with pytest.raises(MeshError, match="names 3"):
        nnx.Param(jnp.ones((4, 8)), out_sharding=("data", None, None), mesh=mesh)
    with pytest.raises(
        AxisMetadataError, match=r"a Cache was given out_sharding='data'.*\('data',\)"
    ):
        nnx.Cache(jnp.ones(4), out_sharding="data")
    with pytest.warns(ShardingWarning, match="cannot be split into 2 equal parts"):
        nnx.Param(jnp.ones(3), out_sharding=("data",), mesh=mesh)
