"""Ahead-of-time compilation for devices that this machine does not have.

A topology names a number of devices. "cpu-64" is 64 virtual CPU devices, whose layouts are those of
other devices; XLA combines and replaces some collectives for other devices, and its temporaries
take less memory there. "tpu-v5p-128" is a part of a TPU pod; XLA's TPU compiler compiles the
program that would run there (`pip install 'jax[tpu]'`; no TPU needed).

    programs = compile_trainer_programs(cfg, topology="v5p-128", topology_num_slices=2)
    print(aot_model_analysis(programs["train_step"]))
"""

import dataclasses
import importlib.util
import math
import re
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from weft.config import InstantiableConfig
from weft.core.axis_rules import logical_axis_rules
from weft.errors import TopologyError, did_you_mean
from weft.inference.runner import InferenceRunner, method_program
from weft.trainer import mesh as mesh_lib
from weft.trainer.flops import FLOPS_OF_STEPS
from weft.trainer.optimizers.base import path_name
from weft.trainer.state import parameter_specs, state_shardings, with_shardings
from weft.typing import Nested, PartitionSpec


@dataclasses.dataclass(frozen=True)
class SystemCharacteristics:
    """Description of a kind of system for its compiler.

    Attributes:
        topology_name: generation of the chips and their number along each side.
        chip_config_name: "megacore" if the two cores of a chip are one device.
        chips_per_host_bounds: chips of one host along each side.
    """

    platform: str
    topology_name: str
    chip_config_name: str
    chips_per_host_bounds: Sequence[int]
    devices_per_slice: int


# Sizes that clouds offer: counted in chips in two dimensions, in cores (2 per chip) in three.
_SQUARES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    *("8x8x16", "8x16x16"),
)
_GENERATIONS = (
    # user-facing name, name of the topology, sides, cores per chip that names count
    ("v4", "v4", _CUBES, 2),
    ("v5p", "v5p", (*_CUBES, "16x16x16", "16x16x24"), 2),
    ("v5e", "v5e", _SQUARES, 1),
    ("v5litepod", "v5e", _SQUARES, 1),
    ("v6e", "v6e", _SQUARES, 1),
)


def _tpu_systems() -> dict[str, SystemCharacteristics]:
    systems: dict[str, SystemCharacteristics] = {}
    for name, generation, all_sides, cores_per_chip in _GENERATIONS:
        for sides in all_sides:
            lengths = [int(length) for length in sides.split("x")]
            num_chips = math.prod(lengths)
            systems[f"{name}-{cores_per_chip * num_chips}"] = (
                SystemCharacteristics(
                    platform="tpu",
                    topology_name=f"{generation}:{sides}",
                    chip_config_name="megacore"
                    if len(lengths) == 3
                    else "default",
                    chips_per_host_bounds=(1, 1, 1)
                    if num_chips == 1
                    else (2, 2, 1),
                    devices_per_slice=num_chips,
                )
            )
    return systems


USER_FACING_NAME_TO_SYSTEM_CHARACTERISTICS = _tpu_systems()
"""The TPU slices that can be compiled for, by names such as "v5p-128"."""


def get_devices_for_topology(
    topology: str | None, topology_num_slices: int = 1
) -> Sequence[Any]:
    """Returns the devices of a topology, for which programs can be compiled.

    Args:
        topology: "cpu-N" for N virtual CPU devices, or a name, or "tpu-" and a name, of
          `USER_FACING_NAME_TO_SYSTEM_CHARACTERISTICS`; None for the devices of this machine.

    Raises TopologyError if the topology is unknown, or its compiler is not installed.
    """
    if topology is None:
        return jax.devices()
    cpu = re.fullmatch(r"cpu-([1-9]\d*)", topology)
    if cpu:
        return _cpu_devices(int(cpu[1]) * topology_num_slices)
    name = topology.removeprefix("tpu-")
    system = USER_FACING_NAME_TO_SYSTEM_CHARACTERISTICS.get(name)
    if system is None:
        raise TopologyError(
            f"unknown topology {topology!r}. "
            f"{did_you_mean(name, USER_FACING_NAME_TO_SYSTEM_CHARACTERISTICS)} Or use virtual "
            "CPU devices: 'cpu-64'."
        )
    options: dict[str, Any] = {}
    if topology_num_slices > 1:
        # Only with this option does the compiler expect a network between slices.
        options["num_slices"] = topology_num_slices
    try:
        description = topologies.get_topology_desc(
            platform=system.platform,
            topology_name=system.topology_name,
            chip_config_name=system.chip_config_name,
            chips_per_host_bounds=system.chips_per_host_bounds,
            **options,
        )
    except RuntimeError as error:
        advice = "Install it by pip install 'jax[tpu]'; no TPU is needed."
        if importlib.util.find_spec("libtpu") is not None:
            advice = (
                "libtpu is installed, but only one process at a time can use it: wait for the end "
                "of another one, such as a second `weft check`, or set "
                "ALLOW_MULTIPLE_LIBTPU_LOAD=1 if neither uses TPUs."
            )
        raise TopologyError(
            f"the compiler for {topology!r} cannot be used: {error} {advice} Or compile for "
            f"virtual CPU devices: 'cpu-{system.devices_per_slice}'."
        ) from error
    return description.devices


# XLA counts CPU devices from here on as those of another process.
_CPU_DEVICES_PER_PROCESS = 2048
_MAX_CPU_DEVICES = 2**20


def _cpu_devices(count: int) -> Sequence[Any]:
    if count > _MAX_CPU_DEVICES:
        raise TopologyError(
            f"{count:,} virtual CPU devices are needed, and there can be {_MAX_CPU_DEVICES:,}. "
            "Choose smaller sizes for the axes of the mesh."
        )
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # JAX has already created its devices
        devices = jax.devices("cpu")
        if len(devices) < count:
            raise TopologyError(
                f"{count} virtual CPU devices are needed, but JAX has already created "
                f"{len(devices)}; request them before JAX is used, or set "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={count}."
            ) from None
        return devices[:count]
    is_alone = not jax.distributed.is_initialized()
    if count > _CPU_DEVICES_PER_PROCESS and is_alone:
        return _cpu_devices_across_processes()
    return jax.devices("cpu")


def _cpu_devices_across_processes() -> Sequence[Any]:
    """Creates CPU devices for which XLA compiles as if they were those of several processes.

    It does so only if there is a way for processes to communicate, which asks for a coordinator
    when the devices are created, and never again: nothing runs on them.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # The service would replace the handler of SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    with tempfile.TemporaryDirectory() as directory:
        address = f"unix:{directory}/coordinator"
        jax.distributed.initialize(
            address,
            num_processes=1,
            process_id=0,
            coordinator_bind_address=address,
            cluster_detection_method="deactivate",
        )
        try:
            return jax.devices("cpu")
        finally:
            jax.distributed.shutdown()


def reshape_devices(
    *,
    devices: Sequence[Any],
    mesh_shape: mesh_lib.MeshShape,
    devices_per_slice: int,
    num_slices: int,
) -> np.ndarray:
    """Returns devices in the shape of a mesh; mesh neighbors are near each other in the machine.

    The first axis whose size `num_slices` divides is split over the slices.

    Raises:
        TopologyError: if the numbers of devices differ.
        MeshError: if the number of slices divides no axis.
    """
    sizes = tuple(mesh_shape)
    if (
        math.prod(sizes) != len(devices)
        or len(devices) != devices_per_slice * num_slices
    ):
        raise TopologyError(
            f"mesh_shape={sizes} has {math.prod(sizes)} places for {len(devices)} devices in "
            f"num_slices={num_slices} slices of devices_per_slice={devices_per_slice}; all three "
            "numbers must be equal."
        )
    axis_names = [str(axis) for axis in range(len(sizes))]
    hybrid_shape = mesh_lib.over_slices(sizes, num_slices)
    return mesh_lib.build_mesh(hybrid_shape, axis_names, devices).devices


def compile_trainer_programs(
    trainer_config: InstantiableConfig,
    *,
    topology: str | None,
    topology_num_slices: int = 1,
    compiler_options: dict[str, Any] | None = None,
) -> dict[str, jax.stages.Compiled]:
    """Compiles the programs that a trainer runs on its devices, by name: "train_step".

    The config's mesh spans all devices of the topology; see `get_devices_for_topology`.

    Raises MeshError if the mesh does not fit the devices, or an array does not fit the mesh.
    """
    devices = get_devices_for_topology(topology, topology_num_slices)
    trainer = trainer_config.clone().instantiate(parent=None, devices=devices)
    return {
        "train_step": trainer.compile_train_step(
            compiler_options=compiler_options
        )
    }


def compile_inference_programs(
    inferencer_config: InferenceRunner.Config,
    *,
    input_batch_spec: Nested[jax.ShapeDtypeStruct] | None,
    topology: str | None,
    topology_num_slices: int = 1,
    compiler_options: dict[str, Any] | None = None,
    method: str = "sample_decode",
) -> dict[str, jax.stages.Compiled]:
    """Compiles a method of a trained model, without a checkpoint; returns it by the method's name.

    `input_batch_spec` is a tree with the shapes and dtypes of a global batch, such as
    `jax.ShapeDtypeStruct`s. For topology and errors see `compile_trainer_programs`.
    """
    cfg = inferencer_config
    devices = get_devices_for_topology(topology, topology_num_slices)
    mesh = mesh_lib.build_mesh(cfg.mesh_shape, cfg.mesh_axis_names, devices)
    rules = mesh_lib.rules_of(cfg)
    with jax.set_mesh(mesh), logical_axis_rules(rules.activations):
        model = cfg.model.clone(name="model").instantiate(parent=None)
        specs = parameter_specs(model, rules.parameters)
        shapes = jax.eval_shape(
            lambda: model.initialize_parameters_recursively(
                jax.random.key(0), prebuilt=None
            )
        )
        params = with_shardings(shapes, state_shardings(mesh, specs))
        partition = tuple(cfg.input_batch_partition_spec.partition_spec(mesh))

        def laid_out(
            path: jax.tree_util.KeyPath, x: jax.ShapeDtypeStruct
        ) -> jax.ShapeDtypeStruct:
            spec = PartitionSpec(*partition[: len(x.shape)])
            name = f"input_batch_spec {path_name(path)}"
            sharding = mesh_lib.named_sharding(mesh, spec, name)
            mesh_lib.check_divides(name, x.shape, sharding)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        batch = jax.tree_util.tree_map_with_path(
            laid_out, input_batch_spec, is_leaf=lambda x: hasattr(x, "shape")
        )
        key = jax.eval_shape(lambda: jax.random.key(0))
        lowered = method_program(cfg, model, mesh, method=method).lower(
            key, params, batch
        )
        return {method: lowered.compile(compiler_options=compiler_options)}


def aot_model_analysis(compiled: jax.stages.Compiled) -> str:
    """Returns memory by purpose and floating-point operations of a compiled step, per device.

    Operations are known of the steps of a trainer.
    """
    lines = []
    memory = compiled.memory_analysis()
    for name in ("argument", "output", "temp", "alias", "generated_code"):
        size = getattr(memory, f"{name}_size_in_bytes", None)
        if size is not None:
            lines.append(f"{name.replace('_', ' ')}: {size / 2**20:.1f} MiB")
    flops = FLOPS_OF_STEPS.get(compiled)
    if flops is not None:
        lines.append(f"floating-point operations: {flops:.3e}")
    return "\n".join(lines)
