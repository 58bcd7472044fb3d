"""State of custom training loops: `TrainState`, `DynamicScale` and `EarlyStopping`.

The optimizer updates a leaf of a train state's `params` from its gradient. The backward pass itself
computes the next value of some leaves, such as the scales of low-precision layers: these are in the
collection `OVERWRITE_WITH_GRADIENT`, next to `params`, and the optimizer never sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import optax

from weft import errors, struct
from weft.functional.fp8 import (
    OVERWRITE_WITH_GRADIENT as OVERWRITE_WITH_GRADIENT,
)
from weft.trainer.dynamic_scale import DynamicScale as DynamicScale
from weft.trainer.dynamic_scale import DynamicScaleResult as DynamicScaleResult


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
            with_it, without = (
                ("params", "grads") if overwrites else ("grads", "params")
            )
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
            new = {
                "params": params,
                OVERWRITE_WITH_GRADIENT: grads[OVERWRITE_WITH_GRADIENT],
            }
            params = type(self.params)({**self.params, **new})
        return self.replace(
            step=self.step + 1, params=params, opt_state=opt_state, **kwargs
        )

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
        return cls(
            step=0,
            apply_fn=apply_fn,
            params=params,
            tx=tx,
            opt_state=opt_state,
            **kwargs,
        )


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
            return self.replace(
                best_metric=metric, patience_count=0, has_improved=True
            )
        return self.replace(
            patience_count=self.patience_count + 1,
            should_stop=self.should_stop
            or self.patience_count >= self.patience,
            has_improved=False,
        )
