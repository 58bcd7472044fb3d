import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from weft.core.axis_rules import logical_axis_rules
from weft.errors import ParameterSpecError
from weft.hierarchy.param_init import FanAxes
from weft.hierarchy.parameter_spec import (
    FactorizationSpec,
    ParameterSpec,
    TensorSpec,
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
        ParameterSpecError, match=r"mesh_axes=\('model',\) has 1 entries, but shape"
    ):
        ParameterSpec(shape=(2, 3), mesh_axes=("model",))
    with pytest.raises(ParameterSpecError, match="factorization"):
        ParameterSpec(shape=(2, 3), factorization=FactorizationSpec(("row",)))
    with pytest.raises(ParameterSpecError, match="has no fan axes"):
        ParameterSpec(shape=(2, 3)).fans()


def test_a_leading_axis_leaves_the_fans():
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


def test_a_leading_name_leaves_what_lies_by_rules_of_its_own():
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
