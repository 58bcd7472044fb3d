import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft import jax_utils
from weft.errors import ArgumentShapeError, ArgumentValueError

N = jax.local_device_count()
GRID = jnp.arange(24.0).reshape(2, 3, 4)


def test_unreplicate_of_arrays_that_are_on_one_device():
    assert jax_utils.unreplicate(jnp.arange(6).reshape(2, 3)).tolist() == [0, 1, 2]
    assert type(jax_utils.unreplicate(np.ones((2, 3)))) is np.ndarray


@pytest.mark.parametrize("spec", [3, ("a",), None])
def test_invalid_spec(spec):
    with pytest.raises(
        ArgumentValueError, match=r"input_spec has .*; expected a shape as \(2, 3\)"
    ):
        jax_utils.partial_eval_by_shape(jnp.sum, [spec])


def test_prefetch_errors():
    with pytest.raises(ArgumentValueError, match="size=0: nothing would ever be copied"):
        jax_utils.prefetch_to_device([], 0)
    bad = jax_utils.prefetch_to_device([{"x": np.ones((N + 1, 2))}], 1)
    with pytest.raises(
        ArgumentShapeError, match=rf"at \['x'\] has shape \({N + 1}, 2\); its first"
    ):
        next(bad)


def test_scan_errors():
    body = lambda carry, x: (carry, x.sum())  # noqa: E731
    with pytest.raises(ArgumentShapeError, match=r"axis=\(1,\) of an array of shape \(3,\)"):
        jax_utils.scan_in_dim(body, 0, jnp.ones(3), axis=1)
    with pytest.raises(ArgumentShapeError, match=r"axis=\(1,\) of an array of shape \(3,\)"):
        jax_utils.scan_in_dim(body, 0, jnp.ones((2, 3)), axis=1)
    with pytest.raises(ArgumentValueError, match=r"unroll=\(2, 1\) is longer than axis=\(0,\)"):
        jax_utils.scan_in_dim(body, 0, GRID, axis=0, unroll=(2, 1))


def forward(params, x, y=None):
    assert jax.tree.leaves(x)[0].shape[0] == N
    return jax.tree.map(lambda x: x * params, x)


def test_indivisible_batches():
    run = jax_utils.pad_shard_unpad(forward)
    with pytest.raises(ArgumentShapeError, match=r"are \{\"\[1\]\['a'\]\": 3, \"\['y'\]\": 4\}"):
        run(1, {"a": np.ones(3)}, y=np.ones(4))
    with pytest.raises(ArgumentShapeError, match=r"are \{'\[1\]': 'no axis'\}; expected at least"):
        run(1, 3.0)
    with pytest.raises(ArgumentShapeError, match=r"are \{\}; expected at least one"):
        run(1)
