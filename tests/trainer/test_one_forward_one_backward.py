"""1F1B: gradients are those of GPipe, and memory does not grow with the microbatches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.config import config_class, config_for_function
from weft.errors import GradientAccumulationError, LayerConfigError
from weft.hierarchy.base_layer import BaseLayer, ParameterSpec
from weft.hierarchy.metrics import WeightedScalar
from weft.hierarchy.module import functional as F
from weft.hierarchy.pipeline import InterleavedSchedule, Pipeline
from weft.hierarchy.repeat import drop_by_regex
from weft.trainer.one_forward_one_backward import with_one_forward_one_backward
from weft.trainer.update_transformation import ForwardOutputs

STAGES, DIM = 4, 8


class Block(BaseLayer):
    @config_class
    class Config(BaseLayer.Config):
        noise: float = 0.0
        has_outputs: bool = False

    def _create_layer_parameter_specs(self):
        return {
            "weight": ParameterSpec((DIM, DIM)),
            "mean": ParameterSpec((), is_state=True),
        }

    def forward(self, x, bias):
        y = jnp.tanh(x @ self.parameters["weight"] + bias[None])
        if self.config.noise:
            y += self.config.noise * jax.random.normal(self.prng_key, y.shape)
        if self.config.has_outputs:
            mean = y.mean()
            self.add_module_output("aux_loss", jnp.square(mean))
            self.add_summary("mean", mean)
            self.add_summary("weighted", WeightedScalar(mean, jnp.float32(len(y))))
            self.add_state_update("mean", 0.9 * self.parameters["mean"] + 0.1 * mean)
            self.add_module_output("num_large", jnp.sum(y > 0.5))
        return y


class Piped(Pipeline):
    def forward(self, x, ids, bias):
        def stage(carry, _):
            x, ids = carry
            return (self.layer(x, bias) + ids[:, None], ids), None

        return self._run(stage, (x, ids)).carry[0]


class PipedWithResults(Pipeline):
    def forward(self, x, ids, bias):
        return self._run(lambda x, _: (self.layer(x, bias), x), x).carry


class Model(BaseLayer):
    """Has parameters before, in and after the stages; one is used by all of these."""

    @config_class
    class Config(BaseLayer.Config):
        stack: Pipeline.Config = Piped.default_config()

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("stack", cfg.stack)

    def _create_layer_parameter_specs(self):
        return {"embedding": ParameterSpec((5, DIM)), "bias": ParameterSpec((DIM,))}

    def forward(self, input_batch):
        embedding, ids = self.parameters["embedding"], input_batch["ids"]
        x = self.stack(embedding[ids], ids, self.parameters["bias"])
        losses = -jax.nn.log_softmax(x @ embedding.T)[jnp.arange(len(ids)), input_batch["labels"]]
        live = input_batch["live"]
        loss = jnp.sum(losses * live) / jnp.maximum(live.sum(), 1)
        for losses_of_layers in jax.tree.leaves(self.get_module_outputs()):
            loss += jnp.mean(losses_of_layers)
        return loss, live.sum()


def model(num_microbatches=4, schedule=None, stack=Piped, **layer):
    cfg = Model.default_config().set(name="model", stack=stack.default_config())
    cfg.stack.set(
        layer=Block.default_config().set(**layer),
        num_layers=STAGES,
        num_microbatches=num_microbatches,
        drop_output=config_for_function(drop_by_regex).set(rules=[]),
    )
    if schedule is not None:
        cfg.stack.schedule = schedule
    return cfg.instantiate(parent=None)


def forward_fn(module):
    def forward(*, model_params, inputs):
        (loss, weight), outputs = F(
            module,
            inputs["forward_key"],
            model_params,
            {"input_batch": inputs["input_batch"]},
            is_training=True,
        )
        outputs.summaries["loss"] = WeightedScalar(loss, weight)
        return ForwardOutputs(loss=loss, aux={}, output_collection=outputs)

    return forward


def inputs_of(rows):
    rng = np.random.default_rng(0)
    batch = {"ids": rng.integers(5, size=rows), "labels": rng.integers(5, size=rows)}
    live = (np.arange(rows) % 4 != 1) | (np.arange(rows) < rows // 2)
    batch["live"] = live.astype(np.float32)  # microbatches have different numbers of them
    return {"input_batch": jax.tree.map(jnp.asarray, batch), "forward_key": jax.random.key(1)}


def params_of(module):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda spec: jnp.asarray(rng.normal(size=spec.shape), jnp.float32),
        module.create_parameter_specs_recursively(),
    )


def loss_and_gradients(fn, params, inputs):
    def loss(params):
        outputs = fn(model_params=params, inputs=inputs)
        return outputs.loss, outputs

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


def one_forward_one_backward(module, num_microbatches=4):
    transform = with_one_forward_one_backward(num_microbatches=num_microbatches)
    return transform(forward_fn(module))


@pytest.mark.parametrize("num_microbatches", [1, 2, 8])
def test_equals_gpipe(num_microbatches):
    module, inputs = model(num_microbatches), inputs_of(16)
    params = params_of(module)
    (expected, _), expected_grads = loss_and_gradients(forward_fn(module), params, inputs)
    fn = one_forward_one_backward(module, num_microbatches)
    (loss, outputs), grads = loss_and_gradients(fn, params, inputs)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert outputs.output_collection.summaries["loss"].weight == inputs["input_batch"]["live"].sum()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grads, expected_grads
    )


def test_outputs_of_layers_equal_gpipe():
    module, inputs = model(has_outputs=True), inputs_of(16)
    # Without weights of the targets: GPipe's mean of the losses of layers has none.
    inputs["input_batch"]["live"] = jnp.ones(16)
    params = params_of(module)
    (expected_loss, expected), expected_grads = loss_and_gradients(
        forward_fn(module), params, inputs
    )
    (loss, outputs), grads = loss_and_gradients(one_forward_one_backward(module), params, inputs)
    (without_layers, _), _ = loss_and_gradients(one_forward_one_backward(model()), params, inputs)
    assert loss > without_layers + 0.01
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    collection, expected_collection = outputs.output_collection, expected.output_collection
    assert set(collection.summaries["stack"]) == {f"layer{i}" for i in range(STAGES)}
    assert set(collection.state_updates["stack"]["layer"]) == {"mean"}
    for got, want in (
        (grads, expected_grads),
        (collection.summaries, expected_collection.summaries),
        (collection.state_updates, expected_collection.state_updates),
    ):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, want)


def test_backward_pass_draws_the_same_noise():
    module, inputs = model(noise=0.1), inputs_of(16)
    params = params_of(module)
    fn = one_forward_one_backward(module)
    (loss, _), grads = loss_and_gradients(fn, params, inputs)
    direction = jax.tree.map(lambda g: g / np.linalg.norm(g.ravel() + 1e-20), grads)
    slope = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, grads, direction)))
    step = 1e-2
    (ahead, _), _ = loss_and_gradients(
        fn, jax.tree.map(lambda x, d: x + step * d, params, direction), inputs
    )
    (behind, _), _ = loss_and_gradients(
        fn, jax.tree.map(lambda x, d: x - step * d, params, direction), inputs
    )
    assert behind < loss < ahead
    np.testing.assert_allclose((ahead - behind) / (2 * step), slope, rtol=2e-2)


def test_memory_does_not_grow_with_the_microbatches():
    def temporaries(make, num_microbatches):
        module, inputs = model(num_microbatches), inputs_of(256 * num_microbatches)
        fn = make(module, num_microbatches)
        gradients = jax.jit(lambda params: loss_and_gradients(fn, params, inputs)[1])
        compiled = gradients.lower(params_of(module)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    few, many = (temporaries(one_forward_one_backward, m) for m in (4, 32))
    assert many < 1.1 * few
    few_of_gpipe, many_of_gpipe = (temporaries(lambda m, _: forward_fn(m), m) for m in (4, 32))
    assert many_of_gpipe > 3 * few_of_gpipe
    assert many < many_of_gpipe / 3


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (lambda: model(stack=PipedWithResults), "take or return values for each layer"),
        (lambda: model(schedule=InterleavedSchedule.default_config()), "which is not interleaved"),
    ],
    ids=["results", "interleaved"],
)
def test_unsupported_stages(module, said):
    module = module()
    with pytest.raises(LayerConfigError, match=f"model.stack: .*{said}"):
        loss_and_gradients(one_forward_one_backward(module), params_of(module), inputs_of(16))


def test_indivisible_rows():
    fn = one_forward_one_backward(module := model())
    with pytest.raises(
        GradientAccumulationError, match=r"ids has 6 rows, .* or num_microbatches of"
    ):
        loss_and_gradients(fn, params_of(module), inputs_of(6))


def test_model_without_a_pipeline():
    def forward(*, model_params, inputs):
        del inputs
        return ForwardOutputs(jnp.sum(model_params["w"]), {}, None)

    fn = with_one_forward_one_backward(num_microbatches=2)(forward)
    with pytest.raises(LayerConfigError, match="needs a model with a pipeline"):
        loss_and_gradients(fn, {"w": jnp.ones(3)}, inputs_of(4))
