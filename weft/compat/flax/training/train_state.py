"""State of custom training loops: `TrainState`, `DynamicScale` and `EarlyStopping`.

The optimizer updates a leaf of a train state's `params` from its gradient. The backward pass itself
computes the next value of some leaves, such as the scales of low-precision layers: these are in the
collection `OVERWRITE_WITH_GRADIENT`, next to `params`, and the optimizer never sees them.

Dynamic loss scaling prevents underflow of half-precision gradients: the loss is multiplied by a
scale and its gradients are divided by it. The scale doubles after `growth_interval` steps with
finite gradients, and is halved when they are not finite; skip such a step (Micikevicius et al.,
2018).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from weft import errors, struct
from weft.functional.fp8 import OVERWRITE_WITH_GRADIENT


class TrainState(struct.PyTreeNode):
    """State of a simple training loop; derive from it to add fields.

    `apply_fn` computes the model and is static, like the optimizer `tx`; `params` may be a dict
    with the collections `params` and `OVERWRITE_WITH_GRADIENT`.

    >>> apply_fn, params = lambda p, x: p["w"] * x, {"w": jax.numpy.ones(2)}
    >>> state = TrainState.create(apply_fn=apply_fn, params=params, tx=optax.sgd(0.5))
    >>> grads = jax.grad(lambda p: state.apply_fn(p, 2.0).sum())(state.params)
    >>> state = state.apply_gradients(grads=grads)
    >>> state.step, state.params["w"].tolist()
    (1, [0.0, 0.0])
    """

    step: int | jax.Array
    apply_fn: Callable[..., Any] = struct.field(pytree_node=False)
    params: Any
    tx: optax.GradientTransformation = struct.field(pytree_node=False)
    opt_state: optax.OptState

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> Self:
        """Returns the state after one step of the optimizer, with other fields changed by keyword.

        Raises a TrainStateError if only one of `params` and `grads` has `OVERWRITE_WITH_GRADIENT`.
        """
        overwrites = _has_overwrites(self.params)
        if overwrites != _has_overwrites(grads):
            with_it, without = ("params", "grads") if overwrites else ("grads", "params")
            raise errors.TrainStateError(
                f"{with_it} have the collection {OVERWRITE_WITH_GRADIENT!r}, but {without} do not; "
                "differentiate with respect to all of state.params, and create the state with all "
                "of these collections."
            )
        theirs = _optimizer_params(grads) if overwrites else grads
        params = _optimizer_params(self.params)
        updates, opt_state = self.tx.update(theirs, self.opt_state, params)
        params = optax.apply_updates(params, updates)
        if overwrites:
            new = {"params": params, OVERWRITE_WITH_GRADIENT: grads[OVERWRITE_WITH_GRADIENT]}
            params = type(self.params)({**self.params, **new})
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **kwargs)

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., Any],
        params: optax.Params,
        tx: optax.GradientTransformation,
        **kwargs: Any,
    ) -> Self:
        """Creates a state at step 0 with a fresh optimizer state and the fields of a derived class.

        Raises a TrainStateError if `params` has `OVERWRITE_WITH_GRADIENT` but no `params`.
        """
        opt_state = tx.init(_optimizer_params(params))
        return cls(step=0, apply_fn=apply_fn, params=params, tx=tx, opt_state=opt_state, **kwargs)


def _has_overwrites(tree: object) -> bool:
    return isinstance(tree, Mapping) and OVERWRITE_WITH_GRADIENT in tree


def _optimizer_params(tree: Any) -> Any:
    if not _has_overwrites(tree):
        return tree
    if "params" not in tree:
        raise errors.TrainStateError(
            f"params have the collections {list(tree)}; in addition to {OVERWRITE_WITH_GRADIENT!r} "
            "expected 'params', with the parameters that the optimizer updates."
        )
    return tree["params"]


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

        def scaled(*args: object, **kwargs: object) -> tuple[Array, Any]:
            loss, *rest = fun(*args, **kwargs) if has_aux else (fun(*args, **kwargs),)
            product = loss * self.scale
            # Dividing the product again may be infinite where the loss is not.
            loss = jnp.asarray(loss, product.dtype)
            return product, (loss, *rest) if has_aux else loss

        grad_fn = jax.grad(scaled, argnums, has_aux=True)

        def value_and_grad(*args: object, **kwargs: object) -> DynamicScaleResult:
            grad, result = grad_fn(*args, **kwargs)
            grad = jax.tree.map(self._unscaled, grad)
            if axis_name is not None:
                grad = jax.lax.pmean(grad, axis_name)
            finite = jnp.array(True)
            for g in jax.tree.leaves(grad):
                finite &= jnp.all(jnp.isfinite(g))
            return DynamicScaleResult(self.after(finite), finite, result, grad)

        return value_and_grad

    def _unscaled(self, grad: Array) -> Array:
        return jnp.asarray(grad, jnp.promote_types(grad.dtype, jnp.float32)) / self.scale

    def after(self, finite: Array) -> DynamicScale:
        """Returns the scale for the next step."""
        scale = jnp.asarray(self.scale, jnp.float32)
        grow = self.fin_steps == self.growth_interval
        largest = jnp.finfo(jnp.float32).max
        larger = jnp.where(grow, jnp.minimum(scale * self.growth_factor, largest), scale)
        shrunk = scale * self.backoff_factor
        if self.minimum_scale is not None:
            shrunk = jnp.maximum(shrunk, self.minimum_scale)
        fin_steps = jnp.where(grow | ~finite, 0, self.fin_steps + 1)
        return self.replace(fin_steps=fin_steps, scale=jnp.where(finite, larger, shrunk))


class EarlyStopping(struct.PyTreeNode):
    """State that counts how long a metric, where smaller is better, has not improved.

    Attributes:
        min_delta: minimum improvement that counts.
        patience: number of consecutive updates without improvement before the next one stops.
        patience_count: number of updates since the best metric.
        should_stop: whether training should end; stays True.

    >>> stopping = EarlyStopping(min_delta=0.1, patience=1)
    >>> for loss in (1.0, 0.5, 0.45, 0.6):
    ...     stopping = stopping.update(loss)
    >>> stopping.best_metric, stopping.has_improved, stopping.should_stop
    (0.5, False, True)
    """

    min_delta: float = 0
    patience: int = 0
    best_metric: float = float("inf")
    patience_count: int = 0
    should_stop: bool = False
    has_improved: bool = False

    def reset(self) -> "EarlyStopping":
        """Returns the state before the first update."""
        return EarlyStopping(min_delta=self.min_delta, patience=self.patience)

    def update(self, metric: float) -> "EarlyStopping":
        """Returns the state after an evaluation with a scalar metric; NaN is not an improvement."""
        if self.best_metric - metric > self.min_delta:
            return self.replace(best_metric=metric, patience_count=0, has_improved=True)
        return self.replace(
            patience_count=self.patience_count + 1,
            should_stop=self.should_stop or self.patience_count >= self.patience,
            has_improved=False,
        )
