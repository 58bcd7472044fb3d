import jax
import jax.numpy as jnp
import pytest

from weft.linen import initializers

KEY = jax.random.key(0)


@pytest.mark.parametrize(
    "name", [n for n in initializers.__all__ if hasattr(jax.nn.initializers, n)]
)
def test_they_are_those_of_jax(name):
    assert getattr(initializers, name) is getattr(jax.nn.initializers, name)


def test_initializers_of_one_value_can_be_made_like_the_others():
    assert initializers.ones_init()(KEY, (2,), jnp.bfloat16).tolist() == [1, 1]
    assert initializers.zeros_init()(KEY, (2,), jnp.int32).tolist() == [0, 0]
