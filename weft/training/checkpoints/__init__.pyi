from weft.compat.flax.training.checkpoints import *
