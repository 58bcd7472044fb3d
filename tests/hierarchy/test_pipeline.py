"""A pipeline computes what its stages do one after the other, on one device and on several."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from weft.config import config_class, config_for_function
from weft.core.axis_rules import logical_axis_rules
from weft.errors import ArgumentShapeError, ConfigTypeError, LayerConfigError, MeshError
from weft.hierarchy.base_layer import BaseLayer, ParameterSpec
from weft.hierarchy.metrics import WeightedScalar
from weft.hierarchy.module import functional as F
from weft.hierarchy.pipeline import (
    GPipeSchedule,
    InterleavedSchedule,
    Pipeline,
    StreamSchedule,
    shard_stages,
)
from weft.hierarchy.repeat import Repeat, drop_by_regex

DIM, STAGES, BATCH = 4, 4, 8
INTERLEAVED = InterleavedSchedule.default_config()
GPIPE, STREAM = GPipeSchedule.default_config(), StreamSchedule.default_config()


class Block(BaseLayer):
    """Has a parameter, randomness and all sorts of outputs."""

    @config_class
    class Config(BaseLayer.Config):
        noise: float = 0.0

    def _create_layer_parameter_specs(self):
        return {
            "weight": ParameterSpec((DIM, DIM), mesh_axes=(None, "model")),
            "average": ParameterSpec(()),
            "count": ParameterSpec((), dtype=jnp.int32),
        }

    def forward(self, x, shift):
        y = jnp.tanh(x @ self.parameters["weight"]) + shift
        if self.config.noise:
            y = y + self.config.noise * jax.random.normal(self.prng_key, y.shape)
        self.add_summary("mean", y.mean())
        self.add_summary("rows", WeightedScalar(y.mean(), jnp.float32(len(y))))
        self.add_state_update("average", 0.9 * self.parameters["average"] + 0.1 * y.mean())
        self.add_state_update("count", self.parameters["count"] + 1)
        self.add_module_output("aux_loss", jnp.square(y).mean())
        self.add_module_output("losses", {"each_loss": jnp.square(y).mean(axis=0)})
        self.add_module_output("y", y)
        return y


class Piped(Pipeline):
    def forward(self, x, shifts):
        return self._run(lambda x, s: (y := self.layer(x, s), y), x, xs=shifts)


class Looped(Repeat):
    def forward(self, x, shifts):
        return self._run(lambda x, s: (y := self.layer(x, s), y), x, xs=shifts)


KEEP_ALL = config_for_function(drop_by_regex).set(rules=[])


def make(cls, **fields):
    layer = Block.default_config().set(**fields.pop("layer", {}))
    cfg = cls.default_config().set(name="stages", num_layers=STAGES, layer=layer)
    return cfg.set(drop_output=KEEP_ALL, **fields).instantiate(parent=None)


def piped(m=4, schedule=GPIPE, **fields):
    return make(Piped, num_microbatches=m, schedule=schedule, **fields)


RNG = np.random.default_rng(0)
X = RNG.normal(size=(BATCH, DIM)).astype("f")
SHIFTS = RNG.normal(size=(STAGES,)).astype("f")
STATE = {
    "layer": {
        "weight": RNG.normal(size=(STAGES, DIM, DIM)).astype("f"),
        "average": RNG.normal(size=(STAGES,)).astype("f"),
        "count": np.arange(STAGES, dtype="i"),
    }
}


def in_layout_of(module, values):
    """Returns values per layer in the layout of the parameters, with axes of repeats and stages."""
    sizes = (module.schedule.num_repeats, -1) if isinstance(module, Pipeline) else (-1,)
    sizes = sizes[1:] if sizes[0] == 1 else sizes
    return jax.tree.map(lambda x: x.reshape(*sizes, *x.shape[1:]), values)


def run(module, state=None, x=X, key=None):
    state = in_layout_of(module, STATE) if state is None else state
    inputs = {"x": x, "shifts": SHIFTS}
    return F(module, key, state, inputs, is_training=True, drop_output_collections=())


def values_and_gradients(module):
    """Returns the result, the outputs, and the gradients by parameters and inputs."""

    def loss(weight, x):
        state = {"layer": {**in_layout_of(module, STATE["layer"]), "weight": weight}}
        result, outputs = run(module, state, x)
        return jnp.sum(jnp.square(result.carry - 1)), (result, outputs)

    both = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    return jax.jit(lambda w, x: both(w, x))


@pytest.fixture(scope="module")
def looped():
    return values_and_gradients(make(Looped))(STATE["layer"]["weight"], X)


CASES = [(1, GPIPE), (8, GPIPE), (8, STREAM), (2, INTERLEAVED), (8, INTERLEAVED)]


@pytest.mark.parametrize(
    "m, schedule", CASES, ids=lambda x: x if isinstance(x, int) else x.klass.__name__
)
def test_equals_sequential_stages(m, schedule, looped):
    module = piped(m, schedule)
    weight = in_layout_of(module, STATE["layer"]["weight"])
    (loss, (result, outputs)), grads = values_and_gradients(module)(weight, X)
    (expected_loss, (expected, expected_outputs)), expected_grads = looped
    # No row meets another one, so that values are the same to the last bit.
    np.testing.assert_allclose(result.carry, expected.carry, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(result.ys, expected.ys, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for a, b in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(a.reshape(b.shape), b, rtol=1e-4, atol=1e-5)
    for i in range(STAGES):
        got, want = outputs.summaries[f"layer{i}"], expected_outputs.summaries[f"layer{i}"]
        np.testing.assert_allclose(got["mean"], want["mean"], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(got["rows"].mean, want["rows"].mean, rtol=1e-4, atol=1e-6)
        assert got["rows"].weight == BATCH
    for name in ("average", "count"):
        got, want = (o.state_updates["layer"][name] for o in (outputs, expected_outputs))
        want = in_layout_of(module, want)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        assert got.dtype == want.dtype
    got, want = (o.module_outputs["layer"] for o in (outputs, expected_outputs))
    np.testing.assert_allclose(got["aux_loss"], want["aux_loss"], rtol=1e-4)
    each, expected_each = (x["losses"]["each_loss"] for x in (got, want))
    np.testing.assert_allclose(each, expected_each, rtol=1e-4)
    assert got["y"].shape == (STAGES, m, BATCH // m, DIM)
    np.testing.assert_allclose(got["y"][:, 0], want["y"][:, ::m], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("schedule", [GPIPE, INTERLEAVED], ids=["gpipe", "interleaved"])
def test_each_stage_and_microbatch_has_its_own_key(schedule):
    module = piped(4, schedule, layer={"noise": 1.0})
    state = jax.tree.map(np.zeros_like, in_layout_of(module, STATE))
    compiled = jax.jit(lambda key: run(module, state, np.zeros_like(X), key)[0].ys)
    ys = np.asarray(compiled(jax.random.PRNGKey(0)))
    noise = ys - SHIFTS[:, None, None]
    assert len(np.unique(noise.round(5))) == noise.size
    np.testing.assert_array_equal(ys, compiled(jax.random.PRNGKey(0)))
    assert not np.array_equal(ys, compiled(jax.random.PRNGKey(1)))


def test_outputs_are_dropped_by_path():
    cfg = piped(2).config.clone(drop_output=Pipeline.default_config().drop_output)
    _, outputs = jax.jit(lambda: run(cfg.instantiate(parent=None)))()
    assert not jax.tree.leaves(outputs.module_outputs)


def test_stages_are_sharded_over_the_pipeline_axis():
    specs = piped().create_parameter_specs_recursively()
    assert specs["layer"]["weight"].mesh_axes == PartitionSpec("pipeline", None, "model")
    assert specs["layer"]["weight"].shape == (STAGES, DIM, DIM)
    state = piped().initialize_parameters_recursively(
        jax.random.PRNGKey(0), prebuilt={"layer": STATE["layer"]}
    )
    np.testing.assert_array_equal(state["layer"]["weight"], STATE["layer"]["weight"])


def test_rules_map_the_stage_axis():
    def layout(*rules):
        with logical_axis_rules(rules):
            return piped().create_parameter_specs_recursively()["layer"]["weight"].partition_spec

    assert layout(("pipeline", "stage")) == PartitionSpec("stage", None, "model")
    assert layout(("pipeline", ("host", "stage"))) == PartitionSpec(
        ("host", "stage"), None, "model"
    )
    assert layout(("pipeline", None)) == PartitionSpec(None, None, "model")
    # One array uses a mesh axis once, and the first rule is the one that counts.
    assert layout(("pipeline", "data"), ("model", "data")) == PartitionSpec("data", None, None)
    assert layout(("model", "data"), ("pipeline", "data")) == PartitionSpec(None, None, "data")


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
@pytest.mark.parametrize(
    ("size", "name", "schedule"),
    [(2, "stage", GPIPE), (4, "pipeline", STREAM), (2, "pipeline", INTERLEAVED)],
)
def test_stages_exchange_rows_but_not_parameters(size, name, schedule, looped):
    module = piped(4, schedule)
    auto = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.make_mesh((size, 4 // size, 2), (name, "data", "model"), axis_types=auto)
    rules = [] if name == "pipeline" else [("pipeline", name)]
    with logical_axis_rules(rules):
        specs = module.create_parameter_specs_recursively()["layer"]
    weight = in_layout_of(module, STATE["layer"]["weight"])
    weight = jax.device_put(weight, specs["weight"].sharding(mesh))
    assert weight.addressable_shards[0].data.size == STAGES // size * DIM * DIM // 2
    x = jax.device_put(X, jax.NamedSharding(mesh, PartitionSpec("data")))
    with jax.set_mesh(mesh), logical_axis_rules(rules):
        compiled = values_and_gradients(module).lower(weight, x).compile()
        (_, (result, _)), grads = compiled(weight, x)
    (_, (expected, _)), expected_grads = looped
    np.testing.assert_allclose(result.carry, expected.carry, rtol=1e-5, atol=1e-5)
    for a, b in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(a.reshape(b.shape), b, rtol=1e-4, atol=1e-4)
    text = compiled.as_text()
    assert "collective-permute" in text
    # No device ever holds the weights of all stages.
    stages = ",".join(map(str, weight.shape[:-2]))
    assert f"f32[{stages},{DIM},{DIM}]" not in text
    assert f"f32[{stages},{DIM},{DIM // 2}]" not in text


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"m": 0}, "stages: num_microbatches=0; expected at least 1"),
        (
            {"m": 2, "schedule": STREAM},
            "stages: num_microbatches=2 is not a multiple of num_stages=4, which a StreamSchedule",
        ),
        (
            {"m": 3, "schedule": INTERLEAVED},
            "stages: num_microbatches=3 is not a multiple of num_stages=2, which an Interleaved",
        ),
        (
            {"schedule": InterleavedSchedule.default_config().set(num_repeats=3)},
            "stages: num_layers=4 is not a multiple of num_repeats=3 of the schedule; set a divi",
        ),
        ({"schedule": KEEP_ALL}, "is not the config of a schedule; expected GPipeSchedule"),
    ],
    ids=["none", "stream", "interleaved", "repeats", "function"],
)
def test_invalid_pipelines_raise(fields, said):
    with pytest.raises(LayerConfigError, match=re.escape(said)):
        piped(**fields)


def test_schedule_name_fails():
    with pytest.raises(ConfigTypeError, match=r"schedule: .* declares BaseSchedule.Config there"):
        piped(schedule="1F1B")


def test_indivisible_rows():
    with pytest.raises(
        ArgumentShapeError,
        match=r"stages: a batch of shape \(8, 4\) does not divide into num_microbatches=3",
    ):
        run(piped(3))


def made(cls):
    return cls.default_config().set(num_stages=4, num_microbatches=8).instantiate()


def test_bubble_shrinks_with_repeats():
    for cls, num_steps in ((GPipeSchedule, 11), (StreamSchedule, 11), (InterleavedSchedule, 19)):
        schedule = made(cls)
        assert schedule.num_iterations == num_steps
        assert schedule.bubble_share == 3 / num_steps


def test_weights_are_not_kept_for_each_step():
    module = piped(8, INTERLEAVED)
    weight = in_layout_of(module, STATE["layer"]["weight"])

    def loss(weight):
        state = {"layer": {**in_layout_of(module, STATE["layer"]), "weight": weight}}
        return jnp.sum(run(module, state)[0].carry)

    text = str(jax.make_jaxpr(jax.grad(loss))(weight))
    assert f"f32[2,{DIM},{DIM}]" in text  # those of one step
    assert f"f32[{module.schedule.num_iterations},2,{DIM},{DIM}]" not in text


def test_rule_for_a_missing_mesh_axis_raises():
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(shard_stages(np.ones((3, 2))), np.ones((3, 2)))
        with (
            logical_axis_rules([("pipeline", "stage")]),
            pytest.raises(MeshError, match="is to be split over 'stage', and the mesh has the axe"),
        ):
            shard_stages(np.ones((3, 2)))
