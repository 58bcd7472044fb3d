"""Every optimizer against known numbers, and through one suite of laws."""

import inspect
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from weft.config import config_for_function
from weft.errors import OptimizerArgumentError
from weft.hierarchy.base_layer import ParameterSpec
from weft.hierarchy.parameter_spec import FactorizationSpec, TensorSpec
from weft.trainer import optimizers, schedule
from weft.trainer.optimizers import OptParam

# The golden values are of a version that counted steps from 0.
SCHEDULE = schedule.polynomial(begin_step=1, begin_value=0.1, end_step=3, end_value=0.3)
ADAM = {"b1": 0.9, "b2": 0.99, "eps": 1e-8}
ADAFACTOR = {
    "b1": None,
    "b2": 0.99,
    "multiply_by_parameter_scale": False,
    "clipping_threshold": None,
}
ADASTAR = {
    "gradient_ema_decay": 0.9,
    "gradient_ema_debias": True,
    "gradient_square_ema_decay": 0.99,
    "gradient_square_ema_debias": True,
    "eps": 1e-8,
    "eps_square": 0.0,
    "raw_update_clipping_threshold": None,
    "update_ema_decay": None,
    "update_ema_debias": True,
    "update_schedule": SCHEDULE,
    "weight_decay": 0.01,
}
BY_PATH = config_for_function(optimizers.per_param_scale_by_path).set(
    scale_by_path=[("b", 0.0), ("w", 0.5)], description="weight decay"
)
MOMENTUM = config_for_function(optimizers.sgd_optimizer).set(
    learning_rate=0.1, decouple_weight_decay=True, momentum=0.9
)


def of(fn, *args, **kwargs):
    """Returns a config of `fn`, with which nothing but values enters."""
    names = list(inspect.signature(fn).parameters)
    return config_for_function(fn).set(**dict(zip(names, args, strict=False)), **kwargs)


# Whole optimizers: names and configs.
OPTIMIZERS = {
    "sgd": of(optimizers.sgd_optimizer, SCHEDULE, decouple_weight_decay=True),
    "sgd_momentum_decoupled_decay": of(
        optimizers.sgd_optimizer,
        SCHEDULE,
        decouple_weight_decay=True,
        momentum=0.9,
        weight_decay=0.01,
    ),
    "sgd_momentum_coupled_decay": of(
        optimizers.sgd_optimizer,
        SCHEDULE,
        decouple_weight_decay=False,
        momentum=0.9,
        weight_decay=0.01,
    ),
    "adam_l2": of(optimizers.adam_optimizer, SCHEDULE, **ADAM, l2_regularizer_weight=0.01),
    "adamw": of(optimizers.adamw_optimizer, SCHEDULE, **ADAM, weight_decay=0.01),
    "adamw_decay_by_path": of(
        optimizers.adamw_optimizer,
        SCHEDULE,
        **ADAM,
        weight_decay=0.01,
        weight_decay_per_param_scale=BY_PATH,
    ),
    "adamw_decoupled": of(
        optimizers.adamw_decoupled_optimizer,
        0.1,
        **ADAM,
        weight_decay=0.01,
        update_schedule=SCHEDULE,
    ),
    "adamw_update_transformation": of(
        optimizers.adamw_optimizer,
        SCHEDULE,
        **ADAM,
        weight_decay=0.01,
        adam_update_transformation=of(optimizers.clip_by_block_rms, 0.5),
    ),
    "lion": of(optimizers.lion_optimizer, SCHEDULE, 0.9, 0.99, weight_decay=0.01),
    "lion_parameter_scale": of(
        optimizers.lion_optimizer,
        SCHEDULE,
        0.9,
        0.99,
        weight_decay=0.01,
        multiply_by_parameter_scale=True,
    ),
    "adafactor": of(
        optimizers.adafactor_optimizer,
        SCHEDULE,
        b1=0.9,
        b2=of(schedule.adafactor_decay_rate),
        multiply_by_parameter_scale=True,
        clipping_threshold=1.0,
    ),
    "adafactor_unfactored": of(
        optimizers.adafactor_optimizer, SCHEDULE, **ADAFACTOR, factored=False
    ),
    "adafactor_decay": of(
        optimizers.adafactor_optimizer,
        SCHEDULE,
        **ADAFACTOR,
        weight_decay=0.01,
        weight_decay_scale_by_learning_rate_exponent=2.0,
    ),
    "adafactor_trust_ratio": of(
        optimizers.adafactor_optimizer,
        SCHEDULE,
        **ADAFACTOR,
        apply_scale_by_trust_ratio=True,
        eps=0.1,
    ),
    "adastar": of(optimizers.adastar_optimizer, 0.1, **ADASTAR),
    "adastar_like_adafactor": of(
        optimizers.adastar_optimizer,
        0.1,
        **{
            **ADASTAR,
            "gradient_ema_decay": None,
            "eps": 0.0,
            "eps_square": 1e-3,
            "raw_update_clipping_threshold": 0.5,
            "update_ema_decay": 0.9,
            "update_ema_debias": False,
        },
    ),
    "adastar_biased": of(
        optimizers.adastar_optimizer,
        0.1,
        **{
            **ADASTAR,
            "gradient_ema_debias": False,
            "gradient_square_ema_debias": False,
            "update_ema_decay": 0.9,
        },
    ),
    "skip_and_clip": of(
        optimizers.skip_and_clip_by_global_norm, MOMENTUM, drop_norm=3.0, max_norm=1.0
    ),
    "chain": config_for_function(optimizers.chain).set(
        args=[
            of(optimizers.clip_by_global_norm, 1.0),
            of(optimizers.adamw_optimizer, SCHEDULE, **ADAM),
        ]
    ),
}

PARTS = {
    "clip_by_global_norm": of(optimizers.clip_by_global_norm, 1.0, drop_norm=3.0),
    "clip_by_block_rms": of(optimizers.clip_by_block_rms, 0.5),
    "scale_by_param_block_rms": of(optimizers.scale_by_param_block_rms),
    "scale_update_per_param": of(
        optimizers.scale_update_per_param, of(optimizers.per_param_scale_by_rms)
    ),
    "scale_by_trust_ratio": of(
        optimizers.scale_by_trust_ratio, min_norm=1.0, trust_coefficient=0.5, eps=0.1
    ),
    "l2_regularizer": of(optimizers.l2_regularizer, 0.1, BY_PATH),
    "add_decayed_weights": of(
        optimizers.add_decayed_weights, 0.1, learning_rate=SCHEDULE, learning_rate_exponent=1.0
    ),
    "ema": of(optimizers.ema, 0.9),
    "ema_scheduled_biased": of(
        optimizers.ema, of(schedule.ema_schedule, 0.9, warmup_steps=2), debias=False
    ),
    "ema_int8": of(optimizers.ema, 0.9, accumulator_dtype=jnp.int8),
}

# Not among those whose numbers are known, but held to the same laws.
OTHERS = {
    "optax_adamw": of(optax.adamw, 0.1),
    "optax_muon_of_matrices": of(optax.contrib.muon, 0.1),
    "named_chain": config_for_function(optimizers.named_chain).set(
        kwargs={
            "clip": of(optimizers.clip_by_global_norm, 1.0),
            "lion": of(optimizers.lion_optimizer, 0.1, 0.9, 0.99),
        }
    ),
    "skip_by_statistics": of(
        optimizers.skip_and_clip_by_global_norm,
        MOMENTUM,
        drop_norm=of(optimizers.drop_norm_by_grad_norm_ema),
        grad_norm_ema_decay=0.9,
    ),
    "offload": of(optimizers.offload_optimizer, MOMENTUM),
}

PARAMS = {
    "w": np.array([[1.0, -2.0, 3.0], [0.5, 0.1, -0.7]], np.float32),
    "b": np.array([0.3, 0.0, -0.2], np.float32),
}
GRADS = {
    "w": np.array([[0.1, -0.2, 0.3], [2.0, -1.0, 0.01]], np.float32),
    "b": np.array([1.0, -0.5, 0.0], np.float32),
}
FACTORS = (1.0, 2.0, -1.0, 0.5)  # of the gradients in each step

# Updates of AXLearn 0.0.1.post20240213 from these parameters and gradients, found by calling it.
GOLDEN = json.loads(
    (pathlib.Path(__file__).parent / "optimizers_golden.json").read_text(encoding="utf-8")
)


def factorization(value):
    return FactorizationSpec(("row", "col")) if value.ndim == 2 else None


def opt_params(values, weight_decay_scale=None):
    return jax.tree.map(
        lambda value: OptParam(jnp.asarray(value), factorization(value), weight_decay_scale), values
    )


def param_specs(values):
    axes = {2: PartitionSpec("data", "model"), 1: PartitionSpec("model")}
    return jax.tree.map(
        lambda value: ParameterSpec(
            shape=value.shape,
            dtype=value.dtype,
            mesh_axes=axes[value.ndim],
            factorization=factorization(value),
        ),
        values,
    )


def make(cfg):
    return optimizers.chain(cfg)


@pytest.mark.parametrize("name", GOLDEN)
def test_updates_match_golden_values(name):
    tx = {**OPTIMIZERS, **PARTS}[name].instantiate()
    params = PARAMS
    state = tx.init(opt_params(params))
    for factor, expected in zip(FACTORS, GOLDEN[name], strict=True):
        grads = jax.tree.map(lambda g, factor=factor: jnp.asarray(g * factor), GRADS)
        updates, state = tx.update(grads, state, opt_params(params))
        params = optax.apply_updates(params, updates)
        for key in params:
            np.testing.assert_allclose(
                np.ravel(updates[key]), expected[key], rtol=3e-5, atol=1e-6, err_msg=key
            )


LAWFUL = {**OPTIMIZERS, **OTHERS}
# Parameters of two dtypes, and one that is masked.
MIXED = {
    "layer": PARAMS,
    "low": jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), PARAMS),
    "frozen": optax.MaskedNode(),
}


@pytest.mark.parametrize("name", LAWFUL)
class TestLaws:
    def test_specs_describe_the_state(self, name):
        tx = make(LAWFUL[name])
        state = jax.eval_shape(lambda: tx.init(opt_params(MIXED)))
        specs = tx.partition(param_specs(MIXED))
        assert jax.tree.structure(specs) == jax.tree.structure(state)
        for spec, leaf in zip(jax.tree.leaves(specs), jax.tree.leaves(state), strict=True):
            assert isinstance(spec, TensorSpec)
            assert (tuple(spec.shape), spec.dtype) == (leaf.shape, leaf.dtype)
            assert len(spec.partition_spec) == leaf.ndim

    def test_step_keeps_state_sharding(self, name):
        tx = make(LAWFUL[name])
        state = jax.eval_shape(lambda: tx.init(opt_params(MIXED)))
        updates, new_state = jax.eval_shape(
            lambda state: tx.update(jax.tree.map(jnp.asarray, MIXED), state, opt_params(MIXED)),
            state,
        )
        assert jax.tree.structure(updates) == jax.tree.structure(MIXED)
        assert jax.tree.structure(new_state) == jax.tree.structure(state)
        for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(new_state), strict=True):
            assert (old.shape, old.dtype) == (new.shape, new.dtype)


def test_layer_decay_scale_precedes_path_scale():
    cfg = OPTIMIZERS["adamw_decay_by_path"]
    base, by_layer = (
        cfg.instantiate().update(
            GRADS, cfg.instantiate().init(opt_params(PARAMS)), opt_params(PARAMS, scale)
        )[0]
        for scale in (None, 2.0)
    )
    # The rate is 0.01 and the first learning rate 0.1; by path, "b" has 0 and "w" a half.
    np.testing.assert_allclose(base["b"] - by_layer["b"], 0.001 * 2.0 * PARAMS["b"], atol=1e-7)
    np.testing.assert_allclose(base["w"] - by_layer["w"], 0.001 * 1.5 * PARAMS["w"], atol=1e-7)


def test_adam_agrees_with_optax():
    ours = optimizers.adamw_optimizer(0.01, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    theirs = optax.adamw(0.01, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    state, optax_state, params = ours.init(opt_params(PARAMS)), theirs.init(PARAMS), PARAMS
    for factor in FACTORS:
        grads = jax.tree.map(lambda g, factor=factor: g * factor, GRADS)
        updates, state = ours.update(grads, state, opt_params(params))
        expected, optax_state = theirs.update(grads, optax_state, params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), updates, expected)
        params = optax.apply_updates(params, updates)


def test_moment_dtype_is_configurable():
    tx = optimizers.adamw_optimizer(0.1, **ADAM, mu_dtype=jnp.bfloat16)
    mu = tx.partition(param_specs(PARAMS))[0].mu["w"]
    assert (mu.dtype, mu.mesh_axes) == (jnp.bfloat16, PartitionSpec("data", "model"))


def test_adafactor_decay_needs_learning_rate_exponent():
    with pytest.raises(
        OptimizerArgumentError, match=r"weight_decay=0.01, which needs .* set it to 0"
    ):
        optimizers.adafactor_optimizer(0.1, **ADAFACTOR, weight_decay=0.01)
