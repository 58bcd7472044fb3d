"""Does a deeper repeated stack take longer to trace and compile?"""

import jax
import jax.numpy as jnp

from benchmarks.harness import Row, ratios, row
from weft.hierarchy.attention import RepeatedTransformerLayer
from weft.hierarchy.module import functional


def _lower_and_compile(num_layers: int):
    cfg = RepeatedTransformerLayer.default_config().set(
        name="stack", input_dim=64, num_layers=num_layers
    )
    cfg.layer.self_attention.attention.set(num_heads=4)
    cfg.layer.feed_forward.set(hidden_dim=256)
    stack = cfg.instantiate(parent=None)
    shapes = jax.eval_shape(stack.initialize_parameters_recursively, jax.random.key(0))
    x = jax.ShapeDtypeStruct((2, 32, 64), jnp.float32)

    def build() -> None:
        def loss(params, x):
            outputs, _ = functional(stack, jax.random.key(0), params, {"data": x}, is_training=True)
            return outputs.data.sum()

        # A function made anew, so that neither the trace nor the executable is found in a cache.
        jax.jit(jax.value_and_grad(loss)).lower(shapes, x).compile()

    return build


def run() -> list[Row]:
    """A repeated stack of 48 layers against one of 12: forward and backward, traced and
    compiled.
    """
    measured = ratios(_lower_and_compile(48), _lower_and_compile(12))
    return [row("trace and compile 48 / 12 repeated layers", measured, at_most=1.1)]
