"""Arrays that are filled part by part, on one device and on a mesh of eight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from weft.serialization import array_parts
from weft.serialization.array_parts import ArrayFromParts

SHAPE = (4, 2, 8, 6)
VALUES = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)


@pytest.fixture(params=["on the host", "in place"])
def place(request, monkeypatch):
    """Where the shards are put together."""
    if request.param == "in place":
        monkeypatch.setattr(array_parts, "MAX_HOST_BYTES", 0)
    return request.param


@pytest.mark.parametrize(
    ("spec", "num_leading"),
    [
        (None, 0),
        (None, 1),
        (PartitionSpec(), 1),
        (PartitionSpec("stage", None, "data", "model"), 2),
        (PartitionSpec(None, "model", ("stage", "data")), 1),
    ],
    ids=str,
)
def test_parts_become_an_array(place, spec, num_leading):
    sharding = None
    if spec is not None:
        mesh = jax.make_mesh(
            (2, 2, 2), ("stage", "data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 3
        )
        sharding = NamedSharding(mesh, spec)
    array = ArrayFromParts(SHAPE, jnp.bfloat16, sharding)
    for index in np.ndindex(SHAPE[:num_leading]):
        array.write(index, VALUES[index])
    result = array.on_devices()
    assert result.dtype == jnp.bfloat16
    assert sharding is None or result.sharding == sharding
    np.testing.assert_array_equal(result, VALUES.astype(jnp.bfloat16))


def test_memory_of_the_host():
    """There, an array is put together whatever its size."""
    device = jax.devices()[0]
    sharding = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    assert device.default_memory().kind != "pinned_host"
    array = ArrayFromParts((2, 3), jnp.float32, sharding)
    array.write((1,), np.ones(3))
    array.write((0,), np.zeros(3))
    result = array.on_devices()
    assert result.sharding == sharding
    np.testing.assert_array_equal(result, [[0, 0, 0], [1, 1, 1]])


def test_what_a_process_needs_of_a_part():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    array = ArrayFromParts((2, 4, 6), jnp.float32, NamedSharding(mesh, PartitionSpec(None, "a")))
    assert array.box((1,)) == (slice(0, 4), slice(0, 6))

    class OfOneProcess:
        """Sharding over two processes, this one with the second half of each axis."""

        memory_kind = None

        def addressable_devices_indices_map(self, shape):
            half = tuple(slice(size // 2, size) for size in shape)
            return {jax.devices()[0]: half, jax.devices()[1]: half}

    array = ArrayFromParts((2, 4, 6), jnp.float32, OfOneProcess())
    assert array.box((0,)) is None
    assert array.box((1,)) == (slice(2, 4), slice(3, 6))
    assert array.box(()) == (slice(1, 2), slice(2, 4), slice(3, 6))
    array.write((0,), np.zeros((2, 3)))  # for another process
