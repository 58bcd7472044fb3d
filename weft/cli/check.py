"""`weft check`: the sharding of a recipe, compiled for a mesh of devices that may be absent."""

import argparse
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from weft.cli import configs
from weft.cli.collectives import Collective, collectives_of
from weft.cli.layout_report import (
    ArrayLayout,
    array_layouts,
    is_conflict,
    rule_findings,
)
from weft.cli.step_time import StepTime, axes_text, predict
from weft.core.axis_rules import Rules
from weft.debug.lookup_checks import check_tokens
from weft.errors import (
    BatchShardingError,
    CommandLineError,
    MeshError,
    ShardingWarning,
)
from weft.hierarchy.parameter_spec import ParameterSpec, TensorSpec
from weft.hierarchy.pipeline import Pipeline, pipelines_of
from weft.input import Input
from weft.input.corpus import Corpus, TextFile
from weft.input.grain import check_batch_size
from weft.input.text import lm_text_source
from weft.report import display
from weft.trainer import SpmdTrainer, run_dir
from weft.trainer.aot_compilation import get_devices_for_topology
from weft.trainer.device_specs import (
    DEVICE_SPECS,
    DeviceSpec,
    device_spec_of,
)
from weft.trainer.mesh import HybridMeshShape, build_mesh, over_slices, rules_of
from weft.trainer.model import build_model
from weft.trainer.state import batch_partition, parameter_specs, state_specs
from weft.typing import DType, Nested


def run(arguments: argparse.Namespace) -> int:
    """Prints layouts, memory and collectives of a recipe; returns 1 if it does not fit the mesh."""
    cfg = configs.load_config(
        arguments.recipe,
        arguments.overrides,
        keep_unreadable=True,
        **arguments.trust,
    )
    cfg = configs.with_recorded_batch(cfg)
    cfg = configs.on_mesh(
        cfg, selector=arguments.mesh_selector, mesh=arguments.mesh
    )
    devices = get_devices_for_topology(
        _topology(arguments.devices, cfg), arguments.slices
    )
    # After the devices are made, as it uses JAX.
    cfg = without_corpus(cfg)
    mesh = build_mesh(cfg.mesh_shape, cfg.mesh_axis_names, devices)
    console = display.table_console()
    display.print_words(console, f"{arguments.recipe} on {_mesh_text(mesh)}\n")
    with warnings.catch_warnings(), jax.set_mesh(mesh):
        warnings.simplefilter("ignore", ShardingWarning)
        problems = _report_layouts(console, cfg, mesh)
    if not problems:
        problems = _report_program(
            console,
            cfg,
            mesh,
            devices,
            spec=_spec(arguments.device, devices),
            num_slices=arguments.slices,
        )
    return _conclude(console, problems)


def _spec(device: str | None, devices: Sequence[Any]) -> DeviceSpec | None:
    if device is not None:
        return DEVICE_SPECS[device]
    return device_spec_of(devices[0].device_kind)


def without_corpus(cfg: SpmdTrainer.Config) -> SpmdTrainer.Config:
    """Returns a config for programs alone, whose input knows the shapes of a batch.

    They come from a short text in place of a corpus, which may be absent, or too small for a batch
    on many devices. Other inputs than `lm_text_source` stay.
    """
    source: Any = getattr(cfg.input, "source", None)
    is_text = getattr(source, "fn", None) is lm_text_source
    if not is_text or cfg.input.input_dispatcher is not None:
        return cfg
    check_tokens(cfg)
    check_batch_size(source.global_batch_size)
    text = TextFile("text", b"Words of a text. " * source.sequence_length)
    row = source.clone(
        corpus=Corpus("a short text", (text,)), global_batch_size=1
    )
    row_input: Any = cfg.input.clone(name="input")
    row_input.source = row
    row_spec = row_input.instantiate(parent=None).element_spec()

    def with_all_rows(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = (source.global_batch_size, *x.shape[1:])
        return jax.ShapeDtypeStruct(shape, x.dtype)

    recorded_input = configs.RecordedInput.default_config().set(
        batch=jax.tree.map(with_all_rows, row_spec),
        partition_spec=cfg.input.partition_spec,
    )
    return cfg.clone(input=recorded_input, evalers={})


def _mesh_text(mesh: Mesh) -> str:
    sizes = [
        f"{name}={size}" for name, size in mesh.shape.items() if size > 1
    ] or ["1 device"]
    device = mesh.devices.flat[0]
    device_kind = (
        "virtual CPU devices"
        if device.platform == "cpu"
        else device.device_kind
    )
    return f"{' × '.join(sizes)}: {mesh.size} {device_kind}"


def _topology(devices: str | None, cfg: SpmdTrainer.Config) -> str | None:
    """Returns the topology to compile for; None for the devices of this machine."""
    if devices is not None:
        if re.fullmatch(r"-?\d+", devices) is None:
            return devices
        if int(devices) < 1:
            raise CommandLineError(
                f"--devices {devices}: expected 1 or more virtual CPU devices, or a TPU slice such "
                "as v5p-128."
            )
        return f"cpu-{int(devices)}"
    sizes: Any = cfg.mesh_shape
    if isinstance(sizes, HybridMeshShape):
        sizes = [*sizes.ici_mesh_shape, *sizes.dcn_mesh_shape]
    # `build_mesh` takes -1 for the rest, and refuses other sizes below 1.
    return None if min(sizes, default=1) < 1 else f"cpu-{math.prod(sizes)}"


# Layouts.


class _SpecsAndRules(NamedTuple):
    """Specs of parameters, gradients or the state of the optimizer, and the rules of their axes."""

    specs: Nested[ParameterSpec]
    rules: Rules


def _report_layouts(
    console: Console, cfg: SpmdTrainer.Config, mesh: Mesh
) -> list[str]:
    """Prints tables of layouts and warnings about rules; returns the problems."""
    model = build_model(cfg)
    learner = (
        run_dir.learner_config(cfg).set(name="learner").instantiate(parent=None)
    )
    sizes, rules = dict(mesh.shape), rules_of(cfg)
    specs = state_specs(model, learner, rules)
    params = array_layouts(
        specs.model, sizes, model=model, rules=rules.parameters
    )
    learner_state = array_layouts(specs.learner, sizes)
    layouts = {"parameter": params}
    specs_and_rules = {
        "parameters": _SpecsAndRules(specs.model, rules.parameters)
    }
    # Arrays with the same layouts as the parameters are listed once.
    if rules.gradients != rules.parameters:
        gradient_specs = parameter_specs(model, rules.gradients)
        layouts["gradient"] = array_layouts(
            gradient_specs, sizes, rules=rules.gradients
        )
        specs_and_rules["gradients"] = _SpecsAndRules(
            gradient_specs, rules.gradients
        )
    is_learner_listed = rules.optimizer != rules.parameters
    if is_learner_listed:
        layouts["state of the learner"] = learner_state
        optimizer_specs = parameter_specs(model, rules.optimizer)
        specs_and_rules["optimizer"] = _SpecsAndRules(
            optimizer_specs, rules.optimizer
        )
    layouts["batch"] = array_layouts(_batch_specs(cfg), sizes)
    for name, named_layouts in layouts.items():
        for table in _layout_tables(name, named_layouts):
            console.print(table)
            console.print()
    console.print(
        _totals(
            {"parameters": params, "optimizer and other state": learner_state}
        )
    )
    console.print()
    if not is_learner_listed:
        layouts["state of the learner"] = _without_copies(learner_state, params)
    problems: list[str] = []
    for name, named_layouts in layouts.items():
        for layout in named_layouts:
            problems += [
                f"{name} {layout.path}: {problem}"
                for problem in layout.problems
            ]
    return problems + _report_findings(console, specs_and_rules, sizes)


def _without_copies(
    learner_state: Sequence[ArrayLayout], params: Sequence[ArrayLayout]
) -> list[ArrayLayout]:
    """Leaves out averages and the like of parameters whose problems are listed already."""
    endings = tuple(f"/{layout.path}" for layout in params if layout.problems)
    return [
        layout
        for layout in learner_state
        if not f"/{layout.path}".endswith(endings)
    ]


def _report_findings(
    console: Console,
    specs_and_rules: Mapping[str, _SpecsAndRules],
    sizes: Mapping[str, int],
) -> list[str]:
    """Prints notes about the rules of each kind of arrays; returns what must be fixed."""
    conflicts: list[str] = []
    for name, (specs, rules) in specs_and_rules.items():
        prefix = f"{name}: " if len(specs_and_rules) > 1 else ""
        for finding in rule_findings(specs, rules, sizes):
            if is_conflict(finding):
                conflicts.append(f"{prefix}{finding}")
            else:
                display.print_words(console, f"note: {prefix}{finding}")
    return conflicts


def _batch_specs(cfg: SpmdTrainer.Config) -> Nested[TensorSpec]:
    input_: Input = cfg.input.set(name="input").instantiate(parent=None)
    batch_axes = tuple(batch_partition(input_, cfg.batch_axis_names))

    def spec(x: jax.ShapeDtypeStruct) -> TensorSpec:
        ndim = len(x.shape)
        mesh_axes = (*batch_axes, *[None] * ndim)[:ndim]
        return TensorSpec(x.shape, x.dtype, mesh_axes)

    return jax.tree.map(spec, input_.element_spec())


def _layout_tables(
    title: str, layouts: Sequence[ArrayLayout]
) -> Iterator[RenderableType]:
    """Yields a table of the arrays, and one of the numbered reasons in its last column."""
    numbers_by_reason: dict[str, int] = {}
    for layout in layouts:
        if layout.reason:
            numbers_by_reason.setdefault(
                layout.reason, len(numbers_by_reason) + 1
            )
    columns = ["array", "layout", "by", "per device"]
    if not numbers_by_reason:
        columns.remove("by")
    table = display.tree_table(title, columns, numbers=["by", "per device"])
    for _, name, layout in display.tree_lines(
        (layout.path, layout) for layout in layouts
    ):
        if layout is None:
            table.add_row(Text(name))
            continue
        dims = ",".join(map(str, layout.shape))
        layout_text = (
            display.layout_text(layout.spec).replace(", ", ",")
            or "on every device"
        )
        problems = [
            Text(problem, style="bold red") for problem in layout.problems
        ]
        cells = [
            f"{_dtype_text(layout.dtype)}[{dims}]",
            Group(Text(layout_text), *problems),
        ]
        if numbers_by_reason:
            cells.append(str(numbers_by_reason.get(layout.reason, "")))
        table.add_row(
            Text(name), *cells, display.bytes_text(layout.bytes_per_device)
        )
    yield table
    if numbers_by_reason:
        legend = display.tree_table("by", ["source of the layout"], numbers=[])
        for reason, number in numbers_by_reason.items():
            legend.add_row(str(number), Text(reason))
        yield legend


def _dtype_text(dtype: DType) -> str:
    """Returns the name of a dtype as in HLO: f32, bf16, s32.

    >>> _dtype_text(np.dtype("float32")), _dtype_text(np.dtype("bool"))
    ('f32', 'bool')
    """
    short = {
        "bfloat": "bf",
        "float": "f",
        "uint": "u",
        "int": "s",
        "complex": "c",
    }
    return re.sub(
        rf"^({'|'.join(short)})(?=\d)",
        lambda match: short[match[0]],
        str(dtype),
    )


def _totals(layouts_by_name: Mapping[str, Sequence[ArrayLayout]]) -> Table:
    table = display.tree_table(
        "", ["in all", "per device"], numbers=["in all", "per device"]
    )
    for name, layouts in layouts_by_name.items():
        num_bytes = sum(layout.bytes for layout in layouts)
        bytes_per_device = sum(layout.bytes_per_device for layout in layouts)
        table.add_row(
            name,
            display.bytes_text(num_bytes),
            display.bytes_text(bytes_per_device),
        )
    return table


# The compiled program.


def _report_program(
    console: Console,
    cfg: SpmdTrainer.Config,
    mesh: Mesh,
    devices: Sequence[Any],
    *,
    spec: DeviceSpec | None,
    num_slices: int,
) -> list[str]:
    """Compiles the train step, prints what it needs and takes; returns the problems."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ShardingWarning)
        try:
            trainer = cfg.instantiate(parent=None, devices=devices)
            status = nullcontext()
            # With FORCE_COLOR, which notebooks set, a pipe is a terminal to rich.
            if console.file.isatty():
                status = console.status("compiling the train step")
            with status:
                compiled = trainer.compile_train_step()
        except (MeshError, BatchShardingError) as error:
            return [str(error)]
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return [_memory_problem(str(error))]
    mesh_shape = _shape_of_program(cfg, mesh, devices)
    try:
        text = compiled.as_text() or ""
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        console.print(_memory_table(compiled.memory_analysis()))
        console.print()
        return [
            "the step compiles, but JAX cannot read the program of this compiler, to count its "
            f"collectives: {reason}. Install the compiler's version that belongs to this JAX: pip "
            "install 'jax[tpu]'."
        ]
    pipelines = list(pipelines_of(trainer.model))
    if pipelines:
        console.print(_pipelines_table(pipelines))
        console.print()
    collectives = collectives_of(text)
    console.print(_collectives_table(collectives, mesh_shape))
    console.print()
    memory = compiled.memory_analysis()
    console.print(_memory_table(memory))
    console.print()
    problems: dict[str, None] = {}  # each once, in their order
    for warning in caught:
        if issubclass(warning.category, ShardingWarning):
            problems[str(warning.message)] = None
    if spec is None or memory is None:
        return list(problems)
    needed = sum(_memory_parts(memory).values())
    if needed > spec.memory:
        problem = (
            f"a device has {display.bytes_text(spec.memory)} of memory, and the step needs "
            f"{display.bytes_text(needed)}. {_LESS_MEMORY}"
        )
        problems[problem] = None
    step_time = predict(
        spec,
        flops=trainer.train_step_flops(),
        model_flops=trainer.model_flops(),
        memory_traffic=_memory_traffic(memory),
        collectives=collectives,
        mesh_shape=mesh_shape,
        num_devices=mesh.size,
        num_slices=num_slices,
    )
    console.print(_time_table(step_time))
    display.print_words(console, step_time.advice())
    console.print()
    return list(problems)


_LESS_MEMORY = (
    "Shard over more devices (fsdp=…), recompute activations (remat), or take fewer rows of the "
    "batch per device."
)


def _memory_problem(error: str) -> str:
    """Returns the problem of a program that a compiler refuses for its memory."""
    amounts = re.search(r"Used (\S+) of (\S+)", error)
    if amounts is None:
        return f"the step does not fit a device: {error.splitlines()[0]}"
    needed, available = amounts.groups()
    return (
        f"a device has {available} of memory, and the step needs {needed}. "
        f"{_LESS_MEMORY}"
    )


def _memory_traffic(memory: Any) -> int:
    """Returns the bytes that a device reads and writes in a step, at least."""
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + 2 * memory.temp_size_in_bytes
    )


def _time_table(step_time: StepTime) -> Table:
    table = display.tree_table(
        "predicted step", ["seconds"], numbers=["seconds"]
    )
    table.add_row("compute", _seconds_text(step_time.compute))
    table.add_row("memory", _seconds_text(step_time.memory))
    for axes, seconds in step_time.collectives.items():
        table.add_row(f"collectives over {axes}", _seconds_text(seconds))
    table.add_row("in all", _seconds_text(step_time.total))
    table.add_row("MFU", f"{100 * step_time.mfu:.0f} %")
    table.add_row("limited by", step_time.limit())
    return table


def _seconds_text(seconds: float) -> str:
    return f"{seconds:.3g}"


def _shape_of_program(
    cfg: SpmdTrainer.Config, mesh: Mesh, devices: Sequence[Any]
) -> dict[str, int]:
    """Returns the mesh axes that the collectives of a program refer to."""
    num_slices = len(
        {getattr(device, "slice_index", None) for device in devices}
    )
    if devices[0].platform != "tpu" or num_slices == 1:
        return dict(mesh.shape)
    # A TPU program covers one slice; transfers between slices are not in it.
    hybrid = cfg.mesh_shape
    if not isinstance(hybrid, HybridMeshShape):
        hybrid = over_slices(list(mesh.shape.values()), num_slices)
    return dict(zip(mesh.axis_names, hybrid.ici_mesh_shape, strict=True))


def _pipelines_table(pipelines: Iterable[Pipeline]) -> Table:
    columns = ["stages", "microbatches", "parts per stage", "bubble"]
    table = display.tree_table("pipeline", columns, numbers=columns)
    for pipeline in pipelines:
        schedule = pipeline.schedule
        _, _, path = pipeline.path().partition(".model.")
        table.add_row(
            path,
            str(schedule.num_stages),
            str(schedule.num_microbatches),
            str(schedule.num_repeats),
            f"{100 * schedule.bubble_share:.0f} %",
        )
    return table


def _collectives_table(
    collectives: Iterable[Collective], mesh_shape: dict[str, int]
) -> Table:
    """Returns a table of the collectives of one step by kind and mesh axes, most bytes first."""
    times: Counter[tuple[str, str, str]] = Counter()
    num_bytes: Counter[tuple[str, str, str]] = Counter()
    for collective in collectives:
        place = "in a loop" if collective.in_loop else ""
        row = (collective.kind, axes_text(collective, mesh_shape), place)
        times[row] += collective.times
        num_bytes[row] += collective.times * collective.bytes
    columns = ["over", "", "times per step", "bytes per device"]
    table = display.tree_table("collective", columns, numbers=columns[2:])
    for row, row_bytes in num_bytes.most_common():
        table.add_row(*row, f"{times[row]:,}", display.bytes_text(row_bytes))
    if not times:
        table.add_row("none")
    return table


def _memory_table(memory: Any) -> Table:
    table = display.tree_table(
        "memory per device", ["bytes"], numbers=["bytes"]
    )
    if memory is None:
        table.add_row("unknown for this kind of device")
        return table
    parts = _memory_parts(memory)
    for name, size in parts.items():
        table.add_row(name, display.bytes_text(size))
    table.add_row("in all", display.bytes_text(sum(parts.values())))
    if memory.host_temp_size_in_bytes:
        on_host = display.bytes_text(memory.host_temp_size_in_bytes)
        table.add_row("offloaded to the host", on_host)
    return table


def _memory_parts(memory: Any) -> dict[str, int]:
    return {
        "state and batch": memory.argument_size_in_bytes,
        "other results": (
            memory.output_size_in_bytes - memory.alias_size_in_bytes
        ),
        "temporaries": memory.temp_size_in_bytes,
        "program": memory.generated_code_size_in_bytes,
    }


def _conclude(console: Console, problems: Sequence[str]) -> int:
    if not problems:
        console.print(
            "fits: all sizes divide evenly, and the train step compiles"
        )
        return 0
    plural = "s" if len(problems) > 1 else ""
    console.print(f"{len(problems)} problem{plural}:", style="bold red")
    for problem in problems:
        display.print_words(console, f"  {problem}")
    console.print("Change a size, the mesh, or the source of the layout.")
    return 1
