from weft.compat.flax.nnx_compat import *
