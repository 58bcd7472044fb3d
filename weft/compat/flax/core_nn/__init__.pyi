from weft.compat.flax.core_nn.attention import (
    dot_product_attention as dot_product_attention,
    multi_head_dot_product_attention as multi_head_dot_product_attention,
)
from weft.compat.flax.core_nn.conv import conv as conv, conv_transpose as conv_transpose
from weft.compat.flax.core_nn.linear import (
    dense as dense, dense_general as dense_general, embedding as embedding, Embedding as Embedding,
)
from weft.compat.flax.core_nn.norm import (
    batch_norm as batch_norm, dropout as dropout, group_norm as group_norm,
    layer_norm as layer_norm,
)
from weft.functional.window_pooling import avg_pool as avg_pool, max_pool as max_pool
