import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft import jax_utils
from weft.errors import ArgumentShapeError, ArgumentValueError

N = jax.local_device_count()
GRID = jnp.arange(24.0).reshape(2, 3, 4)


def test_replicated_and_back():
    tree = {"w": jnp.arange(3), "b": 1.5, "key": jax.random.key(3)}
    copies = jax_utils.replicate(tree)
    assert copies["w"].shape == (N, 3) and copies["b"].shape == (N,)
    assert {shard.data.shape for shard in copies["w"].addressable_shards} == {(1, 3)}
    back = jax_utils.unreplicate(copies)
    assert back["w"].tolist() == [0, 1, 2] and back["b"] == 1.5 and back["key"] == tree["key"]
    assert len(back["w"].devices()) == 1


def test_some_devices_only():
    copies = jax_utils.replicate(jnp.ones(3), jax.devices()[:2], axis_name="two")
    assert copies.shape == (2, 3) and copies.devices() == set(jax.devices()[:2])
    assert copies.sharding.spec == jax.P("two")


def test_unreplicate_of_arrays_that_are_on_one_device():
    assert jax_utils.unreplicate(jnp.arange(6).reshape(2, 3)).tolist() == [0, 1, 2]
    assert type(jax_utils.unreplicate(np.ones((2, 3)))) is np.ndarray


def test_pmean():
    means = jax.vmap(lambda x: jax_utils.pmean({"a": x, "b": 2 * x}, "i"), axis_name="i")
    assert means(jnp.arange(3.0))["b"].tolist() == [2, 2, 2]


def test_partial_eval_by_shape_results():
    def fn(x, ids, scale, *, shift):
        return {"ones": jnp.ones(x.shape) * scale + shift, "sum": x.sum(), "ids": ids, "n": 3}

    result = jax_utils.partial_eval_by_shape(fn, [(2,), ((4,), jnp.int32)], 5.0, shift=1.0)
    assert result["ones"].tolist() == [6, 6]
    assert (result["sum"].shape, result["sum"].dtype) == ((), jnp.float32)
    assert (result["ids"].shape, result["ids"].dtype) == ((4,), jnp.int32)
    assert result["n"] == 3


@pytest.mark.parametrize("spec", [3, ("a",), None])
def test_invalid_spec(spec):
    with pytest.raises(
        ArgumentValueError, match=r"input_spec has .*; expected a shape as \(2, 3\)"
    ):
        jax_utils.partial_eval_by_shape(jnp.sum, [spec])


@pytest.mark.parametrize("size", [1, 2, 9])
def test_prefetch_keeps_elements(size):
    batches = [{"x": np.full((N, 2), i)} for i in range(4)]
    fetched = list(jax_utils.prefetch_to_device(batches, size))
    assert [int(b["x"][0, 0]) for b in fetched] == [0, 1, 2, 3]
    assert len(fetched[0]["x"].devices()) == N


def test_prefetch_size():
    read = []
    source = (read.append(i) or np.full(N, i) for i in range(5))
    fetched = jax_utils.prefetch_to_device(source, 2)
    assert int(next(fetched)[0]) == 0 and read == [0, 1]
    assert int(next(fetched)[0]) == 1 and read == [0, 1, 2]


def test_prefetch_errors():
    with pytest.raises(ArgumentValueError, match="size=0: nothing would ever be copied"):
        jax_utils.prefetch_to_device([], 0)
    bad = jax_utils.prefetch_to_device([{"x": np.ones((N + 1, 2))}], 1)
    with pytest.raises(
        ArgumentShapeError, match=rf"at \['x'\] has shape \({N + 1}, 2\); its first"
    ):
        next(bad)


def test_scan_over_two_axes_in_their_order():
    def body(carry, x):
        return carry + 1, carry + 0 * x

    carry, order = jax_utils.scan_in_dim(body, 0.0, GRID, axis=(2, 0), unroll=2)
    assert carry == 8 and order.shape == GRID.shape
    assert order[:, 0, :].tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_scanned_axes_may_be_kept():
    def body(carry, x):
        assert x.shape == (2, 1, 1)
        return carry + x, carry

    carry, sums = jax_utils.scan_in_dim(
        body, jnp.zeros((2, 1, 1)), GRID, axis=(1, -1), keepdims=True
    )
    assert carry.ravel().tolist() == GRID.sum((1, 2)).tolist()
    assert sums.shape == GRID.shape and sums[1, 0, 1] == GRID[1, 0, 0]


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


def test_batches_of_any_size():
    run = jax_utils.pad_shard_unpad(forward)
    assert run.__name__ == "forward"
    assert run(2, np.arange(N + 2)).tolist() == list(range(0, 2 * N + 4, 2))
    tree = run(2, {"a": np.ones(3), "b": np.ones((3, 5), np.float16)}, min_device_batch=2)
    assert tree["b"].dtype == np.float16 and tree["b"].tolist() == [[2] * 5] * 3


def test_min_device_batch():
    def sizes(x):
        return jnp.full(x.shape[:2], x.shape[1])

    run = jax_utils.pad_shard_unpad(sizes, static_argnums=())
    assert run(np.ones(N + 1)).tolist() == [2] * (N + 1)
    assert run(np.ones(N + 1), min_device_batch=5).tolist() == [5] * (N + 1)


def test_arguments_and_results_may_be_static():
    def total(x, scale, n):
        return {"sum": x.sum() * scale, "n": n}

    run = jax_utils.pad_shard_unpad(
        total, static_argnums=(1,), static_argnames=("n",), static_return=True
    )
    assert run(np.ones(N + 1), 2.0, n=3) == {"sum": 2 * (N + 1), "n": 3}


def test_indivisible_batches():
    run = jax_utils.pad_shard_unpad(forward)
    with pytest.raises(ArgumentShapeError, match=r"are \{\"\[1\]\['a'\]\": 3, \"\['y'\]\": 4\}"):
        run(1, {"a": np.ones(3)}, y=np.ones(4))
    with pytest.raises(ArgumentShapeError, match=r"are \{'\[1\]': 'no axis'\}; expected at least"):
        run(1, 3.0)
    with pytest.raises(ArgumentShapeError, match=r"are \{\}; expected at least one"):
        run(1)
