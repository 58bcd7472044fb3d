import datetime

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ThroughputError
from weft.hierarchy.base_model import BaseModel
from weft.trainer.run_record import read_record, update_record
from weft.trainer.throughput import Throughput, peak_flops_of

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
        return self.throughput.on_step(
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
            self.throughput.on_checkpoint(self.step_number, LOSS)
            self.clock.seconds += seconds / 2


def test_speed_is_that_of_the_steps_between_two_readings(tmp_path):
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


def test_a_batch_without_tokens_has_examples_only(tmp_path):
    run = Run(tmp_path, tokens_field="ids")
    run.step()
    assert "tokens_per_second" not in run.step()


def test_a_slow_input_shows_and_is_said_once(tmp_path, caplog):
    run = Run(tmp_path)
    run.step(waited=100)  # for the first batch, which belongs to no step
    assert run.step(waited=0.05)["input_wait_seconds"] == pytest.approx(0.05)
    assert not caplog.records
    run.save(seconds=10)
    run.step(waited=0.4)
    assert run.step(waited=0.2)["input_wait_seconds"] == pytest.approx(0.3)
    for _ in range(4):
        run.step(waited=0.9)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "Up to step 4 each step waited 0.3 s for its input, 30 % of the time: the input is slower"
    )


def test_mfu_is_a_share_of_what_the_devices_can_do(tmp_path):
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


def test_there_is_no_mfu_for_a_device_that_is_not_known(tmp_path):
    run = Run(tmp_path)
    run.step()
    assert "mfu" not in run.step()


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


def test_goodput_counts_what_is_kept_over_all_starts(tmp_path):
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


def test_a_mark_after_the_step_that_is_restored_is_void(tmp_path):
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


def test_no_steps_between_readings_is_refused():
    with pytest.raises(ThroughputError, match=r"throughput.every_n_steps=0; expected 1 or more"):
        Throughput.default_config().set(every_n_steps=0).instantiate()
