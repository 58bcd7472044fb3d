import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from weft import nnx
from weft.errors import AxisMetadataError, MeshError, NoMeshError, ShardingWarning

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
@pytest.mark.parametrize("order", [(0, 1), (1, 0), None])
def test_format_sets_memory_layout(kind, order):
    sharding = NamedSharding(mesh_of(kind), P("data", None))
    layout = Format(order and Layout(order), sharding)
    w = nnx.Param(jnp.arange(32.0).reshape(4, 8), out_sharding=layout)
    assert is_laid(w, "data") and w.format.layout.major_to_minor == (order or (0, 1))
    assert w.get_metadata(exclude_required=True) == {"out_sharding": layout}
    np.testing.assert_array_equal(w, np.arange(32).reshape(4, 8))
    with jax.set_mesh(sharding.mesh):
        assert is_laid(nnx.jit(lambda: nnx.Param(jnp.ones((4, 8)), out_sharding=layout))(), "data")
    assert nnx.get_partition_spec(w).get_value() == P("data", None)
    nnx.spmd.add_axis(w, 0, {"partition_name": "model"})
    assert w.out_sharding.spec == P("model", "data", None)
    with pytest.raises(AxisMetadataError, match="a NamedSharding, or a Format with one"):
        nnx.Param(jnp.ones((4, 8)), out_sharding=Format())


LAID_OUT = {"names": ("data", "model"), "spec": P("data", "model"), "none": None, "sharding": P}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("layout", LAID_OUT)
def test_shapes_have_the_sharding_of_their_variable(kind, layout):
    mesh, out_sharding = mesh_of(kind), LAID_OUT[layout]
    if layout == "sharding":
        metadata = {"out_sharding": NamedSharding(mesh, P("data", "model"))}
    else:
        metadata = {
            "mesh": mesh,
            **({} if out_sharding is None else {"out_sharding": out_sharding}),
        }

    def make():
        later = nnx.Param(jnp.ones(4), out_sharding=("data",), mesh=mesh, eager_sharding=False)
        return nnx.Dict(w=nnx.Param(jnp.ones((4, 8)), **metadata), later=later)

    abstract = nnx.eval_shape(make)
    expected = P() if layout == "none" else P("data", "model")
    assert abstract.w.sharding.spec == expected
    assert abstract.w.sharding.mesh.axis_names == mesh.axis_names
    assert kind is AxisType.Explicit or abstract.later.sharding is None
    if kind is AxisType.Auto:
        assert nnx.state(abstract).w.sharding == NamedSharding(mesh, expected)


@KINDS
def test_in_jit_and_without_values(kind):
    with jax.set_mesh(mesh_of(kind)):

        def make():
            return nnx.Param(jnp.ones((4, 8)), out_sharding=("data", "model"))

        assert is_laid(jax.jit(make)(), "data", "model")
        assert jax.eval_shape(make).shape == (4, 8)
        abstract = nnx.Param(jax.ShapeDtypeStruct((4,), jnp.float32), out_sharding=("data",))
        assert abstract.get_value().sharding.spec == P("data")
    doubled = jax.vmap(lambda x: nnx.Param(x, out_sharding=("model",), mesh=mesh_of(kind)))
    assert doubled(jnp.ones((2, 4))).shape == (2, 4)


def test_invalid_shardings():
    mesh = mesh_of(AxisType.Auto)
    with pytest.raises(NoMeshError, match=r"a Param has the layout \('data',\).*no mesh"):
        nnx.Param(jnp.ones(4), out_sharding=("data",))
    with pytest.raises(MeshError, match=r"'nope'.*the mesh has the axes 'data', 'model'") as caught:
        nnx.Param(jnp.ones((4, 8)), out_sharding=("nope",), mesh=mesh)
    assert "Raised while making a Param" in caught.value.__notes__[0]
    with pytest.raises(MeshError, match="names 3"):
        nnx.Param(jnp.ones((4, 8)), out_sharding=("data", None, None), mesh=mesh)
    with pytest.raises(
        AxisMetadataError, match=r"a Cache was given out_sharding=3; expected a tuple with a name"
    ):
        nnx.Cache(jnp.ones(4), out_sharding=3)
    with pytest.warns(ShardingWarning, match="cannot be split into 2 equal parts"):
        nnx.Param(jnp.ones(3), out_sharding=("data",), mesh=mesh)
