"""NNX modules as Linen modules: `ToLinen`, whose collections are the kinds of variables.

The NNX module exists for one call. `init` makes it with keys of the Linen module's streams; `apply`
makes it again, computing only the initial values it needs, and sets the variables. Changes made by
the call go back to the mutable collections.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weft import linen
from weft.core.filters import in_filter
from weft.core.frozen_dict import FrozenDict
from weft.errors import RngStreamNotFoundError
from weft.interop.bridge.variables import to_linen_var
from weft.interop.linen import boxed_as
from weft.interop.models import nested
from weft.interop.nnx import NNXModel

__all__ = ["ToLinen", "to_linen"]


class ToLinen(linen.Module):
    """An NNX module as a module of Linen; see `to_linen`."""

    nnx_class: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = FrozenDict({})
    skip_rng: bool = False
    metadata_fn: Callable[[Any], Any] | None = to_linen_var
    abstract_init: bool = True

    @linen.compact
    def __call__(self, *args: Any, nnx_method: Any = None, **kwargs: Any) -> Any:
        """Calls the NNX module on the variables.

        `nnx_method` is a method, its name, or a function of the NNX module.

        Raises:
            RngStreamNotFoundError: at `init`, if the module needs a missing stream.
            InvalidRngError: if a key is drawn from a stream that `apply` was not given.
            LayerVariablesError: if a variable is missing that cannot be made, or a parameter has
                another shape.
        """
        scope: Any = self.scope
        rngs = {name: self.make_rng(name) for name in scope.rngs}
        model = NNXModel(self.nnx_class, *self.args, **self.kwargs)
        model.takes_rngs, model.abstract = not self.skip_rng, self.abstract_init
        model.metadata_fn = self.metadata_fn
        variables = self.variables
        if self.is_initializing() and not any(variables.values()):
            module = self._first(model, rngs)
            model.begin(module, args, kwargs, nnx_method)
            leaves = model.collections(module)
            self._put(nested({path: model.boxed(leaf) for path, leaf in leaves.items()}))
            return model.call(module, args, kwargs, nnx_method)
        module, before, made = model.with_values(variables, rngs, scope.mutable)
        self._put(nested({path: model.boxed(leaf) for path, leaf in made.items()}))
        out = model.call(module, args, kwargs, nnx_method)
        if not self.is_initializing():
            self._put(boxed_as(variables, model.changes(module, before, scope.mutable)))
        return out

    def _first(self, model: NNXModel, rngs: Mapping[str, Any]) -> Any:
        try:
            return model.make(rngs)
        except RngStreamNotFoundError as error:
            error.add_note(
                f"{model.name} is made by a module of Linen, whose streams are its own: give "
                "`init` a key for each, as in init({'params': key, 'dropout': other_key}, ...)."
            )
            raise

    def _put(self, variables: Mapping[str, Any]) -> None:
        scope: Any = self.scope
        for col, entries in variables.items():
            if in_filter(scope.mutable, col):
                for name, value in entries.items():
                    self.put_variable(col, name, value)


def to_linen(
    nnx_class: Callable[..., Any],
    *args: Any,
    metadata_fn: Callable[[Any], Any] | None = to_linen_var,
    name: str | None = None,
    skip_rng: bool = False,
    abstract_init: bool = True,
    **kwargs: Any,
) -> ToLinen:
    """Returns an NNX module as a module of Linen.

    Args:
        nnx_class: its class, or a function that makes it.
        *args: for the class.
        metadata_fn: converts a variable to its entry in a collection; by default the value, in an
            `NNXMeta` if there is metadata. None for the bare value.
        name: of the Linen module.
        skip_rng: whether the class does not take `rngs`.
        abstract_init: whether `apply` skips computing the initial values.
        **kwargs: for the class, except `rngs`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from weft import nnx
        >>> model = to_linen(nnx.Linear, 3, 2)
        >>> variables = model.init(jax.random.key(0), jnp.ones((1, 3)))
        >>> jax.tree.map(jnp.shape, variables)
        {'params': {'bias': (2,), 'kernel': (3, 2)}}
    """
    return ToLinen(
        nnx_class,
        args,
        FrozenDict(kwargs),
        skip_rng,
        metadata_fn,
        abstract_init,
        name=name,
    )
