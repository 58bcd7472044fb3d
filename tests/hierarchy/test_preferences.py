"""Models that learn from preferences and rewards, against the formulas on their logits."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft import hierarchy
from weft.errors import LayerConfigError
from weft.hierarchy.causal_lm import Model
from weft.hierarchy.lora import base_state, set_lora_recursively
from weft.hierarchy.module import functional
from weft.hierarchy.preferences import (
    PolicyModel,
    PreferenceLossMetrics,
    PreferenceModel,
    without_reference,
)
from weft.recipes.lm import initializer

PAIRS, TIME, VOCAB = 3, 6, 16
RNG = np.random.default_rng(0)


def base_config():
    layer = hierarchy.TransformerLayer.default_config()
    layer.self_attention.attention.set(
        num_heads=2, mask=hierarchy.CausalAttentionBias.default_config()
    )
    layer.feed_forward.hidden_dim = 16
    decoder = hierarchy.Decoder.default_config().set(
        dim=8,
        vocab_size=VOCAB,
        transformer=hierarchy.StackedTransformerLayer.default_config().set(
            num_layers=1, layer=layer
        ),
        eos_token_id=1,
        pad_token_id=0,
    )
    return Model.default_config().set(decoder=decoder, param_init=initializer(variance=1.0))


def made(cfg):
    return cfg.clone(name="model").instantiate(parent=None)


@functools.cache
def pair_batch():
    tokens = RNG.integers(2, VOCAB, size=(PAIRS, 2, TIME + 1))
    starts = np.array([2, 3, 2])[:, None, None]
    ends = RNG.integers(4, TIME + 1, size=(PAIRS, 2, 1))
    index = np.arange(TIME)
    return {
        "input_ids": tokens[..., :-1],
        "target_labels": tokens[..., 1:],
        "live_targets": (index >= starts) & (index < ends),
    }


def plain_log_probs(model, params, batch):
    """The log probability of each answer, from all logits."""
    rows = {k: x.reshape(-1, TIME) for k, x in batch.items()}
    logits, _ = functional(model, None, params, [rows], method="extract_logits", is_training=False)
    labels = rows["target_labels"][..., None]
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), labels, -1)[..., 0]
    return jnp.where(rows["live_targets"], log_probs, 0)


def random_params(model):
    """Random parameters; nothing is compiled."""
    init = functools.partial(model.initialize_parameters_recursively, jax.random.key(0))
    shapes = jax.eval_shape(init)
    return jax.tree.map(lambda x: 0.5 * RNG.normal(size=x.shape).astype(x.dtype), shapes)


@pytest.fixture(scope="module", params=["adapters", "copy", "none"])
def case(request):
    """A model, its parameters, its base and the base's parameters."""
    base = base_config()
    policy = base.clone()
    if request.param == "adapters":
        set_lora_recursively(policy, rank=2, alpha=4.0)
    has_reference = request.param != "none"
    cfg = PreferenceModel.from_model(policy, has_reference=has_reference)
    model, plain = made(cfg), made(policy)
    params = random_params(model)
    reference_params = {"adapters": base_state, "copy": lambda p: p.get("reference")}.get(
        request.param, lambda p: None
    )(params)
    return model, params, plain, made(base), reference_params


def plain_margins(params, reference_params, plain, base):
    batch = pair_batch()
    margins = plain_log_probs(plain, params, batch).sum(-1).reshape(PAIRS, 2) @ jnp.array(
        [1.0, -1.0]
    )
    if reference_params is None:
        return margins
    reference = plain_log_probs(base, reference_params, batch).sum(-1).reshape(PAIRS, 2)
    return margins - jax.lax.stop_gradient(reference @ jnp.array([1.0, -1.0]))


def test_loss_and_gradients_are_those_of_the_formula(case):
    model, params, plain, base, reference_params = case

    @jax.jit
    def of_model(params):
        def loss(params):
            (loss, _), collection = functional(
                model, None, params, [pair_batch()], is_training=True
            )
            return loss, collection.summaries

        return jax.value_and_grad(loss, has_aux=True)(params)

    @jax.jit
    def of_formula(params):
        def loss(params):
            margins = plain_margins(params, reference_params, plain, base)
            return -jnp.mean(jnp.log(jax.nn.sigmoid(0.1 * margins))), margins

        return jax.value_and_grad(loss, has_aux=True)(params)

    (loss, summaries), grads = of_model(params)
    (expected, margins), expected_grads = of_formula(params)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    reference_grads = grads.pop("reference", {})
    assert all((x == 0).all() for x in jax.tree.leaves(reference_grads))
    expected_grads.pop("reference", None)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), grads, expected_grads
    )
    np.testing.assert_allclose(summaries["margin"].mean, 0.1 * margins.mean(), rtol=1e-4)
    np.testing.assert_allclose(summaries["accuracy"].mean, (margins > 0).mean())
    lengths = pair_batch()["live_targets"].sum(-1)
    np.testing.assert_allclose(summaries["chosen_length"].mean, lengths[:, 0].mean(), rtol=1e-6)
    assert summaries["loss"].weight == PAIRS


def test_variants_and_rows_that_fill_a_batch():
    log_probs = jnp.array([[-1.0], [-3.0], [-2.0], [-1.5], [0.0], [0.0]])
    batch = {
        "target_labels": jnp.ones((6, 1), int),
        "live_targets": jnp.array([[True]] * 4 + [[False]] * 2),
        "reference_log_probs": jnp.full((6, 1), -1.0),
    }
    outputs = {"target_statistics": {"nll": -log_probs}}
    margins = np.array([2.0, -0.5])
    expected = {
        ("ipo", 0.0): np.mean((margins - 1 / (2 * 0.2)) ** 2),
        ("dpo", 0.1): np.mean(
            -0.9 * np.log(1 / (1 + np.exp(-0.2 * margins)))
            - 0.1 * np.log(1 / (1 + np.exp(0.2 * margins)))
        ),
    }
    for (loss, smoothing), value in expected.items():
        settings: dict[str, Any] = {"loss": loss, "beta": 0.2, "label_smoothing": smoothing}
        cfg = PreferenceLossMetrics.default_config().set(**settings)
        kwargs = {"predict_outputs": outputs, "module_outputs": {}}
        (mean, metrics), _ = functional(
            made(cfg), None, {}, {"input_batch": batch, **kwargs}, is_training=True
        )
        np.testing.assert_allclose(mean.mean, value, rtol=1e-5)
        assert mean.weight == 2 and metrics["accuracy"].mean == 0.5


@pytest.mark.parametrize("loss", ["dpo", "ipo"])
def test_term_of_the_chosen_answers_is_a_mean_over_tokens(loss):
    log_probs = jnp.array([[-1.0, -3.0], [-1.0, -9.0]])
    batch = {
        "target_labels": jnp.ones((2, 2), int),
        "live_targets": jnp.array([[True, True], [True, False]]),
    }
    inputs = {
        "input_batch": batch,
        "predict_outputs": {"target_statistics": {"nll": -log_probs}},
        "module_outputs": {},
    }

    def mean_of(alpha):
        cfg = PreferenceLossMetrics.default_config().set(loss=loss, rpo_alpha=alpha)
        (mean, _), _ = functional(made(cfg), None, {}, inputs, is_training=True)
        return mean.mean

    np.testing.assert_allclose(mean_of(0.5), mean_of(0.0) + 0.5 * (1 + 3) / 2, rtol=1e-6)


@pytest.mark.parametrize("is_updated", [False, True])
def test_policy_model_has_the_loss_of_its_answers(is_updated):
    base = base_config()
    policy = base.clone()
    set_lora_recursively(policy, rank=2, alpha=4.0)
    model, plain, reference = made(PolicyModel.from_model(policy)), made(policy), made(base)
    params = random_params(model)
    rows = {k: x.reshape(-1, TIME) for k, x in pair_batch().items()}
    advantages = jnp.array([1.0, -1.0, 0.5, -0.5, 2.0, 0.0])
    batch = {**rows, "advantages": advantages, "rewards": advantages + 1}
    # How far an update has moved the model from the one that has drawn the answers.
    moved = 0.3 * RNG.normal(size=(2 * PAIRS, TIME)) if is_updated else 0.0

    @jax.jit
    def both(params):
        old = jax.lax.stop_gradient(plain_log_probs(plain, params, rows)) - moved
        if is_updated:
            batch["old_log_probs"] = old

        def of_model(params):
            (loss, _), collection = functional(model, None, params, [batch], is_training=True)
            return loss, collection.summaries

        def of_formula(params):
            log_probs = plain_log_probs(plain, params, rows)
            ratio = jnp.exp(log_probs - old)
            clipped = jnp.clip(ratio, 0.8, 1.2)
            gain = jnp.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
            frozen = jax.lax.stop_gradient(base_state(params))
            r = plain_log_probs(reference, frozen, rows) - log_probs
            divergence = jnp.exp(r) - r - 1
            live = rows["live_targets"]
            per_token = 0.04 * divergence - gain
            is_clipped = ratio * advantages[:, None] > gain
            means = [
                ((x * live).sum(-1) / live.sum(-1)).mean()
                for x in (per_token, divergence, is_clipped)
            ]
            return means[0], means[1:]

        return [jax.value_and_grad(f, has_aux=True)(params) for f in (of_model, of_formula)]

    ((loss, summaries), grads), ((expected, (kl, clipped)), expected_grads) = both(params)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(summaries["kl"].mean, kl, rtol=1e-4)
    np.testing.assert_allclose(summaries["reward"].mean, 4 / 3, rtol=1e-6)
    assert ("clipped" in summaries) == is_updated
    if is_updated:
        assert 0 < clipped < 1
        np.testing.assert_allclose(summaries["clipped"].mean, clipped, rtol=1e-5)
    adapters = [
        (x, y)
        for (path, x), y in zip(
            jax.tree_util.tree_leaves_with_path(grads),
            jax.tree.leaves(expected_grads),
            strict=True,
        )
        if "adapter" in jax.tree_util.keystr(path)
    ]
    assert adapters
    for ours, plain_grad in adapters:
        np.testing.assert_allclose(ours, plain_grad, rtol=1e-4, atol=1e-6)


def test_without_reference_gives_the_model_alone():
    base = base_config()
    cfg = PreferenceModel.from_model(base)
    params = {"decoder": {"x": 1}, "reference": {"decoder": {"x": 2}}}
    assert without_reference(cfg, params) == (base, {"decoder": {"x": 1}})
    assert without_reference(base, params) == (base, params)


def test_label_smoothing_is_refused_for_ipo():
    cfg = PreferenceLossMetrics.default_config().set(loss="ipo", label_smoothing=0.1)
    with pytest.raises(LayerConfigError, match=r"label_smoothing=0\.1 is for loss='dpo'"):
        made(cfg)
