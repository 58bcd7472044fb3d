import re

import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ArgumentShapeError, ArgumentValueError
from weft.functional import relative_position_buckets
from weft.hierarchy.attention.bias import (
    NEG_INF,
    ALiBiAttentionLogitBiasLayer,
    BiasAndResidual,
    BoolAttentionBias,
    BoolTensorAttentionBias,
    CausalAttentionBias,
    CausalAttentionLogitBiasLayer,
    LeftRightWindowAttentionBias,
    MaskFnAttentionBias,
    RelativePositionAttentionLogitBiasLayer,
    SegmentIdAttentionBias,
    SlidingWindowAttentionBias,
    SymmetricALiBiAttentionLogitBiasLayer,
    TensorAttentionBias,
    ZeroAttentionBias,
    alibi_get_slopes,
    apply_attention_logit_biases,
    as_attention_bias,
    causal_mask,
    make_causal_biases,
    make_segment_mask,
    make_sliding_window_causal_biases,
    split,
)
from weft.hierarchy.module import functional as F

N = 5
ROWS, COLUMNS = np.indices((N, N))
POSITIONS = jnp.arange(N)[None]
SEGMENTS = jnp.array([[1, 1, 2, 2, 2]])
SAME = np.asarray(SEGMENTS[0][:, None] == SEGMENTS[0][None])


def instantiate(cfg):
    return cfg.instantiate(target_positions=POSITIONS, source_positions=POSITIONS)


def allowed(bias):
    value = bias.value()
    assert set(np.unique(value)) <= {np.float32(NEG_INF), np.float32(0)}
    return np.asarray(value == 0)


@pytest.mark.parametrize(
    "cfg, expected",
    [
        (CausalAttentionBias.default_config(), COLUMNS <= ROWS),
        (
            SlidingWindowAttentionBias.default_config(sliding_window_size=1),
            (COLUMNS <= ROWS) & (ROWS - COLUMNS <= 1),
        ),
        (
            LeftRightWindowAttentionBias.default_config(left_context=2, right_context=1),
            (ROWS - COLUMNS <= 2) & (COLUMNS - ROWS <= 1),
        ),
        (
            MaskFnAttentionBias.default_config(lambda q, k: (q + k) % 2 == 0),
            (ROWS + COLUMNS) % 2 == 0,
        ),
    ],
)
def test_masks_by_position(cfg, expected):
    bias = instantiate(cfg)
    assert bias.eval_shape() == (1, 1, N, N)
    np.testing.assert_array_equal(allowed(bias)[0, 0], expected)
    np.testing.assert_array_equal(bias.bool_value()[0, 0], expected)


def test_segments():
    np.testing.assert_array_equal(allowed(SegmentIdAttentionBias(SEGMENTS))[0, 0], SAME)
    mask = make_segment_mask(source_segments=SEGMENTS[:, :3], target_segments=SEGMENTS)
    np.testing.assert_array_equal(mask[0, 0] == 0, SAME[:, :3])


def test_masks_as_arrays():
    np.testing.assert_array_equal(make_causal_biases(N) == 0, COLUMNS <= ROWS)
    window = make_sliding_window_causal_biases(N, 2) == 0
    np.testing.assert_array_equal(window, (COLUMNS <= ROWS) & (ROWS - COLUMNS <= 2))


def test_sum_with_an_array():
    slope = jnp.arange(2.0).reshape(1, 2, 1, 1) * (COLUMNS - ROWS)[None, None]
    causal = instantiate(CausalAttentionBias.default_config())
    for bias in (causal + slope, slope + causal, TensorAttentionBias.from_tensor(slope) + causal):
        assert bias.eval_shape() == (1, 2, N, N)
        np.testing.assert_allclose(
            bias.value()[0, 1][ROWS >= COLUMNS], (COLUMNS - ROWS)[ROWS >= COLUMNS]
        )
        assert np.all(bias.value()[0, 1][ROWS < COLUMNS] < -1e14)


def test_dtype():
    bias = instantiate(CausalAttentionBias.default_config().set(dtype=jnp.bfloat16))
    assert bias.value().dtype == jnp.bfloat16
    assert bias.astype(jnp.float32).value().dtype == jnp.float32
    assert as_attention_bias(jnp.zeros((N, N), jnp.bfloat16)).value().dtype == jnp.bfloat16


def test_split():
    causal = instantiate(CausalAttentionBias.default_config())
    tensor = TensorAttentionBias.from_tensor(jnp.ones((N, N)))
    bias = causal + SegmentIdAttentionBias(SEGMENTS) + tensor
    got_causal, window, segments, rest = split(
        bias, CausalAttentionBias, SlidingWindowAttentionBias, SegmentIdAttentionBias
    )
    assert isinstance(got_causal, CausalAttentionBias)
    assert isinstance(window, ZeroAttentionBias)
    assert isinstance(segments, SegmentIdAttentionBias)
    assert isinstance(rest, TensorAttentionBias)
    total = got_causal + window + segments + rest
    np.testing.assert_array_equal(total.value(), bias.value())


def test_several_of_a_class_become_one():
    causal = instantiate(CausalAttentionBias.default_config())
    window = instantiate(LeftRightWindowAttentionBias.default_config(1, None))
    ones = TensorAttentionBias.from_tensor(jnp.ones((N, N)))
    bias = causal + window + ones + ones + SegmentIdAttentionBias(SEGMENTS)
    masks, rest = bias.bias_and_residual(MaskFnAttentionBias)
    np.testing.assert_array_equal(allowed(masks)[0, 0], (COLUMNS <= ROWS) & (ROWS - COLUMNS <= 1))
    both = bias.bias_and_residual(TensorAttentionBias)
    assert isinstance(both, BiasAndResidual)
    np.testing.assert_array_equal(both.bias.value(), np.full((1, 1, N, N), 2.0))
    bools, rest = bias.bias_and_residual(BoolAttentionBias)
    np.testing.assert_array_equal((bools + rest).value(), bias.value())
    assert isinstance(
        (causal + causal).bias_and_residual(CausalAttentionBias).bias, CausalAttentionBias
    )
    mask = BoolTensorAttentionBias.from_tensor(jnp.array(COLUMNS <= ROWS))
    joined = (mask + BoolTensorAttentionBias.from_tensor(jnp.array(SAME))).bias_and_residual(
        BoolTensorAttentionBias
    )
    np.testing.assert_array_equal(allowed(joined.bias)[0, 0], SAME & (COLUMNS <= ROWS))


def test_mask_functions_get_batch_queries_and_keys():
    shapes = []

    def mask(query_position, key_position):
        shapes.append((query_position.shape, key_position.shape))
        return query_position >= key_position

    bias = MaskFnAttentionBias(mask, jnp.zeros((2, 3), int), jnp.arange(4)[None])
    assert bias.bool_value().shape == (2, 1, 3, 4)
    assert shapes == [((2, 3, 1), (1, 1, 4))]
    of_one_axis = MaskFnAttentionBias(causal_mask, jnp.arange(N), jnp.arange(N))
    np.testing.assert_array_equal(allowed(of_one_axis), (COLUMNS <= ROWS)[None, None])


def test_segments_without_a_batch_axis():
    bias = SegmentIdAttentionBias(jnp.array([1, 1, 2]))
    assert bias.bool_value().astype(int).tolist() == [[[[1, 1, 0], [1, 1, 0], [0, 0, 1]]]]


def test_incompatible_biases():
    bias = SegmentIdAttentionBias(SEGMENTS) + SegmentIdAttentionBias(SEGMENTS + 1)
    with pytest.raises(ArgumentValueError, match="2 biases of the class SegmentIdAttentionBias"):
        split(bias, SegmentIdAttentionBias)


def test_mask_that_is_not_boolean():
    with pytest.raises(ArgumentValueError, match="a mask of the dtype float32 was given"):
        BoolTensorAttentionBias.from_tensor(jnp.zeros((N, N)))


def test_mask_function_itself():
    bias = MaskFnAttentionBias(causal_mask, POSITIONS, POSITIONS)
    np.testing.assert_array_equal(allowed(bias)[0, 0], COLUMNS <= ROWS)


# Two segments of 2 and 3; positions are counted within each.
LAYER_SEGMENTS, LAYER_POSITIONS = jnp.array([[1, 1, 2, 2, 2]]), jnp.array([[0, 1, 0, 1, 2]])
LAYER_ROWS, LAYER_COLUMNS = np.indices((5, 5))
LAYER_SAME = np.asarray(LAYER_SEGMENTS[0][:, None] == LAYER_SEGMENTS[0][None])
DISTANCE = np.asarray(LAYER_POSITIONS[0][:, None] - LAYER_POSITIONS[0][None])


def bias(cls, **fields):
    layer = cls.default_config().set(name="bias", **fields).instantiate(parent=None)
    inputs = {"segment_ids": LAYER_SEGMENTS, "positions": LAYER_POSITIONS}
    return np.asarray(F(layer, None, {}, inputs, is_training=False)[0])


def test_causal_within_segments():
    got = bias(CausalAttentionLogitBiasLayer)
    assert got.shape == (1, 1, 5, 5)
    np.testing.assert_array_equal(got[0, 0] == 0, LAYER_SAME & (LAYER_COLUMNS <= LAYER_ROWS))


def test_alibi_falls_with_distance():
    for cls, seen in (
        (ALiBiAttentionLogitBiasLayer, LAYER_SAME & (LAYER_COLUMNS <= LAYER_ROWS)),
        (SymmetricALiBiAttentionLogitBiasLayer, LAYER_SAME),
    ):
        got = bias(cls, num_heads=2)
        for head, slope in enumerate(alibi_get_slopes(2)):
            expected = -slope * np.abs(DISTANCE)
            np.testing.assert_allclose(got[0, head][seen], expected[seen], rtol=1e-6)
            assert np.all(got[0, head][~seen] < -1e14)


@pytest.mark.parametrize("is_causal", [False, True])
def test_relative_positions_have_a_bias_by_bucket(is_causal):
    cfg = RelativePositionAttentionLogitBiasLayer.default_config().set(name="bias", num_heads=2)
    layer = cfg.set(num_buckets=8, max_distance=5, is_causal=is_causal).instantiate(parent=None)
    weight = jnp.arange(16.0).reshape(8, 2)
    inputs = {"segment_ids": LAYER_SEGMENTS, "positions": LAYER_POSITIONS}
    got = np.asarray(F(layer, None, {"weight": weight}, inputs, is_training=False)[0])
    buckets = relative_position_buckets(
        jnp.asarray(-DISTANCE), num_buckets=8, max_distance=5, is_causal=is_causal
    )
    seen = LAYER_SAME & (DISTANCE >= 0) if is_causal else LAYER_SAME
    for head in range(2):
        np.testing.assert_array_equal(got[0, head][seen], weight[buckets, head][seen])
        assert np.all(got[0, head][~seen] < -1e14)


def test_adding_to_logits():
    logits = jnp.ones((1, 1, 2, 2), jnp.bfloat16)
    assert apply_attention_logit_biases(logits) is logits
    got = apply_attention_logit_biases(logits, jnp.array([[0.0, NEG_INF]]))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got[0, 0, 0, 0], 1.0)


def test_a_window_of_two_sizes_is_refused():
    cfg = SlidingWindowAttentionBias.default_config(sliding_window_size=3)
    cfg.sliding_window_size = 5
    positions = {name: jnp.arange(4)[None] for name in ("target_positions", "source_positions")}
    with pytest.raises(
        ArgumentValueError, match=r"sliding_window_size=\(5, 0\).* mask with \(3, 0\)"
    ):
        cfg.set(**positions).instantiate()
    cfg.mask.sliding_window_size = 5
    assert cfg.set(**positions).instantiate().sliding_window_size == 5


def test_shape_of_a_bias():
    message = "an attention bias has the shape (5,); expected (batch, heads, target, source)"
    with pytest.raises(ArgumentShapeError, match=re.escape(message)):
        as_attention_bias(jnp.zeros(N))
