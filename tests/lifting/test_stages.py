import jax
import jax.numpy as jnp

from weft.lifting.stages import Compiled, Lowered, Traced


def doubled(compiled, args, kwargs):
    return 2 * compiled(*args, **kwargs)


def test_stages_have_what_those_of_jax_have_and_are_called_as_they_were_told():
    traced = Traced(jax.jit(jnp.sin).trace(jnp.float32(0)), doubled)
    lowered = traced.lower()
    compiled = lowered.compile()
    assert isinstance(lowered, Lowered) and "stablehlo.sine" in lowered.as_text()
    assert isinstance(compiled, Compiled) and "HloModule" in compiled.as_text()
    assert compiled(jnp.float32(1)) == 2 * jnp.sin(1.0)
    assert repr(compiled).startswith("Compiled(")
    assert not hasattr(compiled, "_missing") and not hasattr(compiled, "missing")
