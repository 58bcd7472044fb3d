"""Memory and speeds of accelerators, to predict the time of a step on devices that are absent."""

from typing import NamedTuple

from weft.trainer.flops import PEAK_FLOPS


class DeviceSpec(NamedTuple):
    """Memory and speeds of a kind of device.

    Attributes:
        kinds: parts of JAX's device kind by which it is known.
        memory: bytes.
        flops: dense bfloat16 operations per second.
        memory_bandwidth: bytes per second.
        link_bandwidth: bytes per second that a device receives from others of its node, or, over
            one axis of the torus, of its TPU slice.
        network_bandwidth: bytes per second that a device receives from other nodes or slices.
        node_size: devices of a node; None for a TPU, whose slices have links throughout.
    """

    kinds: tuple[str, ...]
    memory: float
    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    node_size: int | None


# From the makers' data sheets. NVIDIA: "H100 Tensor Core GPU" (SXM), "H200 Tensor Core GPU", "DGX
# B200"; of NVLink's bandwidth one half is for each direction, and a node of eight has a network
# card of 400 Gbit/s for each GPU. Google: "TPU v5e", "TPU v5p", "TPU v6e" in the documentation of
# Cloud TPU; the links of one axis are a half or, of v5p, a third of all those of a chip.
DEVICE_SPECS = {
    "H100": DeviceSpec(
        kinds=("H100",),
        memory=80e9,
        flops=PEAK_FLOPS["H100"],
        memory_bandwidth=3.35e12,
        link_bandwidth=450e9,
        network_bandwidth=50e9,
        node_size=8,
    ),
    "H200": DeviceSpec(
        kinds=("H200",),
        memory=141e9,
        flops=PEAK_FLOPS["H200"],
        memory_bandwidth=4.8e12,
        link_bandwidth=450e9,
        network_bandwidth=50e9,
        node_size=8,
    ),
    "B200": DeviceSpec(
        kinds=("B200",),
        memory=180e9,
        flops=PEAK_FLOPS["B200"],
        memory_bandwidth=8e12,
        link_bandwidth=900e9,
        network_bandwidth=50e9,
        node_size=8,
    ),
    "v5e": DeviceSpec(
        kinds=("TPU v5 lite", "TPU v5e"),
        memory=16e9,
        flops=PEAK_FLOPS["TPU v5e"],
        memory_bandwidth=819e9,
        link_bandwidth=100e9,
        network_bandwidth=3.1e9,
        node_size=None,
    ),
    "v5p": DeviceSpec(
        kinds=("TPU v5", "TPU v5p"),
        memory=95e9,
        flops=PEAK_FLOPS["TPU v5p"],
        memory_bandwidth=2.765e12,
        link_bandwidth=200e9,
        network_bandwidth=6.25e9,
        node_size=None,
    ),
    "v6e": DeviceSpec(
        kinds=("TPU v6 lite", "TPU v6e"),
        memory=32e9,
        flops=PEAK_FLOPS["TPU v6e"],
        memory_bandwidth=1.64e12,
        link_bandwidth=200e9,
        network_bandwidth=12.5e9,
        node_size=None,
    ),
}


def device_spec_of(device_kind: str) -> DeviceSpec | None:
    """Returns the spec of a `jax.Device.device_kind`; None for unknown ones.

    >>> device_spec_of("TPU v5 lite") is DEVICE_SPECS["v5e"], device_spec_of("cpu")
    (True, None)
    """
    specs_by_kind: dict[str, DeviceSpec] = {}
    for spec in DEVICE_SPECS.values():
        for kind in spec.kinds:
            if kind in device_kind:
                specs_by_kind[kind] = spec
    if not specs_by_kind:
        return None
    return specs_by_kind[max(specs_by_kind, key=len)]
