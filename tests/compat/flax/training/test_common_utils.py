import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.training import common_utils
from weft.training.common_utils import PrefetchIterator

N = jax.local_device_count()


def test_shard():
    batch = {"x": np.arange(2 * N), "y": jnp.ones((N, 3))}
    sharded = common_utils.shard(batch)
    assert type(sharded["x"]) is np.ndarray
    assert sharded["x"].shape == (N, 2) and sharded["y"].shape == (N, 1, 3)
    with pytest.raises(ArgumentShapeError, match=rf"at \['x'\] has shape \({N + 1},\)"):
        common_utils.shard({"x": np.ones(N + 1)})
    with pytest.raises(ArgumentShapeError, match=r"at the root has shape \(\)"):
        common_utils.shard(jnp.ones(()))


def test_shard_prng_key():
    keys = common_utils.shard_prng_key(jax.random.key(3))
    assert (keys == jax.random.split(jax.random.key(3), N)).all()


def test_stack_forest():
    stacked = common_utils.stack_forest([{"a": 1, "b": jnp.ones(2)}, {"a": 2, "b": jnp.zeros(2)}])
    assert stacked["a"].tolist() == [1, 2]
    assert stacked["b"].tolist() == [[1, 1], [0, 0]]
    with pytest.raises(ArgumentValueError, match=r"was given \[\]; expected at least one"):
        common_utils.stack_forest([])


def test_get_metrics():
    steps = [{"loss": jnp.full(N, 2.0), "n": jnp.full((N, 2), i)} for i in range(3)]
    metrics = common_utils.get_metrics(steps)
    assert metrics["loss"].tolist() == [2, 2, 2]
    assert metrics["n"].tolist() == [[0, 0], [1, 1], [2, 2]]


def test_onehot():
    hot = common_utils.onehot([[0], [2], [-1]], 3)
    assert hot.dtype == jnp.float32
    assert hot.tolist() == [[[1, 0, 0]], [[0, 0, 1]], [[0, 0, 0]]]
    assert common_utils.onehot(np.array(1), 2, on_value=3, off_value=-1).tolist() == [-1, 3]


def test_yields_same_elements():
    elements = PrefetchIterator(iter(range(5)), buffer_size=2)
    assert next(elements) == 0
    assert list(elements) == [1, 2, 3, 4]
    with pytest.raises(StopIteration):
        next(elements)


def test_reads_ahead():
    read = threading.Event()

    def source():
        yield 0
        read.set()
        yield 1

    with PrefetchIterator(source()) as elements:
        assert next(elements) == 0
        assert read.wait(10)


def test_error_is_raised_in_order():
    def source():
        yield 0
        raise OSError("record 1 is broken")

    elements = PrefetchIterator(source())
    assert next(elements) == 0
    for _ in range(2):
        with pytest.raises(OSError, match="record 1 is broken"):
            next(elements)


def test_close_ends_iteration():
    elements = PrefetchIterator(range(5))
    assert next(elements) == 0
    elements.close()
    assert list(elements) == []


def test_empty_buffer_is_rejected():
    with pytest.raises(ArgumentValueError, match="buffer_size=0: at least one"):
        PrefetchIterator([], buffer_size=0)
