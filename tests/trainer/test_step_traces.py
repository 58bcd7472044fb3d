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


def event_names(directory, step):
    """What the viewers show."""
    (folder,) = (directory / f"trace/step_{step:08d}/plugins/profile").iterdir()
    (xplane,) = folder.glob("*.xplane.pb")
    assert xplane.stat().st_size
    (events_file,) = folder.glob("*.trace.json.gz")
    with gzip.open(events_file) as file:
        return [event.get("name", "") for event in json.load(file)["traceEvents"]]


def test_a_trace_can_be_viewed_and_holds_its_steps(tmp_path):
    run(StepTraces(str(tmp_path), [2, 3], n_steps=2), range(1, 5))
    assert [path.name for path in (tmp_path / "trace").iterdir()] == ["step_00000002"]
    assert len([name for name in event_names(tmp_path, 2) if name.startswith("PjitFunction")]) >= 2


def test_a_trace_has_as_much_of_python_as_is_asked_for(tmp_path):
    run(StepTraces(str(tmp_path / "a"), [1], n_steps=1), [1])
    run(StepTraces(str(tmp_path / "b"), [1], n_steps=1, python_tracer_level=0), [1])
    run(StepTraces(str(tmp_path / "c"), [1], n_steps=1, host_tracer_level=0), [1])
    whole, without_python, without_host = (event_names(tmp_path / name, 1) for name in "abc")
    assert any(name.startswith("$") for name in whole)  # how functions of Python are shown
    assert not any(name.startswith("$") for name in without_python)
    assert any(name.startswith("PjitFunction") for name in without_python)
    assert not any(name.startswith("PjitFunction") for name in without_host)


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
