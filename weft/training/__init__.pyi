from weft.training import checkpoints as checkpoints, common_utils as common_utils
from weft.training import train_state as train_state
