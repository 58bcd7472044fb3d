"""Prediction of the time of a training step, from its program and the speeds of a device.

A device computes or moves memory, whichever takes longer, and then waits for all collectives:

    step     = max(compute, memory) + collectives
    compute  = operations of the step / devices / peak
    memory   = (state and batch + results + 2 × temporaries) / bandwidth
    collective over n devices = bytes × (n - 1) / n / bandwidth; an all-reduce moves them twice

No operation reaches its peak, and a compiler hides some of the communication behind computation:
the prediction says what limits a step and compares meshes, and may be off by half.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from weft.cli.collectives import Collective
from weft.trainer.device_specs import DeviceSpec


class StepTime(NamedTuple):
    """Seconds of a step by what takes them.

    Attributes:
        collectives: by the mesh axes that they are over, longest first.
        mfu: operations that the model needs, without recomputation, relative to the peak.
    """

    compute: float
    memory: float
    collectives: dict[str, float]
    mfu: float

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return max(self.compute, self.memory) + sum(self.collectives.values())

    def limit(self) -> str:
        """Returns what takes most of a step: "compute", "memory" or "collectives"."""
        seconds = {
            "compute": self.compute,
            "memory": self.memory,
            "collectives": sum(self.collectives.values()),
        }
        return max(seconds, key=lambda name: seconds[name])

    def advice(self) -> str:
        """Returns what to change first."""
        if self.limit() == "compute":
            return (
                "The devices are busy: more of them, or fewer recomputed operations (remat), make "
                "a step faster."
            )
        if self.limit() == "memory":
            return (
                "More rows of the batch per device use each read of the parameters for more "
                "computation."
            )
        axes = next(iter(self.collectives))
        return (
            f"Collectives over {axes} take longest: use fewer devices there, more rows of the "
            "batch per device, or an axis inside of a node (the last ones of the mesh)."
        )


def predict(
    spec: DeviceSpec,
    *,
    flops: float,
    model_flops: float,
    memory_traffic: float,
    collectives: Iterable[Collective],
    mesh_shape: Mapping[str, int],
    num_devices: int,
    num_slices: int = 1,
) -> StepTime:
    """Predicts the time of a step.

    Args:
        flops: operations of a step on all devices, with those that are recomputed.
        model_flops: operations that the model needs.
        memory_traffic: bytes that a device reads and writes.
        mesh_shape: the axes that the groups of the collectives refer to.
    """
    node_size = spec.node_size or num_devices // num_slices
    seconds_by_axes: defaultdict[str, float] = defaultdict(float)
    for collective in collectives:
        seconds = _seconds(collective, spec, node_size)
        seconds_by_axes[axes_text(collective, mesh_shape)] += seconds
    compute = flops / num_devices / spec.flops
    memory = memory_traffic / spec.memory_bandwidth
    step_time = StepTime(
        compute=compute,
        memory=memory,
        collectives=dict(
            sorted(seconds_by_axes.items(), key=lambda item: -item[1])
        ),
        mfu=0.0,
    )
    peak_seconds = model_flops / num_devices / spec.flops
    return step_time._replace(mfu=peak_seconds / step_time.total)


def axes_text(collective: Collective, mesh_shape: Mapping[str, int]) -> str:
    """Returns the mesh axes of a collective, as in a table."""
    axes = collective.axes(mesh_shape)
    return "other groups" if axes is None else " × ".join(axes)


def _seconds(collective: Collective, spec: DeviceSpec, node_size: int) -> float:
    if not collective.groups:
        return 0.0
    if collective.kind == "collective-permute":
        is_inside = all(
            source // node_size == target // node_size
            for source, target in collective.groups
        )
        bandwidth = spec.link_bandwidth if is_inside else spec.network_bandwidth
        return collective.times * collective.bytes / bandwidth
    group = collective.groups[0]
    num_nodes = len({position // node_size for position in group})
    bandwidth = spec.link_bandwidth
    if num_nodes > 1:
        # All devices of a node move their share over the network at the same time.
        devices_per_node = len(group) / num_nodes
        bandwidth = min(bandwidth, spec.network_bandwidth * devices_per_node)
    passes = 2 if collective.kind == "all-reduce" else 1
    share = (len(group) - 1) / len(group)
    num_bytes = collective.times * collective.bytes
    return passes * num_bytes * share / bandwidth
