import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from weft.errors import ProfilerTraceError
from weft.trainer.step_traces import StepTraces


def run(traces, steps):
    step_fn = jax.jit(lambda x: jnp.sin(x) @ x)
    for step in steps:
        with traces.around(step) as computes:
            computes(step_fn(jnp.ones((8, 8))))


def test_a_trace_can_be_viewed_and_holds_its_steps(tmp_path):
    run(StepTraces(str(tmp_path), [2, 3], n_steps=2), range(1, 5))
    assert [path.name for path in (tmp_path / "trace").iterdir()] == ["step_00000002"]
    (folder,) = (tmp_path / "trace/step_00000002/plugins/profile").iterdir()
    (xplane,) = folder.glob("*.xplane.pb")
    assert xplane.stat().st_size
    (events_file,) = folder.glob("*.trace.json.gz")
    with gzip.open(events_file) as file:
        events = json.load(file)["traceEvents"]
    calls = [event for event in events if event.get("name", "").startswith("PjitFunction")]
    assert len(calls) >= 2


def test_a_run_that_ends_first_ends_the_trace(tmp_path):
    traces = StepTraces(str(tmp_path), [1], n_steps=10)
    run(traces, [1])
    traces.close()
    traces.close()
    assert list(tmp_path.glob("trace/step_00000001/**/*.xplane.pb"))


def test_other_processes_trace_nothing(tmp_path):
    run(StepTraces(str(tmp_path), [1], processes=[1]), [1, 2, 3])
    assert not list(tmp_path.iterdir())
    run(StepTraces(str(tmp_path), [1], n_steps=1, processes="all"), [1])
    assert list(tmp_path.iterdir())


def test_a_trace_of_no_steps_is_refused(tmp_path):
    with pytest.raises(ProfilerTraceError, match=r"n_steps_for_each_trace=0; expected 1 or more"):
        StepTraces(str(tmp_path), [1], n_steps=0)
