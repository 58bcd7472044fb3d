import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.compiled import (
    absolute_error,
    activation_flops,
    binary_cross_entropy,
    categorical_hinge_loss,
    contrastive_logits,
    contrastive_loss,
    cross_entropy,
    elementwise_similarity,
    focal_loss,
    generalized_iou,
    huber_error,
    kl_divergence,
    nearest_neighbor_entropy_loss,
    pairwise_loss,
    rank_pairs,
    sigmoid_cross_entropy,
    squared_error,
    weighted_mean,
    with_cosine_margin,
)
from weft.errors import ArgumentValueError

RNG = np.random.default_rng(0)


def array(*shape):
    return jnp.array(RNG.normal(size=shape).astype(np.float32))


def close(ours, expected):
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)


LOGITS = array(2, 5, 7)
LABELS = jnp.array([[0, 6, 3, -1, 2], [7, 1, 1, 4, -100]])
LIVE = np.array([[1, 1, 1, 0, 1], [0, 1, 1, 1, 0]], bool)


def test_cross_entropy_averages_over_the_labels_that_are_classes():
    loss, aux = cross_entropy(LOGITS, LABELS)
    expected = optax.softmax_cross_entropy_with_integer_labels(LOGITS[LIVE], LABELS[LIVE])
    close(loss, expected.mean())
    close(aux["total_loss"], loss)
    close(aux["cross_entropy_loss"], loss)
    close(aux["accuracy"], (LOGITS.argmax(-1) == LABELS)[LIVE].mean())
    close(aux["per_target_loss"][LIVE], expected)
    assert (aux["per_target_loss"][~LIVE] == 0).all()
    assert aux["num_targets"] == 7
    np.testing.assert_array_equal(aux["live_targets"], LIVE)


def test_label_smoothing_spreads_over_all_classes():
    logits, labels = LOGITS[LIVE], LABELS[LIVE]
    smooth = optax.smooth_labels(jax.nn.one_hot(labels, 7), 0.2)
    expected = optax.softmax_cross_entropy(logits, smooth)
    close(cross_entropy(logits, labels, label_smoothing=0.2)[1]["per_target_loss"], expected)


def test_soft_labels_replace_labels():
    soft = jax.nn.softmax(array(2, 5, 7))
    loss, aux = cross_entropy(LOGITS, LABELS, soft_target_labels=soft)
    expected = optax.softmax_cross_entropy(LOGITS[LIVE], soft[LIVE])
    close(loss, expected.mean())
    close(aux["per_target_loss"][LIVE], expected)


def test_z_loss_is_the_squared_log_of_the_denominator():
    logits, labels = LOGITS[LIVE], LABELS[LIVE]
    loss, aux = cross_entropy(logits, labels, z_loss_scale=0.1)
    z = jax.nn.logsumexp(logits, axis=-1) ** 2
    each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    close(loss, (each + 0.1 * z).mean())
    close(cross_entropy(logits, labels)[1]["z_loss"], z.mean())
    close(aux["z_loss"], z.mean())
    close(aux["cross_entropy_loss"], each.mean())
    close(aux["per_target_loss"], each + 0.1 * z)


@pytest.mark.parametrize(
    "wrong", [{"label_smoothing": -0.1}, {"label_smoothing": 1.5}, {"z_loss_scale": -1.0}]
)
def test_ranges_of_factors_are_checked(wrong):
    with pytest.raises(ArgumentValueError, match="between 0 and 1, and a factor of at least 0"):
        cross_entropy(LOGITS, LABELS, **wrong)


def test_extreme_logits_stay_finite():
    logits = jnp.array([[1e30, -1e30], [-1e30, 1e30]])
    value, grad = jax.jit(jax.value_and_grad(lambda x: cross_entropy(x, jnp.array([0, 1]))[0]))(
        logits
    )
    assert value == 0
    assert np.isfinite(grad).all()


def test_binary_cross_entropy_leaves_out_labels_that_are_neither():
    logits, labels = array(6), jnp.array([0, 1, 1, -1, 0, 2])
    loss, aux = binary_cross_entropy(logits, target_labels=labels)
    live = (labels >= 0) & (labels < 2)
    expected = optax.sigmoid_binary_cross_entropy(logits, labels)
    close(loss, expected[live].mean())
    close(aux["per_target_loss"], jnp.where(live, expected, 0))
    assert aux["num_targets"] == 4


def test_sigmoid_cross_entropy_of_probabilities():
    logits, targets = array(8), jax.nn.sigmoid(array(8))
    p = jax.nn.sigmoid(logits)
    expected = -targets * jnp.log(p) - (1 - targets) * jnp.log(1 - p)
    close(sigmoid_cross_entropy(logits, targets), expected)


def test_categorical_hinge_loss():
    logits, labels = np.array(array(9, 4)), RNG.integers(0, 4, 9)
    expected = []
    for row, label in zip(logits, labels, strict=True):
        others = np.where(np.arange(4) == label, 0, row).max()
        expected.append(max(0, others - row[label] + 1))
    logits, targets = jnp.array(logits), jax.nn.one_hot(labels, 4)
    close(categorical_hinge_loss(logits, targets), expected)
    close(categorical_hinge_loss(logits[None], targets[None]), [expected])


def test_errors_of_regression():
    preds, targets = array(10), array(10)
    close(squared_error(preds, targets), (preds - targets) ** 2)
    close(absolute_error(preds, targets), abs(preds - targets))
    close(huber_error(preds, targets, delta=0.5), optax.huber_loss(preds, targets, delta=0.5))


def test_huber_gradient_is_clipped():
    grad = jax.vmap(jax.grad(lambda x: huber_error(x, jnp.float32(0), delta=2.0)))
    close(grad(jnp.array([-9.0, -1.0, 0.0, 1.5, 9.0])), [-2, -1, 0, 1.5, 2])


@pytest.mark.parametrize("log", [False, True])
def test_kl_divergence(log):
    p, q = jax.nn.softmax(array(3, 5)), jax.nn.softmax(array(3, 5))
    ours = kl_divergence(jnp.log(q), jnp.log(p) if log else p, is_log_targets=log)
    close(ours, np.sum(p * np.log(p / q), -1))


def test_weighted_mean():
    x, w = array(3, 4), jnp.array([[1.0], [0.0], [2.0]])
    mean, weight = weighted_mean(x, w)
    close(mean, (x * w).sum() / 12)
    assert weight == 12
    mean, weight = weighted_mean(x)
    close(mean, x.mean())
    assert weight == 12
    assert weighted_mean(jnp.array([jnp.nan, 2.0]), jnp.array([0, 1]))[0] == 2
    assert weighted_mean(x, jnp.zeros((3, 4)))[0] == 0


def test_contrastive_loss_finds_the_key_of_each_query():
    x, y = array(3, 4), array(5, 4)
    logits = contrastive_logits(x, y)
    close(logits, x @ y.T)
    expected = optax.softmax_cross_entropy_with_integer_labels(logits / 0.5, jnp.arange(3))
    close(contrastive_loss(logits, temperature=0.5), expected.mean())
    paddings = jnp.array([False, False, False, True, True])
    alone = optax.softmax_cross_entropy_with_integer_labels(logits[:, :3], jnp.arange(3))
    close(contrastive_loss(logits, key_paddings=paddings), alone.mean())
    soft = jax.nn.softmax(array(3, 5))
    close(
        contrastive_loss(logits, soft_labels=soft), optax.softmax_cross_entropy(logits, soft).mean()
    )


@pytest.mark.parametrize("alpha, gamma", [(0.25, 1.5), (0.5, 2.0), (0.25, 0.0)])
def test_focal_loss_formula(alpha, gamma):
    logits = RNG.normal(size=(3, 4)).astype(np.float32)
    targets = RNG.integers(0, 2, (3, 4))
    p = 1 / (1 + np.exp(-logits))
    p_t = np.where(targets, p, 1 - p)
    alpha_t = np.where(targets, alpha, 1 - alpha)
    expected = -alpha_t * (1 - p_t) ** gamma * np.log(p_t)
    found = focal_loss(jnp.array(logits), jnp.array(targets), alpha=alpha, gamma=gamma)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_focal_loss_has_gradients_at_large_logits():
    grad = jax.grad(lambda x: focal_loss(x, jnp.array([1, 0])).sum())(jnp.array([200.0, 200.0]))
    assert np.isfinite(grad).all()


def iou(a, b):
    """Boxes of whole numbers, by counting unit squares."""

    def cells(box):
        return {(x, y) for x in range(box[0], box[2]) for y in range(box[1], box[3])}

    low, high = np.minimum(a, b)[:2], np.maximum(a, b)[2:]
    around, union = np.prod(high - low), cells(a) | cells(b)
    return len(cells(a) & cells(b)) / len(union) - (around - len(union)) / around


def test_generalized_iou():
    corners = RNG.integers(0, 6, (20, 2, 2))
    boxes = np.concatenate([corners, corners + RNG.integers(1, 5, (20, 2, 2))], axis=2)
    a, b = boxes[:, 0], boxes[:, 1]
    expected = [iou(x, y) for x, y in zip(a, b, strict=True)]
    found = generalized_iou(jnp.array(a, jnp.float32), jnp.array(b, jnp.float32))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


X = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
UNIT = X / np.linalg.norm(X, axis=1, keepdims=True)


def test_nearest_neighbor_counts():
    distances = np.linalg.norm(UNIT[:, None] - UNIT[None], axis=-1) + 9 * np.eye(5)
    expected = -np.log(distances.min(1)).mean()
    np.testing.assert_allclose(nearest_neighbor_entropy_loss(jnp.array(X)), expected, rtol=1e-4)
    # Without the sphere, the nearest is the one of the largest inner product.
    nearest = (X @ X.T - 99 * np.eye(5)).argmax(1)
    expected = -np.log(np.linalg.norm(X - X[nearest], axis=1)).mean()
    found = nearest_neighbor_entropy_loss(jnp.array(X), normalize_embedding=False)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_equal_vectors_have_finite_gradients():
    grad = jax.grad(nearest_neighbor_entropy_loss)(jnp.ones((3, 2)).at[0].set(0.0))
    assert np.isfinite(grad).all()
    # Both components of the difference are eps, which is also added to the distance.
    distance = (np.sqrt(2) + 1) * 1e-8
    close(nearest_neighbor_entropy_loss(jnp.ones((3, 2))), -np.log(distance))


def test_one_vector_is_its_own_neighbor():
    value, grad = jax.value_and_grad(nearest_neighbor_entropy_loss)(jnp.array([[3.0, 4.0]]))
    close(value, 17.539307)  # of AXLearn
    np.testing.assert_array_equal(grad, [[0, 0]])
    with pytest.raises(ArgumentValueError, match=r"\(0, 3\) have no neighbors; expected at least"):
        nearest_neighbor_entropy_loss(jnp.array(X[:0]))


def test_products_add_up_to_the_cosine():
    y = X[::-1]
    products = elementwise_similarity(jnp.array(X), jnp.array(y))
    np.testing.assert_allclose(products, UNIT * UNIT[::-1], rtol=1e-5)
    plain = elementwise_similarity(jnp.array(X), jnp.array(y), normalize_embedding=False)
    np.testing.assert_allclose(plain, X * y, rtol=1e-5)


def test_zero_vector_has_cosine_zero_and_a_gradient():
    zero = jnp.zeros(3)
    assert elementwise_similarity(zero, jnp.ones(3)).tolist() == [0, 0, 0]
    grad = jax.grad(lambda x: elementwise_similarity(x, jnp.ones(3)).sum())(zero)
    assert np.isfinite(grad).all()


def test_flops_are_squares_of_mean_magnitudes():
    cost, zeros = activation_flops(jnp.array(X), sparsity_threshold=0.5)
    np.testing.assert_allclose(cost, (np.abs(X).mean(0) ** 2).sum(), rtol=1e-5)
    np.testing.assert_allclose(zeros, (np.abs(X) <= 0.5).sum(1).mean(), rtol=1e-5)
    cost, zeros = activation_flops(jnp.array(X), paddings=jnp.array([0, 1, 0, 1, 1]))
    np.testing.assert_allclose(cost, (np.abs(X[[0, 2]]).mean(0) ** 2).sum(), rtol=1e-5)
    assert zeros == 0
    of_rows = activation_flops(jnp.array(X[:4]), paddings=jnp.array([0, 1, 0, 0]))
    x = jnp.array(X[:4].reshape(2, 2, 3))
    assert activation_flops(x, paddings=jnp.array([[0, 1], [0, 0]])) == of_rows


def test_margin_lowers_the_right_class():
    targets = np.eye(3, dtype=np.float32)[[0, 1, 2, 1, 0]]
    found = with_cosine_margin(jnp.array(X), jnp.array(targets), alpha=3.0, margin=0.2)
    np.testing.assert_allclose(found, 3 * X - 0.6 * targets, rtol=1e-5, atol=1e-6)


def test_pairs_are_of_different_ranks():
    pairs = np.asarray(rank_pairs(jnp.array([[2, 1, 2, 0, 3]])))[0]
    expected = np.zeros((5, 5))
    expected[1, [0, 2, 4]] = expected[[0, 2], 4] = 1
    np.testing.assert_array_equal(pairs, expected)


def test_pairwise_loss_formula():
    logits = RNG.normal(size=(2, 3)).astype(np.float32)
    weights = RNG.uniform(size=(2, 3, 3)).astype(np.float32)
    scale = np.array([1.0, 3.0], np.float32)
    total = sum(
        scale[b] * weights[b, i, j] * np.log1p(np.exp(logits[b, j] - logits[b, i]))
        for b in range(2)
        for i in range(3)
        for j in range(3)
    )
    loss, weight = pairwise_loss(
        logits=jnp.array(logits), pair_weights=jnp.array(weights), loss_scale=jnp.array(scale)
    )
    np.testing.assert_allclose(loss, total / weights.sum(), rtol=1e-5)
    np.testing.assert_allclose(weight, weights.sum(), rtol=1e-5)


def test_no_pairs_give_zero_loss():
    nothing = jnp.zeros((1, 2, 2))
    loss, weight = pairwise_loss(
        logits=jnp.ones((1, 2)), pair_weights=nothing, loss_scale=jnp.ones(1)
    )
    assert (float(loss), float(weight)) == (0, 0)
