"""`weft check`: the sharding of a recipe, compiled for a mesh of devices that may be absent."""

import argparse
import math
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import jax
from jax.sharding import Mesh
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from weft.cli import configs
from weft.cli.collectives import Collective, collectives_of
from weft.cli.layout_report import ArrayLayout, array_layouts, is_conflict, rule_findings
from weft.core.axis_rules import Rules
from weft.errors import BatchShardingError, MeshError, ShardingWarning
from weft.hierarchy.parameter_spec import TensorSpec
from weft.input import Input
from weft.report import display
from weft.trainer import SpmdTrainer, run_dir
from weft.trainer.aot_compilation import get_devices_for_topology
from weft.trainer.mesh import HybridMeshShape, build_mesh, over_slices, rules_of
from weft.trainer.model import build_model
from weft.trainer.state import batch_partition, parameter_specs, state_specs
from weft.typing import DType, Nested


def run(arguments: argparse.Namespace) -> int:
    """Prints layouts, memory and collectives of a recipe; returns 1 if it does not fit the mesh."""
    cfg = configs.load_config(arguments.recipe, arguments.overrides, **arguments.trust)
    cfg = configs.on_mesh(cfg, selector=arguments.mesh_selector, mesh=arguments.mesh)
    devices = get_devices_for_topology(_topology(arguments.devices, cfg), arguments.slices)
    mesh = build_mesh(cfg.mesh_shape, cfg.mesh_axis_names, devices)
    console = display.table_console()
    sizes = [f"{name}={size}" for name, size in mesh.shape.items() if size > 1] or ["1 device"]
    device = mesh.devices.flat[0]
    kind = "virtual CPU devices" if device.platform == "cpu" else device.device_kind
    title = f"{arguments.recipe} on {' × '.join(sizes)}: {mesh.size} {kind}\n"
    console.print(title, soft_wrap=True)
    with warnings.catch_warnings(), jax.set_mesh(mesh):
        warnings.simplefilter("ignore", ShardingWarning)
        problems = _report_layouts(console, cfg, mesh)
    if not problems:
        problems = _report_program(console, cfg, mesh, devices)
    return _conclude(console, problems)


def _topology(devices: str | None, cfg: SpmdTrainer.Config) -> str | None:
    """Returns the topology to compile for; None for the devices of this machine."""
    if devices is not None:
        return f"cpu-{devices}" if devices.isdigit() else devices
    sizes: Any = cfg.mesh_shape
    if isinstance(sizes, HybridMeshShape):
        sizes = [*sizes.ici_mesh_shape, *sizes.dcn_mesh_shape]
    return None if -1 in sizes else f"cpu-{math.prod(sizes)}"


# Layouts.


def _report_layouts(console: Console, cfg: SpmdTrainer.Config, mesh: Mesh) -> list[str]:
    model = build_model(cfg)
    learner = run_dir.learner_config(cfg).set(name="learner").instantiate(parent=None)
    sizes, rules = dict(mesh.shape), rules_of(cfg)
    specs = state_specs(model, learner, rules)
    params = array_layouts(specs.model, sizes, model=model, rules=rules.parameters)
    rest = array_layouts(specs.learner, sizes)
    kinds = {"parameter": params}
    specs_and_rules = {"parameters": (specs.model, rules.parameters)}
    # Arrays with the same layouts as the parameters are listed once.
    if rules.gradients != rules.parameters:
        gradient_specs = parameter_specs(model, rules.gradients)
        kinds["gradient"] = array_layouts(gradient_specs, sizes, rules=rules.gradients)
        specs_and_rules["gradients"] = (gradient_specs, rules.gradients)
    if rules.optimizer != rules.parameters:
        kinds["state of the learner"] = rest
        specs_and_rules["optimizer"] = (parameter_specs(model, rules.optimizer), rules.optimizer)
    kinds["batch"] = array_layouts(_batch_specs(cfg), sizes)
    for kind, layouts in kinds.items():
        for table in _layout_tables(kind, layouts):
            console.print(table)
            console.print()
    console.print(_totals({"parameters": params, "optimizer and other state": rest}))
    console.print()
    if "state of the learner" not in kinds:
        known = tuple(f"/{layout.path}" for layout in params if layout.problems)
        kinds["state of the learner"] = [
            layout for layout in rest if not f"/{layout.path}".endswith(known)
        ]
    return _problems(console, kinds, specs_and_rules, sizes)


def _problems(
    console: Console,
    kinds: dict[str, list[ArrayLayout]],
    specs_and_rules: dict[str, tuple[Any, Rules]],
    sizes: dict[str, int],
) -> list[str]:
    """Prints the warnings about the rules of each kind; returns the problems."""
    problems = [
        f"{kind} {layout.path}: {problem}"
        for kind, layouts in kinds.items()
        for layout in layouts
        for problem in layout.problems
    ]
    for kind, (specs, rules) in specs_and_rules.items():
        of_kind = f"{kind}: " if len(specs_and_rules) > 1 else ""
        for finding in rule_findings(specs, rules, sizes):
            if is_conflict(finding):
                problems.append(f"{of_kind}{finding}")
            else:
                console.print(f"note: {of_kind}{finding}", soft_wrap=True)
    return problems


def _batch_specs(cfg: SpmdTrainer.Config) -> Nested[TensorSpec]:
    input_: Input = cfg.input.set(name="input").instantiate(parent=None)
    entries = tuple(batch_partition(input_, cfg.batch_axis_names))

    def spec(x: jax.ShapeDtypeStruct) -> TensorSpec:
        own = entries[: len(x.shape)]
        return TensorSpec(x.shape, x.dtype, (*own, *[None] * (len(x.shape) - len(own))))

    return jax.tree.map(spec, input_.element_spec())


def _layout_tables(title: str, layouts: Sequence[ArrayLayout]) -> Iterator[RenderableType]:
    """Yields a table of the arrays, and one of the numbered reasons in its last column."""
    reasons = list(dict.fromkeys(layout.reason for layout in layouts if layout.reason))
    columns = ["array", "layout", "by", "per device"]
    table = display.tree_table(
        title, columns if reasons else columns[:2] + columns[3:], columns[2:]
    )
    for _, name, layout in display.tree_lines((layout.path, layout) for layout in layouts):
        if layout is None:
            table.add_row(Text(name))
            continue
        by = [str(reasons.index(layout.reason) + 1) if layout.reason else ""] if reasons else []
        array = f"{_dtype_text(layout.dtype)}[{','.join(map(str, layout.shape))}]"
        text = display.layout_text(layout.spec).replace(", ", ",") or "on every device"
        problems = [Text(problem, style="bold red") for problem in layout.problems]
        cell = Group(Text(text), *problems)
        table.add_row(Text(name), array, cell, *by, display.bytes_text(layout.bytes_per_device))
    yield table
    if reasons:
        legend = display.tree_table("by", ["source of the layout"], numbers=[])
        for number, reason in enumerate(reasons, 1):
            legend.add_row(str(number), Text(reason))
        yield legend


def _dtype_text(dtype: DType) -> str:
    """Returns the name of a dtype as in HLO: f32, bf16, s32.

    >>> _dtype_text(np.dtype("float32")), _dtype_text(np.dtype("bool"))
    ('f32', 'bool')
    """
    short = {"bfloat": "bf", "float": "f", "uint": "u", "int": "s", "complex": "c"}
    return re.sub(rf"^({'|'.join(short)})(?=\d)", lambda match: short[match[0]], str(dtype))


def _totals(kinds: dict[str, list[ArrayLayout]]) -> Table:
    table = display.tree_table("", ["in all", "per device"], numbers=["in all", "per device"])
    for name, layouts in kinds.items():
        whole = sum(layout.bytes for layout in layouts)
        held = sum(layout.bytes_per_device for layout in layouts)
        table.add_row(name, display.bytes_text(whole), display.bytes_text(held))
    return table


# The compiled program.


def _report_program(
    console: Console, cfg: SpmdTrainer.Config, mesh: Mesh, devices: Sequence[Any]
) -> list[str]:
    """Compiles the train step, prints its collectives and memory; returns the problems."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ShardingWarning)
        try:
            trainer = cfg.instantiate(parent=None, devices=devices)
            # With FORCE_COLOR, which notebooks set, a pipe is a terminal to rich.
            is_live = console.file.isatty()
            with console.status("compiling the train step") if is_live else nullcontext():
                compiled = trainer.compile_train_step()
        except (MeshError, BatchShardingError) as error:
            return [str(error)]
    shape = _shape_of_program(cfg, mesh, devices)
    console.print(_collectives_table(collectives_of(compiled.as_text() or ""), shape))
    console.print()
    console.print(_memory_table(compiled.memory_analysis()))
    console.print()
    found = [w.message for w in caught if issubclass(w.category, ShardingWarning)]
    return list(dict.fromkeys(map(str, found)))


def _shape_of_program(
    cfg: SpmdTrainer.Config, mesh: Mesh, devices: Sequence[Any]
) -> dict[str, int]:
    """Returns the mesh axes that the collectives of a program refer to."""
    num_slices = len({getattr(device, "slice_index", None) for device in devices})
    if devices[0].platform != "tpu" or num_slices == 1:
        return dict(mesh.shape)
    # A TPU program covers one slice; transfers between slices are not in it.
    hybrid = cfg.mesh_shape
    if not isinstance(hybrid, HybridMeshShape):
        hybrid = over_slices(list(mesh.shape.values()), num_slices)
    return dict(zip(mesh.axis_names, hybrid.ici_mesh_shape, strict=True))


def _collectives_table(collectives: Iterable[Collective], mesh_shape: dict[str, int]) -> Table:
    """Returns a table of the collectives of one step by kind and mesh axes, most bytes first."""
    totals: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for collective in collectives:
        axes = collective.axes(mesh_shape)
        over = "other groups" if axes is None else " × ".join(axes)
        where = "in a loop" if collective.in_loop else ""
        total = totals[collective.kind, over, where]
        total[0] += collective.times
        total[1] += collective.times * collective.bytes
    columns = ["over", "", "times per step", "bytes per device"]
    table = display.tree_table("collective", columns, numbers=columns[2:])
    for key, (times, size) in sorted(totals.items(), key=lambda item: -item[1][1]):
        table.add_row(*key, f"{times:,}", display.bytes_text(size))
    if not totals:
        table.add_row("none")
    return table


def _memory_table(memory: Any) -> Table:
    table = display.tree_table("memory per device", ["bytes"], numbers=["bytes"])
    if memory is None:
        table.add_row("unknown for this kind of device")
        return table
    parts = {
        "state and batch": memory.argument_size_in_bytes,
        "other results": (memory.output_size_in_bytes - memory.alias_size_in_bytes),
        "temporaries": memory.temp_size_in_bytes,
        "program": memory.generated_code_size_in_bytes,
    }
    for name, size in parts.items():
        table.add_row(name, display.bytes_text(size))
    table.add_row("in all", display.bytes_text(sum(parts.values())))
    return table


def _conclude(console: Console, problems: Sequence[str]) -> int:
    if not problems:
        console.print("fits: all sizes divide evenly, and the train step compiles")
        return 0
    console.print(f"{len(problems)} problem{'s' if len(problems) > 1 else ''}:", style="bold red")
    for problem in problems:
        console.print(f"  {problem}", soft_wrap=True, markup=False)
    console.print("Change a size, the mesh, or the source of the layout.")
    return 1
