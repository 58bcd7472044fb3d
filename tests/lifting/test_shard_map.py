import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from tests.lifting.counting import BOXES, Box
from weft.errors import AxisSizeError
from weft.lifting import FORK, Roles, pmap, shard_map

needs_devices = pytest.mark.skipif(len(jax.devices()) < 4, reason="needs four devices")
SPLIT = PartitionSpec("d")


@pytest.fixture
def mesh():
    return Mesh(np.asarray(jax.devices()[:4]), ("d",))


@needs_devices
def test_each_device_has_its_part_of_the_state(mesh):
    box = Box(x=jnp.arange(8.0), scale=jnp.float32(2))

    def f(box, y):
        assert box.arrays["x"].shape == (2,)
        box.write("x", box.arrays["scale"] * box.arrays["x"])
        return jax.lax.psum(y.sum(), "d")

    roles = Roles((("x", SPLIT), ("scale", PartitionSpec())))
    mapped = shard_map(
        BOXES, f, mesh=mesh, in_specs=(roles, SPLIT), out_specs=PartitionSpec(), check_vma=False
    )
    assert mapped(box, jnp.arange(4.0)) == 6
    np.testing.assert_array_equal(box.arrays["x"], 2 * np.arange(8.0))


@needs_devices
def test_each_device_has_its_own_keys(mesh):
    box = Box(key=jax.random.key(0))
    mapped = shard_map(
        BOXES,
        lambda box: jax.random.uniform(box.arrays["key"], (1,)),
        mesh=mesh,
        in_specs=(Roles(((True, FORK),)),),
        out_specs=SPLIT,
    )
    expected = jax.vmap(jax.random.uniform)(jax.random.split(jax.random.key(0), 4))
    np.testing.assert_array_equal(mapped(box), expected)


@needs_devices
def test_pmap_equals_vmap_with_a_device_for_each_index():
    x = np.arange(12.0, dtype=np.float32).reshape(3, 4)

    def f(box, y):
        box.write("x", box.arrays["x"] * y)
        return jax.lax.pmean(y, "i"), box.arrays["x"].sum()

    box, roles = Box(x=jnp.asarray(x)), Roles(((True, 1),))
    mapped = pmap(BOXES, f, axis_name="i", in_axes=(roles, 0), out_axes=(None, 0))
    mean, sums = mapped(box, jnp.arange(4.0))
    assert mean == 1.5
    np.testing.assert_allclose(box.arrays["x"], x * np.arange(4.0))
    np.testing.assert_allclose(sums, (x * np.arange(4.0)).sum(0))
    assert len(box.arrays["x"].sharding.device_set) == 4


def test_pmap_needs_a_device_for_each_index():
    with pytest.raises(AxisSizeError, match=r"have size 100, and there are \d+ devices"):
        pmap(BOXES, lambda x: x)(jnp.ones(100))
