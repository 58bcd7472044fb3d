from weft.compat.flax.as_flax import *
