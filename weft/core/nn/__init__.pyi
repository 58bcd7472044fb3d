from weft.compat.flax.core_nn import *
