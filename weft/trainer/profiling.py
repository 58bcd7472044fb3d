"""Speed of a run: throughput in its summaries, floating-point operations, and profiler traces.

    steps per second   between two readings, excluding evaluation and saving
    MFU                operations that the model needs, relative to the devices' peak
    input wait         seconds per step of waiting for its batch
    device idle        fraction of the time between the end of a step and the dispatch of the next,
                       over ten steps after a reading without an evaluation or a save between them
    goodput            fraction of the time since the first start of the run that went into steps
                       that were not lost

MFU counts three times the operations of a forward pass (the backward pass takes two), regardless of
recomputation (Chowdhery et al., 2022, appendix B). They are counted in its jaxpr: only matrix
products and convolutions, a scan's body once per iteration, each product for the weight that it
uses, followed through casts, reshapes and slices. Goodput covers all starts: work lost when a
process was killed, compilation, waiting for a start, saving and evaluation do not count as steps.

Each profiler trace has its own directory below the run's,
`trace/step_00000010/plugins/profile/<time>/`, with `*.xplane.pb` for XProf and TensorBoard's
profile plugin, and `*.trace.json.gz` for ui.perfetto.dev.
"""

import contextlib
import datetime
import logging
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

import jax

from weft.config import Configurable
from weft.errors import ProfilerTraceError, RunDirError, ThroughputError
from weft.hierarchy.module import Module, functional
from weft.serialization.directory import Directory
from weft.trainer.hooks import Hook
from weft.trainer.optimizers.base import leaves_by_path, path_name
from weft.trainer.run_dir import read_record, update_record
from weft.typing import NestedTensor

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, JaxprEqn

# Dense bfloat16 FLOP/s per device, by JAX's device kind, from the makers' data sheets. The longest
# name contained in a device kind applies.
PEAK_FLOPS = {
    "TPU v2": 22.5e12,
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "V100": 125e12,
    "A10G": 70e12,
    "A100": 312e12,
    "L4": 121e12,
    "L40S": 362e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
}
_RECORD = "goodput"
# Fraction of the time above which the input is reported as slow, and the seconds lost before that:
# no one has to tune the input of a run that lasts seconds.
_SLOW_INPUT = 0.1
_SLOW_SECONDS = 1.0

logger = logging.getLogger(__name__)
_MAX_MARKS = 200
# Steps in a sample of the time between them.
_IDLE_STEPS = 10


def peak_flops_of(device_kind: str) -> float | None:
    """Returns the peak operations per second of a `jax.Device.device_kind`; None for unknown ones.

    >>> peak_flops_of("NVIDIA H100 80GB HBM3"), peak_flops_of("cpu")
    (989000000000000.0, None)
    """
    names = [name for name in PEAK_FLOPS if name in device_kind]
    return PEAK_FLOPS[max(names, key=len)] if names else None


class IdleTime:
    """Fraction of the time that devices wait for the host between two steps, in a sample of them.

    A thread waits for each step of the sample, so that the time of its end is known without holding
    up the next one. It waits in C++, and not at all between samples.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._starts: list[float] = []
        self._ends: list[Future[float]] = []
        self._waiter: ThreadPoolExecutor | None = None

    def __bool__(self) -> bool:
        """Returns whether a sample is being taken."""
        return self._waiter is not None and len(self._ends) <= _IDLE_STEPS

    def start(self) -> None:
        """Starts a sample of the next steps."""
        self.discard()
        self._waiter = ThreadPoolExecutor(1, "weft-idle-time")

    def discard(self) -> None:
        """Ends the sample without a result."""
        if self._waiter is not None:
            self._waiter.shutdown(wait=False)
        self._starts, self._ends, self._waiter = [], [], None

    def restart(self) -> None:
        """Starts the sample again, if one is taken: an evaluation or a save is not a step."""
        if self._waiter is not None:
            self.start()

    def on_dispatch(self) -> None:
        """Records the start of a step."""
        self._starts.append(self._clock())

    def on_dispatched(self, output: object) -> None:
        """Records the end of a step when it has computed `output`."""
        assert self._waiter is not None
        self._ends.append(self._waiter.submit(self._ended, output))

    def _ended(self, output: object) -> float:
        jax.block_until_ready(output)
        return self._clock()

    def fraction(self) -> float | None:
        """Ends a complete sample, and returns its fraction of idle time; None without one."""
        if len(self._ends) <= _IDLE_STEPS:
            return None
        ends = [end.result() for end in self._ends]
        gaps = (max(0.0, start - end) for end, start in zip(ends, self._starts[1:], strict=False))
        total = ends[-1] - self._starts[0]
        idle = sum(gaps)
        self.discard()
        return idle / total if total > 0 else None


class Throughput(Configurable, Hook):
    """Hook that measures a run's steps, and adds the results to their summaries.

    It reads a monotonic clock and the time of day, in seconds.
    """

    class Config(Configurable.Config):
        """Configures a Throughput.

        Attributes:
            every_n_steps: Number of steps between two readings. A reading waits for its step; in
                between, steps are dispatched ahead.
            tokens_field: The field of a batch whose elements are counted as tokens, if present.
            peak_flops_per_device: For the MFU; None for `peak_flops_of` the device kind, if known.
        """

        every_n_steps: int = 100
        tokens_field: str = "input_ids"
        peak_flops_per_device: float | None = None

    def __init__(
        self,
        config: Config,
        *,
        clock: Callable[[], float] = time.perf_counter,
        now: Callable[[], float] = time.time,
    ):
        super().__init__(config)
        if config.every_n_steps < 1:
            raise ThroughputError(
                f"throughput.every_n_steps={config.every_n_steps}; expected 1 or more steps."
            )
        self._every_n_steps = config.every_n_steps
        self._clock, self._now = clock, now
        self.idle = IdleTime(clock)
        self._trainer: Any = None  # that of the run, from its start on
        self._directory: str | None = None
        self._start: tuple[int, float] | None = None  # step and time to count from
        self._paused = 0.0  # total seconds
        self._pause_began: float | None = None
        self._productive = 0.0  # seconds of steps since the first start of the run
        self._flops: float | None = None  # of a step, once counted
        self._waited: tuple[int, float] = (0, 0.0)  # last report's step and total seconds
        self._slow_seconds = 0.0  # total of readings with a slow input
        self._slow_logged = False

    # In a run.

    def on_start(self, trainer: Any, resumed_from: int | None) -> None:
        self._trainer = trainer
        self.start(trainer.config.dir, trainer.step)

    def on_rewind(self, step: int) -> None:
        self.start(self._trainer.config.dir, step)

    def before_step(self, step: int) -> None:
        if self.idle:
            self.idle.on_dispatch()

    def on_dispatch(self, step: int, outputs: dict[str, Any]) -> None:
        if self.idle:
            self.idle.on_dispatched(outputs["loss"])

    def on_summaries(self, step: int, outputs: dict[str, Any], batch: NestedTensor) -> None:
        if not self.is_due(step):
            return
        trainer = self._trainer
        outputs["summaries"]["throughput"] = self.measure(
            step,
            outputs["loss"],
            batch,
            model=trainer.model,
            params=trainer.trainer_state.model,
            input_wait_seconds=trainer.input_wait_seconds,
        )

    def on_eval(self, name: str, step: int, summaries: dict[str, Any]) -> None:
        self.idle.restart()

    def on_checkpoint(self, step: int) -> None:
        if self._trainer is not None:
            self.mark(step, self._trainer.trainer_state)

    def close(self) -> None:
        self.idle.discard()

    # The measurement.

    def start(self, directory: str, step: int) -> None:
        """Starts or resumes measuring after a step."""
        self._directory, self._start = directory, None
        self.idle.discard()
        record = read_record(directory)
        starts = record.get("starts", [])
        self._first_start = (
            datetime.datetime.fromisoformat(starts[0]["time"]).timestamp()
            if starts
            else self._now()
        )
        marks = [mark for mark in record.get(_RECORD, []) if mark["step"] <= step]
        self._productive = marks[-1]["productive_seconds"] if marks else 0.0

    def is_due(self, step: int) -> bool:
        """Returns whether to call `measure`, which waits for the step; for the first step, too."""
        return self._start is None or step % self._every_n_steps == 0

    def measure(
        self,
        step: int,
        outputs: object,
        batch: NestedTensor,
        *,
        model: Module,
        params: NestedTensor,
        input_wait_seconds: float = 0.0,
    ) -> dict[str, float]:
        """Records a dispatched step; returns values to report by name, none if it is not due.

        `outputs` are arrays that the step computes; `model` is the module whose
        `forward(input_batch)` it differentiates; `input_wait_seconds` is the time that the run has
        waited for batches so far.
        """
        if not self.is_due(step):
            return {}
        jax.block_until_ready(outputs)
        idle = self.idle.fraction()
        if not self.idle:
            self.idle.start()
        before, (steps, seconds) = self._start, self._take_time(step)
        waited, self._waited = self._waited, (step, input_wait_seconds)
        if before is None or seconds <= 0:
            return {}
        per_second = steps / seconds
        steps_waited = step - waited[0]
        wait = (input_wait_seconds - waited[1]) / steps_waited
        self._warn_if_slow(step, steps_waited, wait, wait * per_second)
        summaries = {
            "steps_per_second": per_second,
            "examples_per_second": per_second * jax.tree.leaves(batch)[0].shape[0],
            "input_wait_seconds": wait,
            "goodput": min(1.0, self._productive / max(self._now() - self._first_start, 1e-9)),
        }
        if isinstance(batch, Mapping) and self.config.tokens_field in batch:
            tokens = jax.tree.leaves(batch[self.config.tokens_field])[0].size
            summaries["tokens_per_second"] = per_second * tokens
        if idle is not None:
            summaries["device_idle"] = idle
        utilization = self._utilization(per_second, batch, model, params)
        if utilization is not None:
            summaries["mfu"] = utilization
        return summaries

    def _warn_if_slow(self, step: int, steps: int, wait: float, share: float) -> None:
        if share > _SLOW_INPUT:
            self._slow_seconds += steps * wait
        if self._slow_seconds >= _SLOW_SECONDS and not self._slow_logged:
            self._slow_logged = True
            logger.warning(
                "Up to step %d each step waited %.3g s for its input, %.0f %% of the time: the "
                "input is slower than the model. Reduce its work per batch, or read with more "
                "workers.",
                step,
                wait,
                100 * min(share, 1.0),
            )

    def _take_time(self, step: int) -> tuple[int, float]:
        """Returns the number of steps since the last reading, and their duration in seconds."""
        now = self._clock() if self._pause_began is None else self._pause_began
        now -= self._paused
        before, self._start = self._start, (step, now)
        if before is None:  # the first step, which includes compilation
            return 0, 0.0
        seconds = now - before[1]
        self._productive += seconds
        return step - before[0], seconds

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time while open from that of steps."""
        self._pause_began = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - self._pause_began
            self._pause_began = None

    def mark(self, step: int, outputs: object) -> None:
        """Records in the run's directory the time of the steps up to a saved one."""
        jax.block_until_ready(outputs)
        self.idle.restart()
        self._take_time(step)
        if jax.process_index() or self._directory is None:
            return
        # Neither a full disk nor a damaged record ends training.
        with contextlib.suppress(OSError, RunDirError):
            marks = read_record(self._directory).get(_RECORD, [])
            marks = [mark for mark in marks if mark["step"] < step][-_MAX_MARKS:]
            marks.append({"step": step, "productive_seconds": round(self._productive, 3)})
            update_record(self._directory, **{_RECORD: marks})

    def _utilization(
        self, per_second: float, batch: NestedTensor, model: Module, params: NestedTensor
    ) -> float | None:
        peak = self.config.peak_flops_per_device or peak_flops_of(jax.devices()[0].device_kind)
        if peak is None:
            return None
        if self._flops is None:
            self._flops = 3 * forward_flops(model, params, batch)
        devices = len(jax.tree.leaves(params)[0].sharding.device_set)
        return self._flops * per_second / (peak * devices)


def forward_flops(model: Module, params: NestedTensor, batch: NestedTensor) -> int:
    """Counts the operations of a forward pass over a global batch, without running it.

    Parameters and batch are arrays or their shapes.
    """

    def forward(params: NestedTensor, batch: NestedTensor) -> Any:
        key, inputs = jax.random.key(0), {"input_batch": batch}
        (loss, _), _ = functional(model, key, params, inputs, is_training=True)
        return loss

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, batch))
    return count_flops(forward, *shapes).total()


Flops = Counter[str | None]


def count_flops(fn: Callable[..., Any], weights: object, *args: object) -> Flops:
    """Counts the floating-point operations of a function without running it.

    `weights`, its first argument, is a pytree of arrays, or their shapes as `jax.ShapeDtypeStruct`.
    Returns operations by the path of the weight, joined by `/`; under None those of products
    without a weight. The body of a `while_loop` counts once; of a `cond` the costliest branch.

    >>> count_flops(lambda w, x: x @ w["a"], {"a": jnp.zeros((3, 5))}, jnp.zeros((2, 3)))
    Counter({'a': 60})
    """
    paths = list(map(path_name, leaves_by_path(weights)))
    jaxpr = jax.make_jaxpr(fn)(weights, *args).jaxpr
    others = [None] * (len(jaxpr.invars) - len(paths))
    return _count(jaxpr, [*paths, *others])[0]


def _count(jaxpr: "Jaxpr", sources: list[str | None]) -> tuple[Flops, list[str | None]]:
    """Returns the operations of a jaxpr, and the weight that each of its outputs is, if any."""
    source_of = dict(zip(jaxpr.invars, sources, strict=True))

    def look_up(variables: Any) -> list[str | None]:
        return [None if hasattr(v, "val") else source_of.get(v) for v in variables]

    total: Flops = Counter()
    for equation in jaxpr.eqns:
        flops, outputs = _count_equation(equation, look_up(equation.invars))
        total.update(flops)
        source_of.update(zip(equation.outvars, outputs, strict=True))
    return total, look_up(jaxpr.outvars)


def _count_equation(
    equation: "JaxprEqn", sources: list[str | None]
) -> tuple[Flops, list[str | None]]:
    from jax.extend.core import jaxprs_in_params

    name, params = equation.primitive.name, equation.params
    computed: list[str | None] = [None] * len(equation.outvars)
    if name in _PRODUCTS:
        source = next((s for s in sources if s is not None), None)
        return Counter({source: _PRODUCTS[name](equation)}), computed
    inner = list(jaxprs_in_params(params))
    if not inner:
        # With a single array operand, such as a cast, transpose or slice, a weight stays a weight.
        pairs = zip(equation.invars, sources, strict=True)
        arrays = [source for v, source in pairs if getattr(v.aval, "shape", ())]
        return Counter(), arrays * len(computed) if len(arrays) == 1 else computed
    counted = [_count(jaxpr, _of_body(name, jaxpr, sources)) for jaxpr in inner]
    if name == "cond":
        return max((flops for flops, _ in counted), key=Counter.total), computed
    times = params["length"] if name == "scan" else 1
    total: Flops = Counter()
    for flops, _ in counted:
        total.update({source: times * count for source, count in flops.items()})
    outputs = counted[0][1]
    return total, outputs if len(counted) == 1 and len(outputs) == len(computed) else computed


def _of_body(name: str, jaxpr: "Jaxpr", sources: list[str | None]) -> list[str | None]:
    """Returns the sources of a body's arguments, the last of the equation's."""
    count = len(jaxpr.invars)
    known = [] if name == "while" or count > len(sources) else sources[len(sources) - count :]
    return known or [None] * count


def _flops_of_dot(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    lhs = equation.invars[0].aval.shape
    return 2 * _size(equation) * math.prod(lhs[axis] for axis in contracted)


def _flops_of_conv(equation: Any) -> int:
    # Each output sums over a window of input features: all of the kernel but its outputs.
    kernel = equation.invars[1].aval.shape
    outputs = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    return 2 * _size(equation) * math.prod(kernel) // outputs


_PRODUCTS: dict[str, Callable[[Any], int]] = {
    "dot_general": _flops_of_dot,
    "conv_general_dilated": _flops_of_conv,
}


def _size(equation: Any) -> int:
    return math.prod(equation.outvars[0].aval.shape)


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
        here = processes == "all" or jax.process_index() in processes
        self._start_steps = frozenset(start_steps if here else ())
        self._directory = directory
        self._open_folder = contextlib.ExitStack()
        self._n_steps = n_steps or _DEFAULT_STEPS
        self._last: int | None = None  # the last step of the open trace
        self._options = jax.profiler.ProfileOptions()
        if host_tracer_level is not None:
            self._options.host_tracer_level = host_tracer_level
        if python_tracer_level is not None:
            self._options.python_tracer_level = python_tracer_level

    def before_step(self, step: int) -> None:
        """Starts the trace that begins with a step, if any."""
        if step in self._start_steps and self._last is None:
            os.makedirs(self._directory, exist_ok=True)
            folder = Directory(self._directory).steady_path(f"trace/step_{step:08d}")
            path = self._open_folder.enter_context(folder)
            jax.profiler.start_trace(path, profiler_options=self._options)
            self._last = step + self._n_steps - 1

    def on_dispatch(self, step: int, outputs: dict[str, Any]) -> None:
        """Ends the trace that ends with a step, if any, for whose outputs it then waits."""
        if self._last is not None and step >= self._last:
            jax.block_until_ready(outputs)
            self.close()

    def close(self) -> None:
        """Ends an open trace, as when the run ends before the trace does."""
        if self._last is not None:
            self._last = None
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
    text = step.as_text() or ""
    layers, program = _layers_of_operations(text), text.split(",")[0].removeprefix("HloModule ")
    times, runs = Counter[str](), set[object]()
    run = Directory(directory)
    for entry in run.walk() if os.path.isdir(directory) else ():
        if not (entry.is_file and entry.name.endswith(".xplane.pb")):
            continue
        path = run.full_path(entry.name)
        for plane in jax.profiler.ProfileData.from_file(path).planes:
            for line in plane.lines:
                for event in line.events:
                    stats = dict(event.stats)
                    operation = stats.get("hlo_op")
                    if stats.get("hlo_module") != program or operation not in layers:
                        continue
                    times[layers[operation]] += event.duration_ns / 1e9
                    runs.add((path, stats.get("run_id")))
    if not times:
        raise ProfilerTraceError(
            f"there is no trace of {program!r} below {directory!r}. Train with "
            "start_trace_steps=[10], or another step, and pass the directory of the run."
        )
    return {layer: seconds / len(runs) for layer, seconds in times.most_common()}


def _layers_of_operations(text: str) -> dict[str, str]:
    """Returns the layer's path of each operation in a program's text, but not of loops and calls.

    Those contain other operations of the program.
    """
    names: dict[str, str] = {}  # by operation
    parts: dict[str, Counter[str]] = {}  # names of operations, by computation
    called: dict[str, str] = {}  # computation, by fused operation without a name
    computation = ""
    for line in text.splitlines():
        if begins := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            computation = begins[1]
        elif found := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = .*? ([\w\-]+)\(", line):
            operation, kind = found[1], found[2]
            if kind in ("while", "conditional", "call"):
                continue
            name = re.search(r'op_name="([^"]*)"', line)
            names[operation] = _layer_of(name[1]) if name else ""
            parts.setdefault(computation, Counter())[names[operation]] += 1
            if calls := re.search(r"calls=%?([\w.\-]+)", line):
                called[operation] = calls[1]
    for operation, body in called.items():
        known = [(layer, n) for layer, n in parts.get(body, Counter()).most_common() if layer]
        if not names[operation] and known:
            names[operation] = known[0][0]
    return names


def _layer_of(name: str) -> str:
    """Returns the layer in an operation's name.

    >>> name = "jit(train_step)/learner/jvp(model)/decoder/while/body/closed_call/layer/dot_general"
    >>> _layer_of(name), _layer_of("jit(train_step)/learner/optimizer/mul"), _layer_of("add")
    ('model/decoder/layer', 'learner/optimizer', '')
    """
    parts = [part for part in name.split("/")[:-1] if not part.startswith("jit(")]
    # A transformation surrounds the name of the outermost layer that it applies to.
    layers = [re.sub(r"^(?:\w+\()+|\)+$", "", part) for part in parts]
    layers = [x for x in layers if not re.match(_NO_LAYER, x)]
    return "/".join(layers[layers.index("model") :] if "model" in layers else layers)


# Names that JAX adds for control flow, recomputation, and einsums.
_NO_LAYER = (
    r"$|(while|body|cond|scan|pjit|closed_call|eval_jaxpr|checkpoint|rematted_computation|branch_\w+)"
    r"$|.*->"
)
