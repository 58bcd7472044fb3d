"""How layers of NNX make their parameters."""

import jax
import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import InvalidRngError
from weft.nnx.nn.linear import Linear
from weft.nnx.nn.parameters import default_kernel_init, key_of, new_param


def test_a_parameter_is_what_the_initializer_makes_of_the_next_key():
    init = jax.nn.initializers.normal()
    made = new_param(init, nnx.Rngs(0), (2, 3), jnp.bfloat16, {"tag": "a"}, nnx.BatchStat)
    assert made.get_metadata() == {"tag": "a"}
    assert isinstance(made, nnx.BatchStat)
    assert (made[...] == init(key_of(nnx.Rngs(0)), (2, 3), jnp.bfloat16)).all()
    assert default_kernel_init(jax.random.key(0), (2, 3), jnp.float32).shape == (2, 3)


@pytest.mark.parametrize("rngs", [0, None, {"params": 0}], ids=str)
def test_what_has_no_streams_is_named(rngs):
    with pytest.raises(InvalidRngError, match=r"rngs=.*expected streams, such as rngs=nnx.Rngs\(0"):
        Linear(2, 3, rngs=rngs)
