from weft.compat.flax.ids import *
