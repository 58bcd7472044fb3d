import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.training import common_utils

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
