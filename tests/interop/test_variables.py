import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from weft import linen, nnx
from weft.core.logical import LogicallyPartitioned
from weft.core.meta import AxisMetadata, Partitioned
from weft.errors import LayerVariablesError, PartitionNameError
from weft.interop.variables import (
    NNXMeta,
    to_linen_var,
    to_nnx_var,
    with_partitioning,
)
from weft.serialization import from_bytes, to_bytes, to_state_dict

W = jnp.ones((4, 8))


def test_box_of_metadata_follows_the_axes():
    box = NNXMeta(nnx.Param, W, {"out_sharding": ("a", "b"), "tag": 1})
    stacked = box.add_axis(0, {"partition_name": "layers"})
    assert stacked.metadata == {"out_sharding": ("layers", "a", "b"), "tag": 1}
    assert stacked.get_partition_spec() == P("layers", "a", "b")
    assert (
        stacked.replace_boxed(jnp.ones((2, 4, 8)))
        .remove_axis(0, {"partition_name": "layers"})
        .metadata
        == box.metadata
    )
    with pytest.raises(PartitionNameError, match="'layers'"):
        stacked.remove_axis(0, {"partition_name": "other"})
    plain = NNXMeta(nnx.Param, W, {"tag": 1})
    assert plain.add_axis(0, {}) is plain
    assert plain.get_partition_spec() == P()
    with nnx.logical_axis_rules([("a", "data")]):
        assert box.get_partition_spec() == P("data", "b")


def test_box_is_a_pytree_that_compares_by_value():
    box = NNXMeta(nnx.Param, W, {"out_sharding": ("a", "b"), "sizes": [1, 2]})
    again = NNXMeta(nnx.Param, W, {"sizes": [1, 2], "out_sharding": ("a", "b")})
    assert jax.tree.structure(box) == jax.tree.structure(again)
    assert jax.tree.structure(box) != jax.tree.structure(box.replace(var_type=nnx.Cache))
    doubled = jax.jit(lambda b: jax.tree.map(lambda x: 2 * x, b))(box)
    assert doubled.metadata == box.metadata
    assert doubled.unbox()[0, 0] == 2
    assert doubled.replace(value=3).value == 3
    ((path, _),) = jax.tree_util.tree_leaves_with_path(box)
    assert jax.tree_util.keystr(path) == ".value"
    variable = box.to_nnx_variable()
    assert type(variable) is nnx.Param
    assert variable.sizes == [1, 2]


def test_box_shards_its_value():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    box = NNXMeta(nnx.Param, W, {"out_sharding": ("a", "b")})
    with jax.set_mesh(mesh):
        assert box.unbox().sharding.spec == P("a", "b")


def test_value_in_a_reference_is_read():
    assert to_linen_var(nnx.Param(jnp.ones(2), ref=True)).unbox().shape == (2,)


def test_invalid_boxes_are_rejected():
    with pytest.raises(LayerVariablesError, match="'params' has an NNXMeta of a BatchStat"):
        to_nnx_var("params", NNXMeta(nnx.BatchStat, W, {}))

    class Odd(AxisMetadata):
        def unbox(self):
            return W

        def add_axis(self, index, params):
            return self

        def remove_axis(self, index, params):
            return self

    with pytest.raises(LayerVariablesError, match=r"has a Odd, .* to_nnx_metadata"):
        to_nnx_var("params", Odd())


def test_initializers_set_sharding():
    init = with_partitioning(jax.nn.initializers.ones, ("a", None))
    with nnx.use_eager_sharding(False):
        w = nnx.Param(init(jax.random.key(0), (2, 3)))
    assert w.out_sharding == ("a", None)
    assert isinstance(to_linen_var(w), linen.Partitioned)


def test_box_is_saved_as_its_value():
    box = NNXMeta(nnx.Param, W, {"out_sharding": ("a", "b")})
    assert to_state_dict({"w": box}) == {"w": {"value": W}}
    back = from_bytes({"w": box.replace_boxed(0 * W)}, to_bytes({"w": box}))
    assert back["w"].metadata == box.metadata
    assert (back["w"].value == W).all()


@pytest.mark.parametrize(
    "box",
    [
        Partitioned(W, ("a", None)),
        LogicallyPartitioned(W, ("a", None), rules=[("a", "b")]),
        NNXMeta(nnx.Param, W, {"tag": "t"}),
        W,
    ],
    ids=["names", "logical", "metadata", "array"],
)
def test_round_trip(box):
    with nnx.use_eager_sharding(False):
        back = to_linen_var(to_nnx_var("params", box))
    assert type(back) is type(box)
    assert jax.tree.structure(back) == jax.tree.structure(box)
