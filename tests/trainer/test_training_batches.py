import jax
import pytest
from jax.sharding import PartitionSpec as P

from weft.errors import BatchShardingError
from weft.input.fake import FakeLmInput
from weft.trainer.mesh import build_mesh
from weft.trainer.training_batches import (
    batch_partition,
    batch_shapes,
    check_batches,
    open_batches,
)


def input_of(**kwargs):
    cfg = FakeLmInput.default_config().set(
        name="input", is_training=True, global_batch_size=8, source_length=4
    )
    return cfg.set(**kwargs).instantiate(parent=None)


@pytest.fixture(scope="module")
def mesh():
    return build_mesh((4, 2), ("data", "model"), jax.devices()[:8])


def test_what_the_input_says_of_its_layout_counts():
    assert batch_partition(input_of(), ("data", "model")) == P(("data", "model"))
    own = input_of(partition_spec=P("model"))
    assert batch_partition(own, "data") == P("model")


def test_batches_lie_over_the_mesh_as_their_shapes_say(mesh):
    input_ = input_of(total_num_batches=2)
    with jax.set_mesh(mesh), open_batches(input_, P("data"), mesh) as batches:
        batch, *rest = batches
    assert len(rest) == 1
    shapes = batch_shapes(input_, P("data"), mesh)
    assert jax.tree.structure(batch) == jax.tree.structure(shapes)
    for x, shape in zip(jax.tree.leaves(batch), jax.tree.leaves(shapes), strict=True):
        assert (x.shape, x.dtype) == (shape.shape, shape.dtype)
        assert x.sharding.is_equivalent_to(shape.sharding, x.ndim)


def test_whether_a_batch_divides_is_known_without_one(mesh):
    with jax.set_mesh(mesh):
        check_batches(input_of(), P("data"))
        with pytest.raises(BatchShardingError, match="6"):
            check_batches(input_of(global_batch_size=6), P("data"))
