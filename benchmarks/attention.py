"""What do memory and time of attention in blocks come to, against logits of all pairs?

A training step of attention alone, forward and backward: a batch of 1, 8 heads of 64, float32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness import Curve, Row, counted, ratios, row
from weft.functional import causal_mask, dot_product_attention

HEADS, DIM = 8, 64
LENGTHS = (1024, 2048, 4096, 8192, 16_384)


@functools.cache
def _step(implementation: str, length: int, mask: Any) -> Any:
    """Returns the compiled gradients by query, key and value."""

    def loss(query, key, value):
        y = dot_product_attention(query, key, value, mask=mask, implementation=implementation)
        return jnp.sum(y**2)

    x = jax.ShapeDtypeStruct((1, length, HEADS, DIM), jnp.float32)
    return jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile()


def _memory(implementation: str, length: int) -> int:
    analysis: Any = _step(implementation, length, causal_mask).memory_analysis()
    return analysis.temp_size_in_bytes


def _times(length: int, mask: Any) -> Row:
    keys = jax.random.split(jax.random.key(0), 3)
    operands = [jax.random.normal(key, (1, length, HEADS, DIM)) for key in keys]
    steps = [_step(name, length, mask) for name in ("blockwise", "plain")]
    measured = ratios(*(lambda step=step: jax.block_until_ready(step(*operands)) for step in steps))
    kind = "full" if mask is None else "causal"
    return row(f"{kind} attention over {length} tokens, blocks / plain", measured, at_most=1.0)


def run() -> list[Row | Curve]:
    """Compares what the compiler says of memory, and times in turns."""
    memory = {
        name: [(float(length), _memory(name, length) / 1e6) for length in LENGTHS]
        for name in ("blockwise", "plain")
    }
    at = {name: dict(points) for name, points in memory.items()}
    blocks, plain = at["blockwise"], at["plain"]
    return [
        counted(
            "temporary memory of attention over 8192 tokens, blocks / plain",
            blocks[8192] / plain[8192],
            at_most=1 / 8,
            note=f"{blocks[8192]:,.0f} against {plain[8192]:,.0f} MB",
        ),
        counted(
            "temporary memory of blocks over 16384 tokens / 16 times that over 1024",
            blocks[16_384] / (16 * blocks[1024]),
            at_most=1.1,
            note=f"{blocks[16_384]:,.0f} against {blocks[1024]:,.0f} MB",
        ),
        *(_times(length, mask) for length in (1024, 2048) for mask in (None, causal_mask)),
        Curve(
            "attention_memory_by_length",
            "Temporary memory of a training step of attention",
            "tokens",
            "MB",
            memory,
            [
                f"{name}: from {points[0][1]:,.0f} MB at {points[0][0]:,.0f} tokens to "
                f"{points[-1][1]:,.0f} MB at {points[-1][0]:,.0f}"
                for name, points in memory.items()
            ],
        ),
    ]
