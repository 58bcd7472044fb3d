import jax
import numpy as np
import pytest

from weft.functional import apply_rotary, rotary_sincos
from weft.interop.huggingface import family
from weft.interop.huggingface.family import norm_entries


def test_norm_with_and_without_a_bias():
    assert [e[:2] for e in norm_entries("a", "b", bias=True)] == [
        ("a.weight", "b.scale"),
        ("a.bias", "b.bias"),
    ]
    assert [e[:2] for e in norm_entries("a", "b")] == [("a.weight", "b.scale")]


HEADS, HEAD, DIM = 3, 4, 5


@pytest.mark.parametrize(
    ("change", "theirs", "ours"),
    [
        (family.IDENTITY, (DIM,), (DIM,)),
        (family.TRANSPOSED, (DIM, 2), (2, DIM)),
        (family.POSITIONS, (7, DIM), (1, 7, DIM)),
        (family.ROTARY, (HEAD,), (HEAD,)),
        (family.input_heads(HEADS), (HEADS * HEAD, DIM), (DIM, HEADS, HEAD)),
        (family.input_heads(HEADS, rotary=True), (HEADS * HEAD, DIM), (DIM, HEADS, HEAD)),
        (family.head_biases(HEADS, rotary=True), (HEADS * HEAD,), (HEADS, HEAD)),
        (family.output_heads(HEADS), (DIM, HEADS * HEAD), (DIM, HEADS, HEAD)),
        (family.output_heads_of_conv(HEADS), (HEADS * HEAD, DIM), (DIM, HEADS, HEAD)),
        (family.fused_heads_of_conv(HEADS), (DIM, 3 * HEADS * HEAD), (3, DIM, HEADS, HEAD)),
        (family.fused_head_biases(HEADS), (3 * HEADS * HEAD,), (3, HEADS, HEAD)),
    ],
    ids=lambda x: str(x) if isinstance(x, tuple) and isinstance(x[0], int) else "change",
)
def test_every_change_has_an_inverse(change, theirs, ours):
    x = np.arange(np.prod(theirs)).reshape(theirs)
    assert change.to_weft(x).shape == ours
    np.testing.assert_array_equal(change.to_hf(change.to_weft(x)), x)
    # Shapes are known without values.
    shape = jax.eval_shape(change.to_hf, jax.ShapeDtypeStruct(ours, np.float32))
    assert shape.shape == theirs


def test_heads_compute_the_same():
    x, kernel = np.random.RandomState(0).randn(2, DIM), np.random.RandomState(1).randn(12, DIM)
    ours = family.input_heads(HEADS).to_weft(kernel)
    np.testing.assert_allclose(
        np.einsum("bd,dnh->bnh", x, ours).reshape(2, -1), x @ kernel.T, rtol=1e-6
    )
    back = family.output_heads(HEADS).to_weft(kernel.T)
    heads = np.random.RandomState(2).randn(2, HEADS, HEAD)
    np.testing.assert_allclose(
        np.einsum("bnh,dnh->bd", heads, back), heads.reshape(2, -1) @ kernel, rtol=1e-6
    )


def test_permuted_heads_rotate_to_the_same_products():
    """Pairs of halves of theirs are neighbours of ours."""
    q, k = np.random.RandomState(0).randn(2, 6, 8).astype(np.float32)
    sin, cos = rotary_sincos(np.arange(6), dim=8)
    theirs = [apply_rotary(x, sin, cos, layout="half") for x in (q, k)]
    ours = [apply_rotary(family.ROTARY.to_weft(x), sin, cos) for x in (q, k)]
    np.testing.assert_allclose(ours[0] @ ours[1].T, theirs[0] @ theirs[1].T, atol=1e-5)
