import jax
import jax.numpy as jnp

from weft.trainer.step_analysis import aot_model_analysis


def test_memory_and_operations_of_a_compiled_function():
    x = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    text = aot_model_analysis(jax.jit(lambda x: x @ x).lower(x).compile())
    assert "argument: 1.0 MiB" in text
    assert "floating-point operations: 2.68" in text
