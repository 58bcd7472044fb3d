"""Modules whose state is about parameters that are being trained."""

from typing import Any

from weft.hierarchy.base_layer import NestedParameterSpec
from weft.hierarchy.module import Module, nowrap
from weft.trainer.optimizer_base import NestedOptParam, NestedOptStateSpec


class LearnerModule(Module):
    """A module that makes its own state from parameters, and lays it out from their specs."""

    @nowrap
    def init(self, model_params: NestedOptParam) -> Any:
        """The state of this module before the first step.

        Args:
          model_params: the parameters of a model.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `init`.")

    @nowrap
    def create_state_partition_specs(
        self, model_param_specs: NestedParameterSpec
    ) -> NestedOptStateSpec:
        """The layout of what `init` returns.

        Args:
          model_param_specs: of the parameters.

        Returns:
          A tree like the state, whose leaves are specs of tensors.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define `create_state_partition_specs`."
        )
