from weft.compat.flax.jax_utils import *
