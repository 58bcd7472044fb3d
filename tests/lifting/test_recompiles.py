import jax.numpy as jnp

from tests.lifting.counting import BOXES, Box
from weft.lifting import jit


def test_what_differed_is_said():
    f = jit(BOXES, lambda box, x, **kwargs: x, static_argnames="mode")
    box = Box(x=jnp.ones(2))
    assert "traced not yet" in f.explain_recompile()
    f(box, jnp.ones(3))
    f(box, jnp.ones(3))
    assert "traced once, so nothing was compiled again" in f.explain_recompile()
    f(box, jnp.ones(4))
    assert "float32[3] before, float32[4]" in f.explain_recompile()
    f(Box(x=jnp.ones(2), y=jnp.ones(1)), jnp.ones(4))
    assert "not there before, float32[1]" in f.explain_recompile()
    f(box, jnp.ones(4), mode="fast")
    f(box, jnp.ones(4), mode="slow")
    assert "fast" in f.explain_recompile()
    assert "slow" in f.explain_recompile()
