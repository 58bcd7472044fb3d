"""Helpers for devices, batches and scans, on Flax and on Weft."""

import flax.jax_utils
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import weft.jax_utils

N = jax.local_device_count()
GRID = jnp.arange(24.0).reshape(2, 3, 4)


def both(program):
    """Runs a program on both modules; it returns arrays and `jax.ShapeDtypeStruct`s."""
    theirs, ours = program(flax.jax_utils), program(weft.jax_utils)
    assert jax.tree.structure(theirs) == jax.tree.structure(ours)
    for a, b in zip(jax.tree.leaves(theirs), jax.tree.leaves(ours), strict=True):
        assert type(a) is type(b)
        assert (jnp.shape(a), jnp.result_type(a)) == (jnp.shape(b), jnp.result_type(b))
        if isinstance(a, jax.Array):
            assert a.devices() == b.devices()
        if not isinstance(a, jax.ShapeDtypeStruct):
            np.testing.assert_array_equal(a, b)


@pytest.mark.filterwarnings("ignore:use jax.lax.pmean:DeprecationWarning")
def test_replicate():
    tree = {"w": np.arange(3), "b": 1.5, "n": 2}
    both(lambda utils: utils.replicate(tree))
    both(lambda utils: utils.replicate(tree, jax.devices()[:2]))
    both(lambda utils: utils.unreplicate(utils.replicate(tree)))
    both(lambda utils: utils.unreplicate({"x": np.ones((2, 3))}))
    both(lambda utils: jax.pmap(lambda x: utils.pmean(x, "i"), axis_name="i")(jnp.arange(N)))
    a, b = (utils.replicate(jnp.ones(3)).sharding for utils in (flax.jax_utils, weft.jax_utils))
    assert a == b


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("devices", [None, jax.devices()[:2]], ids=["all", "two"])
def test_prefetch_to_device(size, devices):
    n = len(devices or jax.devices())
    batches = [{"x": np.full((n, 2), i)} for i in range(3)]
    both(lambda utils: list(utils.prefetch_to_device(iter(batches), size, devices)))


@pytest.mark.parametrize(
    "spec", [[(2, 3)], [((2, 3), jnp.bfloat16)], [[2, 3], ((4,), jnp.int32)]], ids=str
)
def test_partial_eval_by_shape(spec):
    def fn(x, *args, scale):
        key = jax.random.PRNGKey(3)
        return {"w": jax.random.normal(key, x.shape[1:]) * scale, "y": x @ x.T, "args": args}

    both(lambda utils: utils.partial_eval_by_shape(fn, spec, jnp.ones(2), scale=2.0))


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"axis": 1},
        {"axis": -1},
        {"axis": (0, 1)},
        {"axis": (2, 0), "unroll": 2},
        {"axis": (1, 0), "unroll": (2, 1)},
        {"axis": (2,), "keepdims": True},
        {"axis": (1, 0), "keepdims": True},
    ],
    ids=str,
)
def test_scan_in_dim(kwargs):
    def body(carry, x):
        return carry * 0.5 + x["a"].sum(), {"x": x["b"] * carry, "y": x["a"] + carry}

    xs = {"a": GRID, "b": GRID + 1}
    both(lambda utils: utils.scan_in_dim(body, jnp.float32(1), xs, **kwargs))


@pytest.mark.parametrize("batch", [1, 10, 2 * N])
@pytest.mark.parametrize(
    "kwargs", [{}, {"static_argnums": (0, 2), "static_argnames": ("z",)}], ids=str
)
def test_pad_shard_unpad(batch, kwargs):
    def forward(params, x, y, z):
        return jax.tree.map(lambda x: x * params, x), y * 2, z * 2

    def program(utils):
        run = utils.pad_shard_unpad(forward, **kwargs)
        y = z = np.arange(1.0, batch + 1) if not kwargs else np.ones((2, batch))
        return run(2.0, {"a": np.ones((batch, 3)), "b": jnp.arange(batch)}, y, z=z)

    both(program)


def test_static_return_and_least_size():
    def program(utils):
        run = utils.pad_shard_unpad(lambda w, x: jnp.array(x.shape), static_return=True)
        return run(0, np.ones((3, 2))), run(0, np.ones((3, 2)), min_device_batch=4)

    both(program)
