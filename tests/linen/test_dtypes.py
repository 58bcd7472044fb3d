import jax.numpy as jnp

from weft.functional import dtypes as mathematics
from weft.linen import dtypes


def test_they_are_those_of_functional():
    assert dtypes.promote_dtype is mathematics.promote_dtype
    assert dtypes.canonicalize_dtype is mathematics.canonicalize_dtype


def test_parameters_in_float32_lift_an_input_in_half_precision():
    x, kernel, bias = dtypes.promote_dtype(jnp.ones(2, jnp.bfloat16), jnp.ones(2), None)
    assert (x.dtype, kernel.dtype, bias) == (jnp.float32, jnp.float32, None)
