"""Pooling functions, from `weft.functional.window_pooling`."""

from __future__ import annotations

from weft.functional.window_pooling import avg_pool, max_pool, min_pool, pool

__all__ = ["avg_pool", "max_pool", "min_pool", "pool"]
