from weft.compat.flax.nnx_bridge import *
