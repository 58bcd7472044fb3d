"""The dtype in which layers of NNX compute."""

import jax.numpy as jnp
import pytest

from weft.errors import ArgumentValueError
from weft.nnx.nn.dtypes import canonicalize_dtype, promote_dtype


def test_a_tuple_of_arrays_gets_one_dtype_and_none_stays_none():
    x, kernel, bias = promote_dtype((jnp.ones(2, jnp.bfloat16), jnp.ones(2), None))
    assert (x.dtype, kernel.dtype, bias) == (jnp.float32, jnp.float32, None)
    (half,) = promote_dtype((jnp.ones(2),), dtype=jnp.float16)
    assert half.dtype == jnp.float16
    (ids,) = promote_dtype((jnp.arange(2),), inexact=False)
    assert ids.dtype == jnp.int32
    assert canonicalize_dtype(jnp.arange(2)) == jnp.float32


def test_a_dtype_that_cannot_hold_fractions_is_refused():
    with pytest.raises(ArgumentValueError, match="dtype=int32 cannot hold fractions"):
        promote_dtype((jnp.ones(2),), dtype=jnp.int32)
