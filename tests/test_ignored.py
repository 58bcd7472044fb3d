"""What does not count has no effect: neither on values nor on gradients, even if it is not finite.

Each case is a function of arrays by name, and where it ignores each array. Its value and gradients
with NaN and infinities there are those with finite numbers, and the gradient there is 0.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft import functional, hierarchy, nnx
from weft import linen as nn
from weft.functional import routing
from weft.hierarchy import mixture_of_experts, poolings, quantizer
from weft.hierarchy.causal_lm import target_statistics
from weft.hierarchy.layers.classification import CategoricalHingeLossMetric
from weft.hierarchy.module import functional as run_method

RNG = np.random.default_rng(0)
LIVE = np.array([True, True, False, True])
LABELS = jnp.array([2, 0, 1, 1])
HIDDEN = jnp.where(LIVE, LABELS, -1)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


@dataclasses.dataclass
class Case:
    """Attributes:
    fn: returns a number.
    arrays: its arguments by name.
    ignored: where an array is ignored, broadcastable to it. Other arrays count everywhere.
    """

    fn: Callable[..., jax.Array]
    arrays: dict[str, np.ndarray]
    ignored: dict[str, np.ndarray]


def rows(fn: Callable[..., jax.Array], **arrays: np.ndarray) -> Case:
    """A case that ignores row 2 of each of four rows."""
    of_rows = {k: x for k, x in arrays.items() if np.shape(x)[:1] == (4,)}
    ignored = {k: ~LIVE.reshape(-1, *[1] * (x.ndim - 1)) for k, x in of_rows.items()}
    return Case(fn, arrays, ignored)


def total(y: jax.Array, live: np.ndarray = LIVE) -> jax.Array:
    """The sum of the squares of what counts."""
    live = live.reshape(*live.shape, *[1] * (y.ndim - live.ndim))
    return jnp.sum(jnp.square(jnp.where(live, y, 0)))


def norm(fn: Callable[..., jax.Array]) -> Case:
    def masked(x, scale, bias):
        return total(fn(x, scale, bias, jnp.array(LIVE)[:, None]))

    return rows(masked, x=normal(4, 6), scale=normal(6), bias=normal(6))


def nnx_norm(make: Callable[..., nnx.Module], features: int = 6) -> Case:
    """A norm of NNX, with its mask."""
    module = make(features, rngs=nnx.Rngs(0))
    graph, params, rest = nnx.split(module, nnx.Param, ...)

    def masked(params, x):
        y = nnx.merge(graph, params, rest, copy=True)(x, mask=jnp.array(LIVE)[:, None])
        return total(y + 0.1)

    params = nnx.to_pure_dict(params)
    return rows(masked, params=params, x=normal(4, features))


def linen_norm(module: nn.Module) -> Case:
    """A norm of Linen, with its mask."""
    x = normal(4, 6)
    variables = module.init(jax.random.key(0), x)
    params = variables.pop("params")

    def masked(params, x):
        mask = jnp.array(LIVE)[:, None]
        y, _ = module.apply({"params": params, **variables}, x, mask=mask, mutable=["batch_stats"])
        return total(y + 0.1)

    return rows(masked, params=params, x=x)


def hierarchy_layer(
    cfg: hierarchy.BaseLayer.Config, features: int, loss: Callable[..., jax.Array], **arguments
) -> Case:
    """A layer of a batch of one sequence of four positions."""
    layer = cfg.set(name="layer").instantiate(parent=None)
    specs = layer.create_parameter_specs_recursively()
    state = jax.tree.map(lambda spec: np.ones(spec.shape, spec.dtype or "f"), specs)
    params = jax.tree.map(lambda x: normal(*x.shape) if x.dtype == "f" else None, state)

    def run(params, x):
        both = jax.tree.map(lambda x, p: x if p is None else p, state, params)
        first = next(iter(inspect.signature(layer.forward).parameters))
        inputs = {first: x[None], **arguments}
        y, _ = run_method(layer, jax.random.key(0), both, inputs, is_training=True)
        return loss(y)

    return rows(run, params=params, x=normal(4, features))


def of_moments(x, scale, bias, where, **options):
    mean, variance = functional.moments(x, axis=0, where=where, **options)
    return functional.batch_norm(x, mean, variance, scale, bias, where=where)


SIMPLEX = np.array(jax.nn.softmax(normal(4, 3)))
WEIGHTS = jnp.array([1.0, 0.5, 0.0, 2.0])
PADDED_KEYS = np.array([False, False, True])
RANKS = jnp.array([[1, 2, 0, 3]])

CASES = {
    "cross_entropy": rows(lambda x: functional.cross_entropy(x, HIDDEN)[0], x=normal(4, 3)),
    "cross_entropy, all parts": rows(
        lambda x: sum(
            jnp.sum(part)
            for part in functional.cross_entropy(
                x, LABELS, live_targets=WEIGHTS, z_loss_scale=0.1, label_smoothing=0.2
            )[1].values()
        ),
        x=normal(4, 3),
    ),
    "cross_entropy, soft labels": rows(
        lambda x, labels: functional.cross_entropy(x, HIDDEN, soft_target_labels=labels)[0],
        x=normal(4, 3),
        labels=SIMPLEX,
    ),
    **{
        f"linear_cross_entropy, chunks of {size}": rows(
            lambda x, weight, bias, labels, size=size: functional.linear_cross_entropy(
                x,
                weight,
                LABELS,
                bias=bias,
                live_targets=WEIGHTS,
                z_loss_scale=0.1,
                soft_target_labels=labels,
                chunk_size=size,
            )[0],
            x=normal(4, 5),
            weight=normal(3, 5),
            bias=normal(3),
            labels=SIMPLEX,
        )
        for size in (1, 3)
    },
    "linear_cross_entropy, hard labels": rows(
        lambda x, weight: functional.linear_cross_entropy(x, weight, HIDDEN, chunk_size=2)[0],
        x=normal(4, 5),
        weight=normal(3, 5),
    ),
    "target_statistics": rows(
        lambda x: sum(
            jnp.sum(part)
            for part in target_statistics(x[None], LABELS[None], jnp.array(LIVE)[None]).values()
        ),
        x=normal(4, 3),
    ),
    "binary_cross_entropy": rows(
        lambda x, labels: functional.binary_cross_entropy(
            x, target_labels=labels, live_targets=WEIGHTS
        )[0],
        x=normal(4),
        labels=SIMPLEX[:, 0],
    ),
    "kl_divergence": Case(
        lambda x, p: functional.kl_divergence(x, p),
        {"x": normal(4), "p": SIMPLEX[:, 0] * LIVE},
        {"x": ~LIVE},
    ),
    "activation_flops": rows(
        lambda x: functional.activation_flops(x, paddings=1 - jnp.array(LIVE))[0], x=normal(4, 3)
    ),
    "pairwise_loss": Case(
        lambda x: hierarchy.ranking_pairwise_loss(logits=x, ranks=RANKS, loss_scale=jnp.ones(1))[0],
        {"x": normal(1, 4)},
        {"x": ~LIVE[None]},
    ),
    "contrastive_loss": Case(
        lambda x, temperature: functional.contrastive_loss(
            x, temperature=temperature, key_paddings=jnp.array(PADDED_KEYS)
        ),
        {"x": normal(2, 3), "temperature": np.float32(0.5)},
        {"x": PADDED_KEYS[None]},
    ),
    "contrastive_loss, soft labels": rows(
        lambda x, temperature: functional.contrastive_loss(
            x, temperature=temperature, soft_labels=jnp.array(SIMPLEX * LIVE[:, None])
        ),
        x=normal(4, 3),
        temperature=np.float32(0.5),
    ),
    "contrastive features": Case(
        lambda x, y, negatives: hierarchy.symmetric_contrastive_loss_from_features(
            x, y, x_negatives=negatives, x_negative_paddings=jnp.array(PADDED_KEYS)
        ),
        {"x": normal(2, 5), "y": normal(2, 5), "negatives": normal(3, 5)},
        {"negatives": PADDED_KEYS[:, None]},
    ),
    **{
        name: rows(
            lambda x, y, fn=fn: fn(x, y, sample_weight=WEIGHTS).mean, x=normal(4, 3), y=normal(4, 3)
        )
        for name, fn in {
            "mean_squared_error": hierarchy.mean_squared_error,
            "l1_loss": hierarchy.l1_loss,
        }.items()
    },
    "bilinear_mean_squared_error": rows(
        lambda x, y: (
            hierarchy.bilinear_mean_squared_error(
                x, y, shape=(4, 2, 2, 1), sample_weight=WEIGHTS
            ).mean
        ),
        x=normal(4, 3, 3, 1),
        y=normal(4, 4, 4, 1),
    ),
    **{
        f"huber_loss, {reduce_axis=}": rows(
            lambda x, y, reduce_axis=reduce_axis: hierarchy.huber_loss(
                predictions=x,
                targets=y,
                sample_weight=WEIGHTS,
                reduce_axis=reduce_axis,
                reduction=hierarchy.ReductionMethod.SUM,
            ),
            x=normal(4, 3),
            y=normal(4, 3),
        )
        for reduce_axis in (None, 1)
    },
    "giou_loss": rows(
        lambda x, y: hierarchy.giou_loss(
            predictions=x,
            targets=y,
            sample_weight=WEIGHTS,
            reduction=hierarchy.ReductionMethod.MEAN,
        ),
        x=np.sort(normal(4, 4)),
        y=np.sort(normal(4, 4)),
    ),
    "focal_loss": rows(
        lambda x, y: hierarchy.focal_loss(x, y, sample_weight=WEIGHTS),
        x=normal(4, 3),
        y=SIMPLEX,
    ),
    "negative_cosine_similarity_loss": rows(
        lambda x, y: hierarchy.negative_cosine_similarity_loss(x, y, live_targets=WEIGHTS)[0],
        x=normal(4, 3),
        y=normal(4, 3),
    ),
    "large_margin_cosine_loss": rows(
        lambda x: hierarchy.large_margin_cosine_loss(x, labels=HIDDEN, alpha=2.0, margin=0.1)[0],
        x=normal(4, 3),
    ),
    "layer_norm": Case(
        lambda x, scale, bias: total(
            functional.layer_norm(x, scale, bias, where=jnp.array(LIVE)[None]), LIVE[None]
        ),
        {"x": normal(3, 4), "scale": normal(4), "bias": normal(4)},
        {"x": ~LIVE[None]},
    ),
    "layer_norm, two passes": norm(
        lambda x, scale, bias, where: functional.layer_norm(
            x, scale, bias, axis=0, where=where, fast_variance=False
        )
    ),
    "layer_norm over a mapped axis": norm(
        lambda x, scale, bias, where: jax.vmap(
            lambda x, where: functional.layer_norm(x, scale, bias, where=where, axis_name="i"),
            axis_name="i",
        )(x, jnp.broadcast_to(where, x.shape))
    ),
    "rms_norm": norm(
        lambda x, scale, bias, where: (
            functional.rms_norm(x, scale, axis=0, where=where) + bias[None]
        )
    ),
    "group_norm": norm(
        lambda x, scale, bias, where: functional.group_norm(
            x[None], scale, bias, num_groups=2, where=where[None]
        )[0]
    ),
    "group_norm of segments": norm(
        lambda x, scale, bias, where: functional.group_norm(
            x[None],
            scale,
            bias,
            num_groups=2,
            where=where[None],
            segment_ids=jnp.array([[1, 1, 1, 2]]),
        )[0]
    ),
    "batch_norm": norm(of_moments),
    "batch_norm, two passes": norm(
        lambda x, scale, bias, where: of_moments(x, scale, bias, where, fast=False)
    ),
    "router losses": rows(lambda x: routing.router_z_loss(x, jnp.array(LIVE)), x=normal(4, 3)),
    "pearson_correlation": rows(
        lambda x, y: functional.pearson_correlation(x, y, weights=WEIGHTS), x=normal(4), y=normal(4)
    ),
}


SEQUENCE = {"paddings": jnp.array(~LIVE)[None]}


def of_layer(cls: type, loss: Callable[..., jax.Array], features: int = 6, **fields) -> Case:
    cfg = cls.default_config().set(**fields)
    return hierarchy_layer(cfg, features, loss, **SEQUENCE)


def pooled(cls: type, **fields) -> Case:
    return of_layer(cls, lambda y: jnp.sum(jnp.square(y)), input_dim=6, output_dim=6, **fields)


def experts(cls: type) -> Case:
    return of_layer(
        cls,
        lambda y: total(y[0]),
        input_dim=6,
        hidden_dim=5,
        num_experts=3,
        structure="prenorm",
        **({"num_groups": 1} if cls is mixture_of_experts.TransformerFeedForwardMoE else {}),
    )


def recurrent() -> Case:
    """A network over a sequence of four positions, where the last two do not count."""
    module, lengths = nn.RNN(nn.GRUCell(3)), jnp.array([2])
    x = normal(4, 6)
    params = module.init(jax.random.key(0), x[None])["params"]

    def run(params, x):
        y = module.apply({"params": params}, x[None], seq_lengths=lengths)
        return total(y[0, :2], LIVE[:2])

    return Case(run, {"params": params, "x": x}, {"x": np.arange(4)[:, None] >= 2})


CASES |= {
    "nnx.BatchNorm": nnx_norm(nnx.BatchNorm),
    "nnx.LayerNorm": nnx_norm(lambda n, rngs: nnx.LayerNorm(n, reduction_axes=0, rngs=rngs)),
    "nnx.RMSNorm": nnx_norm(lambda n, rngs: nnx.RMSNorm(n, reduction_axes=0, rngs=rngs)),
    "nnx.GroupNorm": nnx_norm(
        lambda n, rngs: nnx.GroupNorm(n, num_groups=2, reduction_axes=(0, 1), rngs=rngs)
    ),
    "nnx.InstanceNorm": nnx_norm(lambda n, rngs: nnx.InstanceNorm(n, rngs=rngs)),
    "linen.BatchNorm": linen_norm(nn.BatchNorm(use_running_average=False)),
    "linen.LayerNorm": linen_norm(nn.LayerNorm(reduction_axes=0)),
    "linen.RMSNorm": linen_norm(nn.RMSNorm(reduction_axes=0)),
    "linen.GroupNorm": linen_norm(nn.GroupNorm(num_groups=2, reduction_axes=(0, 1))),
    "hierarchy.BatchNorm": hierarchy_layer(
        hierarchy.BatchNorm.default_config().set(input_dim=6),
        6,
        lambda y: total(y[0]),
        segment_ids=jnp.array(LIVE).astype(int)[None],
    ),
    **{
        cls.__name__: pooled(cls)
        for cls in (
            poolings.AveragePooling,
            poolings.MaxPooling,
            poolings.FirstNTokenPooling,
            poolings.LastNTokenPooling,
            poolings.AttentionPooling,
        )
    },
    **{
        cls.__name__: of_layer(
            cls,
            lambda y: total(y.quantized_vectors[0]) + (0.0 if y.loss is None else y.loss),
            codebook_size=3,
            codebook_dim=2,
            num_codebooks=3,
            **fields,
        )
        for cls, fields in {
            quantizer.KmeansVectorQuantizer: {},
            quantizer.GumbelSoftmaxVectorQuantizer: {"input_dim": 6},
        }.items()
    },
    **{
        cls.__name__: experts(cls)
        for cls in (
            mixture_of_experts.TransformerFeedForwardMoE,
            mixture_of_experts.TransformerFeedForwardDropFreeMoE,
        )
    },
    "CategoricalHingeLossMetric": hierarchy_layer(
        CategoricalHingeLossMetric.default_config().set(num_classes=3),
        3,
        lambda loss: loss,
        labels=HIDDEN[None],
    ),
    "linen.RNN": recurrent(),
}


def poisoned(case: Case, bad: float) -> dict[str, np.ndarray]:
    """The arrays, with a number where they are ignored."""
    ignored = case.ignored
    return {k: np.where(ignored[k], bad, x) if k in ignored else x for k, x in case.arrays.items()}


LOGITS = np.array([[0.0, 1.0, -np.inf], [2.0, -np.inf, 0.5]], np.float32)
PROBS = np.array([[0.3, 0.7, 0.0], [0.5, 0.0, 0.5]], np.float32)
IMPOSSIBLE = {
    "cross_entropy": lambda x: functional.cross_entropy(
        x, LABELS[:2], soft_target_labels=jnp.array(PROBS)
    )[0],
    **{
        f"linear_cross_entropy, chunks of {size}": lambda x, size=size: (
            functional.linear_cross_entropy(
                jnp.eye(1),
                jnp.zeros((3, 1)),
                LABELS[:1],
                bias=x[0],
                soft_target_labels=jnp.array(PROBS[:1]),
                chunk_size=size,
            )[0]
        )
        for size in (1, 3)
    },
    "contrastive_loss": lambda x: functional.contrastive_loss(
        x, temperature=2.0, soft_labels=jnp.array(PROBS)
    ),
    "kl_divergence": lambda x: functional.kl_divergence(
        jax.nn.log_softmax(x), jnp.array(PROBS)
    ).sum(),
    "binary_cross_entropy": lambda x: functional.binary_cross_entropy(
        jnp.stack([x[0, 2], -x[0, 2], x[0, 1]]), target_labels=jnp.array([0, 1, 1])
    )[0],
    "focal_loss": lambda x: functional.focal_loss(x[0], jnp.array([1, 0, 0])).sum(),
    "categorical_hinge_loss": lambda x: functional.categorical_hinge_loss(
        x, jnp.array([[1, 0, 0], [0, 0, 1]])
    ).sum(),
}


def test_a_class_without_probability_may_have_a_logit_of_minus_infinity():
    """The loss and its gradient are those of a logit that is low enough."""

    @jax.jit
    def all_losses(x):
        return {name: jax.value_and_grad(fn)(x) for name, fn in IMPOSSIBLE.items()}

    low = all_losses(np.where(np.isinf(LOGITS), -60, LOGITS))
    assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(assert_close, all_losses(LOGITS), low)


def test_the_temperature_has_a_gradient_beside_a_logit_of_minus_infinity():
    def loss(temperature, x):
        probs = jnp.array(PROBS)
        return functional.contrastive_loss(x, temperature=temperature, soft_labels=probs)

    of_low = jax.grad(loss)(2.0, jnp.where(np.isinf(LOGITS), -60, LOGITS))
    np.testing.assert_allclose(jax.grad(loss)(2.0, jnp.array(LOGITS)), of_low, rtol=1e-5)


@functools.cache
def results(bad: float) -> dict[str, tuple[jax.Array, dict[str, jax.Array]]]:
    """Values and gradients of all cases, computed by one program."""
    return run_all({name: poisoned(case, bad) for name, case in CASES.items()})


@jax.jit
def run_all(arrays: dict[str, dict[str, jax.Array]]) -> dict[str, tuple[jax.Array, dict]]:
    return {
        name: jax.value_and_grad(lambda arrays, fn=case.fn: fn(**arrays))(arrays[name])
        for name, case in CASES.items()
    }


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", CASES)
def test_what_does_not_count_has_no_effect(name, bad):
    value, gradients = results(0.5)[name]
    assert np.isfinite(value) and value != 0
    value_of_bad, gradients_of_bad = results(bad)[name]
    np.testing.assert_allclose(value_of_bad, value, rtol=1e-5)
    assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(assert_close, gradients_of_bad, gradients)
    for k, ignored in CASES[name].ignored.items():
        gradient = np.asarray(gradients_of_bad[k])
        assert (gradient[np.broadcast_to(ignored, gradient.shape)] == 0).all()


NONE_COUNTS = np.zeros(4, np.float32)
NO_CLASS = jnp.full(4, -1)
WITHOUT_TARGETS = {
    "cross_entropy": lambda x: functional.cross_entropy(x, NO_CLASS, z_loss_scale=1.0)[0],
    "linear_cross_entropy": lambda x: functional.linear_cross_entropy(
        x, jnp.ones((5, 3)), NO_CLASS, chunk_size=3
    )[0],
    "binary_cross_entropy": lambda x: functional.binary_cross_entropy(
        x[:, 0], target_labels=jnp.ones(4), live_targets=NONE_COUNTS
    )[0],
    "mean_squared_error": lambda x: (
        hierarchy.mean_squared_error(x, x[::-1], sample_weight=NONE_COUNTS).mean
    ),
    "l1_loss": lambda x: hierarchy.l1_loss(x, x[::-1], sample_weight=NONE_COUNTS).mean,
    "huber_loss": lambda x: hierarchy.huber_loss(
        predictions=x,
        targets=jnp.ones((4, 3)),
        sample_weight=NONE_COUNTS,
        reduction=hierarchy.ReductionMethod.MEAN,
    ),
    "negative_cosine_similarity_loss": lambda x: hierarchy.negative_cosine_similarity_loss(
        x, jnp.ones((4, 3)), live_targets=NONE_COUNTS
    )[0],
    "large_margin_cosine_loss": lambda x: hierarchy.large_margin_cosine_loss(
        x, labels=NO_CLASS, alpha=2.0, margin=0.1
    )[0],
    "contrastive_loss": lambda x: functional.contrastive_loss(
        x, temperature=1.0, key_paddings=jnp.ones(3, bool)
    ),
}


@pytest.mark.parametrize("bad", [1.0, np.nan])
def test_a_loss_of_nothing_is_zero(bad):
    @jax.jit
    def all_losses(x):
        return {name: jax.value_and_grad(fn)(x) for name, fn in WITHOUT_TARGETS.items()}

    for name, (loss, gradient) in all_losses(jnp.full((4, 3), bad)).items():
        assert loss == 0 and (gradient == 0).all(), name
