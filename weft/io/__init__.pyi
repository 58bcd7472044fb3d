from weft.compat.flax.io import *
