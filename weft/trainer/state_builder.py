"""Initial states from parts of other runs' checkpoints, with conversions.

The field `init_state_builder` of a trainer's config takes a `Builder`. The trainer calls it once,
if the run has no checkpoint of its own; leaves that it does not provide are initialized as usual.
"""

from weft.trainer.builder_base import (
    Builder,
    ChainBuilder,
    ChainConverter,
    Converter,
    RestoreAndConvertBuilder,
    clone_tree,
    initial_state,
)
from weft.trainer.state_converters import (
    BaseConverterFromPretrainedModel,
    EmaParamsConverter,
    MergeStateConverter,
    MergeStateSelection,
    ModelStateScopeConverter,
    PosEmbeddingConverter,
    PruneEmaStateBuilder,
    is_dict,
    traverse_and_set_target_state_parameters,
)
from weft.trainer.storage_builders import (
    BaseStateStorageBuilder,
    OrbaxStateBuilder,
    TensorStoreStateStorageBuilder,
)

__all__ = [
    "BaseConverterFromPretrainedModel",
    "BaseStateStorageBuilder",
    "Builder",
    "ChainBuilder",
    "ChainConverter",
    "Converter",
    "EmaParamsConverter",
    "MergeStateConverter",
    "MergeStateSelection",
    "ModelStateScopeConverter",
    "OrbaxStateBuilder",
    "PosEmbeddingConverter",
    "PruneEmaStateBuilder",
    "RestoreAndConvertBuilder",
    "TensorStoreStateStorageBuilder",
    "clone_tree",
    "initial_state",
    "is_dict",
    "traverse_and_set_target_state_parameters",
]
