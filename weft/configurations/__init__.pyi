from weft.compat.flax.configurations import *
