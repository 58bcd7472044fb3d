import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from weft.config import REQUIRED, Required, config_class, config_for_function
from weft.errors import InputDatasetError, InputReadError, NoMeshError
from weft.hierarchy.module import Module
from weft.hierarchy.module import functional as F
from weft.hierarchy.parameter_spec import TensorSpec
from weft.input.base import Input, PathAndRank, partition_by_path_rank
from weft.input.dispatch import InputDispatcher, SpmdInputDispatcher, host_to_global_device_array


class Records(Input):
    """Rows of 0, 1, ...; fails at one of them."""

    @config_class
    class Config(Input.Config):
        batch_size: Required[int] = REQUIRED
        num_batches: int = 3
        fails_at: int | None = None

    def dataset(self):
        for i in range(self.config.num_batches):
            if i == self.config.fails_at:
                raise OSError(f"record {i} of x.txt is broken")
            yield {"ids": np.full((self.config.batch_size, 2), i, np.int32)}


def make(**kwargs):
    cfg = Records.default_config().set(name="records", batch_size=8).set(**kwargs)
    return cfg.instantiate(parent=None)


@pytest.fixture
def mesh():
    if jax.device_count() != 8:
        pytest.skip("needs eight devices")
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    with jax.set_mesh(mesh):
        yield mesh


def test_four_steps_from_process_to_step(mesh):
    records = make(partition_spec=PartitionSpec("data"))
    seen = []
    for batch in records.batches(iter(records.dataset())):
        global_batch = host_to_global_device_array(batch, partition=records.partition_spec)
        assert global_batch["ids"].sharding.spec == PartitionSpec("data", None)
        step = jax.jit(lambda b: records.dispatch_global_batch(b)["ids"].sum())
        seen.append(int(step(global_batch)))
    assert seen == [0, 16, 32]


def test_partition_spec_defaults_to_all_mesh_axes(mesh):
    assert make(partition_spec=PartitionSpec("model")).partition_spec == PartitionSpec("model")
    assert make().partition_spec == PartitionSpec(("data", "model"))


def test_partition_spec_is_required_without_mesh():
    with pytest.raises(NoMeshError, match="no mesh is set"):
        _ = make().partition_spec


def test_partitioner_constrains_by_path_and_rank(mesh):
    rules = {
        PathAndRank("doc/.*", 2): PartitionSpec("data", "model"),
        PathAndRank(None, 1): PartitionSpec("model"),
        PathAndRank(None, None): PartitionSpec(),
    }
    records = make(
        input_partitioner=config_for_function(partition_by_path_rank).set(
            path_rank_to_partition=rules
        )
    )
    batch = {
        "doc": {"ids": np.ones((8, 4)), "length": np.ones(8)},
        "ids": np.ones((8, 4)),
        "my_doc/x": np.ones((8, 4)),
    }
    replicated = jax.device_put(batch, NamedSharding(mesh, PartitionSpec()))
    result = jax.jit(records.dispatch_global_batch)(replicated)
    jax.tree.map(np.testing.assert_array_equal, result, batch)

    def blocks(leaf):
        return len({str(s.index) for s in leaf.addressable_shards})

    assert blocks(result["doc"]["ids"]) == 8
    assert blocks(result["doc"]["length"]) == 2
    assert blocks(result["ids"]) == blocks(result["my_doc/x"]) == 1


def test_partitioner_refuses_leaves_without_a_rule(mesh):
    partition = partition_by_path_rank({PathAndRank("ids", 2): PartitionSpec("data")})
    with pytest.raises(InputDatasetError, match=r"no rule of .* matches 'doc/x' with 1 axes; add"):
        partition({"doc": {"x": np.ones(3)}})


def test_rules_of_a_partitioner_may_be_pairs(mesh):
    partition = partition_by_path_rank({("ids", 2): PartitionSpec("data"), (None, None): None})
    specs = partition({"ids": TensorSpec((8, 4)), "x": TensorSpec((8,))})
    assert specs["ids"].mesh_axes == PartitionSpec("data")
    assert specs["x"].mesh_axes is None


def test_a_dispatcher_gets_the_partition_spec(mesh):
    dispatcher = SpmdInputDispatcher.default_config().set(global_logical_batch_size=8)
    records = make(partition_spec=PartitionSpec("data"), input_dispatcher=dispatcher)
    assert records.dispatcher.partition_spec == PartitionSpec("data")


def test_partitioner_without_mesh_is_identity():
    partition = partition_by_path_rank({PathAndRank(None, None): PartitionSpec("data")})
    batch = {"x": np.ones(3)}
    assert partition(batch) is batch


def test_error_of_the_source_names_the_input_and_the_cause():
    records = make(fails_at=1)
    batches = records.batches(iter(records.dataset()))
    next(batches)
    with pytest.raises(
        InputReadError, match=r"records: a batch cannot be read: OSError: record 1 of x.txt is"
    ) as e:
        next(batches)
    assert isinstance(e.value.__cause__, OSError)


def test_errors_name_the_iterator_state():
    class Failing:
        def __iter__(self):
            return self

        def get_state(self):
            return {"next_index": 17}

        def __next__(self):
            raise ValueError("torn")

    with pytest.raises(InputReadError, match=r"the batch after state {'next_index': 17} .* torn"):
        next(make().batches(Failing()))


def test_dispatcher_is_a_child_and_shapes_the_batches(mesh):
    dispatcher = InputDispatcher.default_config().set(
        global_logical_batch_size=2,
        num_physical_feeds=4,
        physical_feed_index=1,
    )
    records = make(batch_size=1, input_dispatcher=dispatcher)
    assert records.input_dispatcher.path() == "records.input_dispatcher"
    assert records.partition_spec == PartitionSpec(("data", "model"))
    (batch, *_) = records.batches(iter(records.dataset()))
    # Two of eight devices belong to a feed, so it brings two rows.
    assert batch["ids"].shape == (2, 2)


def test_dispatching_works_in_any_context():
    class Trainer(Module):
        @config_class
        class Config(Module.Config):
            input: Input.Config = Records.default_config().set(batch_size=2)

        def __init__(self, cfg, *, parent):
            super().__init__(cfg, parent=parent)
            self._add_child("input", cfg.input)

        def forward(self, batch):
            # Twice, as where gradients are accumulated.
            return [self.input.dispatch_global_batch(batch)["x"] for _ in range(2)]

    trainer = Trainer.default_config().set(name="trainer").instantiate(parent=None)
    batch = {"x": np.ones(2)}
    outputs, _ = F(trainer, prng_key=None, state={}, inputs={"batch": batch}, is_training=True)
    assert outputs[0] is outputs[1] is batch["x"]


def test_element_spec_matches_a_process_batch():
    assert make().element_spec() == {"ids": jax.ShapeDtypeStruct((8, 2), np.int32)}
    with pytest.raises(InputDatasetError, match=r"records: the dataset is empty"):
        make(num_batches=0).element_spec()


def test_partitioner_of_specs(mesh):
    partition = partition_by_path_rank({PathAndRank("ids", 2): PartitionSpec("data")})
    specs = partition({"ids": TensorSpec((8, 4))})
    assert specs["ids"] == TensorSpec((8, 4), mesh_axes=PartitionSpec("data"))
