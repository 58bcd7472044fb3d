import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ArgumentValueError
from weft.functional import can_quantize, dequantize_weight, dequantized_shape, quantize_weight

# Half of a step of int8, and half of the widest gap between two levels of nf4.
LARGEST_ERROR = {"int8": 0.5 / 127, "nf4": (1 - 0.6961928009986877) / 2}
BITS = {"int8": 8 + 32 / 64, "nf4": 4 + 32 / 64}


@pytest.mark.parametrize("weight_format", LARGEST_ERROR)
def test_error_and_memory(weight_format):
    weight = jax.random.normal(jax.random.key(0), (3, 5, 128))
    quantized = quantize_weight(weight, weight_format)
    restored = dequantize_weight(quantized)
    blocks = np.asarray(weight).reshape(3, 5, 2, 64)
    bound = np.abs(blocks).max(-1, keepdims=True) * (LARGEST_ERROR[weight_format] + 1e-6)
    assert (np.abs(np.asarray(restored).reshape(blocks.shape) - blocks) <= bound).all()
    num_bytes = quantized.codes.nbytes + quantized.scales.nbytes
    assert num_bytes * 8 / weight.size == BITS[weight_format]
    assert dequantized_shape(quantized) == weight.shape
    # What is on a level stays there.
    again = dequantize_weight(quantize_weight(restored, weight_format))
    np.testing.assert_allclose(again, restored, rtol=1e-6)
    # Every row is quantized for itself, as in a stack of layers.
    row = quantize_weight(weight[1], weight_format)
    np.testing.assert_array_equal(row.codes, quantized.codes[1])


def test_zeros_and_dtypes():
    zeros = quantize_weight(jnp.zeros((2, 16), jnp.bfloat16), "nf4")
    restored = dequantize_weight(zeros, jnp.bfloat16)
    assert restored.dtype == jnp.bfloat16 and not np.asarray(restored).any()


def test_weights_that_cannot_be_quantized():
    assert can_quantize((2, 8)) and not can_quantize((2, 12)) and not can_quantize((8,))
    with pytest.raises(ArgumentValueError, match=r"no format 'int4'; expected 'int8' or 'nf4'"):
        quantize_weight(jnp.ones((2, 8)), "int4")
    with pytest.raises(ArgumentValueError, match=r"shape \(2, 12\) has no blocks of 8"):
        quantize_weight(jnp.ones((2, 12)), "int8")
