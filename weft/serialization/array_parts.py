"""Arrays on devices that are filled part by part, so that the host never holds a whole one.

A part is all that is below an index of the leading axes, such as one layer of a stack:

    array = ArrayFromParts((num_layers, 4, 8), jnp.bfloat16, sharding)
    for layer in range(num_layers):
        array.write((layer,), read(layer))
    array.on_devices()

A device gets what its shard has of a part. Small arrays are put together on the host. The shards of
large ones are on their devices from the beginning and are written in place: each call of `write`
returns when its values have been sent, so that the host holds one part at a time.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from weft.typing import DType

MAX_HOST_BYTES = 2**26
"""Bytes of an array in one process up to which its shards are put together on the host."""


@dataclasses.dataclass
class _Shard:
    """A part of an array that one or several devices hold.

    Attributes:
        box: along each axis of the array, what is in the shard.
        places: the devices; None for JAX's default one.
        block: its values on the host, if they are put together there.
        buffers: its values on each device, otherwise.
    """

    box: tuple[slice, ...]
    places: list[Sharding | None]
    block: np.ndarray | None = None
    buffers: list[jax.Array] = dataclasses.field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(extent.stop - extent.start for extent in self.box)

    def start_of(self, index: Sequence[int]) -> tuple[int, ...] | None:
        """Returns where a part of the array is in the shard, None if it is not in it."""
        start: list[int] = []
        for i, extent in zip(index, self.box, strict=False):
            if not extent.start <= i < extent.stop:
                return None
            start.append(i - extent.start)
        return tuple(start)


class ArrayFromParts:
    """An array on devices that is filled part by part.

    Args:
        sharding: None for JAX's default device.

    >>> array = ArrayFromParts((2, 3), jnp.float32)
    >>> array.write((1,), np.ones(3))
    >>> array.write((0,), np.zeros(3))
    >>> array.on_devices().tolist()
    [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: DType,
        sharding: Sharding | None = None,
    ):
        self._shape = tuple(shape)
        self._dtype = jnp.dtype(dtype)
        self._sharding = sharding
        self._shards = _local_shards(self._shape, sharding)
        num_values = sum(math.prod(shard.shape) for shard in self._shards)
        is_small = num_values * self._dtype.itemsize <= MAX_HOST_BYTES
        if is_small or not _is_in_device_memory(sharding):
            for shard in self._shards:
                shard.block = np.empty(shard.shape, self._dtype)

    def box(self, index: Sequence[int]) -> tuple[slice, ...] | None:
        """Returns along each axis of a part what devices of this process hold.

        None if they hold nothing of it.
        """
        boxes: list[tuple[slice, ...]] = []
        for shard in self._shards:
            if shard.start_of(index) is not None:
                boxes.append(shard.box[len(index) :])
        if not boxes:
            return None
        extents: list[slice] = []
        for axis_extents in zip(*boxes, strict=True):
            start = min(extent.start for extent in axis_extents)
            stop = max(extent.stop for extent in axis_extents)
            extents.append(slice(start, stop))
        return tuple(extents)

    def write(self, index: Sequence[int], values: np.ndarray) -> None:
        """Sets the values of a part, or what `box` says of it, and converts them to the dtype."""
        box = self.box(index)
        if box is None:
            return
        if values.dtype.itemsize > 4:
            # JAX would cut them to 32 bits.
            values = values.astype(self._dtype)
        num_leading = len(index)
        for shard in self._shards:
            start = shard.start_of(index)
            if start is None:
                continue
            extents: list[slice] = []
            for extent, origin in zip(
                shard.box[num_leading:], box, strict=True
            ):
                extents.append(
                    slice(
                        extent.start - origin.start, extent.stop - origin.start
                    )
                )
            self._write_to(shard, start, values[tuple(extents)])

    def _write_to(
        self, shard: _Shard, start: tuple[int, ...], values: np.ndarray
    ) -> None:
        if shard.block is not None:
            shard.block[start] = values
            return
        values = values.reshape((1,) * len(start) + values.shape)
        if values.shape == shard.shape:
            shard.buffers = [
                jax.device_put(values, place).astype(self._dtype)
                for place in shard.places
            ]
        else:
            if not shard.buffers:
                shard.buffers = [
                    jnp.zeros(shard.shape, self._dtype, device=place)
                    for place in shard.places
                ]
            all_starts = (*start, *(0,) * (values.ndim - len(start)))
            for i, place in enumerate(shard.places):
                part = jax.device_put(values, place)
                shard.buffers[i] = _with_part(
                    shard.buffers[i], part, all_starts
                )
        # Otherwise the host would hold the values of many parts until they are sent.
        jax.block_until_ready(shard.buffers)

    def on_devices(self) -> jax.Array:
        """Returns the array."""
        arrays: list[jax.Array] = []
        for shard in self._shards:
            if shard.block is None:
                arrays += shard.buffers
                continue
            for place in shard.places:
                arrays.append(jax.device_put(shard.block, place))
        if self._sharding is None:
            return arrays[0]
        return jax.make_array_from_single_device_arrays(
            self._shape, self._sharding, arrays
        )


def _local_shards(
    shape: tuple[int, ...], sharding: Sharding | None
) -> list[_Shard]:
    """Returns the parts of an array that devices of this process hold, each one once."""
    if sharding is None:
        whole = tuple(slice(0, size) for size in shape)
        return [_Shard(whole, [None])]
    shards: dict[tuple[tuple[int, int], ...], _Shard] = {}
    index_of_device = sharding.addressable_devices_indices_map(shape)
    for device, index in index_of_device.items():
        extents: list[tuple[int, int]] = []
        for size, part in zip(shape, index or (), strict=True):
            start, stop, _ = part.indices(size)
            extents.append((start, stop))
        box = tuple(slice(start, stop) for start, stop in extents)
        shard = shards.setdefault(tuple(extents), _Shard(box, []))
        shard.places.append(
            SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        )
    return list(shards.values())


def _is_in_device_memory(sharding: Sharding | None) -> bool:
    if sharding is None or sharding.memory_kind is None:
        return True
    device = next(iter(sharding.addressable_devices))
    return sharding.memory_kind == device.default_memory().kind


@functools.partial(jax.jit, donate_argnums=0)
def _with_part(
    buffer: jax.Array, part: jax.Array, start: tuple[int, ...]
) -> jax.Array:
    return jax.lax.dynamic_update_slice(
        buffer, part.astype(buffer.dtype), start
    )
