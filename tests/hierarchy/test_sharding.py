import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from weft.errors import MeshError, ShardingWarning
from weft.hierarchy.sharding import maybe_shard

X = jnp.arange(16.0).reshape(4, 4)


@pytest.fixture
def mesh():
    shape = (jax.device_count() // 2, 2) if jax.device_count() > 1 else (1, 1)
    axis_types = (jax.sharding.AxisType.Auto,) * 2
    with jax.set_mesh(jax.make_mesh(shape, ("data", "model"), axis_types=axis_types)) as mesh:
        yield mesh


@pytest.mark.parametrize("spec", [PartitionSpec("data", "model"), ("data", "model")])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_lays_out_over_the_mesh(mesh, spec, transform):
    y = transform(lambda x: maybe_shard(x, spec))(X)
    assert y.sharding.spec == PartitionSpec("data", "model")
    np.testing.assert_array_equal(y, X)


def test_several_mesh_axes_for_one_axis(mesh):
    y = maybe_shard(jnp.ones((jax.device_count(), 3)), [["data", "model"], None])
    assert y.sharding.spec[0] == ("data", "model")


def test_under_transformations(mesh):
    def loss(x):
        return (maybe_shard(x, ("data", None)) ** 2).sum()

    np.testing.assert_allclose(jax.grad(loss)(X), 2 * X)
    np.testing.assert_allclose(jax.vmap(loss)(X[None]), loss(X)[None])


def test_nothing_without_a_mesh_or_a_spec(mesh):
    assert maybe_shard(X, None) is X


def test_nothing_without_a_mesh():
    assert maybe_shard(X, ("data", "model")) is X


def test_unknown_mesh_axis(mesh):
    with pytest.raises(MeshError, match="over 'fsdp', and the mesh has the axes 'data', 'model'"):
        maybe_shard(X, (("data", "fsdp"), None))


def test_an_axis_that_does_not_divide_is_not_split(mesh):
    if jax.device_count() == 1:
        pytest.skip("one device divides everything")
    with pytest.warns(ShardingWarning, match=r"axis 1 .* \(4, 3\) cannot be split into 2 equal"):
        y = jax.jit(lambda x: maybe_shard(x, ("data", "model")))(jnp.ones((4, 3)))
    assert y.sharding.spec == PartitionSpec("data")


def test_one_row_is_not_split(mesh):
    y = jax.jit(lambda x: maybe_shard(x, ("data", None, "model")))(jnp.ones((1, 1, 8)))
    assert y.sharding.spec in (PartitionSpec(None, None, "model"), PartitionSpec())
