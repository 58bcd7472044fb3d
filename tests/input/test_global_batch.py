import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from weft.errors import BatchShardingError, NoMeshError
from weft.input.global_batch import (
    current_mesh,
    global_to_host_array,
    host_to_global_device_array,
    input_partition_spec,
)


@pytest.fixture(scope="module")
def mesh():
    if jax.device_count() != 8:
        pytest.skip("needs eight devices")
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def batch(rows=8):
    return {
        "ids": np.arange(rows * 3, dtype=np.int32).reshape(rows, 3),
        "nested": {"weight": np.arange(rows, dtype=np.float32), "step": np.float32(7)},
    }


@pytest.mark.parametrize(
    ("spec", "rows_per_device"),
    [
        (None, 1),
        (PartitionSpec("data"), 2),
        (PartitionSpec(("model", "data")), 1),
        (PartitionSpec(), 8),
    ],
)
def test_rows_lie_as_the_spec_says_and_come_back(mesh, spec, rows_per_device):
    host = batch()
    with jax.set_mesh(mesh):
        result = host_to_global_device_array(host, partition=spec)
    for got, want in zip(jax.tree.leaves(result), jax.tree.leaves(host), strict=True):
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
        if want.ndim:
            assert {s.data.shape[0] for s in got.addressable_shards} == {rows_per_device}
    jax.tree.map(np.testing.assert_array_equal, global_to_host_array(result), host)


def test_a_second_axis_may_be_laid_out_too(mesh):
    host = {"ids": np.arange(32).reshape(4, 8), "length": np.arange(4)}
    result = host_to_global_device_array(host, partition=PartitionSpec("data", "model"), mesh=mesh)
    assert {s.data.shape for s in result["ids"].addressable_shards} == {(1, 4)}
    assert {s.data.shape for s in result["length"].addressable_shards} == {(1,)}
    np.testing.assert_array_equal(result["ids"], host["ids"])


def test_the_global_batch_enters_a_compiled_step_without_being_moved(mesh):
    result = host_to_global_device_array(batch(), partition=PartitionSpec("data"), mesh=mesh)
    doubled = jax.jit(lambda x: x * 2)(result["ids"])
    assert doubled.sharding.is_equivalent_to(result["ids"].sharding, 2)


def test_default_is_rows_over_all_axes(mesh):
    assert input_partition_spec(mesh) == PartitionSpec(("data", "model"))
    with jax.set_mesh(mesh):
        assert input_partition_spec() == PartitionSpec(("data", "model"))
        assert current_mesh() == mesh


def test_rows_that_do_not_divide(mesh):
    with pytest.raises(BatchShardingError) as e:
        host_to_global_device_array(batch(6), partition=PartitionSpec("data"), mesh=mesh)
    assert str(e.value) == (
        "input batch: axis 0 of 'ids', of size 6 over 1 process(es), does not divide over the 4 "
        "blocks of mesh axis 'data' of 4; use a multiple of 4, such as 8, or set the input's "
        "partition_spec to fewer mesh axes"
    )
    with pytest.raises(BatchShardingError, match=r"axis 1 of 'ids', of size 3 .* 'model' of 2"):
        host_to_global_device_array(batch(), partition=PartitionSpec("data", "model"), mesh=mesh)
    with pytest.raises(
        BatchShardingError, match=r"8 blocks of mesh axis 'data' of 4, 'model' of 2"
    ):
        host_to_global_device_array(batch(4), mesh=mesh)


def test_text_is_no_array(mesh):
    with pytest.raises(BatchShardingError, match=r"'doc/title' has dtype <U1.*drop it or encode"):
        host_to_global_device_array({"doc": {"title": np.array(["a"] * 8)}}, mesh=mesh)


def test_no_mesh():
    with pytest.raises(NoMeshError, match=r"no mesh is set.*jax\.set_mesh\(mesh\)"):
        host_to_global_device_array(batch())


def test_jax_arrays_are_taken_too(mesh):
    result = host_to_global_device_array({"x": jnp.ones((8, 2))}, mesh=mesh)
    assert float(result["x"].sum()) == 16
