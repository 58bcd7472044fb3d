"""Dynamic loss scaling, which prevents underflow of half-precision gradients.

The loss is multiplied by a scale and its gradients are divided by it. The scale doubles after
`growth_interval` steps with finite gradients, and is halved when they are not finite; skip such a
step (Micikevicius et al., 2018).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from weft import struct
from weft.typing import PyTree


class DynamicScaleResult(NamedTuple):
    """Result of a function of `DynamicScale.value_and_grad`.

    Attributes:
        dynamic_scale: for the next step.
        finite: whether all gradients are finite; if not, keep parameters and optimizer state.
        aux: unscaled value of the function, with its auxiliary output if `has_aux`.
        grad: unscaled gradients, in float32 or wider.
    """

    dynamic_scale: DynamicScale
    finite: Bool[Array, ""]
    aux: Any
    grad: Any


class DynamicScale(struct.PyTreeNode):
    """Loss scale and its schedule.

    Attributes:
        growth_factor: factor of the scale after `growth_interval` finite steps.
        backoff_factor: factor of the scale after a step that was not finite.

    >>> loss = lambda w: (w**2).sum()
    >>> scale = DynamicScale()
    >>> scale, finite, value, grad = scale.value_and_grad(loss)(jnp.ones(2, jnp.float16))
    >>> bool(finite), float(scale.scale)
    (False, 32768.0)
    """

    growth_factor: float = struct.field(pytree_node=False, default=2.0)
    backoff_factor: float = struct.field(pytree_node=False, default=0.5)
    growth_interval: int = struct.field(pytree_node=False, default=2000)
    fin_steps: int | Array = 0
    scale: float | Array = 65536.0
    minimum_scale: float | None = struct.field(
        pytree_node=False, default=float(jnp.finfo(jnp.float32).tiny)
    )

    def value_and_grad(
        self,
        fun: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        axis_name: str | None = None,
    ) -> Callable[..., DynamicScaleResult]:
        """Transforms a function like `jax.value_and_grad`, with a scaled loss.

        Gradients are averaged over the mapped axis `axis_name`, if given.
        """

        def scaled(*args: PyTree, **kwargs: PyTree) -> tuple[Array, PyTree]:
            if has_aux:
                loss, aux = fun(*args, **kwargs)
            else:
                loss, aux = fun(*args, **kwargs), None
            product = loss * self.scale
            # Dividing the product again may be infinite where the loss is not.
            loss = jnp.asarray(loss, product.dtype)
            if has_aux:
                return product, (loss, aux)
            return product, loss

        grad_fn = jax.grad(scaled, argnums, has_aux=True)

        def value_and_grad(
            *args: PyTree, **kwargs: PyTree
        ) -> DynamicScaleResult:
            grad, result = grad_fn(*args, **kwargs)
            grad = jax.tree.map(self._unscaled, grad)
            if axis_name is not None:
                grad = jax.lax.pmean(grad, axis_name)
            is_finite = jnp.array(True)
            for leaf in jax.tree.leaves(grad):
                is_finite &= jnp.all(jnp.isfinite(leaf))
            return DynamicScaleResult(
                self.after(is_finite), is_finite, result, grad
            )

        return value_and_grad

    def _unscaled(self, grad: Array) -> Array:
        return (
            jnp.asarray(grad, jnp.promote_types(grad.dtype, jnp.float32))
            / self.scale
        )

    def after(self, finite: Array) -> DynamicScale:
        """Returns the scale for the next step."""
        scale = jnp.asarray(self.scale, jnp.float32)
        is_due = self.fin_steps == self.growth_interval
        max_scale = jnp.finfo(jnp.float32).max
        grown_scale = jnp.minimum(scale * self.growth_factor, max_scale)
        reduced_scale = scale * self.backoff_factor
        if self.minimum_scale is not None:
            reduced_scale = jnp.maximum(reduced_scale, self.minimum_scale)
        scale_if_finite = jnp.where(is_due, grown_scale, scale)
        return self.replace(
            fin_steps=jnp.where(is_due | ~finite, 0, self.fin_steps + 1),
            scale=jnp.where(finite, scale_if_finite, reduced_scale),
        )
