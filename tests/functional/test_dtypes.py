import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ArgumentValueError
from weft.functional import canonicalize_dtype, promote_dtype

HALF, INT = jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.int32)


@pytest.mark.parametrize(
    ("args", "name"),
    [
        ((HALF, HALF), "bfloat16"),
        ((HALF, None, jnp.ones(2)), "float32"),
        ((HALF, 1.5), "bfloat16"),
        ((HALF, INT), "bfloat16"),
        ((INT,), "float32"),
        ((INT, INT), "float32"),
        ((1, [2, 3]), "float32"),
        ((np.ones(2),), "float32"),
        ((HALF, jnp.ones(2, jnp.complex64)), "complex64"),
    ],
)
def test_the_dtype_is_the_one_that_all_promote_to(args, name):
    assert jnp.dtype(canonicalize_dtype(*args)).name == name
    promoted = promote_dtype(*args)
    assert [x is None for x in promoted] == [x is None for x in args]
    assert all(x.dtype.name == name for x in promoted if x is not None)


def test_integers_stay_where_they_may():
    assert canonicalize_dtype(INT, 1, inexact=False) == jnp.int32
    (x,) = promote_dtype(INT, inexact=False)
    assert x is INT


def test_a_given_dtype_is_kept():
    assert canonicalize_dtype(HALF, dtype=jnp.float16) == jnp.float16
    assert canonicalize_dtype(dtype="float16") == "float16"
    assert [x.dtype.name for x in promote_dtype(HALF, 2, dtype=jnp.float16)] == ["float16"] * 2


def test_an_array_of_the_dtype_is_not_copied():
    x, y = promote_dtype(HALF, INT)
    assert x is HALF
    assert y.dtype == jnp.bfloat16


def test_weak_types_become_strong():
    def f(x):
        (y,) = promote_dtype(2.0 * x)
        return y + jnp.ones((), jnp.bfloat16)

    assert jax.eval_shape(f, 1.0).dtype == jnp.float32


def test_a_dtype_without_fractions_is_refused():
    with pytest.raises(ArgumentValueError, match=r"dtype=int32 cannot hold fractions.*Leave"):
        promote_dtype(HALF, dtype=jnp.int32)


def test_nothing_to_go_by_is_refused():
    with pytest.raises(ArgumentValueError, match="neither a dtype nor an array"):
        promote_dtype(None)
