"""Dynamic loss scale, which keeps half-precision gradients from underflow.

The loss is multiplied by a scale before it is differentiated, and the gradients are divided by it.
The scale grows after a number of steps with finite gradients, and falls after a step whose
gradients are not finite; that step changes nothing else (Micikevicius et al., 2018).
"""

from typing import Any

import jax
import jax.numpy as jnp

from weft.config import Configurable, config_class
from weft.errors import LossScaleError
from weft.trainer.optimizer_base import COUNT_SPEC, replicated
from weft.trainer.update_transformation import ForwardFn, ForwardOutputs
from weft.training.dynamic_scale import DynamicScale
from weft.typing import NestedTensor, Tensor


class DynamicLossScale(Configurable):
    """Scale of a learner's loss; its state is a dict of the scale and a count of steps.

    Example:
        >>> loss_scale = DynamicLossScale.default_config().set(initial_scale=8).instantiate()
        >>> state = loss_scale.after(loss_scale.init(), is_finite=jnp.array(False))
        >>> float(state["scale"])
        4.0
    """

    @config_class
    class Config(Configurable.Config):
        """Configures a DynamicLossScale.

        Attributes:
            initial_scale: scale of the first step.
            growth_factor: factor by which the scale grows; above 1.
            backoff_factor: factor by which it falls after a step whose gradients are not finite;
                between 0 and 1.
            growth_interval: number of consecutive finite steps after which it grows.
            minimum_scale: lower bound.
        """

        initial_scale: float = 2.0**15
        growth_factor: float = 2.0
        backoff_factor: float = 0.5
        growth_interval: int = 2000
        minimum_scale: float = 1.0

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        expectations = (
            ("growth_factor", cfg.growth_factor > 1, "a factor above 1"),
            ("backoff_factor", 0 < cfg.backoff_factor < 1, "a factor between 0 and 1"),
            ("growth_interval", cfg.growth_interval >= 1, "1 or more steps"),
            ("minimum_scale", cfg.minimum_scale > 0, "a scale above 0"),
            (
                "initial_scale",
                cfg.initial_scale >= cfg.minimum_scale,
                f"at least minimum_scale={cfg.minimum_scale:g}",
            ),
        )
        for name, holds, expected in expectations:
            if not holds:
                raise LossScaleError(
                    f"loss_scale.{name}={getattr(cfg, name):g}; expected {expected}."
                )

    def init(self) -> dict[str, Tensor]:
        """Returns the state before the first step."""
        return {
            "scale": jnp.array(self.config.initial_scale, jnp.float32),
            "finite_steps": jnp.zeros((), jnp.int32),
        }

    def partition(self) -> dict[str, Any]:
        """Returns the layout of the state."""
        return {"scale": replicated((), jnp.float32), "finite_steps": COUNT_SPEC}

    def after(self, state: dict[str, Tensor], *, is_finite: Tensor) -> dict[str, Tensor]:
        """Returns the state after a step whose gradients were all finite, or not."""
        cfg = self.config
        scale = DynamicScale(
            growth_factor=cfg.growth_factor,
            backoff_factor=cfg.backoff_factor,
            growth_interval=cfg.growth_interval - 1,  # it counts the steps before this one
            minimum_scale=cfg.minimum_scale,
            scale=state["scale"],
            fin_steps=state["finite_steps"],
        ).after(is_finite)
        return {
            "scale": jnp.asarray(scale.scale),
            "finite_steps": jnp.asarray(scale.fin_steps, jnp.int32),
        }


def with_scaled_loss(fn: ForwardFn, scale: Tensor) -> ForwardFn:
    """Returns a forward pass whose loss is multiplied by a scale, in single precision."""

    def forward(*, model_params: NestedTensor, inputs: Any) -> ForwardOutputs:
        outputs = fn(model_params=model_params, inputs=inputs)
        return outputs.replace(loss=outputs.loss.astype(jnp.float32) * scale)

    return forward


def unscaled(tree: Any, scale: Tensor) -> Any:
    """Divides losses or gradients by the scale, in at least single precision."""
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)) / scale, tree)
