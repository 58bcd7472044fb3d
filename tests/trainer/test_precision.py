"""Policies of dtypes: in the trainer for every way of writing, and in a learner by itself."""

import flax.nnx
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.keys import quick_key
from tests.trainer.language_models import NNXLM, RULES, VOCAB, HierarchyLM, LinenLM
from weft.cli.configs import load_config
from weft.config import config_for_class, config_for_function
from weft.errors import (
    CheckpointStructureError,
    InvalidConfigValueError,
    MissingPrngKeyError,
    RunDirError,
)
from weft.functional import default_dot_general, fp8_dot_general, int8_dot_general
from weft.hierarchy import BaseModel, Linear, WeightedScalar, functional
from weft.hierarchy.context import new_output_collection
from weft.hierarchy.parameter_spec import ParameterSpec
from weft.input.fake import FakeLmInput
from weft.recipes.lm import lm_tiny
from weft.trainer.checkpointer import every_n_steps_policy
from weft.trainer.checkpointer.index import CheckpointValidationType
from weft.trainer.learner import BaseLearner, Learner
from weft.trainer.model import build_model
from weft.trainer.optimizers import OptParam, adamw_optimizer, sgd_optimizer
from weft.trainer.precision import Precision, as_precision
from weft.trainer.supervised import Supervised
from weft.trainer.trainer import SpmdTrainer
from weft.trainer.update_transformation import ForwardOutputs

LENGTH = 4
BATCH = {
    name: jax.ShapeDtypeStruct((2, LENGTH), np.int32) for name in ("input_ids", "target_labels")
}


def config(directory, model, **kwargs):
    optimizer = config_for_function(adamw_optimizer).set(
        learning_rate=1e-2, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.1
    )
    source = FakeLmInput.default_config().set(
        is_training=True, global_batch_size=2, source_length=LENGTH, max_token_id=VOCAB
    )
    cfg = SpmdTrainer.default_config().set(
        name="trainer",
        dir=str(directory),
        model=model,
        learner=Learner.default_config().set(optimizer=optimizer),
        input=source,
        max_step=4,
        mesh_shape=(1, 1),
        mesh_axis_names=("data", "model"),
        logical_axis_rules=RULES,
    )
    cfg.checkpointer.save_policy = config_for_function(every_n_steps_policy).set(n=10**6)
    return cfg.set(**kwargs)


def trainer_of(cfg):
    return cfg.instantiate(parent=None, devices=jax.devices()[:1])


def floats(tree):
    leaves = jax.tree.leaves(tree)
    return {jnp.dtype(x.dtype).name for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)}


def operands_of_products(jaxpr):
    found = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            found |= {v.aval.dtype.name for v in eqn.invars}
        for sub in jax.extend.core.jaxprs_in_params(eqn.params):
            found |= operands_of_products(sub)
    return found


def dtypes_of_model(cfg):
    """Returns the dtypes of parameters, and of the operands of products in a forward pass."""
    model = build_model(cfg)
    shapes = jax.eval_shape(model.initialize_parameters_recursively, jax.random.key(0))

    def loss(params, batch):
        return functional(model, jax.random.key(0), params, (batch,), is_training=False)[0][0]

    return floats(shapes), operands_of_products(jax.make_jaxpr(loss)(shapes, BATCH).jaxpr)


MODELS = {
    "hierarchy": HierarchyLM.default_config(),
    "linen": config_for_class(LinenLM),
    "nnx": config_for_class(NNXLM),
}
PRODUCTS = {"int8": int8_dot_general, "fp8": fp8_dot_general}
POLICIES = {
    "float32": ("float32", "float32"),
    "mixed_bfloat16": ("float32", "bfloat16"),
    "bfloat16": ("bfloat16", "bfloat16"),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", MODELS)
def test_policies_hold_for_every_way_of_writing(kind, policy, tmp_path):
    stored, computed = POLICIES[policy]
    trainer = trainer_of(config(tmp_path, MODELS[kind], precision=policy))
    with trainer.mesh():
        state = jax.eval_shape(trainer._new_state, jax.random.key(0))
        new_state, outputs = jax.eval_shape(trainer._train_step, state, BATCH)
    for before_or_after in (state, new_state, trainer.trainer_state_specs):
        assert floats(before_or_after.model) == {stored}
        assert floats(before_or_after.learner) == {stored}
    assert outputs["loss"].dtype == jnp.float32
    # The model that is evaluated, sampled from and exported is the same.
    params, operands = dtypes_of_model(config(tmp_path, MODELS[kind], precision=policy))
    assert (params, operands) == ({stored}, {computed})


@pytest.mark.parametrize("kind", MODELS)
def test_products_in_8_bits_and_the_rest_in_bfloat16(kind, tmp_path):
    policy = Precision.default_config().set(compute_dtype="bfloat16", quantization="int8")
    params, operands = dtypes_of_model(config(tmp_path, MODELS[kind], precision=policy))
    assert (params, operands) == ({"float32"}, {"int8", "bfloat16"})


@pytest.mark.parametrize(
    ("kind", "policy"),
    [("hierarchy", "fp8"), ("linen", "int8")],
)
def test_policies_of_8_bits_quantize_products_with_weights(kind, policy, tmp_path):
    trainer = trainer_of(config(tmp_path, MODELS[kind], precision=policy))
    batch = {name: np.arange(2 * LENGTH).reshape(2, LENGTH) for name in BATCH}
    with trainer.mesh():
        state = jax.jit(trainer._new_state)(quick_key(0))
        assert floats((state.model, state.learner)) == {"float32"}
        losses = []
        for _ in range(20):
            state, outputs = trainer._train_step(state, batch)
            losses.append(float(outputs["loss"]))
    assert losses[-1] < 0.8 * losses[0]

    def logits(trainer, **kwargs):
        @jax.jit
        def forward(params):
            return functional(trainer.model, None, params, (batch,), **kwargs)[0][1]["logits"]

        return np.asarray(forward(state.model))

    # Of the same state, in float32 and in 8 bits.
    plain = trainer_of(config(tmp_path / "plain", MODELS[kind]))
    in_8_bits = logits(trainer, is_training=False)
    np.testing.assert_array_equal(in_8_bits, logits(trainer, is_training=True))
    assert (in_8_bits != logits(plain, is_training=False)).any()
    with default_dot_general(PRODUCTS[policy]):
        np.testing.assert_array_equal(in_8_bits, logits(plain, is_training=False))


@pytest.mark.parametrize(("policy", "dtype"), [("int8", "int8"), ("fp8", "float8_e4m3fn")])
def test_tables_of_embeddings_and_layers_that_are_off_are_not_quantized(policy, dtype, tmp_path):
    def operands(model):
        return dtypes_of_model(config(tmp_path, model, precision=policy))[1]

    # Logits are by the table of embeddings.
    lm = lm_tiny().model
    assert operands(lm) == {dtype, "float32"}
    lm.decoder.transformer.quantization = "off"
    assert operands(lm) == {"float32"}


def test_layers_with_a_dtype_of_their_own_keep_it_and_their_moments(tmp_path):
    model = lm_tiny().model
    model.dtype = jnp.float16  # of the whole model, which a policy replaces
    model.decoder.output_norm.dtype = jnp.float32
    trainer = trainer_of(config(tmp_path, model, precision="bfloat16"))
    state = jax.eval_shape(trainer._new_state, jax.random.key(0))
    adam = state.learner["optimizer"][0]
    for tree in (state.model, adam.mu, adam.nu):
        assert floats(tree["decoder"].pop("output_norm")) == {"float32"}
        assert floats(tree) == {"bfloat16"}


# A learner by itself.

N = 4096
HALF = Precision.default_config().set(moment_dtype="bfloat16")
NEAREST = HALF.clone(stochastic_rounding=False)


def slope(*, model_params, inputs):
    """Forward pass whose gradient is 1 for each weight."""
    del inputs
    loss = jnp.sum(model_params["w"].astype(jnp.float32))
    return ForwardOutputs(loss, {}, new_output_collection())


def sgd(**kwargs):
    optimizer = config_for_function(sgd_optimizer).set(
        learning_rate=2.0**-10, decouple_weight_decay=True
    )
    return Learner.default_config().set(name="learner", optimizer=optimizer, **kwargs)


def steps_of(cfg, n, *, seed: int | None = 0):
    """Returns weights, that begin at 1 in bfloat16, and the learner's state after some steps."""
    learner = cfg.instantiate(parent=None)
    params = {"w": OptParam(jnp.ones(N, jnp.bfloat16))}
    state = learner.init(params)
    specs = learner.create_state_partition_specs({"w": ParameterSpec((N,), jnp.bfloat16)})
    assert jax.tree.map(lambda x: x.dtype, state) == jax.tree.map(
        lambda x: jnp.dtype(x.dtype), specs
    )

    def step(i, w, state):
        outputs, collection = functional(
            learner,
            None if key is None else jax.random.fold_in(key, i),
            state,
            {"fn": slope, "inputs": {}, "opt_params": {"w": OptParam(w)}},
            method="forward_and_backward",
            is_training=True,
            copy_args_tree=False,
        )
        return outputs.backward_outputs.updated_params["w"], {**state, **collection.state_updates}

    key = None if seed is None else jax.random.key(seed)
    step, w = jax.jit(step), params["w"].value
    for i in range(n):
        w, state = step(i, w, state)
    assert w.dtype == jnp.bfloat16
    return np.asarray(w, np.float32), state


def test_updates_too_small_for_the_nearest_number_count_on_average():
    # A step of 2**-10 from 1, below which the numbers are 2**-8 apart.
    for cfg in (sgd(), sgd(precision=NEAREST)):
        assert set(steps_of(cfg, 4)[0]) == {1.0}
    w, _ = steps_of(sgd(precision=HALF), 4)
    assert len(set(w)) > 1
    np.testing.assert_allclose(w.mean(), 1 - 4 * 2**-10, atol=5 * 2**-8 / np.sqrt(N))


def test_rounding_follows_from_the_key():
    w, _ = steps_of(sgd(precision=HALF), 2)
    np.testing.assert_array_equal(w, steps_of(sgd(precision=HALF), 2)[0])
    other, _ = steps_of(sgd(precision=HALF), 2, seed=1)
    assert (w != other).any()
    with pytest.raises(MissingPrngKeyError, match=r"learner rounds stochastically.*prng_key="):
        steps_of(sgd(precision=HALF), 1, seed=None)
    steps_of(sgd(precision=NEAREST), 1, seed=None)


def adam(**kwargs):
    return sgd(**kwargs).set(optimizer=config_for_function(optax.adam).set(learning_rate=0.0))


def test_moments_in_fewer_bits_keep_their_averages():
    # From 1/4 on, where numbers are 2**-9 apart, increments of 0.001 * (1 - nu) are lost.
    exact = 1 - 0.999**400
    _, state = steps_of(adam(precision=HALF), 400)
    nu = np.asarray(state["optimizer"][0].nu["w"])
    assert nu.dtype == jnp.bfloat16
    np.testing.assert_allclose(nu.astype(np.float32).mean(), exact, rtol=5e-3)
    _, state = steps_of(adam(precision=NEAREST), 400)
    assert set(np.asarray(state["optimizer"][0].nu["w"], np.float32)) == {0.25}
    # Without a dtype of their own, moments are in float32.
    _, state = steps_of(adam(precision=Precision.default_config()), 1)
    assert floats(state) == {"float32"}


# Runs.


class Sum(BaseModel):
    """Small enough to compile quickly."""

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        linear = Linear.default_config().set(input_dim=LENGTH, output_dim=64)
        self._add_child("linear", linear)

    def forward(self, input_batch):
        y = self.linear(input_batch["input_ids"].astype(jnp.bfloat16) / VOCAB)
        loss = jnp.mean(jnp.square(y.astype(jnp.float32) - 1))
        self.add_summary("loss", WeightedScalar(loss, 1))
        return loss, {}


def run(cfg, **kwargs):
    trainer = trainer_of(cfg)
    trainer.run(progress=False, **kwargs)
    return jax.device_get((trainer.trainer_state.model, trainer.trainer_state.learner))


def test_resumed_run_ends_with_the_same_bits_and_checkpoints_keep_dtypes(tmp_path):
    def half(name, max_step):
        return config(tmp_path / name, Sum.default_config(), precision="bfloat16").set(
            max_step=max_step
        )

    straight = run(half("straight", 4))
    run(half("resumed", 2))
    resumed = run(half("resumed", 4))
    assert floats(resumed) == {"bfloat16"}
    jax.tree.map(np.testing.assert_array_equal, resumed, straight)
    # Other dtypes are another run; only a user who says so gets them converted.
    other = half("resumed", 4).set(precision="float32")
    with pytest.raises(RunDirError, match="precision: 'bfloat16' → 'float32'"):
        run(other)
    with pytest.raises(CheckpointStructureError, match=r"bfloat16.*float32(.|\n)*UP_TO_DTYPE"):
        trainer_of(other).restore_checkpoint()
    other.checkpointer.validation = CheckpointValidationType.EXACT_UP_TO_DTYPE
    trainer = trainer_of(other)
    assert trainer.restore_checkpoint() == 4
    assert floats((trainer.trainer_state.model, trainer.trainer_state.learner)) == {"float32"}
    jax.tree.map(np.testing.assert_array_equal, trainer.trainer_state.model, straight[0])


def test_targets_are_not_rounded():
    cfg = Supervised.default_config().set(
        name="model",
        layer=Linear.default_config().set(input_dim=2, output_dim=1),
        loss=lambda outputs, batch: outputs[:, 0].astype(jnp.float32) - batch["y"],
        target="y",
        batch_spec={
            "x": jax.ShapeDtypeStruct((2, 2), np.float32),
            "y": jax.ShapeDtypeStruct((2,), np.float32),
        },
    )
    model = as_precision("bfloat16").model_config(cfg).instantiate(parent=None)
    params = jax.tree.map(
        jnp.zeros_like, model.initialize_parameters_recursively(jax.random.key(0))
    )
    batch = {"x": jnp.ones((2, 2)), "y": jnp.full(2, 1.001)}
    (loss, _), _ = functional(model, jax.random.key(0), params, (batch,), is_training=True)
    assert loss == -np.float32(1.001)
    outputs, _ = functional(model, None, params, (batch,), method="predict", is_training=False)
    assert outputs.dtype == jnp.bfloat16


# Mistakes.


def test_mistakes_are_explained(tmp_path):
    with pytest.raises(InvalidConfigValueError, match=r"'bf16' is not a policy.*'bfloat16'"):
        as_precision("bf16")
    with pytest.raises(InvalidConfigValueError, match="moment_dtype='int8' is not a floating"):
        as_precision(Precision.default_config().set(moment_dtype="int8"))
    with pytest.raises(InvalidConfigValueError, match="param_dtype='bfloat17' is not a floating"):
        as_precision(Precision.default_config().set(param_dtype="bfloat17"))
    model = MODELS["hierarchy"]
    both = config(tmp_path, model, precision="bfloat16", train_dtype=jnp.bfloat16)
    with pytest.raises(InvalidConfigValueError, match="both precision='bfloat16' and train_dtype"):
        trainer_of(both)
    own = config(tmp_path, model, precision="bfloat16", learner=BaseLearner.default_config())
    with pytest.raises(InvalidConfigValueError, match="BaseLearner has no field 'precision'"):
        trainer_of(own)

    def layer(name, parent):
        return Sum.default_config().set(name=name).instantiate(parent=parent)

    of_flax = config_for_class(flax.nnx.Linear).set(in_features=2, out_features=2)
    with pytest.raises(InvalidConfigValueError, match=r"(?s)dot_general=weft.functional.int8"):
        trainer_of(config(tmp_path, of_flax, precision="int8"))
    unknown = config(tmp_path, model.clone(quantization="int4"))
    with pytest.raises(InvalidConfigValueError, match=r"quantization='int4'.*'int8', 'fp8', 'off'"):
        trainer_of(unknown)
    made = config(tmp_path, config_for_function(layer), precision="mixed_bfloat16")
    with pytest.raises(InvalidConfigValueError, match="set dtype='float32' of the model, but"):
        trainer_of(made)


def test_every_recipe_takes_a_policy():
    cfg = load_config("lm-nnx", ["precision=int8"])
    assert cfg.precision == "int8"
