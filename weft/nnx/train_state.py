"""Train state: a model's description, parameters, optimizer state and step, as one pytree.

It suits functional training loops; `Optimizer` suits loops that change objects in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp

from weft import struct
from weft.nnx.gradients import gradients_like
from weft.nnx.graph import GraphDef
from weft.nnx.state import State, from_flat_state, to_flat_state
from weft.nnx.variables import Variable

if TYPE_CHECKING:
    import optax


class TrainState(struct.PyTreeNode):
    """State of a simple training loop; derive from it to add fields.

    Attributes:
        graphdef: description of the model.
        params: its parameters.
        step: number of applied updates.
        tx: the optimizer; static.

    Example:
        >>> import optax
        >>> from weft import nnx
        >>> graphdef, params = nnx.split(nnx.Dict(w=nnx.Param(jnp.ones(2))))
        >>> train_state = TrainState.create(graphdef, params=params, tx=optax.sgd(0.5))
        >>> train_state = train_state.apply_gradients(params)
        >>> int(train_state.step), train_state.params.w.tolist()
        (1, [0.5, 0.5])
    """

    graphdef: GraphDef
    params: State
    opt_state: "optax.OptState"
    step: jax.Array
    tx: "optax.GradientTransformation" = struct.field(pytree_node=False)

    @classmethod
    def create(
        cls,
        graphdef: GraphDef,
        *,
        params: State,
        tx: "optax.GradientTransformation",
        step: int = 0,
        **kwargs: Any,
    ) -> Self:
        """Creates a state with initial optimizer state; `kwargs` are fields of a derived class."""
        return cls(
            graphdef=graphdef,
            params=params,
            opt_state=tx.init(params),
            step=jnp.asarray(step),
            tx=tx,
            **kwargs,
        )

    def apply(self, state: State | str, *states: State | str) -> Any:
        """Calls a method of the model purely; see `nnx.call`.

        A state may be given by the name of a field; further states are merged with it.

        Example:
            >>> import optax
            >>> from weft import nnx
            >>> class Scale(nnx.Module):
            ...     def __init__(self):
            ...         self.factor = nnx.Param(jnp.array(2.0))
            ...     def __call__(self, x):
            ...         return x * self.factor
            >>> graphdef, params = nnx.split(Scale())
            >>> state = TrainState.create(graphdef, params=params, tx=optax.sgd(0.5))
            >>> y, _ = state.apply("params")(3.0)
            >>> float(y)
            6.0
        """
        found = [getattr(self, s) if isinstance(s, str) else s for s in (state, *states)]
        return self.graphdef.apply(*found)

    def apply_gradients(self, grads: State, **kwargs: Any) -> Self:
        """Returns the state after one optimizer step.

        Args:
            grads: gradients, at the paths of the parameters; variables or arrays.
            **kwargs: other fields to replace.

        Raises:
            GradientStructureError: if paths or shapes of gradients and parameters differ.
        """
        parameters = dict(to_flat_state(self.params))
        values = to_flat_state(gradients_like(parameters, grads, ...))
        like = from_flat_state(
            (path, x.replace(value) if isinstance(x := parameters[path], Variable) else value)
            for path, value in values
        )
        updates, opt_state = self.tx.update(like, self.opt_state, self.params)
        import optax  # local: optax would double the import time of this package

        params = optax.apply_updates(self.params, updates)
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **kwargs)
