"""Pooling, which needs no module; the functions are those of `weft.core.nn.pooling`."""

from weft.core.nn.pooling import avg_pool, max_pool, min_pool, pool

__all__ = ["avg_pool", "max_pool", "min_pool", "pool"]
