from weft.compat.flax.training.common_utils import *
