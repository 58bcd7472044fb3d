"""Parameters, optimizer state and step number as one pytree.

The optimizer updates a leaf of `params` from its gradient. The backward pass itself computes the
next value of some leaves, such as the scales of low-precision layers: these are in the collection
`OVERWRITE_WITH_GRADIENT`, next to `params`, and the optimizer never sees them.
"""

from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import optax

from weft import struct
from weft.errors import TrainStateError

OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"
"""Collection whose variables are replaced by their gradients."""


class TrainState(struct.PyTreeNode):
    """State of a simple training loop; derive from it to add fields.

    `apply_fn` computes the model and is static, like the optimizer `tx`; `params` may be a dict
    with the collections `params` and `OVERWRITE_WITH_GRADIENT`.

    Example:
        >>> state = TrainState.create(
        ...     apply_fn=lambda p, x: p["w"] * x, params={"w": jax.numpy.ones(2)}, tx=optax.sgd(0.5)
        ... )
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
            raise TrainStateError(
                f"{with_it} have the collection {OVERWRITE_WITH_GRADIENT!r}, but {without} do not; "
                "differentiate with respect to all of state.params, and create the state with all "
                "of these collections."
            )
        theirs = _optimized(grads) if overwrites else grads
        params = _optimized(self.params)
        updates, opt_state = self.tx.update(theirs, self.opt_state, params)
        params = optax.apply_updates(params, updates)
        if overwrites:
            new = {"params": params, OVERWRITE_WITH_GRADIENT: grads[OVERWRITE_WITH_GRADIENT]}
            params = type(self.params)({**self.params, **new})
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **kwargs)

    @classmethod
    def create(cls, *, apply_fn: Any, params: Any, tx: Any, **kwargs: Any) -> Self:
        """Creates a state at step 0 with a fresh optimizer state and the fields of a derived class.

        Raises a TrainStateError if `params` has `OVERWRITE_WITH_GRADIENT` but no `params`.
        """
        opt_state = tx.init(_optimized(params))
        return cls(step=0, apply_fn=apply_fn, params=params, tx=tx, opt_state=opt_state, **kwargs)


def _has_overwrites(tree: Any) -> bool:
    return isinstance(tree, Mapping) and OVERWRITE_WITH_GRADIENT in tree


def _optimized(tree: Any) -> Any:
    """Returns the parameters that the optimizer updates."""
    if not _has_overwrites(tree):
        return tree
    if "params" not in tree:
        raise TrainStateError(
            f"params have the collections {list(tree)}; in addition to {OVERWRITE_WITH_GRADIENT!r} "
            "expected 'params', with the parameters that the optimizer updates."
        )
    return tree["params"]
