import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from weft.errors import BatchShardingError, InputDispatchError, NoMeshError
from weft.input.dispatch import (
    LOGICAL_ROW_KEY,
    InputDispatcher,
    SpmdInputDispatcher,
    blocks_by_process,
    global_to_host_array,
    host_to_global_device_array,
)


def dispatchers(feeds, rows, **kwargs):
    cfg = InputDispatcher.default_config().set(
        name="dispatcher", global_logical_batch_size=rows, num_physical_feeds=feeds, **kwargs
    )
    return [cfg.clone(physical_feed_index=i).instantiate(parent=None) for i in range(feeds)]


@st.composite
def arrangements(draw):
    feeds = draw(st.integers(1, 5))
    logical = draw(st.permutations(range(feeds)))[: draw(st.integers(1, feeds))]
    rows = len(logical) * draw(st.integers(1, 3))
    spare = draw(st.integers(0, 2))
    physical = (rows // len(logical) + spare) * feeds
    order = draw(st.permutations(range(feeds)))
    return feeds, logical, rows, physical, order


@settings(deadline=None, max_examples=15)
@given(arrangements())
def test_step_gets_the_logical_batch_in_order(arrangement):
    feeds, logical, rows, physical, order = arrangement
    all_feeds = dispatchers(
        feeds, rows, logical_feed_indices=logical, global_physical_batch_size=physical
    )
    data = np.arange(rows * 2, dtype=np.float32).reshape(rows, 2)
    data[0, 0] = np.nan  # padding must not be mixed in by a product with zero
    brought = [None] * feeds
    for i, dispatcher in enumerate(all_feeds):
        part = dispatcher.feed_read_config()
        size = dispatcher.feed_logical_batch_size
        assert part["num_shards"] == len(logical)
        assert (dispatcher.logical_feed_index is None) == (i not in logical)
        mine = data[part["shard_index"] * size :][:size]
        brought[i] = dispatcher.logical_to_physical_batch({"x": mine, "deep": {"y": mine[:, 0]}})
        shapes = dispatcher.logical_to_physical_shapes({"x": mine, "deep": {"y": mine[:, 0]}})
        got = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), brought[i])
        assert got == shapes
        assert len(brought[i]["x"]) == dispatcher.feed_physical_batch_size == physical // feeds
    # The rows of the processes come in any order that the mesh gives them, unless all bring data.
    if len(logical) == feeds and rows == physical:
        order = logical
    batch = jax.tree.map(lambda *x: np.concatenate([x[i] for i in order]), *brought)
    result = all_feeds[0].physical_to_logical_batch(batch)
    assert set(result) == {"x", "deep"}
    np.testing.assert_array_equal(result["x"], data)
    np.testing.assert_array_equal(result["deep"]["y"], data[:, 0])


def test_defaults_follow_processes_and_devices():
    (only,) = dispatchers(1, 8)
    cfg = InputDispatcher.default_config().set(name="d", global_logical_batch_size=8)
    default = cfg.instantiate(parent=None)
    assert default.num_logical_feeds == jax.process_count() == 1
    assert default.logical_feed_index == 0
    assert (
        default.feed_read_config()
        == only.feed_read_config()
        == {
            "num_shards": 1,
            "shard_index": 0,
        }
    )
    batch = {"x": np.ones((8, 3))}
    assert LOGICAL_ROW_KEY not in default.logical_to_physical_batch(batch)
    assert dispatchers(3, 8)[2].num_logical_feeds == 2  # as many as divide the rows


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"physical_feed_index": 4}, r"physical_feed_index=4 .* num_physical_feeds=4 .* 0 to 3"),
        ({"logical_feed_indices": [0, 0]}, r"logical_feed_indices=\[0, 0\] must be"),
        ({"logical_feed_indices": [5]}, r"logical_feed_indices=\[5\].*choose from 0 to 3"),
        ({"logical_feed_indices": []}, r"logical_feed_indices=\[\] must be at least one"),
        (
            {"logical_feed_indices": [0, 1, 2]},
            r"=8 does not divide over 3 logical feeds; use a multiple, such as 9",
        ),
        (
            {"global_physical_batch_size": 10},
            r"=10 does not divide over 4 physical feeds; use a multiple, such as 12",
        ),
        (
            {"logical_feed_indices": [0], "global_physical_batch_size": 8},
            r"of 2 rows cannot hold a logical one of 8; increase .* at least 32",
        ),
    ],
)
def test_invalid_sizes(kwargs, message):
    cfg = InputDispatcher.default_config().set(
        name="dispatcher",
        global_logical_batch_size=8,
        num_physical_feeds=4,
        physical_feed_index=0,
    )
    with pytest.raises(InputDispatchError, match="dispatcher: .*" + message):
        cfg.set(**kwargs).instantiate(parent=None)


def test_wrong_batch_shape_or_type():
    (feed, _) = dispatchers(2, 4)
    with pytest.raises(InputDispatchError, match=r"'a/b' has shape \(3, 5\).*batch .* by 2"):
        feed.logical_to_physical_batch({"a": {"b": np.ones((3, 5))}})
    with pytest.raises(InputDispatchError, match=r"'n' has shape \(\)"):
        feed.logical_to_physical_batch({"n": np.int32(3)})


def test_a_batch_may_be_one_array():
    def feed(**fields):
        cfg = InputDispatcher.default_config().set(
            name="feed", global_logical_batch_size=2, num_physical_feeds=2, **fields
        )
        return cfg.instantiate(parent=None)

    # Only the second of two processes reads.
    sizes = {"global_physical_batch_size": 8, "logical_feed_indices": [1]}
    rows = np.array([[5, 6], [7, 8]])
    parts = [feed(physical_feed_index=i, **sizes).logical_to_physical_batch(rows) for i in range(2)]
    physical = jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)
    logical = feed(physical_feed_index=0, **sizes).physical_to_logical_batch(physical)
    np.testing.assert_array_equal(logical, rows)
    same = feed(physical_feed_index=0, global_physical_batch_size=2)
    np.testing.assert_array_equal(same.logical_to_physical_batch(rows[:1]), rows[:1])
    with pytest.raises(InputDispatchError, match=r"has shape \(2, 2\), but a feed of a"):
        same.logical_to_physical_batch(rows)


def spmd(rows, spec):
    cfg = SpmdInputDispatcher.default_config()
    cfg.set(name="spmd", global_logical_batch_size=rows, partition_spec=spec)
    return cfg.instantiate(parent=None)


def test_spmd_reads_rows_of_local_devices():
    mesh = Mesh(np.array(jax.devices()).reshape(-1, 1), ("data", "model"))
    dispatcher = spmd(2 * jax.device_count(), PartitionSpec("data"))
    with jax.set_mesh(mesh):
        assert dispatcher.feed_read_config() == {"num_shards": 1, "shard_index": 0}
        assert dispatcher.feed_logical_batch_size == 2 * jax.device_count()
    assert dispatcher.partition_spec == PartitionSpec("data")
    batch = {"x": np.ones(3)}
    assert dispatcher.logical_to_physical_batch(batch) is batch
    assert dispatcher.physical_to_logical_batch(batch) is batch
    spec = {"x": jax.ShapeDtypeStruct((3,), np.float64)}
    assert dispatcher.logical_to_physical_shapes(batch) == spec


def test_spmd_errors():
    if jax.device_count() != 8:
        pytest.skip("needs eight devices")
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    with (
        jax.set_mesh(mesh),
        pytest.raises(
            InputDispatchError, match=r"spmd: .*=6 does not divide over the 4 blocks.* as 8"
        ),
    ):
        spmd(6, PartitionSpec("data")).feed_read_config()
    with pytest.raises(NoMeshError):
        spmd(8, PartitionSpec("data")).feed_read_config()


def held(rows):
    """Returns a dict from device index to (process, block)."""
    return dict(enumerate(rows))


def test_processes_sharing_rows_read_the_same():
    # data=2, model=2 over four processes of one device.
    model_parallel = held([(0, 0), (1, 0), (2, 1), (3, 1)])
    assert blocks_by_process(model_parallel, "x") == {0: (0,), 1: (0,), 2: (1,), 3: (1,)}
    # Two processes of two devices, neighbours or interleaved.
    assert blocks_by_process(held([(0, 0), (0, 1), (1, 2), (1, 3)]), "x") == {0: (0, 1), 1: (2, 3)}
    assert blocks_by_process(held([(0, 0), (1, 1), (0, 2), (1, 3)]), "x") == {0: (0, 2), 1: (1, 3)}


@pytest.mark.parametrize(
    "rows", [[(0, 0), (0, 1), (1, 1), (1, 2)], [(0, 0), (0, 1), (1, 2)]], ids=["overlap", "uneven"]
)
def test_partially_shared_rows_are_rejected(rows):
    with pytest.raises(InputDispatchError, match=r"x: process 0 holds .*\(0, 1\) and process 1"):
        blocks_by_process(held(rows), "x")


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
def test_rows_follow_partition_spec_and_round_trip(mesh, spec, rows_per_device):
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


def test_global_batch_enters_jit_without_transfer(mesh):
    result = host_to_global_device_array(batch(), partition=PartitionSpec("data"), mesh=mesh)
    doubled = jax.jit(lambda x: x * 2)(result["ids"])
    assert doubled.sharding.is_equivalent_to(result["ids"].sharding, 2)


def test_indivisible_rows(mesh):
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


def test_text_is_rejected(mesh):
    with pytest.raises(BatchShardingError, match=r"'doc/title' has dtype <U1.*drop it or encode"):
        host_to_global_device_array({"doc": {"title": np.array(["a"] * 8)}}, mesh=mesh)


def test_no_mesh():
    with pytest.raises(NoMeshError, match=r"no mesh is set.*jax\.set_mesh\(mesh\)"):
        host_to_global_device_array(batch())


def test_batch_on_the_mesh_of_a_with_statement():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    with pytest.deprecated_call(), mesh:
        batch = host_to_global_device_array({"ids": np.zeros((8, 3))})
    assert batch["ids"].sharding.mesh == mesh
