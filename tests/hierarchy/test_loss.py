"""Where a test says so, its numbers are what AXLearn 0.0.1 gives for A and B."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ArgumentValueError
from weft.hierarchy import loss as losses
from weft.hierarchy.loss import ReductionMethod

A = np.array(
    [
        [1.764052391052246, 0.40015721321105957, 0.978738009929657, 2.2408931255340576],
        [1.8675580024719238, -0.9772778749465942, 0.9500884413719177, -0.15135720372200012],
        [-0.10321885347366333, 0.4105985164642334, 0.14404356479644775, 1.4542734622955322],
    ],
    np.float32,
)
B = np.array(
    [
        [0.7610377073287964, 0.12167501449584961, 0.44386324286460876, 0.3336743414402008],
        [1.4940791130065918, -0.2051582634449005, 0.3130677044391632, -0.8540957570075989],
        [-2.5529897212982178, 0.653618574142456, 0.8644362092018127, -0.7421650290489197],
    ],
    np.float32,
)
a, b = jnp.array(A), jnp.array(B)
U = jnp.array([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.5]])
WEIGHT = jnp.array([1.0, 0.0, 2.0])


def near(expected):
    return pytest.approx(expected, rel=2e-5)


def test_squares_match_axlearn():
    loss = losses.mean_squared_error(a, b)
    assert (loss.mean, loss.weight) == near((1.5038501, 12))
    loss = losses.mean_squared_error(a, b, sample_weight=WEIGHT)
    assert (loss.mean, loss.weight) == near((2.3178878, 12))
    loss = losses.l1_loss(a, b, sample_weight=jnp.full((3, 4), 2.0))
    assert (loss.mean, loss.weight) == near((0.98488086, 24))


def test_images_are_resized_before_they_are_compared():
    x, y = jax.random.normal(jax.random.key(0), (2, 1, 2, 2, 1))
    loss = losses.bilinear_mean_squared_error(x, y, shape=(1, 3, 3, 1))
    # On a line of two pixels, three lie at the first, between both, at the second.
    to_three = np.array([[1, 0], [0.5, 0.5], [0, 1]])
    d = to_three @ np.asarray(x - y)[0, :, :, 0] @ to_three.T
    assert (loss.mean, loss.weight) == near(((d**2).mean(), 9))
    same = losses.bilinear_mean_squared_error(
        jnp.ones((1, 2, 2, 1)), jnp.ones((1, 5, 4, 1)), shape=(1, 3, 3, 1)
    )
    assert float(same.mean) == pytest.approx(0, abs=1e-12)


def test_huber_losses_match_axlearn():
    kwargs = {"predictions": a, "targets": b}
    assert losses.huber_loss(**kwargs)[0].tolist() == near(
        [0.50301468, 0.03877617, 0.14304553, 1.40721881]
    )
    rows = losses.huber_loss(**kwargs, delta=0.5, reduce_axis=-1)
    assert rows.tolist() == near([0.34658259, 0.18767068, 0.58445764])
    mean = losses.huber_loss(
        **kwargs, delta=0.5, reduce_axis=-1, reduction=ReductionMethod.MEAN, sample_weight=WEIGHT
    )
    assert mean == near(0.50516599)
    assert losses.huber_loss(**kwargs, reduction=ReductionMethod.SUM) == near(6.84492302)


def test_boxes_match_axlearn():
    kwargs = {
        "predictions": jnp.array([[0, 0, 2, 2], [0, 0, 1, 1], [1, 1, 3, 4]], jnp.float32),
        "targets": jnp.array([[1, 1, 3, 3], [0, 0, 1, 1], [5, 5, 6, 6]], jnp.float32),
    }
    assert losses.giou_loss(**kwargs).tolist() == pytest.approx([1.079365, 0, 1.72], abs=1e-6)
    mean = losses.giou_loss(**kwargs, reduction=ReductionMethod.MEAN, sample_weight=WEIGHT)
    assert mean == near(1.5064551)
    assert losses.giou_loss(**kwargs, reduction=ReductionMethod.SUM) == near(2.799365)


def test_focal_losses_match_axlearn():
    targets = jnp.array([[0, 1, 0, 1]] * 3)
    assert losses.focal_loss(a, targets) == near(4.2727904)
    loss = losses.focal_loss(a, targets, alpha=0.5, gamma=2.0, sample_weight=WEIGHT)
    assert loss == near(1.5385989)


def test_divergences_match_axlearn():
    log_p = jax.nn.log_softmax(a)
    loss, aux = losses.kl_divergence(log_p, jax.nn.softmax(b))
    assert loss == near(0.30620033)
    assert aux["per_example_loss"].tolist() == near([0.17915268, 0.06447431, 0.67497396])
    loss, _ = losses.kl_divergence(log_p, jax.nn.log_softmax(b), is_log_targets=True)
    assert loss == near(0.30620033)


def test_margins_match_axlearn():
    cosines = jnp.tanh(a)
    loss, aux = losses.large_margin_cosine_loss(cosines, labels=jnp.array([0, 1, 3]))
    assert (loss, aux["accuracy"], aux["num_examples"]) == near((1.5575382, 1 / 3, 3))
    kwargs = {"alpha": 3.0, "margin": 0.3}
    loss, aux = losses.large_margin_cosine_loss(cosines, labels=jnp.array([0, 1, -1]), **kwargs)
    assert (loss, aux["accuracy"], aux["num_examples"]) == near((4.0910640, 0, 2))
    soft = jax.nn.softmax(b)
    loss, aux = losses.large_margin_cosine_loss(cosines, soft_labels=soft, **kwargs)
    assert (loss, aux["num_examples"]) == near((1.7120261, 3))


@pytest.mark.parametrize(
    "kwargs", [{}, {"labels": jnp.array([0]), "soft_labels": jnp.ones((1, 4))}]
)
def test_margins_reject_duplicate_labels(kwargs):
    with pytest.raises(ArgumentValueError, match="pass either labels or soft_labels"):
        losses.large_margin_cosine_loss(a[:1], **kwargs)


def test_contrastive_losses_match_axlearn():
    square, wide = a[:, :3], a
    from_logits = losses.asymmetric_contrastive_loss_from_logits
    assert from_logits(square) == near(1.6287107)
    paddings = jnp.array([0, 0, 0, 1])
    assert from_logits(wide, key_paddings=paddings, temperature=0.5) == near(2.4268181)
    both = losses.symmetric_contrastive_loss_from_logits(square, square.T, temperature=0.5)
    assert both == near(2.3348963)
    assert losses.asymmetric_contrastive_loss_from_features(a, b) == near(0.57014048)
    loss = losses.asymmetric_contrastive_loss_from_features(
        a, b, negative_keys=2 * a[:2], negative_key_paddings=jnp.array([0, 1]), temperature=0.5
    )
    assert loss == near(17.791948)
    assert losses.symmetric_contrastive_loss_from_features(a, b, temperature=0.5) == near(
        0.38132176
    )
    loss = losses.symmetric_contrastive_loss_from_features(
        a, b, x_negatives=2 * a[:2], y_negatives=3 * b[:1]
    )
    assert loss == near(2.6157649)


def test_soft_labels_may_name_the_keys():
    labels = jnp.eye(3)[jnp.array([1, 0, 2])]
    x_to_y = losses.asymmetric_contrastive_loss_from_features(a, b, soft_labels=labels)
    swapped = losses.asymmetric_contrastive_loss_from_features(a, b[jnp.array([1, 0, 2])])
    assert x_to_y == near(float(swapped))


def test_cosines_match_axlearn():
    loss, aux = losses.negative_cosine_similarity_loss(a, b)
    assert loss == near(-0.54377282)
    assert aux["cosine_similarity"].tolist() == near([0.89065248, 0.8374781, -0.09681229])
    np.testing.assert_allclose(
        aux["elementwise_similarity"].sum(-1), aux["cosine_similarity"], rtol=1e-5
    )
    live = jnp.array([1, 0, 1])
    loss, _ = losses.negative_cosine_similarity_loss(
        a, b, normalize_embedding=False, live_targets=live
    )
    assert loss == near(-1.0752253)
    by_reduction = {
        reduction: losses.negative_cosine_similarity_loss(
            a, b, live_targets=live, reduction=reduction
        )[0].tolist()
        for reduction in ReductionMethod
    }
    assert by_reduction["none"] == near([-0.89065248, 0, 0.09681229])
    assert by_reduction["sum"] == near(-0.79384017)
    assert by_reduction["mean"] == near(-0.39692009)


def test_spread_and_sparsity_match_axlearn():
    assert losses.koleo_loss(a) == near(0.20501339)
    assert losses.koleo_loss(a, normalize_embedding=False) == near(-0.93895358)
    # A large eps shows each of its places: in squared lengths, differences and distances.
    assert losses.koleo_loss(U, eps=0.5) == near(-0.5383473)
    assert losses.koleo_loss(U, eps=0.5, normalize_embedding=False) == near(-1.2622607)
    assert losses.flops_loss(embeddings=a) == near((4.0265055, 0.0))
    assert losses.flops_loss(embeddings=a, paddings=jnp.array([0, 1, 0])) == near((4.7647305, 0))
    assert losses.flops_loss(embeddings=a, sparsity_threshold=1.0) == near((4.0265055, 8 / 3))


def test_rankings_match_axlearn():
    ranks = jnp.array([[1, 2, 3, 4], [1, 1, 2, 0], [0, 0, 0, 0]])
    found = losses.ranking_pairwise_loss(
        logits=a, ranks=ranks, loss_scale=jnp.array([1.0, 2.0, 1.0])
    )
    assert found == near((1.3606176, 8))


def test_equal_embeddings_are_1e_8_apart_in_each_component():
    # The third is sqrt(0.8) from both others; the difference of these is (1e-8, 1e-8).
    equal = jnp.array([[3.0, 4.0], [3.0, 4.0], [1.0, 0.0]])
    expected = -(2 * np.log(1e-8 * (1 + np.sqrt(2))) + np.log(np.sqrt(0.8))) / 3
    assert losses.koleo_loss(equal) == near(expected)


def test_similarity_adds_eps_to_squared_lengths():
    # (3, 4) has the length 5, (1, 0) the length 1.
    loss, _ = losses.negative_cosine_similarity_loss(
        jnp.array([[3.0, 4.0]]), jnp.array([[1.0, 0.0]]), eps=0.5
    )
    assert loss == near(-3 / np.sqrt(25.5 * 1.5))
