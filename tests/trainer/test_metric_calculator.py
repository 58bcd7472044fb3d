import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from weft.config import config_class, config_for_function
from weft.errors import MetricCalculatorError
from weft.hierarchy.base_layer import BaseLayer
from weft.hierarchy.metrics import WeightedScalar
from weft.hierarchy.parameter_spec import ParameterSpec
from weft.trainer.metric_calculator import (
    BaseMetricCalculator,
    CompositeMetricCalculator,
    GlobalMetricCalculator,
    ModelSummaryAccumulator,
    PredictionOutputs,
)

Dependency = CompositeMetricCalculator.Dependency
TRACES: list[str] = []


class Model(BaseLayer):
    """Predicts `x @ weight`; the weight lies over both axes of the mesh."""

    def _create_layer_parameter_specs(self):
        return {"weight": ParameterSpec((4, 2), mesh_axes=("data", "model"))}

    def predict(self, input_batch):
        TRACES.append("predict")
        x = input_batch["x"] if isinstance(input_batch, dict) else input_batch
        return {"y": x @ self.parameters["weight"]}

    def forward(self, input_batch, scale=1.0):
        TRACES.append("forward")
        y = scale * self.predict(input_batch)["y"]
        error = jnp.mean((y - input_batch["target"]) ** 2)
        rows = jnp.array(y.shape[0], jnp.float32)
        self.add_summary("error", WeightedScalar(error, rows))
        self.add_module_output("hidden", {"y": y, "rows": rows})
        self.add_summary("noise", jax.random.uniform(self.prng_key))
        self.add_summary("training", jnp.array(float(self.is_training)))
        self.add_summary("bits", jnp.array(float(jnp.finfo(y.dtype).bits)))
        return error, {"y": y}


MODEL = Model.default_config().set(name="model").instantiate(parent=None)
SPECS = jax.tree.map(lambda spec: spec.partition_spec, MODEL.create_parameter_specs_recursively())
RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((4, 2)).astype(np.float32)
BATCHES = [
    {
        "x": RNG.standard_normal((8, 4)).astype(np.float32),
        "target": RNG.standard_normal((8, 2)).astype(np.float32),
    }
    for _ in range(3)
]


@pytest.fixture(autouse=True)
def mesh():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    TRACES.clear()
    with jax.set_mesh(mesh):
        yield mesh


def make(cfg):
    return cfg.set(name="calculator").instantiate(
        parent=None, model=MODEL, model_param_partition_specs=SPECS
    )


def evaluate(calculator, seed=0, batches=BATCHES, weight=WEIGHT):
    mesh = jax.sharding.get_mesh()
    params = jax.device_put({"weight": weight}, NamedSharding(mesh, SPECS["weight"]))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    state = calculator.init_state(prng_key=jax.random.key(seed), model_params=params)
    outputs = []
    for batch in batches:
        result = calculator.forward(jax.device_put(batch, rows), model_params=params, state=state)
        state = result["state"]
        outputs.append(result["output"])
    return calculator.get_summaries(
        model_params=params, state=state, all_forward_outputs=outputs
    ), outputs


def mean_error(scale=1.0):
    errors = [np.mean((scale * b["x"] @ WEIGHT - b["target"]) ** 2) for b in BATCHES]
    return np.mean(errors)


# The model's own summaries.


def test_summaries_of_all_batches_add_up():
    summaries, outputs = evaluate(make(ModelSummaryAccumulator.default_config()))
    np.testing.assert_allclose(summaries["error"].mean, mean_error(), rtol=1e-5)
    assert float(summaries["error"].weight) == 24
    assert float(summaries["training"]) == 0.0
    assert summaries["error"].mean.is_fully_replicated
    assert outputs == [{}, {}, {}]


def test_parameters_may_keep_their_layout():
    cfg = ModelSummaryAccumulator.default_config().set(name="calculator")
    calculator = cfg.instantiate(parent=None, model=MODEL, model_param_partition_specs=None)
    summaries, _ = evaluate(calculator)
    np.testing.assert_allclose(summaries["error"].mean, mean_error(), rtol=1e-5)


def test_evaler_keeps_the_module_outputs_of_a_path():
    keep = config_for_function(lambda: lambda path: path == "hidden/y")
    cfg = ModelSummaryAccumulator.default_config().set(filter_module_outputs=keep)
    summaries, outputs = evaluate(make(cfg))
    np.testing.assert_allclose(summaries["error"].mean, mean_error(), rtol=1e-5)
    for batch, output in zip(BATCHES, outputs, strict=True):
        assert output.keys() == {"hidden"} and output["hidden"].keys() == {"y"}
        assert isinstance(output["hidden"]["y"], np.ndarray)
        np.testing.assert_allclose(output["hidden"]["y"], batch["x"] @ WEIGHT, rtol=1e-5)


def test_method_arguments_prefix_and_dtype():
    cfg = ModelSummaryAccumulator.default_config().set(
        model_method_kwargs={"scale": 2.0}, prefix="held_out", eval_dtype=jnp.bfloat16
    )
    summaries, _ = evaluate(make(cfg))
    assert sorted(summaries) == [f"held_out/{n}" for n in ("bits", "error", "noise", "training")]
    np.testing.assert_allclose(summaries["held_out/error"].mean, mean_error(2.0), rtol=2e-2)
    assert float(summaries["held_out/bits"]) == 16


def test_missing_model_method():
    cfg = ModelSummaryAccumulator.default_config().set(model_method="foward")
    with pytest.raises(MetricCalculatorError, match=r"calculator is to call 'foward' .*'forward'"):
        make(cfg)


# Metrics of all examples.


class Median(GlobalMetricCalculator):
    def _calculate_metrics(self, outputs):
        assert isinstance(outputs, PredictionOutputs)
        y = outputs.predict_outputs["y"]
        assert type(y) is np.ndarray
        difference = y - outputs.input_batch["target"]
        return {"median": np.median(np.abs(difference)), "count": len(difference)}


@pytest.mark.parametrize("field", [None, "x"])
def test_predictions_of_all_batches_are_joined(field):
    cfg = Median.default_config().set(predict_input_field=field, prefix="all")
    summaries, outputs = evaluate(make(cfg))
    difference = np.concatenate([b["x"] @ WEIGHT - b["target"] for b in BATCHES])
    np.testing.assert_allclose(summaries["all/median"], np.median(np.abs(difference)), rtol=1e-5)
    assert summaries["all/count"] == 24
    assert len(outputs) == 3
    np.testing.assert_array_equal(outputs[2].input_batch["x"], BATCHES[2]["x"])


def test_missing_batch_field():
    calculator = make(Median.default_config().set(predict_input_field="tarGet"))
    text = r"the batch has no field predict_input_field='tarGet'\. Did you mean 'target'"
    with pytest.raises(MetricCalculatorError, match=text):
        evaluate(calculator)


# Several.


class Plus(BaseMetricCalculator):
    """Adds to what the calculator before made, for tests of dependencies."""

    @config_class
    class Config(BaseMetricCalculator.Config):
        source: str = ""
        metric: str = "sum"

    def init_state(self, *, prng_key, model_params):
        return {"key": prng_key}

    def forward(self, input_batch, *, model_params, state):
        before = input_batch[self.config.source]["sum"] if self.config.source else 0
        return {"state": state, "output": {"sum": before + 1}}

    def get_summaries(self, *, model_params, state, all_forward_outputs):
        return self._with_prefix({self.config.metric: sum(o["sum"] for o in all_forward_outputs)})


def composite(dependencies=None, **calculators):
    return CompositeMetricCalculator.default_config().set(
        metric_calculators=calculators, dependencies=dependencies
    )


def test_several_calculators_see_the_same_batches():
    cfg = composite(
        model=ModelSummaryAccumulator.default_config(), median=Median.default_config()
    ).set(prefix="p", eval_dtype=jnp.bfloat16)
    calculator = make(cfg)
    summaries, _ = evaluate(calculator)
    assert {"p/model/error", "p/median/median", "p/median/count"} <= summaries.keys()
    assert float(summaries["p/model/bits"]) == 16
    states = calculator.init_state(prng_key=jax.random.key(0), model_params={})
    assert states["model"]["prng_key"] != states["median"]["prng_key"]


def test_dependencies_are_resolved_in_any_order():
    plus = Plus.default_config()
    cfg = composite(
        [Dependency("b", "a", dst_key="other"), Dependency(src="c", dst="b")],
        a=plus.clone(source="other", prefix="x"),
        b=plus.clone(source="c"),
        c=plus,
    )
    summaries, outputs = evaluate(make(cfg))
    assert summaries == {"a/x/sum": 9, "b/sum": 6, "c/sum": 3}
    assert outputs[0] == {"a": {"sum": 3}, "b": {"sum": 2}, "c": {"sum": 1}}


def test_invalid_dependencies():
    plus = Plus.default_config()
    with pytest.raises(MetricCalculatorError, match=r"names 'bee', .* There are: a, b"):
        make(composite([Dependency("bee", "a")], a=plus, b=plus))
    with pytest.raises(MetricCalculatorError, match=r"form a cycle: [ab] -> [ab] -> [ab]"):
        make(composite([Dependency("a", "b"), Dependency("b", "a")], a=plus, b=plus))


def test_destinations_may_be_a_pattern():
    plus = Plus.default_config()
    cfg = composite([Dependency("a", "b.*")], a=plus, b1=plus.clone(source="a"), b2=plus)
    assert evaluate(make(cfg))[0] == {"a/sum": 3, "b1/sum": 6, "b2/sum": 3}


def test_outputs_do_not_replace_fields_of_the_batch():
    plus = Plus.default_config()
    cfg = composite([Dependency("a", "b", dst_key="target")], a=plus, b=plus)
    with pytest.raises(MetricCalculatorError, match=r"would replace \['target'\].*dst_key"):
        evaluate(make(cfg))


def test_key_determines_results_and_differs_per_batch():
    calculator = make(ModelSummaryAccumulator.default_config())
    noise = [float(evaluate(calculator, seed)[0]["noise"]) for seed in (0, 0, 1)]
    assert noise[0] == noise[1] != noise[2]
    one, _ = evaluate(calculator, 0, BATCHES[:1])
    assert float(one["noise"]) != noise[0]
