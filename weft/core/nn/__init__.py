"""Layers as functions of a `Scope`, which create parameters and call `weft.functional`."""

from weft.core.nn.attention import dot_product_attention, multi_head_dot_product_attention
from weft.core.nn.conv import conv, conv_transpose
from weft.core.nn.embedding import Embedding, embedding
from weft.core.nn.linear import dense, dense_general
from weft.core.nn.norm import batch_norm, group_norm, layer_norm
from weft.core.nn.stochastic import dropout
from weft.functional.window_pooling import avg_pool, max_pool

__all__ = [
    # linear maps
    "dense",
    "dense_general",
    "conv",
    "conv_transpose",
    "embedding",
    "Embedding",
    # attention
    "dot_product_attention",
    "multi_head_dot_product_attention",
    # norms, pooling, dropout
    "batch_norm",
    "layer_norm",
    "group_norm",
    "avg_pool",
    "max_pool",
    "dropout",
]
