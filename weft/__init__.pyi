from weft import (
    config as config, configurations as configurations, core as core, cursor as cursor, errors as errors, functional as functional,
    evaluation as evaluation,
    generation as generation,
    hierarchy as hierarchy, ids as ids, input as input, interop as interop, io as io,
    jax_utils as jax_utils,
    launch as launch, lifting as lifting, linen as linen, metrics as metrics, nnx as nnx,
    recipes as recipes,
    serialization as serialization, struct as struct, trainer as trainer, training as training,
    traverse_util as traverse_util, typing as typing, utils as utils,
)
from weft.generation.generator import generate as generate
from weft.recipes.finetune import finetune as finetune
from weft.recipes.load import load as load
from weft.trainer.fit import fit as fit

__version__: str
