import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from weft.config import config_class, config_for_function
from weft.errors import (
    CheckpointPolicyError,
    EarlyStoppingError,
    InputDatasetError,
    NoMeshError,
    StepIntervalError,
)
from weft.hierarchy.base_layer import BaseLayer
from weft.hierarchy.metrics import WeightedScalar
from weft.hierarchy.parameter_spec import ParameterSpec
from weft.inference.output import OutputRecordWriter
from weft.input import Input
from weft.input.fake import EmptyInput
from weft.trainer.checkpointer.policy import EvalMetric
from weft.trainer.evaler import (
    AtEndPolicy,
    BaseOutputWriter,
    BestMetricEvalPolicy,
    EarlyStopping,
    GlobalMetricCalculator,
    SpmdEvaler,
    due_at_end,
    every_n_steps_policy,
    run_evalers,
)
from weft.trainer.hooks import Hook
from weft.trainer.summary_writer import JsonLinesWriter, read_json_lines


class Dataset:
    def __init__(self, num_batches, log):
        self.num_batches, self.log = num_batches, log

    def __iter__(self):
        return Batches(self.num_batches, self.log)


class Batches:
    def __init__(self, num_batches, log):
        self.at, self.num_batches, self.log = 0, num_batches, log

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.num_batches:
            raise StopIteration
        self.at += 1
        return {"x": np.full((8, 4), float(self.at), np.float32)}

    def close(self):
        self.log.append("closed")


class Counting(Input):
    @config_class
    class Config(Input.Config):
        num_batches: int = 3

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self.log = []

    def dataset(self):
        return Dataset(self.config.num_batches, self.log)


class Model(BaseLayer):
    def _create_layer_parameter_specs(self):
        return {"weight": ParameterSpec((4,), mesh_axes=("model",))}

    def predict(self, input_batch):
        return jnp.sum(input_batch["x"] * self.parameters["weight"][None], axis=-1)

    def forward(self, input_batch):
        y = self.predict(input_batch)
        self.add_summary("mean", WeightedScalar(jnp.mean(y), jnp.array(8.0)))
        self.add_summary("noise", jax.random.uniform(self.prng_key))
        self.add_summary("bits", jnp.array(float(jnp.finfo(y.dtype).bits)))
        return jnp.mean(y), {}


MODEL = Model.default_config().set(name="model").instantiate(parent=None)
SPECS = jax.tree.map(lambda spec: spec.partition_spec, MODEL.create_parameter_specs_recursively())


class Total(GlobalMetricCalculator):
    def _calculate_metrics(self, outputs):
        return {"total": outputs.predict_outputs.sum()}


class Collect(BaseOutputWriter):
    Config = BaseOutputWriter.Config

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self.calls = []

    def write(self, *, input_batch, output_batch):
        self.calls.append((float(input_batch["x"][0, 0]), output_batch))

    def flush(self):
        self.calls.append("flush")


@pytest.fixture
def mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@pytest.fixture
def make(tmp_path):
    def make(**kwargs):
        cfg = SpmdEvaler.default_config().set(
            name="held_out",
            input=Counting.default_config(),
            summary_writer=JsonLinesWriter.default_config().set(dir=str(tmp_path / "eval")),
        )
        return cfg.set(**kwargs).instantiate(
            parent=None, model=MODEL, model_param_partition_specs=SPECS
        )

    return make


def run(evaler, mesh, step=10, seed=0, **kwargs):
    params = {
        "weight": jax.device_put(np.ones(4, np.float32), NamedSharding(mesh, SPECS["weight"]))
    }
    with jax.set_mesh(mesh):
        return evaler.eval_step(step, prng_key=jax.random.key(seed), model_params=params, **kwargs)


def test_metrics_are_computed_over_all_batches_and_written(make, mesh, tmp_path):
    evaler = make()
    key, summaries, aux = run(evaler, mesh)
    assert float(summaries["mean"].mean) == 8.0
    assert float(summaries["mean"].weight) == 24.0
    assert aux is None
    assert key != jax.random.key(0)
    (record,) = read_json_lines(str(tmp_path / "eval"))
    assert (record["step"], record["values"]["mean"]) == (10, 8.0)
    assert evaler.input.log == ["closed"]


def test_policy_decides_unless_it_is_forced(make, mesh):
    def when_low(below):
        return lambda *, step, train_summaries: train_summaries.get("loss", below) < below

    evaler = make(eval_policy=config_for_function(when_low).set(below=1.0))
    key, summaries, aux = run(evaler, mesh, train_summaries={"loss": 2.0})
    assert (summaries, aux) == (None, None)
    assert key == jax.random.key(0)
    assert evaler.input.log == []
    assert run(evaler, mesh, train_summaries={"loss": 0.5})[1] is not None
    assert run(evaler, mesh, force_run=True)[1] is not None
    assert run(evaler, mesh)[1] is None


def test_every_n_steps():
    steps = lambda **kwargs: [  # noqa: E731
        s for s in range(13) if every_n_steps_policy(**kwargs)(step=s, train_summaries={})
    ]
    assert steps(n=5) == [5, 10]
    assert steps(n=5, min_step=6, max_step=12) == [10, 12]


def test_outputs_are_returned_and_written(make, mesh):
    evaler = make(metric_calculator=Total.default_config(), output_writer=Collect.default_config())
    _, summaries, aux = run(evaler, mesh, return_aux=True)
    assert float(summaries["total"]) == 8 * 4 * (1 + 2 + 3)
    np.testing.assert_array_equal(aux[1].predict_outputs, np.full(8, 8.0))
    calls = evaler.output_writer.calls
    assert [call[0] for call in calls[:-1]] == [1.0, 2.0, 3.0]
    np.testing.assert_array_equal(calls[2][1].predict_outputs, np.full(8, 12.0))
    assert calls[-1] == "flush"


def test_records_of_outputs_are_written(make, mesh, tmp_path):
    writer = OutputRecordWriter.default_config().set(
        converter=lambda *, input_batch, output_batch: {
            "x": input_batch["x"][:, 0],
            "y": output_batch["predict_outputs"],
        }
    )
    writer.sink.output_path = str(tmp_path / "records.jsonl")
    evaler = make(metric_calculator=Total.default_config(), output_writer=writer)
    for _ in range(2):  # the file has the records of the last evaluation
        run(evaler, mesh)
    lines = (tmp_path / "records.jsonl").read_text(encoding="utf-8").splitlines()
    assert list(map(json.loads, lines)) == [
        {"x": x, "y": 4 * x} for x in (1.0, 2.0, 3.0) for _ in range(8)
    ]


def test_calculator_dtype_overrides_evaler_dtype(make, mesh):
    evaler = make(eval_dtype=jnp.bfloat16)
    assert float(run(evaler, mesh)[1]["bits"]) == 16
    own = make().config.metric_calculator.set(eval_dtype=jnp.float16)
    evaler = make(eval_dtype=jnp.float32, metric_calculator=own)
    assert evaler.metric_calculator.config.eval_dtype == jnp.float16


def double(batch):
    return jax.tree.map(lambda x: 2 * x, batch)


def test_input_dispatches_the_batch_in_a_compiled_function(make, mesh):
    batches = Counting.default_config().set(
        input_partitioner=config_for_function(lambda: double), partition_spec=PartitionSpec("data")
    )
    assert float(run(make(input=batches), mesh)[1]["mean"].mean) == 16.0


def test_input_is_not_for_training(make):
    fake = EmptyInput.default_config().set(
        is_training=True, global_batch_size=1, total_num_batches=1
    )
    assert make(input=fake).input.config.is_training is False


def test_empty_evaluation_is_an_error(make, mesh):
    evaler = make(input=Counting.default_config().set(num_batches=0))
    with pytest.raises(InputDatasetError, match="held_out: the dataset has no batch to evaluate"):
        run(evaler, mesh)
    assert evaler.input.log == ["closed"]


def test_without_a_mesh(make):
    with pytest.raises(NoMeshError, match="no mesh is set"):
        make().eval_step(1, prng_key=jax.random.key(0), model_params={"weight": jnp.ones(4)})


def test_profiler_trace(make, mesh, tmp_path):
    run(make(trace_at_iters=[1]), mesh)
    assert [p.name for p in (tmp_path / "eval" / "trace").iterdir()] == ["step_00000010_iter_1"]


class FailsAtOnce(Model):
    def forward(self, input_batch):
        raise ValueError("in the model")


def test_data_is_closed_when_the_model_fails(tmp_path, mesh):
    model = FailsAtOnce.default_config().set(name="model").instantiate(parent=None)
    cfg = SpmdEvaler.default_config().set(name="held_out", input=Counting.default_config())
    cfg.summary_writer.dir = str(tmp_path)
    evaler = cfg.instantiate(parent=None, model=model, model_param_partition_specs=SPECS)
    with pytest.raises(ValueError, match="in the model"):
        run(evaler, mesh)
    assert evaler.input.log == ["closed"]


def reported(loss, evaler="held_out"):
    return {"evalers": {evaler: {"loss": WeightedScalar(loss, 4.0)}}}


def best(**kwargs):
    cfg = BestMetricEvalPolicy.default_config().set(metric=EvalMetric("held_out", "loss"))
    return cfg.set(**kwargs).instantiate()


def fires(policy, losses):
    return [policy(step=i, train_summaries=reported(loss)) for i, loss in enumerate(losses)]


def test_every_n_steps_and_the_last():
    policy = every_n_steps_policy(3, min_step=4, max_step=10)
    assert [s for s in range(1, 12) if policy(step=s, train_summaries={})] == [6, 9, 10]


def test_interval_of_no_steps():
    with pytest.raises(StepIntervalError, match=r"eval_policy.n=0; expected an interval of 1 or"):
        every_n_steps_policy(0, max_step=10)


def test_at_end_policy_with_another_policy():
    assert not AtEndPolicy.default_config().instantiate()(step=4, train_summaries={})
    also = config_for_function(every_n_steps_policy).set(n=2)
    policy = AtEndPolicy.default_config().set(also=also).instantiate()
    assert [s for s in range(1, 6) if policy(step=s, train_summaries={})] == [2, 4]


def test_best_metric_policy():
    assert fires(best(), [2.0, 3.0, 2.0, 1.0, float("nan")]) == [True, False, False, True, False]
    assert fires(best(mode="max"), [2.0, 3.0, 1.0]) == [True, True, False]
    # An evaler that did not run has no summaries.
    assert not best()(step=1, train_summaries=reported(1.0, evaler="other"))
    assert not best()(step=1, train_summaries={})


def test_best_metric_policy_errors():
    with pytest.raises(CheckpointPolicyError, match=r"BestMetricEvalPolicy got mode='least'"):
        best(mode="least")
    policy = best(metric=EvalMetric("held_out", "los"))
    with pytest.raises(CheckpointPolicyError, match=r"'los', which the evaler 'held_out'.*'?loss"):
        fires(policy, [1.0])


def make_stopping(**kwargs):
    cfg = EarlyStopping.default_config().set(metric=EvalMetric("held_out", "loss"))
    return cfg.set(**kwargs).instantiate()


def stops_at(stopping, values):
    """Returns the first evaluation after which the run ends."""
    for i, value in enumerate(values):
        if stopping(step=i, evaler_summaries={"held_out": {"loss": WeightedScalar(value, 2.0)}}):
            return i
    return None


def test_patience_counts_evaluations_without_an_improvement():
    assert stops_at(make_stopping(), [2.0, 1.0, 1.5]) == 2
    assert stops_at(make_stopping(patience=2), [2.0, 3.0, 3.0, 1.0, 2.0, 2.0, 2.0]) == 6
    assert stops_at(make_stopping(min_delta=0.5), [2.0, 1.8]) == 1
    assert stops_at(make_stopping(mode="max"), [1.0, 2.0, 2.0]) == 2
    assert stops_at(make_stopping(), [float("nan")]) == 0


def test_patience_ignores_steps_without_an_evaluation():
    stopping = make_stopping()
    stops_at(stopping, [1.0])
    assert not stopping(step=2, evaler_summaries={"other": {"loss": 5.0}})
    assert not stopping(step=3, evaler_summaries={})


def test_higher_patience_resumes_the_run():
    stopped, patient = make_stopping(), make_stopping(patience=3)
    stops_at(stopped, [1.0, 2.0])
    patient.set_state(stopped.get_state())
    assert stopped.should_stop
    assert not patient.should_stop


def test_early_stopping_errors():
    with pytest.raises(EarlyStoppingError, match=r"patience=-1 and min_delta=0; expected numbers"):
        make_stopping(patience=-1)
    with pytest.raises(EarlyStoppingError, match=r"the evaler 'held_out'.*test, valid. Set early"):
        make_stopping().check(["test", "valid"])


class Evaler:
    """Runs if its rule says so, or if it has to."""

    def __init__(self, rule):
        self.eval_policy = lambda *, step, train_summaries: rule(step, train_summaries)

    def eval_step(self, step, *, prng_key, model_params, train_summaries, force_run):
        assert force_run  # `run_evalers` has asked the policy
        return prng_key, {"sum": step + model_params}, None


class Told(Hook):
    def __init__(self):
        self.told = []

    def on_eval(self, name, step, summaries):
        self.told.append((name, step, summaries["sum"]))


@pytest.fixture
def evalers():
    return {
        "even": Evaler(lambda step, summaries: step % 2 == 0),
        # As a policy that waits for another evaler's result.
        "after": Evaler(lambda step, summaries: "even" in summaries["evalers"]),
        "never": Evaler(lambda step, summaries: False),
    }


def run_due(evalers, step, **kwargs):
    listener = Told()
    found = run_evalers(
        evalers,
        step=step,
        prng_key=None,
        model_params=10,
        train_summaries={"loss": 1.0},
        hook=listener,
        **kwargs,
    )
    return found, listener.told


def test_later_evalers_see_the_summaries_of_earlier_ones(evalers):
    assert run_due(evalers, 3) == ({}, [])
    found, told = run_due(evalers, 4)
    assert found == {"even": {"sum": 14}, "after": {"sum": 14}}
    assert told == [("even", 4, 14), ("after", 4, 14)]


def test_only_forced_evalers_run(evalers):
    assert run_due(evalers, 4, forced={"never"})[0] == {"never": {"sum": 14}}
    assert run_due(evalers, 4, forced=set())[0] == {}


def test_due_at_end(evalers):
    evalers["last"] = types.SimpleNamespace(eval_policy=AtEndPolicy.default_config().instantiate())
    assert due_at_end(evalers) == {"last"}
