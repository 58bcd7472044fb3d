from weft.compat.flax.training.train_state import *
