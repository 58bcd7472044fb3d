"""Gatings, against a loop over tokens in numpy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.config import config_for_function
from weft.errors import LayerConfigError, MissingPrngKeyError
from weft.hierarchy.attention import RematRegexSavePatterns
from weft.hierarchy.mixture_of_experts.gating import (
    AdaptiveLoadBalanceLoss,
    GateNoise,
    Top2Gating,
    TopKBiasGating,
    TopKDropFreeGating,
    TopKGating,
    approx_max_k,
    sigmoid,
)
from weft.hierarchy.module import functional as F

EXPERTS, TOKENS = 4, 6
LOGITS = np.random.default_rng(3).normal(size=(1, 2, TOKENS, EXPERTS)).astype("f")


def gating(cls, **fields):
    cfg = cls.default_config().set(name="gating", num_experts=EXPERTS, **fields)
    return cfg.instantiate(parent=None)


def run(layer, logits=LOGITS, is_training=True, state=None, key=None, **kwargs):
    weight = kwargs.pop("seq_load_balance_loss_weight", None)
    fixed = {} if weight is None else {"seq_load_balance_loss_weight": weight}

    @jax.jit
    def compiled(key, state, inputs):
        return F(layer, key, state, {**inputs, **fixed}, is_training=is_training)

    return compiled(key, state or {}, {"logits": logits, **kwargs})


def softmax(x):
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


def reference(logits, k, capacity, live=None, score=softmax, normalize=True):
    """Returns the combine tensor of one group, token by token."""
    scores = score(logits)
    tokens, num_experts = logits.shape
    combine = np.zeros((tokens, num_experts, capacity), "f")
    used = [0] * num_experts
    order = np.argsort(-scores, axis=-1, kind="stable")[:, :k]
    for rank in range(k):
        for t in range(tokens):
            if live is not None and not live[t]:
                continue
            e = order[t, rank]
            if used[e] < capacity:
                total = scores[t, order[t]].sum() if normalize else 1.0
                combine[t, e, used[e]] = scores[t, e] / total
                used[e] += 1
    return combine


def np_sigmoid(x):
    return 1 / (1 + np.exp(-x))


SIGMOID = config_for_function(sigmoid)
CASES = {
    "top 2, room for all": (Top2Gating, {}, 3, 2, softmax, True),
    "top 2, little room": (Top2Gating, {"train_capacity_factor": 1.0}, 2, 2, softmax, True),
    "top 2, at least": (
        Top2Gating,
        {"train_capacity_factor": 0.1, "expert_capacity": 3},
        3,
        2,
        softmax,
        True,
    ),
    "top 1": (
        TopKGating,
        {"num_experts_per_token": 1, "train_capacity_factor": 1.0},
        2,
        1,
        softmax,
        False,
    ),
    "top 3, nothing dropped": (TopKGating, {"num_experts_per_token": 3}, 6, 3, softmax, True),
    "sigmoid": (
        TopKGating,
        {"score_fn": SIGMOID, "train_capacity_factor": 1.5},
        3,
        2,
        np_sigmoid,
        True,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_a_loop_over_tokens(name):
    cls, fields, capacity, k, score, normalize = CASES[name]
    output, outputs = run(gating(cls, **fields))
    expected = np.stack(
        [reference(LOGITS[0, g], k, capacity, score=score, normalize=normalize) for g in range(2)]
    )[None]
    np.testing.assert_allclose(output.combine_tensor, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(np.asarray(output.dispatch_tensor) > 0, expected > 0)
    kept = (expected > 0).sum() / (2 * TOKENS * k)
    dropped = [outputs.summaries[f"over_capacity_{i + 1}"] for i in range(k)]
    np.testing.assert_allclose(np.mean(dropped), 1 - kept, atol=1e-6)


@pytest.mark.parametrize("cls", [Top2Gating, TopKDropFreeGating])
def test_summaries_of_experts(cls):
    live = np.array([[[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]]], bool)
    shape = (slice(None),) if cls is Top2Gating else (0,)
    fields = {"train_capacity_factor": 0.5} if cls is Top2Gating else {}
    output, outputs = run(gating(cls, **fields), LOGITS[shape], live=jnp.asarray(live[shape]))
    chosen = np.argsort(-LOGITS, axis=-1)[..., :2][live]
    choices = np.bincount(chosen.ravel(), minlength=EXPERTS)
    reported, load = outputs.summaries, choices / choices.sum()
    np.testing.assert_allclose(reported["expert_load"].mean, load, rtol=1e-6)
    assert reported["expert_load"].weight.tolist() == [18] * EXPERTS
    expected = -(load[load > 0] * np.log(load[load > 0])).sum()
    np.testing.assert_allclose(reported["dispatch_entropy"], expected, rtol=1e-5)
    if cls is TopKDropFreeGating:
        assert "dropped_tokens" not in reported
        return
    dispatched = np.asarray(output.dispatch_tensor).sum(-1)  # by token and expert
    kept = dispatched.sum(axis=(0, 1, 2))
    dropped = (choices - kept) / np.maximum(1, choices)
    assert dropped.max() > 0
    np.testing.assert_allclose(reported["expert_over_capacity"].mean, dropped, rtol=1e-5)
    tokens = np.mean(dispatched.sum(-1)[live] == 0)
    assert tokens > 0
    np.testing.assert_allclose(reported["dropped_tokens"], tokens, rtol=1e-6)


def test_evaluation_capacity_differs():
    layer = gating(Top2Gating, train_capacity_factor=1.0, eval_capacity_factor=2.0)
    shapes = [run(layer, is_training=t)[0].combine_tensor.shape[-1] for t in (True, False)]
    assert shapes == [2, 3]
    assert run(layer)[0].dispatch_tensor.dtype == jnp.int32


def test_logits_are_capped():
    layer = gating(TopKGating, gating_logit_cap=0.5)
    capped = 0.5 * np.tanh(LOGITS / 0.5)
    expected = reference(capped[0, 0], 2, TOKENS)
    np.testing.assert_allclose(run(layer)[0].combine_tensor[0, 0], expected, rtol=1e-5, atol=1e-6)


def test_losses_are_equal_to_one_at_balance():
    output, outputs = run(gating(TopKGating), np.zeros((1, 1, 4, EXPERTS), "f"))
    np.testing.assert_allclose(output.load_balance_loss, 1.0, rtol=1e-6)
    np.testing.assert_allclose(output.router_z_loss, np.log(EXPERTS) ** 2, rtol=1e-6)
    assert outputs.summaries["load_balance_loss"] == output.load_balance_loss


def test_gumbel_noise_draws_experts_with_their_probabilities():
    fields = {"num_experts_per_token": 1, "noisy_gating": GateNoise.GUMBEL}
    layer = gating(TopKDropFreeGating, **fields)
    logits = np.broadcast_to(np.log([0.1, 0.2, 0.3, 0.4]), (1, 1, 4000, EXPERTS)).astype("f")
    output, _ = run(layer, logits[0], key=jax.random.PRNGKey(0))
    share = np.bincount(np.asarray(output.dispatch_tensor).ravel(), minlength=EXPERTS) / 4000
    np.testing.assert_allclose(share, [0.1, 0.2, 0.3, 0.4], atol=0.04)
    # The weight of an expert is without noise.
    chosen = np.asarray(output.dispatch_tensor)[0, :, 0]
    weights = np.asarray(output.combine_tensor)[0, :, 0]
    np.testing.assert_allclose(weights, np.array([0.1, 0.2, 0.3, 0.4])[chosen], rtol=1e-5)
    with pytest.raises(MissingPrngKeyError, match="the noise of gating"):
        run(layer, logits[0])


def test_approximate_top_k_matches_exact():
    fields = {"topk_fn": config_for_function(approx_max_k).set(recall_target=1.0)}
    got = run(gating(TopKGating, **fields))[0].combine_tensor
    np.testing.assert_allclose(got, run(gating(TopKGating))[0].combine_tensor, rtol=1e-6)


@pytest.mark.parametrize("value, expected", [(0.2, 0.01), (0.05, 0.0), (0.0, -0.01)])
def test_adaptive_loss_follows_the_share_of_dropped_tokens(value, expected):
    cfg = AdaptiveLoadBalanceLoss.default_config().set(name="adaptive", max_value=0.1)
    cfg.moving_average.min_weight = 0.5
    layer = cfg.instantiate(parent=None)
    average = {"count": jnp.zeros(()), "value": jnp.zeros(())}
    state = {"log_scale": jnp.log(2.0), "value_average": average}
    factor, outputs = F(layer, None, state, (jnp.float32(value),), is_training=True)
    np.testing.assert_allclose(factor, 2.0, rtol=1e-6)
    np.testing.assert_allclose(outputs.state_updates["log_scale"], np.log(2) + expected, rtol=1e-6)
    _, outputs = F(layer, None, state, (jnp.float32(value),), is_training=False)
    assert "log_scale" not in outputs.state_updates


def test_gating_scales_its_loss_adaptively():
    cfg = AdaptiveLoadBalanceLoss.default_config().set(max_value=0.1)
    cfg.moving_average.min_weight = 0.5
    plain = run(gating(Top2Gating))[0].load_balance_loss
    layer = gating(Top2Gating, adaptive_load_balance_loss=cfg)
    average = {"count": jnp.zeros(()), "value": jnp.zeros(())}
    state = {"adaptive_load_balance_loss": {"log_scale": jnp.log(3.0), "value_average": average}}
    scaled = run(layer, state=state)[0].load_balance_loss
    np.testing.assert_allclose(scaled, 3 * plain, rtol=1e-5)


def test_drop_free_gating_output():
    logits = LOGITS[0]
    output, _ = run(gating(TopKDropFreeGating), logits, seq_load_balance_loss_weight=0.5)
    probs = softmax(logits)
    order = np.argsort(-probs, axis=-1)[..., :2]
    chosen = np.take_along_axis(probs, order, -1)
    np.testing.assert_array_equal(output.dispatch_tensor, order)
    np.testing.assert_allclose(
        output.combine_tensor, chosen / chosen.sum(-1, keepdims=True), rtol=1e-5
    )

    def loss(probs, order):
        f = np.bincount(order.ravel(), minlength=EXPERTS) / order.size
        return EXPERTS * (f * probs.mean(0)).sum()

    whole = loss(probs.reshape(-1, EXPERTS), order.reshape(-1, 2))
    np.testing.assert_allclose(output.load_balance_loss, whole, rtol=1e-5)
    of_each = np.mean([loss(probs[i], order[i]) for i in range(2)])
    np.testing.assert_allclose(output.seq_load_balance_loss, 0.5 * of_each, rtol=1e-5)
    shapes = [TopKDropFreeGating.combine_tensor_shape(), TopKGating.dispatch_tensor_shape()]
    assert shapes == ["bsk", "ogsec"]


def test_bias_shifts_load_but_not_weights():
    layer = gating(TopKBiasGating, num_experts_per_token=1, score_fn=SIGMOID)
    bias = jnp.array([0.0, 9.0, 0.0, 0.0])
    output, outputs = run(layer, LOGITS[0], state={"gating_bias": bias})
    assert np.all(np.asarray(output.dispatch_tensor) == 1)
    weights = np_sigmoid(LOGITS[0][..., 1]) * 2.5
    np.testing.assert_allclose(output.combine_tensor[..., 0], weights, rtol=1e-5)
    updated = outputs.state_updates["gating_bias"]
    np.testing.assert_allclose(updated, bias + np.array([1, -1, 1, 1]) * 1e-3, rtol=1e-6)
    live = jnp.zeros(LOGITS[0].shape[:2], bool)
    _, outputs = run(layer, LOGITS[0], state={"gating_bias": bias}, live=live)
    np.testing.assert_array_equal(outputs.state_updates["gating_bias"], bias)


def test_experts_of_few_groups():
    layer = gating(TopKBiasGating, num_group_of_experts=2, topk_group=1)
    logits = np.log([[[0.5, 0.01, 0.3, 0.19]]]).astype("f")
    state = {"gating_bias": jnp.zeros(EXPERTS)}
    output, _ = run(layer, logits, state=state, is_training=False)
    # The best expert is alone in its group: both others together score less than 0.5 + 0.01.
    assert output.dispatch_tensor[0, 0].tolist() == [0, 1]


@pytest.mark.parametrize("cls", [Top2Gating, TopKDropFreeGating])
def test_choices_have_names_for_rematerialization(cls):
    logits = LOGITS if cls is Top2Gating else LOGITS[0]
    jaxpr = jax.make_jaxpr(lambda x: run(gating(cls), x)[0].combine_tensor)(logits)
    names = set(re.findall(r"name=([\w.]+\.\w+)", str(jaxpr)))
    for pattern in ("GATE_WEIGHTS", "GATE_ASSIGNMENT"):
        value = RematRegexSavePatterns[pattern].value
        (found,) = [name for name in names if re.fullmatch(value, name)]
        assert re.fullmatch(RematRegexSavePatterns.MOE_GATING.value, found)


def test_capacity_of_0_is_none():
    plain = run(gating(Top2Gating))[0]
    of_zero = run(gating(Top2Gating, expert_capacity=0))[0]
    np.testing.assert_array_equal(of_zero.combine_tensor, plain.combine_tensor)
    zero = gating(TopKGating, train_capacity_factor=0.0, eval_capacity_factor=0.0)
    assert run(zero)[0].combine_tensor.shape[-1] == TOKENS


@pytest.mark.parametrize(
    "cls, fields, said",
    [
        (Top2Gating, {"train_capacity_factor": -1.0}, "train_capacity_factor=-1.0 leaves no room"),
        (TopKGating, {"expert_capacity": -1}, "gating: expert_capacity=-1 leaves no room"),
        (TopKGating, {"num_experts_per_token": 5}, "a token chooses 5 of num_experts=4 experts"),
        (TopKGating, {"num_experts_per_token": 0}, "a token chooses 0 of num_experts=4 experts"),
        (
            TopKBiasGating,
            {"num_group_of_experts": 3},
            "is not divisible by num_group_of_experts=3",
        ),
        (
            TopKBiasGating,
            {"num_group_of_experts": 4, "topk_group": 1},
            "topk_group=1 of num_group_of_experts=4 groups of 1 experts leave too few",
        ),
    ],
    ids=["factor", "capacity", "too many", "none", "groups", "too few"],
)
def test_invalid_config_raises(cls, fields, said):
    with pytest.raises(LayerConfigError, match=re.escape(said)):
        gating(cls, **fields)


def test_bounds_of_the_adaptive_loss():
    cfg = AdaptiveLoadBalanceLoss.default_config().set(name="a", max_value=0.1, min_value=0.2)
    with pytest.raises(LayerConfigError, match=r"a: min_value=0\.2 and max_value=0\.1"):
        cfg.instantiate(parent=None)
