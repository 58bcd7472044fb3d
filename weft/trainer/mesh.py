"""The mesh: devices in a grid whose axes have names that layouts speak of."""

import copy
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from weft.errors import MeshError

MeshShape = Sequence[int]


def build_mesh(
    mesh_shape: MeshShape,
    mesh_axis_names: Sequence[str],
    devices: Sequence[Any] | None = None,
) -> jax.sharding.Mesh:
    """The mesh of a shape over all devices.

    Args:
        mesh_shape: the number of devices along each axis; one entry may be -1, for what is left.
        mesh_axis_names: the name of each axis.
        devices: the devices, all of them by default.

    Raises:
        MeshError: if the shape does not fit the names or the devices.

    Example:
        >>> build_mesh((-1, 1), ("data", "model")).axis_names
        ('data', 'model')
    """
    devices = jax.devices() if devices is None else devices
    named = ", ".join(f"{n}={s}" for n, s in zip(mesh_axis_names, mesh_shape, strict=False))
    if len(mesh_shape) != len(mesh_axis_names):
        raise MeshError(
            f"mesh_shape={tuple(mesh_shape)} has {len(mesh_shape)} axes and "
            f"mesh_axis_names={tuple(mesh_axis_names)} names {len(mesh_axis_names)}; "
            "give one size per name."
        )
    sizes = list(mesh_shape)
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise MeshError(
            f"mesh_shape ({named}): each size is a positive number, and one may be -1 for the rest."
        )
    known = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and len(devices) % known == 0:
        sizes[sizes.index(-1)] = len(devices) // known
    if -1 in sizes or math.prod(sizes) != len(devices):
        raise MeshError(
            f"mesh_shape ({named}) needs {'a multiple of ' if -1 in sizes else ''}{known} devices "
            f"and there are {len(devices)}; the sizes must multiply to the number of devices "
            "(-1 stands for what is left)."
        )
    grid = jax.make_mesh(
        tuple(sizes),
        tuple(mesh_axis_names),
        axis_types=(jax.sharding.AxisType.Auto,) * len(sizes),
        devices=devices,
    )
    return grid


def select_mesh_config(trainer_config: Any, *, mesh_selector: str) -> None:
    """Sets the mesh shape of a trainer config by its `mesh_rules`.

    Args:
        trainer_config: changed in place, if a rule matches.
        mesh_selector: names the hardware. The first rule whose regular expression matches all of it
            counts; a rule with the shape None leaves the config as it is.
    """
    for pattern, shape in trainer_config.mesh_rules or ():
        if re.fullmatch(pattern, mesh_selector):
            if shape is not None:
                trainer_config.mesh_shape = copy.copy(shape)
            return


def check_divides(path: str, shape: Sequence[int], sharding: jax.sharding.NamedSharding) -> None:
    """Checks that an array's axes divide over the mesh axes they are laid over.

    Args:
        path: names the array in the error.
        shape: of the array.
        sharding: its layout.

    Raises:
        MeshError: if an axis does not divide, or a mesh axis does not exist.
    """
    sizes = dict(sharding.mesh.shape)
    for i, entry in enumerate(sharding.spec):
        names = (entry,) if isinstance(entry, str) else entry or ()
        parts = int(np.prod([sizes[name] for name in names], dtype=np.int64))
        if shape[i] % parts:
            raise MeshError(
                f"{path} of shape {tuple(shape)} is laid out as {sharding.spec}: axis {i} of size "
                f"{shape[i]} does not divide over {'×'.join(names)} = {parts} devices. Change the "
                "size, the mesh_shape, or the parameter's partition spec."
            )


def named_sharding(
    mesh: jax.sharding.Mesh, spec: jax.sharding.PartitionSpec, path: str
) -> jax.sharding.NamedSharding:
    """The layout of an array on a mesh.

    Args:
        mesh: the mesh.
        spec: the mesh axes of each axis. Names that the mesh does not have are an error.
        path: names the array in the error.

    Raises:
        MeshError: if `spec` names an axis that the mesh does not have.
    """
    names = {n for e in spec for n in ((e,) if isinstance(e, str) else e or ())}
    if unknown := sorted(names - set(mesh.axis_names)):
        raise MeshError(
            f"{path} is laid out as {spec}, but the mesh has no axis {unknown}; it has "
            f"{mesh.axis_names}. Add the axis to mesh_axis_names (its size may be 1)."
        )
    return jax.sharding.NamedSharding(mesh, spec)
