"""

Counting floating-point operations, against products worked out by hand.
"""

import datetime
import gzip
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from weft.errors import ProfilerTraceError
from weft.hierarchy.base_layer import BaseModel
from weft.trainer.flops import count_flops, peak_flops_of
from weft.trainer.goodput import KINDS, goodput_of
from weft.trainer.profiling import StepTraces, layer_times
from weft.trainer.run_dir import read_record, update_record
from weft.trainer.throughput import IdleTime, Throughput

BATCH = {"input_ids": np.zeros((4, 8), np.int32)}
LOSS = jnp.zeros(())


class Clock:
    def __init__(self):
        self.seconds = 1_000.0

    def __call__(self):
        return self.seconds


class Product(BaseModel):
    """A product of [4, 8] and [8, 8]."""

    def forward(self, input_batch):
        return jnp.sum(input_batch["input_ids"].astype(jnp.float32) @ self.state["w"]), {}


MODEL = Product.default_config().set(name="model").instantiate(parent=None)


class Run:
    """A run whose steps take a second each, and its start two minutes."""

    def __init__(self, directory, step=0, **kwargs):
        self.clock = Clock()
        self.params = {"w": jnp.zeros((8, 8))}
        cfg = Throughput.default_config().set(**{"every_n_steps": 2, **kwargs})
        self.throughput = Throughput(cfg, clock=self.clock, now=self.clock)
        if not read_record(str(directory)):
            time = datetime.datetime.fromtimestamp(self.clock.seconds, datetime.UTC).isoformat()
            update_record(str(directory), starts=[{"time": time}])
        self.clock.seconds += 120
        self.throughput.start(str(directory), step)
        self.step_number = step

    def step(self, seconds=1.0, waited=0.0):
        self.clock.seconds += seconds
        self.waited = getattr(self, "waited", 0.0) + waited
        self.step_number += 1
        return self.throughput.measure(
            self.step_number,
            LOSS,
            BATCH,
            model=MODEL,
            params=self.params,
            input_wait_seconds=self.waited,
        )

    def save(self, seconds=0.0):
        with self.throughput.paused():
            self.clock.seconds += seconds / 2
            self.throughput.mark(self.step_number, LOSS)
            self.clock.seconds += seconds / 2


def test_speed_covers_steps_between_readings(tmp_path):
    run = Run(tmp_path)
    assert [bool(run.step(seconds)) for seconds in (30, 0.5, 0.5, 0.5)] == [
        False,
        True,
        False,
        True,
    ]
    run.save(seconds=60)  # which is not counted
    assert run.step() == {}
    summaries = run.step()
    assert summaries["steps_per_second"] == pytest.approx(1.0)
    assert summaries["examples_per_second"] == pytest.approx(4.0)
    assert summaries["tokens_per_second"] == pytest.approx(32.0)


def test_batch_without_tokens_has_examples_only(tmp_path):
    run = Run(tmp_path, tokens_field="ids")
    run.step()
    assert "tokens_per_second" not in run.step()


def test_slow_input_is_reported_once(tmp_path, caplog):
    run = Run(tmp_path)
    run.step(waited=100)  # for the first batch, which belongs to no step
    assert run.step(waited=0.05)["input_wait_seconds"] == pytest.approx(0.05)
    assert not caplog.records
    run.save(seconds=10)
    run.step(waited=0.4)
    assert run.step(waited=0.2)["input_wait_seconds"] == pytest.approx(0.3)
    assert not caplog.records  # less than a second in all
    for _ in range(4):
        run.step(waited=0.9)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "Up to step 6 each step waited 0.9 s for its input, 90 % of the time: the input is slower"
    )


def test_mfu_is_relative_to_peak_flops(tmp_path):
    run = Run(tmp_path, peak_flops_per_device=12_288.0)
    run.step()
    # 2 * 4 * 8 * 8 operations forward, three times as many in all, in a second.
    assert run.step()["mfu"] == pytest.approx(3 * 2 * 4 * 8 * 8 / 12_288)
    if len(jax.devices()) > 1:
        run.params = jax.device_put(
            run.params,
            jax.sharding.NamedSharding(
                jax.sharding.Mesh(jax.devices()[:2], "x"), jax.sharding.PartitionSpec()
            ),
        )
        run.step()
        assert run.step()["mfu"] == pytest.approx(3 * 2 * 4 * 8 * 8 / 12_288 / 2)


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA L40S", 362e12),
    ],
)
def test_kinds_of_devices(kind, peak):
    assert peak_flops_of(kind) == peak


def test_goodput_counts_saved_steps_over_restarts(tmp_path):
    run = Run(tmp_path)
    for _ in range(5):
        run.step(10)  # the first one is compiled, so it does not count
    run.save(seconds=20)
    for _ in range(3):
        run.step(10)
    end = run.clock.seconds  # killed: the last three steps are lost
    assert read_record(str(tmp_path))["goodput"] == [{"step": 5, "productive_seconds": 40.0}]

    again = Run(tmp_path, step=5)
    again.clock.seconds = end
    again.throughput.start(str(tmp_path), 5)
    again.clock.seconds += 100
    again.step(10)
    assert again.step(10) == {} and again.step(10)
    goodput = again.step(10) or again.step(10)
    seconds = again.clock.seconds - 1_000
    assert goodput["goodput"] == pytest.approx((40 + again.clock.seconds - end - 110) / seconds)


def test_marks_after_the_restored_step_are_void(tmp_path):
    run = Run(tmp_path)
    for _ in range(4):
        run.step()
        run.save()
    again = Run(tmp_path, step=2)
    again.step()
    again.save()
    marks = read_record(str(tmp_path))["goodput"]
    assert [(mark["step"], mark["productive_seconds"]) for mark in marks] == [
        (1, 0),
        (2, 1),
        (3, 1),
    ]


def test_time_goes_into_kinds_over_restarts(tmp_path):
    run = Run(tmp_path)
    run.step(30, waited=5)  # compiled
    for _ in range(4):
        run.step(10, waited=1)
    run.save(seconds=20)
    with run.throughput.paused():
        run.clock.seconds += 7
        run.throughput.on_eval("held_out", 5, {})
    run.step(10)
    run.save()
    run.step(10)
    run.step(10)  # lost
    killed = run.clock.seconds
    record = read_record(str(tmp_path))
    kinds = {"steps": 46, "input": 9, "compilation": 25, "evaluation": 7, "checkpoints": 20}
    expected = dict.fromkeys(KINDS, 0.0) | kinds | {"restarts": 120}
    assert record["times"]["seconds"] == pytest.approx(expected)

    starts = [*record["starts"], *record["starts"]]
    update_record(str(tmp_path), starts=starts)
    run.clock.seconds += 100
    run.throughput.start(str(tmp_path), 6, last_sign_of_life=killed)
    run.waited = 0.0
    run.step(30)
    run.step(10)
    run.save()
    run.clock.seconds += 15
    run.throughput.on_end(8, "max_step")
    goodput = goodput_of(read_record(str(tmp_path)))
    expected["steps"] += 10
    expected["compilation"] += 30
    expected["restarts"] += 100
    expected["lost"] += 20
    expected["checkpoints"] += 15
    assert goodput.seconds == pytest.approx(expected)
    assert goodput.elapsed == pytest.approx(sum(expected.values()))
    assert goodput.share == pytest.approx(56 / goodput.elapsed)


def test_last_save_and_evaluations_at_the_end_are_no_steps(tmp_path):
    run = Run(tmp_path, every_n_steps=100)
    run.step(30)
    run.clock.seconds += 10
    run.throughput.on_summaries(2, {}, BATCH)
    run.clock.seconds += 40
    run.throughput.mark(2, LOSS)
    run.clock.seconds += 5
    run.throughput.on_eval("held_out", 2, {})
    run.throughput.on_end(2, "max_step")
    seconds = goodput_of(read_record(str(tmp_path))).seconds
    assert seconds["steps"] == 10
    assert (seconds["checkpoints"], seconds["evaluation"]) == (40, 5)


def test_steps_before_a_rewind_are_lost(tmp_path):
    run = Run(tmp_path)
    run.throughput._trainer = types.SimpleNamespace(
        config=types.SimpleNamespace(dir=str(tmp_path)), input_wait_seconds=0.0
    )
    run.step()
    run.step(10)
    run.save()
    run.step(10)
    run.clock.seconds += 3  # to restore
    run.throughput.on_rewind(2)
    account = run.throughput.account
    assert (account.seconds["steps"], account.seconds["lost"]) == (10, 13)


W, X = jnp.zeros((3, 5)), jnp.zeros((2, 3))


def test_scan_counts_its_body_for_each_iteration():
    def stack(w, x):
        return jax.lax.scan(lambda x, w: (jnp.dot(x, w["a"]), None), x, w)[0]

    assert count_flops(stack, {"a": jnp.zeros((7, 3, 3))}, X) == {"a": 7 * (2 * 2 * 3 * 3)}


def test_gradient_counts_the_products_of_both_directions():
    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w))

    assert count_flops(jax.grad(loss), W, X).total() == 2 * 60
    assert count_flops(jax.grad(loss, argnums=(0, 1)), W, X).total() == 3 * 60


def test_weight_is_tracked_through_casts_and_slices():
    def fn(w, x):
        a = jax.jit(lambda w: w["a"].astype(jnp.bfloat16).T)(w)
        return (2 * x.astype(jnp.bfloat16) @ a) @ w["b"][:, :4].astype(jnp.bfloat16)

    weights = {"a": jnp.zeros((5, 3)), "b": jnp.zeros((5, 9))}
    assert count_flops(fn, weights, X) == {"a": 60, "b": 2 * 2 * 5 * 4}


def test_costliest_branch_of_a_cond_counts():
    def branch(w, x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: (x @ w) @ w, x)

    assert count_flops(branch, jnp.zeros((3, 3)), X) == {"": 2 * (2 * 2 * 9)}


def test_body_of_a_while_loop_counts_once():
    def loop(w, x):
        return jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ w, x)

    assert count_flops(loop, jnp.zeros((3, 3)), X).total() == 2 * 2 * 9


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_shard_map_counts_its_body_for_each_part():
    mesh = jax.make_mesh((4, 2), ("data", "same"), axis_types=(AxisType.Auto,) * 2)
    specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
    fn = jax.shard_map(lambda w, x: x @ w, mesh=mesh, **specs)
    # Both devices along "same" compute the same.
    assert count_flops(fn, W.T, jnp.zeros((8, 5))) == {"": 2 * 8 * 5 * 3}


def test_convolution_counts_its_window():
    x, kernel = jnp.zeros((1, 8, 8, 3)), jnp.zeros((2, 2, 3, 5))

    def conv(kernel, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)

    assert count_flops(conv, kernel, x) == {"": 2 * (8 * 8 * 5) * (2 * 2 * 3)}


def run(traces, steps):
    step_fn = jax.jit(lambda x: jnp.sin(x) @ x)
    for step in steps:
        traces.before_step(step)
        traces.on_dispatch(step, {"loss": step_fn(jnp.ones((8, 8)))})


def event_names(directory, step):
    """Returns the event names shown by the viewers."""
    (folder,) = (directory / f"trace/step_{step:08d}/plugins/profile").iterdir()
    (xplane,) = folder.glob("*.xplane.pb")
    assert xplane.stat().st_size
    (events_file,) = folder.glob("*.trace.json.gz")
    with gzip.open(events_file) as file:
        return [event.get("name", "") for event in json.load(file)["traceEvents"]]


def test_trace_is_viewable_and_has_steps(tmp_path):
    run(StepTraces(str(tmp_path), [2, 3], n_steps=2), range(1, 5))
    assert [path.name for path in (tmp_path / "trace").iterdir()] == ["step_00000002"]
    assert len([name for name in event_names(tmp_path, 2) if name.startswith("PjitFunction")]) >= 2


def test_trace_levels_are_configurable(tmp_path):
    run(StepTraces(str(tmp_path / "a"), [1], n_steps=1, python_tracer_level=0), [1])
    run(StepTraces(str(tmp_path / "b"), [1], n_steps=1, host_tracer_level=0), [1])

    def kinds(name):
        names = event_names(tmp_path / name, 1)
        # How functions of Python are shown, and those of JAX.
        return [any(x.startswith(prefix) for x in names) for prefix in ("$", "PjitFunction")]

    assert kinds("a") == [False, True]
    assert kinds("b") == [True, False]


def test_other_processes_trace_nothing(tmp_path):
    run(StepTraces(str(tmp_path), [1], processes=[1]), [1, 2, 3])
    assert not list(tmp_path.iterdir())


def test_trace_of_no_steps_is_rejected(tmp_path):
    with pytest.raises(ProfilerTraceError, match=r"n_steps_for_each_trace=0; expected 1 or more"):
        StepTraces(str(tmp_path), [1], n_steps=0)


def test_traced_time_is_counted_by_layer(tmp_path):
    def layer(x, w):
        with jax.named_scope("dense"):
            return jnp.tanh(x @ w), None

    def loss(weights, x):
        with jax.named_scope("model"):
            x, _ = jax.lax.scan(layer, x, weights)
            with jax.named_scope("head"):
                return jnp.sum(jnp.exp(x @ weights[0]))

    weights, x = jnp.ones((3, 256, 256)) / 256, jnp.ones((256, 256))
    step = jax.jit(jax.grad(loss)).lower(weights, x).compile()
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(2):
            jax.block_until_ready(step(weights, x))
    times = layer_times(str(tmp_path), step)
    assert times["model/dense"] > 0 and times["model/head"] > 0
    other = jax.jit(lambda x: x + 1).lower(x).compile()
    with pytest.raises(ProfilerTraceError, match=r"no trace of .*start_trace_steps=\[10\]"):
        layer_times(str(tmp_path), other)


class Output:
    """Output of a step that ends at a time of the test's clock."""

    def __init__(self, now, end):
        self._now, self._end = now, end

    def block_until_ready(self):
        self._now[0] = self._end
        return self


def test_idle_time_counts_the_gaps_between_steps():
    now = [0.0]
    idle = IdleTime(lambda: now[0])
    assert not idle
    idle.start()
    for i in range(11):
        assert idle and idle.fraction() is None
        now[0] = i  # dispatched one second apart
        idle.on_dispatch()
        idle.on_dispatched(Output(now, i + 0.75))
        assert idle._ends[-1].result() == i + 0.75
    assert not idle  # no further steps
    assert idle.fraction() == pytest.approx(10 * 0.25 / 10.75)
    assert idle.fraction() is None


def test_evaluation_starts_the_sample_of_idle_time_again():
    idle = IdleTime()
    idle.restart()
    assert not idle
    idle.start()
    idle.on_dispatch()
    idle.on_dispatched(1.0)
    idle.restart()
    assert idle and not idle._ends
    idle.discard()
    assert not idle
