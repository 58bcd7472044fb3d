from weft.compat.flax.cursor import *
