"""What does Weft's attention cost on a GPU, against the call of cuDNN alone?

Causal attention in bfloat16, 32 heads of 64 in 8 groups, forward and backward, at several lengths.
"""

import jax
import jax.numpy as jnp

from benchmarks.harness import Row, ratios, row
from weft.functional import causal_mask, dot_product_attention

HEADS, GROUPS, DIM, TOKENS = 32, 8, 64, 16_384


def _operands(length: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(TOKENS // length, length, heads, DIM) for heads in (HEADS, GROUPS, GROUPS)]
    return [jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)]


def _weft(query, key, value):
    return dot_product_attention(query, key, value, mask=causal_mask)


def _cudnn(query, key, value):
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")


def run() -> list[Row]:
    """Gradients of both, in turns."""
    rows = []
    for length in (1024, 4096, 16_384):
        operands = _operands(length)

        def gradients(fn, operands=operands):
            step = jax.jit(jax.grad(lambda *x: jnp.sum(fn(*x).astype(jnp.float32) ** 2), (0, 1, 2)))
            return lambda: jax.block_until_ready([step(*operands) for _ in range(10)])

        measured = ratios(gradients(_weft), gradients(_cudnn), warmup=3)
        rows.append(row(f"attention over {length} tokens / cuDNN", measured, at_most=1 / 0.9))
    return rows
