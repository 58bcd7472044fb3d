"""Runs a layer of a scope on Flax and on Weft, and compares what comes of it."""

import flax.core
import flax.core.nn
import jax
import numpy as np
import pytest

import weft.core
import weft.core.nn
from tests.keys import quick_key

KEY = quick_key(0)
LIBRARIES = (flax.core, flax.core.nn), (weft.core, weft.core.nn)


def same(program, tolerance=1e-5, jit=jax.jit):
    """Runs a program on both; it returns results, and variables that must be the same bits.

    Both are one JAX program, which is compiled much faster than one for each operation.
    """
    (of_flax, variables), (of_weft, ours) = jit(lambda: [program(*libs) for libs in LIBRARIES])()
    assert jax.tree.structure(variables) == jax.tree.structure(ours)
    for a, b in zip(jax.tree.leaves(variables), jax.tree.leaves(ours), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert jax.tree.structure(of_flax) == jax.tree.structure(of_weft)
    for a, b in zip(jax.tree.leaves(of_flax), jax.tree.leaves(of_weft), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(
            np.asarray(a, float), np.asarray(b, float), rtol=tolerance, atol=tolerance
        )


def initialized(name, *args, **kwargs):
    def program(core, nn):
        return core.init(getattr(nn, name))({"params": KEY, "dropout": KEY}, *args, **kwargs)

    return program


def named(cases):
    return pytest.mark.parametrize("kwargs", cases, ids=lambda k: ",".join(k) or "default")
