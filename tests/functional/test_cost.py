"""How large the programs of layers are: equations when traced, operations of StableHLO.

They do not depend on the machine. The bounds are a tenth above what was counted.
"""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.frame.counting import equations, operations
from weft.functional import layer_norm, rms_norm

X = jnp.ones((2, 4, 8))


def size(fn):
    """Equations and operations of the function, and of it with its derivative."""
    found = []
    for made in (fn, jax.value_and_grad(lambda x: (fn(x) ** 2).sum())):
        traced = jax.jit(made).trace(X)
        found += [equations(traced.jaxpr), sum(operations(traced.lower().as_text()).values())]
    return found


@pytest.mark.parametrize(
    ("fn", "at_most"),
    [
        (lambda x: layer_norm(x, eps=1e-6), [19, 33, 64, 104]),
        (lambda x: rms_norm(x, eps=1e-6), [8, 15, 28, 52]),
    ],
    ids=["layer_norm", "rms_norm"],
)
def test_norms(fn, at_most):
    sizes = size(fn)
    assert all(x <= bound for x, bound in zip(sizes, at_most, strict=True)), sizes
    # Means and squares are reduced at once.
    assert operations(jax.jit(fn).lower(X).as_text())["reduce"] == 1
