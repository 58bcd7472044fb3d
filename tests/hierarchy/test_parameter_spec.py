import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from weft.core.axis_rules import logical_axis_rules
from weft.errors import MeshError, ParameterSpecError, ShardingWarning
from weft.hierarchy.layers import Linear
from weft.hierarchy.param_init import FanAxes
from weft.hierarchy.parameter_spec import (
    FactorizationSpec,
    ParameterSpec,
    TensorSpec,
    maybe_shard,
    with_leading_axis,
    with_leading_axis_name,
)


def test_layouts():
    spec = TensorSpec(shape=(4, 2), dtype=jnp.float32, mesh_axes=(["data", "model"], None))
    assert spec.partition_spec == PartitionSpec(("data", "model"), None)
    assert TensorSpec(shape=(4, 2)).partition_spec == PartitionSpec(None, None)
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    assert TensorSpec(shape=(4,), mesh_axes=("data",)).sharding(mesh).spec == PartitionSpec("data")


def test_entries_must_match_the_axes():
    with pytest.raises(
        ParameterSpecError, match=r"mesh_axes=\('model', None\) has 2 entries, but shape"
    ):
        ParameterSpec(shape=(2,), mesh_axes=("model", None))
    with pytest.raises(ParameterSpecError, match="factorization"):
        ParameterSpec(shape=(2, 3), factorization=FactorizationSpec(("row",)))
    with pytest.raises(ParameterSpecError, match="has no fan axes"):
        ParameterSpec(shape=(2, 3)).fans()


def test_leading_axis_keeps_the_fans():
    spec = ParameterSpec(
        shape=(4, 6),
        mesh_axes=(None, "model"),
        fan_axes=FanAxes(-2, -1),
        factorization=FactorizationSpec(("row", "col")),
    )
    stacked = with_leading_axis(spec, 3, mesh_axis="pipeline")
    assert stacked.shape == (3, 4, 6)
    assert stacked.partition_spec == PartitionSpec("pipeline", None, "model")
    assert stacked.factorization.axes == (None, "row", "col")
    assert stacked.fan_axes == FanAxes((-2,), (-1,), (0,))
    assert stacked.fans() == spec.fans()


def test_leading_axis_name_keeps_other_sharding():
    spec = ParameterSpec(
        shape=(3, 4, 6), mesh_axes=(None, "data", None), logical_axes=(None, "embed", "mlp")
    )
    named = with_leading_axis_name(spec, "pipeline")
    assert named.partition_spec == PartitionSpec("pipeline", "data", None)
    assert named.logical_axes == (("pipeline",), "embed", "mlp")
    for axes, layout in [("stage", ("stage", "data", None)), ("data", (None, "data", None))]:
        with logical_axis_rules([("pipeline", axes), ("mlp", "model")]):
            named = with_leading_axis_name(spec, "pipeline")
        assert named.partition_spec == PartitionSpec(*layout)
        assert named.logical_axes == ("pipeline", "embed", "mlp")


X = jnp.arange(16.0).reshape(4, 4)


@pytest.fixture
def mesh():
    shape = (jax.device_count() // 2, 2) if jax.device_count() > 1 else (1, 1)
    axis_types = (jax.sharding.AxisType.Auto,) * 2
    with jax.set_mesh(jax.make_mesh(shape, ("data", "model"), axis_types=axis_types)) as mesh:
        yield mesh


@pytest.mark.parametrize("spec", [PartitionSpec("data", "model"), ("data", "model")])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_shards_over_mesh(mesh, spec, transform):
    y = transform(lambda x: maybe_shard(x, spec))(X)
    assert y.sharding.spec == PartitionSpec("data", "model")
    np.testing.assert_array_equal(y, X)


def test_several_mesh_axes_for_one_axis(mesh):
    y = maybe_shard(jnp.ones((jax.device_count(), 3)), [["data", "model"], None])
    assert y.sharding.spec[0] == ("data", "model")


def test_unknown_mesh_axis(mesh):
    with pytest.raises(MeshError, match="over 'fsdp', and the mesh has the axes 'data', 'model'"):
        maybe_shard(X, (("data", "fsdp"), None))


def test_indivisible_axis_is_replicated(mesh):
    if jax.device_count() == 1:
        pytest.skip("one device divides everything")
    with pytest.warns(ShardingWarning, match=r"axis 1 .* \(4, 3\) cannot be split into 2 equal"):
        y = jax.jit(lambda x: maybe_shard(x, ("data", "model")))(jnp.ones((4, 3)))
    assert y.sharding.spec == PartitionSpec("data")


def test_one_row_is_not_split(mesh):
    y = jax.jit(lambda x: maybe_shard(x, ("data", None, "model")))(jnp.ones((1, 1, 8)))
    assert y.sharding.spec in (PartitionSpec(None, None, "model"), PartitionSpec())


def test_short_mesh_axes_are_padded():
    assert ParameterSpec((2, 3), mesh_axes=("model",)).mesh_axes == ("model", None)
    spec = ParameterSpec((2, 3), mesh_axes=PartitionSpec("model"))
    assert spec.mesh_axes == spec.partition_spec == PartitionSpec("model", None)
    cfg = Linear.default_config().set(input_dim=2, output_dim=3, param_partition_spec=("data",))
    specs = cfg.set(name="linear").instantiate(parent=None).create_parameter_specs_recursively()
    assert specs["weight"].partition_spec == PartitionSpec("data", None)
    assert specs["bias"].partition_spec == PartitionSpec(None)
