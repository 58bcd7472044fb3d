"""Statistics of activations, reported as summaries."""

import jax.numpy as jnp

from weft.config import config_class
from weft.hierarchy.module import Module
from weft.typing import Tensor


class TensorStats(Module):
    """Base of statistics of named arrays."""

    def add_stats(self, name: str, value: Tensor) -> None:
        """Adds summaries about an array called `name` in its layer; this base class adds none."""


class TensorRMSNorm(TensorStats):
    """Reports the root mean square."""

    def add_stats(self, name: str, value: Tensor) -> None:
        self.add_summary("rms_norm", jnp.sqrt(jnp.mean(jnp.square(value.astype(jnp.float32)))))


class TensorMaxAbs(TensorStats):
    """Reports the maximum absolute value."""

    def add_stats(self, name: str, value: Tensor) -> None:
        self.add_summary("max_abs", jnp.max(jnp.abs(value)).astype(jnp.float32))


class CompositeTensorStats(TensorStats):
    """Reports several statistics."""

    @config_class
    class Config(TensorStats.Config):
        """Configures CompositeTensorStats.

        Attributes:
            inline_child_summaries: whether to omit names of statistics from the paths of summaries.
        """

        tensor_stats: dict[str, TensorStats.Config] = {}
        inline_child_summaries: bool = False

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        for name, child in cfg.tensor_stats.items():
            self._add_child(name, child)

    def add_stats(self, name: str, value: Tensor) -> None:
        context = self.get_invocation_context()
        for child_name, child in self.children.items():
            child.add_stats(name, value)  # pyright: ignore[reportAttributeAccessIssue]
            if self.config.inline_child_summaries:
                for of_child, summary in context.get_summaries().pop(child_name).items():
                    self.add_summary(of_child, summary)


class DefaultTensorStats(CompositeTensorStats):
    """Reports the root mean square and the maximum absolute value."""

    @config_class
    class Config(CompositeTensorStats.Config):
        """Configures DefaultTensorStats."""

        tensor_stats: dict[str, TensorStats.Config] = {
            "norm": TensorRMSNorm.default_config(),
            "max": TensorMaxAbs.default_config(),
        }
        inline_child_summaries: bool = True
