import jax.numpy as jnp
import pytest

from weft import nnx
from weft.nnx.ref_map import RefMap


def test_keys_are_objects_themselves():
    a, b = nnx.Param(jnp.ones(2)), nnx.Param(jnp.ones(2))
    seen = RefMap([(a, 0)])
    seen[b] = 1
    assert a in seen and seen[b] == 1 and len(seen) == 2 and [x is a for x in seen] == [True, False]
    assert nnx.Param(1) not in seen and seen.get(3) is None
    del seen[a]
    assert repr(seen) == "RefMap({Param: 1})"
    with pytest.raises(KeyError):
        seen[a]
