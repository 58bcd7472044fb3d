"""Meshes, grids of devices with named axes, and rules that map names of array axes to mesh axes.

A hybrid mesh distinguishes the part of each axis within a slice or host, with a fast interconnect
(`ici_mesh_shape`), from the part that crosses the network between them (`dcn_mesh_shape`); the size
of an axis is the product of both.

A model names the axes of its parameters and activations once. Each kind of array may map a name to
a different mesh axis, for example to shard the optimizer state of replicated parameters. Gradients
and the learner's state take their names from the parameters.
"""

import copy
import dataclasses
import glob
import itertools
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np
from jax.experimental import mesh_utils

from weft import config
from weft.core import axis_rules
from weft.core.spmd import check_divides as check_divides
from weft.core.spmd import named_sharding as named_sharding
from weft.distributed import cpu_threads
from weft.errors import ConfigModifierError, MeshError


class Device(Protocol):
    """Device of JAX, or a description of one."""

    @property
    def platform(self) -> str: ...

    @property
    def process_index(self) -> int: ...


MeshShape = Sequence[int]

# Exist where the driver of NVIDIA's GPUs runs.
_GPU_FILES = "/dev/nvidia[0-9]*"


@dataclasses.dataclass(frozen=True)
class HybridMeshShape:
    """Shape of a mesh over several slices or hosts.

    One number of both may be -1, which fills in the rest:

        HybridMeshShape(ici_mesh_shape=(1, 8), dcn_mesh_shape=(4, 1))    # 4 × 8, 4 slices of 8
    """

    ici_mesh_shape: MeshShape
    dcn_mesh_shape: MeshShape


# Regular expressions for hardware, and mesh shapes or modifiers for it; see `select_mesh_config`.
MeshRules = Sequence[
    tuple[
        str, MeshShape | HybridMeshShape | config.ConfigModifier.Config | None
    ]
]


def build_mesh(
    mesh_shape: MeshShape | HybridMeshShape,
    mesh_axis_names: Sequence[str],
    devices: Sequence[Device] | None = None,
) -> jax.sharding.Mesh:
    """Builds a mesh over `devices`, by default all of them.

    One entry of the shape may be -1, which fills in the rest. Several TPU slices are placed along
    the first axis that their number divides.

    Raises MeshError if the shape does not fit the names or the devices.

    >>> build_mesh((-1, 1), ("data", "model")).axis_names
    ('data', 'model')
    """
    if devices is None:
        cpu_threads.provide_threads()
        devices = jax.devices()
    names = tuple(mesh_axis_names)
    axis_types = (jax.sharding.AxisType.Auto,) * len(names)
    # JAX places neighbors on the mesh near each other, but within one slice only.
    if not isinstance(mesh_shape, HybridMeshShape):
        (sizes,) = _infer_sizes({"mesh_shape": mesh_shape}, names, len(devices))
        num_slices = len(_groups_by(_slice_of, devices))
        if num_slices == 1 or devices[0].platform != "tpu":
            grid = _grid(sizes, devices)
            return jax.sharding.Mesh(grid, names, axis_types=axis_types)
        mesh_shape = over_slices(sizes, num_slices)
    grid = _hybrid_grid(mesh_shape, names, devices)
    return jax.sharding.Mesh(grid, names, axis_types=axis_types)


def _grid(sizes: Sequence[int], devices: Sequence[Device]) -> np.ndarray:
    # Without the option, JAX refuses sizes that do not multiply to those of the torus of a TPU
    # slice: 8 × 8 for its 4 × 4 × 4 chips.
    return mesh_utils.create_device_mesh(
        sizes, devices=devices, allow_split_physical_axes=True
    )


def infer_mesh_shape(
    mesh_shape: MeshShape | HybridMeshShape, *, num_devices: int | None = None
) -> MeshShape | HybridMeshShape:
    """Returns a mesh shape with the entry -1 replaced, for all devices by default.

    Raises MeshError if the shape does not fit the number of devices.

    >>> infer_mesh_shape((2, -1), num_devices=8)
    (2, 4)
    """
    if num_devices is None:
        num_devices = jax.device_count()
    if not isinstance(mesh_shape, HybridMeshShape):
        names = tuple(f"axis{i}" for i in range(len(mesh_shape)))
        return _infer_sizes({"mesh_shape": mesh_shape}, names, num_devices)[0]
    names = tuple(f"axis{i}" for i in range(len(mesh_shape.ici_mesh_shape)))
    return HybridMeshShape(*_infer_sizes(vars(mesh_shape), names, num_devices))


def over_slices(mesh_shape: MeshShape, num_slices: int) -> HybridMeshShape:
    """Splits a mesh shape over slices along the first divisible axis, or raises a MeshError.

    >>> over_slices((1, 4, 2), 2)
    HybridMeshShape(ici_mesh_shape=(1, 2, 2), dcn_mesh_shape=(1, 2, 1))
    """
    for axis, size in enumerate(mesh_shape):
        if size % num_slices == 0:
            sizes_within = list(mesh_shape)
            sizes_within[axis] = size // num_slices
            sizes_across = [1] * len(mesh_shape)
            sizes_across[axis] = num_slices
            return HybridMeshShape(tuple(sizes_within), tuple(sizes_across))
    raise MeshError(
        f"the devices form {num_slices} slices, and no axis of mesh_shape={tuple(mesh_shape)} "
        "is divisible by that number; make one a multiple, or set a HybridMeshShape."
    )


def _infer_sizes(
    shapes: Mapping[str, MeshShape], names: tuple[str, ...], num_devices: int
) -> list[tuple[int, ...]]:
    """Replaces the -1, such that all shapes multiply to the number of devices."""
    for field, shape in shapes.items():
        if len(shape) != len(names):
            raise MeshError(
                f"{field}={tuple(shape)} has {len(shape)} axes and mesh_axis_names={names} names "
                f"{len(names)}; give one size per name."
            )
    shapes_text = " and ".join(
        f"{field} ({_named_sizes(names, shape)})"
        for field, shape in shapes.items()
    )
    sizes = list(itertools.chain.from_iterable(shapes.values()))
    has_open_size = -1 in sizes
    given_sizes = list(sizes)
    if has_open_size:
        given_sizes.remove(-1)
    if any(size < 1 for size in given_sizes):  # such as a second -1
        raise MeshError(
            f"{shapes_text}: each size is a positive number, and one may be -1 for the rest."
        )
    num_given = math.prod(given_sizes)
    needed_devices = f"{num_given}"
    fits = num_devices == num_given
    if has_open_size:
        needed_devices = f"a multiple of {num_given}"
        fits = num_devices > 0 and num_devices % num_given == 0
    if not fits:
        raise MeshError(
            f"{shapes_text} needs {needed_devices} devices "
            f"and there are {num_devices}; the sizes must multiply to the number of devices "
            "(-1 fills in the rest)."
        )
    filled_shapes: list[tuple[int, ...]] = []
    for shape in shapes.values():
        filled_shape = list(shape)
        if -1 in filled_shape:
            filled_shape[filled_shape.index(-1)] = num_devices // num_given
        filled_shapes.append(tuple(filled_shape))
    return filled_shapes


def _named_sizes(names: Sequence[str], shape: MeshShape) -> str:
    return ", ".join(
        f"{name}={size}" for name, size in zip(names, shape, strict=True)
    )


def _hybrid_grid(
    shape: HybridMeshShape, names: tuple[str, ...], devices: Sequence[Device]
) -> np.ndarray:
    ici_sizes, dcn_sizes = _infer_sizes(vars(shape), names, len(devices))
    grids = [
        _grid(ici_sizes, group)
        for group in _equal_groups(devices, names, dcn_sizes)
    ]
    # Axis i of the mesh: first the groups along it, and inside of each its devices.
    grid = np.stack(grids).reshape((*dcn_sizes, *ici_sizes))
    num_axes = len(names)
    interleaved_axes: list[int] = []
    for axis in range(num_axes):
        interleaved_axes += [axis, num_axes + axis]
    return grid.transpose(interleaved_axes).reshape(
        np.multiply(dcn_sizes, ici_sizes)
    )


def _slice_of(device: Device) -> int | None:
    return getattr(device, "slice_index", None)


def _process_of(device: Device) -> int:
    return device.process_index


def _groups_by(
    group_of: Callable[[Device], int | None], devices: Sequence[Device]
) -> list[list[Device]]:
    groups: dict[int | None, list[Device]] = {}
    for device in devices:
        groups.setdefault(group_of(device), []).append(device)
    return list(groups.values())


def _equal_groups(
    devices: Sequence[Device],
    names: tuple[str, ...],
    dcn_sizes: tuple[int, ...],
) -> Sequence[Sequence[Device]]:
    """Groups devices by slice or by process, whichever yields as many groups as the sizes say."""
    num_groups = math.prod(dcn_sizes)
    size = len(devices) // num_groups
    slices = _groups_by(_slice_of, devices)
    processes = _groups_by(_process_of, devices)
    for groups in (slices, processes):
        if len(groups) == num_groups and all(
            len(group) == size for group in groups
        ):
            return groups
    if all(device.platform == "cpu" for device in devices):
        # CPU devices are interchangeable and can emulate any number of slices.
        return [devices[i * size : (i + 1) * size] for i in range(num_groups)]
    raise MeshError(
        f"dcn_mesh_shape ({_named_sizes(names, dcn_sizes)}) spans {num_groups} equal groups of "
        f"devices, and the {len(devices)} devices are in {len(slices)} slice(s) and "
        f"{len(processes)} process(es); its sizes must multiply to one of these numbers."
    )


def select_mesh_config(
    trainer_config: config.InstantiableConfig, *, mesh_selector: str
) -> None:
    """Adapts a trainer config in place to hardware, such as "tpu-v5e-256", by its `mesh_rules`.

    A rule is a pair of a regular expression and a mesh shape, a config modifier (which sets a mesh
    shape and related fields), or None to change nothing. The first rule whose expression matches
    the whole selector applies; without a match the config is unchanged.

    Raises ConfigModifierError if a modifier returns another config instead of changing this one.
    """
    for pattern, rule in trainer_config.mesh_rules or ():
        if not re.fullmatch(pattern, mesh_selector):
            continue
        modifier = config.maybe_instantiate(rule)
        if not isinstance(modifier, config.ConfigModifier):
            if rule is not None:
                trainer_config.mesh_shape = copy.copy(rule)
        elif modifier(trainer_config) is not trainer_config:
            raise ConfigModifierError(
                f"mesh_rules[{pattern!r}]: {type(modifier).__name__} returned another config for "
                "the trainer; a modifier of a mesh rule has to change the given config in place "
                "and return it."
            )
        return


AxisRules = Sequence[tuple[str, str | Sequence[str] | None]]


class RulesByKind(config.Configurable):
    """Axis rules for one kind of array, which take precedence over those for all kinds.

    >>> cfg = RulesByKind.default_config().set(parameters=[("fsdp", None)])
    >>> cfg.instantiate().with_all([("fsdp", "data"), ("mlp", "model")]).parameters
    (('fsdp', None), ('mlp', 'model'))
    """

    class Config(config.Configurable.Config):
        """Configures a RulesByKind with pairs of a name and its mesh axis or axes, or None."""

        parameters: AxisRules = []
        """For the model's parameters and other state."""
        optimizer: AxisRules = []
        """For the learner's state, including moving averages of parameters."""
        gradients: AxisRules = []
        """For gradients, as they leave the backward pass."""
        activations: AxisRules = []
        """For layouts that the model sets inside its computation."""

    def with_all(self, rules: AxisRules) -> "KindRules":
        """Returns the rules of each kind, with those for all where a name has none.

        Raises a LogicalAxisError if rules are malformed.
        """
        cfg = self.config
        return KindRules(
            parameters=_with_priority(cfg.parameters, rules),
            optimizer=_with_priority(cfg.optimizer, rules),
            gradients=_with_priority(cfg.gradients, rules),
            activations=_with_priority(cfg.activations, rules),
        )


class KindRules(NamedTuple):
    """Complete rules of each kind, with the fields of `RulesByKind.Config`."""

    parameters: axis_rules.Rules = ()
    optimizer: axis_rules.Rules = ()
    gradients: axis_rules.Rules = ()
    activations: axis_rules.Rules = ()


def rules_of(cfg: config.ConfigBase) -> KindRules:
    """Returns the rules from a config's `logical_axis_rules` and `rules_by_kind`."""
    return cfg.rules_by_kind.instantiate().with_all(cfg.logical_axis_rules)


def _with_priority(
    rules_of_kind: AxisRules, general_rules: AxisRules
) -> axis_rules.Rules:
    rules = list(axis_rules.checked_rules(rules_of_kind))
    names = {name for name, _ in rules}
    for rule in axis_rules.checked_rules(general_rules):
        if rule[0] not in names:
            rules.append(rule)
    return tuple(rules)


def unused_gpu_note() -> str | None:
    """Returns how to use the GPU of this machine if JAX has only the CPU, else None.

    None also if `JAX_PLATFORMS` or `CUDA_VISIBLE_DEVICES` says so.
    """
    is_chosen = bool(jax.config.jax_platforms)  # pyright: ignore[reportAttributeAccessIssue]
    if is_chosen or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    if jax.default_backend() != "cpu" or not glob.glob(_GPU_FILES):
        return None
    command = (
        f'{sys.executable} -m pip install "jax[cuda12]=={jax.__version__}"'
    )
    return (
        "This machine has a GPU, but this run uses the CPU: JAX has no CUDA plugin, or it does not "
        f"start. Install it with\n  {command}\nor, in a checkout of Weft, train with\n  make train "
        "DEVICE=cuda12\nSet JAX_PLATFORMS=cpu to use the CPU on purpose."
    )
