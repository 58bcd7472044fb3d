"""Scores of predictions against definitions written out over pairs and queries."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.functional import metrics


def arrays(seed, *highs, n=12):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.integers(high, size=n)) for high in highs]


def test_confusion_matrix_counts_weights():
    y_true, y_pred = jnp.array([0, 2, 2, 1]), jnp.array([0, 1, 1, 1])
    weights = jnp.array([1.0, 0.5, 2.0, 0.0])
    found = metrics.confusion_matrix(y_true, y_pred, num_classes=3, weights=weights)
    assert found.tolist() == [[1, 0, 0], [0, 0, 0], [0, 2.5, 0]]


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_precision_recall_and_f_score(beta):
    y_true, y_pred, weights = arrays(0, 2, 2, 3)
    found = metrics.precision_recall_f_score(y_true, y_pred, beta=beta, weights=weights)
    right = sum(int(w) for t, p, w in zip(y_true, y_pred, weights, strict=True) if t == p == 1)
    p = right / sum(int(w) for q, w in zip(y_pred, weights, strict=True) if q)
    r = right / sum(int(w) for q, w in zip(y_true, weights, strict=True) if q)
    expected = [p, r, (1 + beta**2) * p * r / (beta**2 * p + r)]
    np.testing.assert_allclose(list(found.values()), expected, rtol=1e-5)
    nothing = metrics.precision_recall_f_score(jnp.zeros(3), jnp.zeros(3))
    assert set(map(float, nothing.values())) == {0}


@pytest.mark.parametrize("seed", range(3))
def test_roc_auc_counts_pairs(seed):
    y_true, score, weights = arrays(seed, 2, 4, 3)  # scores repeat
    found = jax.jit(metrics.roc_auc_score)(y_true, score, weights=weights)
    wins, total = 0.0, 0.0
    for i, j in itertools.product(range(12), repeat=2):
        if y_true[i] > y_true[j]:
            pair = float(weights[i] * weights[j])
            total += pair
            wins += pair * (float(score[i] > score[j]) + float(score[i] == score[j]) / 2)
    np.testing.assert_allclose(found, wins / total, rtol=1e-6)
    assert jnp.isnan(metrics.roc_auc_score(jnp.ones(3), jnp.arange(3)))


@pytest.mark.parametrize("seed", range(3))
def test_correlations_match_scipy(seed):
    from scipy import stats  # takes a second, which every collection would take

    x, y, _ = arrays(seed, 6, 6, 2)
    padded = jnp.concatenate([x, jnp.array([100])]), jnp.concatenate([y, jnp.array([-100])])
    mask = jnp.arange(13) < 12
    close = {"rtol": 1e-4, "atol": 1e-6}
    expected = stats.pearsonr(x, y).statistic
    np.testing.assert_allclose(metrics.pearson_correlation(x, y), expected, **close)
    np.testing.assert_allclose(
        metrics.pearson_correlation(*padded, weights=mask), expected, **close
    )
    expected = stats.spearmanr(x, y).statistic
    np.testing.assert_allclose(metrics.spearman_correlation(*padded, mask=mask), expected, **close)


def test_matthews_correlation_of_counts():
    y_true, y_pred = jnp.array([1, 1, 1, 0, 0, 0, 0]), jnp.array([1, 1, 0, 0, 0, 0, 1])
    (tn, fp), (fn, tp) = metrics.confusion_matrix(y_true, y_pred, num_classes=2)
    expected = (tp * tn - fp * fn) / jnp.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    np.testing.assert_allclose(metrics.matthews_corrcoef(y_true, y_pred), expected, rtol=1e-5)
    assert metrics.matthews_corrcoef(jnp.ones(4), y_pred[:4]) == 0


SCORES = jnp.array([[0.9, 0.8, 0.7, 0.6], [0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.1, 0.2]])
LABELS = jnp.array([[0, 1, 0, 3], [1, 0, 0, 0], [0, 0, 0, 0]])


def test_retrieval_by_hand():
    hits = metrics.accuracy_at_k(SCORES, LABELS, top_ks=[1, 2, 4])
    np.testing.assert_allclose(list(hits.values()), [0, 1 / 3, 2 / 3], rtol=1e-6)
    assert list(hits) == ["accuracy@1", "accuracy@2", "accuracy@4"]
    assert metrics.average_rank(SCORES, LABELS) == (2 + 4) / 2
    found = metrics.average_precision_at_k(SCORES, LABELS, top_ks=[2, 4])
    expected = [(1 / 2) / 2 / 3, ((1 / 2 + 2 / 4) / 2 + 1 / 4) / 3]
    np.testing.assert_allclose(list(found.values()), expected, rtol=1e-6)
    gain, best = 1 / np.log2(3) + 7 / np.log2(5), 7 + 1 / np.log2(3)
    expected = (gain / best + 1 / np.log2(5)) / 3
    found = metrics.ndcg_at_k(SCORES, LABELS, top_ks=[4])["ndcg@4"]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
    "score", [metrics.accuracy_at_k, metrics.average_precision_at_k, metrics.ndcg_at_k]
)
def test_padding_queries_do_not_count(score):
    padding = jnp.array([False, True, False])
    kept = jnp.array([0, 2])
    labels = jnp.where(padding[:, None], jnp.nan, LABELS)
    padded = score(SCORES, labels, top_ks=[1, 3], query_padding=padding)
    assert padded == score(SCORES[kept], LABELS[kept], top_ks=[1, 3])
