"""Profiler traces of a run: when they start and stop, and the time of each layer in them.

Each trace has its own directory below the run's, `trace/step_00000010/plugins/profile/<time>/`,
with `*.xplane.pb` for XProf and TensorBoard's profile plugin, and `*.trace.json.gz` for
ui.perfetto.dev.
"""

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax

from weft.errors import ProfilerTraceError
from weft.serialization.directory import Directory
from weft.trainer.hooks import Hook

_DEFAULT_STEPS = 3


class StepTraces(Hook):
    """Hook that starts and stops the profiler around steps.

    Args:
        directory: The run's directory.
        start_steps: The first steps of traces; steps within an earlier trace are ignored.
        n_steps: Number of steps per trace; None for 3. Less than 1 raises a ProfilerTraceError.
        processes: The processes that trace, or "all".
        host_tracer_level, python_tracer_level: Level of detail for the host and for Python, 0 for
            none; None for JAX's default.
    """

    def __init__(
        self,
        directory: str,
        start_steps: Sequence[int],
        n_steps: int | None = None,
        processes: Literal["all"] | Sequence[int] = (0,),
        *,
        host_tracer_level: int | None = None,
        python_tracer_level: int | None = None,
    ):
        if n_steps is not None and n_steps < 1:
            raise ProfilerTraceError(
                f"n_steps_for_each_trace={n_steps}; expected 1 or more steps, or None for "
                f"{_DEFAULT_STEPS}."
            )
        self._start_steps: frozenset[int] = frozenset()
        if processes == "all" or jax.process_index() in processes:
            self._start_steps = frozenset(start_steps)
        self._directory = directory
        self._open_folder = contextlib.ExitStack()
        self._n_steps = n_steps or _DEFAULT_STEPS
        self._last_step: int | None = None  # of the open trace
        self._options = jax.profiler.ProfileOptions()
        if host_tracer_level is not None:
            self._options.host_tracer_level = host_tracer_level
        if python_tracer_level is not None:
            self._options.python_tracer_level = python_tracer_level

    def before_step(self, step: int) -> None:
        """Starts the trace that begins with a step, if any."""
        if step in self._start_steps and self._last_step is None:
            os.makedirs(self._directory, exist_ok=True)
            folder = Directory(self._directory).steady_path(
                f"trace/step_{step:08d}"
            )
            path = self._open_folder.enter_context(folder)
            jax.profiler.start_trace(path, profiler_options=self._options)
            self._last_step = step + self._n_steps - 1

    def on_dispatch(self, step: int, outputs: dict[str, Any]) -> None:
        """Ends the trace that ends with a step, if any, for whose outputs it then waits."""
        if self._last_step is not None and step >= self._last_step:
            jax.block_until_ready(outputs)
            self.close()

    def close(self) -> None:
        """Ends an open trace, as when the run ends before the trace does."""
        if self._last_step is not None:
            self._last_step = None
            with self._open_folder:
                jax.profiler.stop_trace()


def layer_times(directory: str, step: jax.stages.Compiled) -> dict[str, float]:
    """Returns the seconds that devices spent in each layer, per step of a trace, longest first.

    The forward and the backward pass of a layer count together, and a repeated layer counts once
    for all its repetitions. An operation that XLA fused from several layers counts for one of them:
    the one in its name, usually the last, or else the one with most of its parts. The key "" has
    what no layer's name is known for.

    Args:
        directory: A run's directory, or that of one trace.
        step: The traced program, as `SpmdTrainer.compile_train_step` returns it.

    Raises ProfilerTraceError if there is no trace of the program.
    """
    program_text = step.as_text() or ""
    program_name = program_text.split(",")[0].removeprefix("HloModule ")
    layers = _layers_by_operation(program_text)
    seconds_by_layer = Counter[str]()
    runs: set[tuple[str, object]] = set()  # executions of the program
    for path in _trace_files(directory):
        for event in _trace_events(path):
            stats = dict(event.stats)
            operation = stats.get("hlo_op")
            if stats.get("hlo_module") == program_name and operation in layers:
                seconds_by_layer[layers[operation]] += event.duration_ns / 1e9
                runs.add((path, stats.get("run_id")))
    if not runs:
        raise ProfilerTraceError(
            f"there is no trace of {program_name!r} below {directory!r}. Train with "
            "start_trace_steps=[10], or another step, and pass the directory of the run."
        )
    return {
        layer: seconds / len(runs)
        for layer, seconds in seconds_by_layer.most_common()
    }


def _trace_files(directory: str) -> Iterator[str]:
    if os.path.isdir(directory):
        run = Directory(directory)
        for entry in run.walk():
            if entry.is_file and entry.name.endswith(".xplane.pb"):
                yield run.full_path(entry.name)


def _trace_events(path: str) -> Iterator[Any]:
    for plane in jax.profiler.ProfileData.from_file(path).planes:
        for line in plane.lines:
            yield from line.events


def _layers_by_operation(program_text: str) -> dict[str, str]:
    """Returns the layer's path of each operation in a program's text, but not of loops and calls.

    Those contain other operations of the program. The text has computations with their operations:

        %fused_computation.1 (param: f32[8]) -> f32[8] {
          ROOT %add.2 = f32[8] add(%param, %param), metadata={op_name="jit(step)/layer/add"}
        }
        ENTRY %main (x: f32[8]) -> f32[8] {
          ROOT %fusion.3 = f32[8] fusion(%x), kind=kLoop, calls=%fused_computation.1
        }
    """
    layers: dict[str, str] = {}  # by operation
    layer_counts: dict[
        str, Counter[str]
    ] = {}  # of the operations in each computation
    fused_computations: dict[str, str] = {}  # by the operation that calls it
    computation = ""
    for line in program_text.splitlines():
        header = re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line)
        if header is not None:
            computation = header[1]
            continue
        assignment = re.match(
            r"\s+(?:ROOT )?%?([\w.\-]+) = .*? ([\w\-]+)\(", line
        )
        if assignment is None or assignment[2] in (
            "while",
            "conditional",
            "call",
        ):
            continue
        operation = assignment[1]
        name = re.search(r'op_name="([^"]*)"', line)
        layers[operation] = "" if name is None else _layer_of(name[1])
        layer_counts.setdefault(computation, Counter())[layers[operation]] += 1
        call = re.search(r"calls=%?([\w.\-]+)", line)
        if call is not None:
            fused_computations[operation] = call[1]
    for operation, computation in fused_computations.items():
        counts = layer_counts.get(computation, Counter())
        del counts[""]
        if not layers[operation] and counts:
            [(layers[operation], _)] = counts.most_common(1)
    return layers


def _layer_of(name: str) -> str:
    """Returns the layer in an operation's name.

    >>> name = "jit(train_step)/learner/jvp(model)/decoder/while/body/closed_call/layer/dot_general"
    >>> _layer_of(name), _layer_of("jit(train_step)/learner/optimizer/mul"), _layer_of("add")
    ('model/decoder/layer', 'learner/optimizer', '')
    """
    layers: list[str] = []
    for part in name.split("/")[:-1]:
        if part.startswith("jit("):
            continue
        # A transformation surrounds the name of the outermost layer that it applies to.
        layer = re.sub(r"^(?:\w+\()+|\)+$", "", part)
        if not re.match(_NO_LAYER, layer):
            layers.append(layer)
    if "model" in layers:
        layers = layers[layers.index("model") :]
    return "/".join(layers)


# Names that JAX adds for control flow, recomputation, and einsums.
_NO_LAYER = (
    r"$|(while|body|cond|scan|pjit|closed_call|eval_jaxpr|checkpoint|rematted_computation|branch_\w+)"
    r"$|.*->"
)
