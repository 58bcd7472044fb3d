from weft.compat.flax.traverse_util import *
