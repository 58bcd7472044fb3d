import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import MetricsError
from weft.hierarchy.causal_lm_metrics import (
    AuxLossMetrics,
    BaseLossMetrics,
    CompositeLossMetrics,
    CompositeLossWeights,
    CrossEntropyLossMetrics,
    Perplexity,
    metrics_config,
    target_statistics,
)
from weft.hierarchy.metrics import WeightedScalar
from weft.hierarchy.module import functional

LOGITS = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)
LABELS = np.array([[0, 4, 2], [3, -1, 1]])
LIVE = LABELS >= 0
LOG_NORMALIZER = np.log(np.exp(LOGITS).sum(-1))
NLL = np.where(
    LIVE, LOG_NORMALIZER - np.take_along_axis(LOGITS, LABELS.clip(0)[..., None], -1)[..., 0], 0
)
MODULE_OUTPUTS = {
    "decoder": {
        "layer0": {"aux_loss": jnp.array(0.5), "router": {"aux_loss": jnp.array([1.0, 2.0])}},
        "layer1": {"aux_losses": jnp.array(100.0)},
    }
}


def measure(cfg, batch=None, outputs=None, module_outputs=MODULE_OUTPUTS):
    metrics = cfg.set(name="metrics").instantiate(parent=None)
    inputs = {
        "input_batch": {"target_labels": jnp.array(LABELS), **(batch or {})},
        "predict_outputs": outputs or {"logits": jnp.array(LOGITS)},
        "module_outputs": module_outputs,
    }
    return functional(metrics, None, {}, inputs, is_training=True)[0]


def test_statistics_are_of_each_target():
    stats = target_statistics(jnp.array(LOGITS), jnp.array(LABELS), jnp.array(LIVE))
    np.testing.assert_allclose(stats["nll"], NLL, rtol=1e-5)
    np.testing.assert_allclose(stats["log_normalizer"], LOG_NORMALIZER * LIVE, rtol=1e-5)
    np.testing.assert_array_equal(stats["correct"], LIVE & (LOGITS.argmax(-1) == LABELS))


@pytest.mark.parametrize("scale", [None, 0.1])
def test_cross_entropy_and_what_follows_from_it(scale):
    cfg = CrossEntropyLossMetrics.default_config().set(z_loss_scale=scale)
    loss, metrics = measure(cfg, {"target_num_bytes": jnp.array([4, 3])})
    z = np.square(LOG_NORMALIZER) * LIVE
    total = NLL + (scale or 0) * z
    nats = NLL.sum() / 5
    expected = {
        "cross_entropy_loss": (nats, 5),
        "perplexity": (np.exp(nats), 5),
        "accuracy": ((LIVE & (LOGITS.argmax(-1) == LABELS)).sum() / 5, 5),
        "train_live_targets": (2.5, 2),
        "bits_per_byte": (NLL.sum() / 7 / np.log(2), 7),
    }
    if scale:
        expected["z_loss"] = (z.sum() / 5, 5)
    np.testing.assert_allclose(metrics.pop("per_label_loss"), total, rtol=1e-5)
    np.testing.assert_array_equal(metrics.pop("live_targets"), LIVE)
    assert {k: (float(m.mean), float(m.weight)) for k, m in metrics.items()} == {
        k: pytest.approx(v, rel=1e-5) for k, v in expected.items()
    }
    assert (float(loss.mean), float(loss.weight)) == pytest.approx((total.sum() / 5, 5), rel=1e-5)


def test_the_batch_may_say_which_targets_count():
    live = jnp.array([[True, False, False], [True, False, False]])
    loss, _ = measure(CrossEntropyLossMetrics.default_config(), {"live_targets": live})
    assert float(loss.mean) == pytest.approx(NLL[:, 0].mean(), rel=1e-5)
    assert float(loss.weight) == 2


def test_statistics_stand_for_logits():
    stats = target_statistics(jnp.array(LOGITS), jnp.array(LABELS), jnp.array(LIVE))
    cfg = CrossEntropyLossMetrics.default_config().set(z_loss_scale=0.1)
    of_logits, of_stats = measure(cfg), measure(cfg, outputs={"target_statistics": stats})
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), of_logits, of_stats)


def test_perplexities_add_up_as_their_logarithms_do():
    texts = [(2.0, 3.0), (0.5, 5.0), (1.0, 2.0)]  # nats per token, tokens
    total = Perplexity(np.exp(2.0), 3.0) + Perplexity(np.exp(0.5), 5.0)
    total = total.accumulate(Perplexity(np.exp(1.0), 2.0))
    nats = sum(n * w for n, w in texts) / 10
    assert isinstance(total, Perplexity)
    assert float(total.value()) == pytest.approx(np.exp(nats), rel=1e-5)
    assert float(total.weight) == 10


def test_auxiliary_losses_are_found_by_path_and_added_up():
    cfg = AuxLossMetrics.default_config().set(aux_loss_regex=".*/aux_loss")
    loss, metrics = measure(cfg)
    assert float(loss.mean) == 3.5
    assert float(metrics["aux_loss"].mean) == 3.5


def test_a_pattern_that_finds_no_loss_is_refused():
    cfg = AuxLossMetrics.default_config().set(aux_loss_regex="aux_loss")
    with pytest.raises(MetricsError, match=r"'aux_loss' of metrics matches none.*layer0/aux_loss"):
        measure(cfg)


def test_without_a_pattern_there_is_no_auxiliary_loss():
    loss, metrics = measure(AuxLossMetrics.default_config())
    assert float(loss.mean) == 0
    assert metrics == {}


def test_a_models_metrics_are_cross_entropy_and_auxiliary_losses():
    loss, metrics = measure(metrics_config(aux_loss_regex=".*/aux_loss", z_loss_scale=0.1))
    expected = (NLL + 0.1 * np.square(LOG_NORMALIZER) * LIVE).sum() / 5
    assert float(loss.mean) == pytest.approx(expected + 3.5, rel=1e-5)
    assert float(loss.weight) == 5
    assert {"perplexity", "z_loss", "aux_loss"} <= metrics.keys()


class Halves(CompositeLossWeights):
    def forward(self, child_metrics):
        return {name: 0.5 / float(loss.weight) for name, (loss, _) in child_metrics.items()}


def test_losses_can_be_weighed():
    cfg = metrics_config(aux_loss_regex=".*/aux_loss")
    plain = measure(cfg.set(loss_weights=CompositeLossWeights.default_config()))[0]
    assert float(plain.mean) == pytest.approx(NLL.sum() / 5 + 3.5, rel=1e-5)
    loss, _ = measure(cfg.set(loss_weights=Halves.default_config()))
    assert float(loss.mean) == pytest.approx(0.1 * NLL.sum() / 5 + 0.5 * 3.5, rel=1e-5)


def test_metrics_of_parts_may_be_kept_apart():
    parts = {"a": CrossEntropyLossMetrics.default_config()}
    parts["b"] = parts["a"].clone()
    cfg = CompositeLossMetrics.default_config().set(metrics=parts)
    loss, metrics = measure(cfg)
    assert metrics.keys() == {"a", "b"}
    assert float(loss.mean) == pytest.approx(2 * NLL.sum() / 5, rel=1e-5)
    with pytest.raises(MetricsError, match=r"'b' of metrics has the metrics \['accuracy', .*False"):
        measure(cfg.set(flatten_metrics=True))


def test_a_composite_of_nothing_is_refused():
    with pytest.raises(MetricsError, match="metrics of metrics is empty; expected at least one"):
        measure(CompositeLossMetrics.default_config().set(metrics={}))


def test_a_metric_of_ones_own():
    class Count(BaseLossMetrics):
        def forward(self, input_batch, *, predict_outputs, module_outputs):
            return WeightedScalar(jnp.array(1.0), jnp.array(1.0)), {"n": input_batch["n"]}

    loss, metrics = measure(Count.default_config(), {"n": jnp.array(3)})
    assert (float(loss.mean), metrics) == (1.0, {"n": 3})
