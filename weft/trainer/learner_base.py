"""Base of modules whose state depends on the parameters being trained."""

from typing import Any

from weft.hierarchy.base_layer import NestedParameterSpec
from weft.hierarchy.module import Module, nowrap
from weft.trainer.optimizer_base import NestedOptParam, NestedOptStateSpec


class LearnerModule(Module):
    """Module that creates its own state from parameters, and its layout from their specs."""

    @nowrap
    def init(self, model_params: NestedOptParam) -> Any:
        """Returns the state before the first step, given the parameters of a model."""
        raise NotImplementedError(f"{type(self).__name__} must define `init`.")

    @nowrap
    def create_state_partition_specs(
        self, model_param_specs: NestedParameterSpec
    ) -> NestedOptStateSpec:
        """Returns the layout of the state: a tree like that of `init`, of tensor specs."""
        raise NotImplementedError(
            f"{type(self).__name__} must define `create_state_partition_specs`."
        )
