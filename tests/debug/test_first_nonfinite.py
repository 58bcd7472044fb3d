import signal

import jax
import jax.numpy as jnp
import pytest

from weft.config import config_class
from weft.debug.first_nonfinite import UNKNOWN, NonfiniteSearch
from weft.distributed.preemption import GracefulStop
from weft.errors import ProcessLostError
from weft.hierarchy.base_layer import BaseLayer, BaseModel, ParameterSpec
from weft.hierarchy.module import functional
from weft.hierarchy.repeat import Repeat
from weft.trainer.optimizers.base import OptParam
from weft.trainer.update_transformation import ForwardOutputs


class Scaled(BaseLayer):
    def _create_layer_parameter_specs(self):
        return {"scale": ParameterSpec(shape=(4,), mesh_axes=(None,))}

    def forward(self, x):
        return x * self.state["scale"][None]


class Block(BaseLayer):
    """Its root has an infinite gradient at 0."""

    @config_class
    class Config(BaseLayer.Config):
        pass

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("before", Scaled.default_config())
        self._add_child("rooted", Rooted.default_config())
        self._add_child("after", Scaled.default_config())

    def forward(self, x):
        return self.after(self.rooted(self.before(x)))


class Rooted(BaseLayer):
    def forward(self, x):
        return jnp.sqrt(x)


class Blocks(Repeat):
    def forward(self, x):
        return self._run(lambda x, _: (self.layer(x), None), x).carry


class Stacked(BaseModel):
    @config_class
    class Config(BaseModel.Config):
        pass

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        layers = Blocks.default_config().set(layer=Block.default_config(), num_layers=3)
        self._add_child("first", Scaled.default_config())
        self._add_child("repeat", layers)

    def forward(self, input_batch):
        x = self.repeat(self.first(input_batch["x"]))
        # Behind all modules: an infinite gradient where x is 0.
        return jnp.mean(x) + jnp.sum(jnp.log1p(-input_batch["edge"] * x)), {}


def step_of(model):
    """Returns a training step, but for the update."""

    def forward(*, model_params, inputs):
        (loss, aux), collection = functional(
            model,
            prng_key=jax.random.key(0),
            state=model_params,
            inputs={"input_batch": inputs},
            is_training=True,
        )
        return ForwardOutputs(loss=loss, aux=aux, output_collection=collection)

    def step(state, batch, *, learner):
        opt_params = jax.tree.map(OptParam, state)
        given = {"fn": forward, "inputs": batch, "opt_params": opt_params}
        results, _ = functional(
            learner,
            prng_key=None,
            state={},
            inputs=given,
            method="forward_and_backward",
            is_training=True,
        )
        return results.backward_outputs.updated_params, {"loss": results.forward_outputs.loss}

    return step


@pytest.fixture(scope="module")
def stacked():
    model = Stacked.default_config().set(name="model", dtype=jnp.float32).instantiate(parent=None)
    ones = jax.tree.map(
        lambda spec: jnp.ones(spec.shape),
        model.create_parameter_specs_recursively(),
        is_leaf=lambda x: isinstance(x, ParameterSpec),
    )
    return NonfiniteSearch(step_of(model)), ones


NAMES = [
    "first/scale",
    "repeat/layer/after/scale",
    "repeat/layer/before/scale",
]
BATCH = {"x": jnp.ones((2, 4)), "edge": jnp.zeros(())}


def test_module_is_found_in_a_loop_over_layers(stacked):
    diagnosis, ones = stacked
    assert diagnosis.first_module(ones, BATCH) is None
    spoiled = jax.tree_util.tree_map_with_path(
        lambda path, x: x.at[1].set(jnp.nan) if "after" in jax.tree_util.keystr(path) else x, ones
    )
    found = diagnosis.first_module(spoiled, BATCH)
    assert found == "model.repeat.layer.after, a Scaled (forward)"
    # Of the forward pass, so a loss that is undefined after all modules is reported as such.
    found = diagnosis.first_module(ones, {**BATCH, "edge": jnp.ones(()) * 2})
    assert found == "the model itself, in its loss"


def test_gradient_is_traced_through_modules(stacked):
    diagnosis, ones = stacked
    batch = {**BATCH, "x": jnp.zeros((2, 4))}
    assert diagnosis.first_module(ones, batch) is None
    module, names = diagnosis.first_gradient(ones, batch, NAMES, NAMES)
    assert module == "model.repeat.layer.rooted, a Rooted (forward)"
    # In the order in which the backward pass comes to them.
    assert names == [NAMES[1], NAMES[2], NAMES[0]]
    all_finite = diagnosis.first_gradient(ones, BATCH, [], NAMES)
    assert all_finite == (None, [])


def test_gradient_undefined_between_modules_names_their_parent():
    class Between(BaseModel):
        def __init__(self, cfg, *, parent):
            super().__init__(cfg, parent=parent)
            self._add_child("scaled", Scaled.default_config())

        def forward(self, input_batch):
            return jnp.sum(jnp.sqrt(self.scaled(input_batch["x"]))), {}

    model = Between.default_config().set(name="model", dtype=jnp.float32).instantiate(parent=None)
    diagnosis, params = NonfiniteSearch(step_of(model)), {"scaled": {"scale": jnp.ones(4)}}
    names = ["scaled/scale"]
    found = diagnosis.first_gradient(params, {"x": jnp.zeros((2, 4))}, names, names)
    assert found == ("the model itself, after model.scaled", names)


def test_stop_request_abandons_the_search(stacked, caplog):
    known, ones = stacked
    diagnosis = NonfiniteSearch(known._step)
    with GracefulStop():
        signal.raise_signal(signal.SIGTERM)
        assert diagnosis.first_module(ones, BATCH) == UNKNOWN
        # In the order of its modules nevertheless.
        assert diagnosis.first_gradient(ones, BATCH, NAMES, NAMES)[1][0] == NAMES[1]
    assert caplog.text.count("is skipped: the run is stopping") == 2


def test_lost_process_ends_the_search(stacked, monkeypatch):
    def lost(lowered, name):
        raise ProcessLostError("process 1 of 2 has ended")

    monkeypatch.setattr("weft.debug.first_nonfinite.compile_unless_stopped", lost)
    known, ones = stacked
    with pytest.raises(ProcessLostError, match="process 1"):
        NonfiniteSearch(known._step).first_module(ones, BATCH)


def test_failed_search_logs_the_reason(caplog):
    def step(state, batch, learner):
        raise NotImplementedError("checkify of pallas_call")

    diagnosis = NonfiniteSearch(step)
    assert diagnosis.first_module(jnp.ones(()), jnp.ones(())) == UNKNOWN
    assert "undefined module failed: checkify of pallas_call" in caplog.text
    found = diagnosis.first_gradient(jnp.ones(()), jnp.ones(()), ["a", "b"], ["a", "b"])
    assert found == (UNKNOWN, ["a", "b"])
