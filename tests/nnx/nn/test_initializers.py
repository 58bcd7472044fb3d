"""Initializers of NNX: those of `weft.functional.initializers`, which are tested there."""

import jax
import pytest

from weft.nnx.nn import initializers


@pytest.mark.parametrize(
    "name", [n for n in initializers.__all__ if hasattr(jax.nn.initializers, n)]
)
def test_they_are_those_of_jax(name):
    assert getattr(initializers, name) is getattr(jax.nn.initializers, name)


def test_those_of_one_value_can_be_made_like_the_others():
    assert initializers.ones_init()(jax.random.key(0), (2,)).tolist() == [1, 1]
    assert initializers.zeros_init()(jax.random.key(0), (2,)).tolist() == [0, 0]
