"""NNX modules as Linen modules: `ToLinen`, whose collections are the kinds of variables.

The NNX module exists for one call. `init` makes it with keys of the Linen module's streams; `apply`
makes it again, computing only the initial values it needs, and sets the variables. Changes made by
the call go back to the mutable collections.

`functional` turns an NNX class into two pure functions: `init` returns the state for `apply`.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from weft import errors, linen, nnx
from weft.core.frozen_dict import FrozenDict
from weft.interop.linen import draw_keys, rebox_all, store_variables
from weft.interop.models import Keys, Layer, Method
from weft.interop.nnx import NNXModel
from weft.interop.variables import to_linen_var
from weft.typing import PyTree


class ToLinen(linen.Module):
    """An NNX module as a module of Linen, with its methods; see `to_linen`."""

    nnx_class: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = FrozenDict({})
    skip_rng: bool = False
    metadata_fn: Callable[[Any], Any] | None = to_linen_var
    abstract_init: bool = True

    def __getattr__(self, name: str) -> Any:
        nnx_class = vars(self).get("nnx_class")
        if name[:2] != "__" and callable(getattr(nnx_class, name, None)):
            return functools.partial(self.__call__, nnx_method=name)
        return super().__getattr__(name)

    @linen.compact
    def __call__(
        self, *args: PyTree, nnx_method: Method = None, **kwargs: PyTree
    ) -> Any:
        """Calls the NNX module on the variables.

        `nnx_method` is a method, its name, or a function of the NNX module.

        Raises:
            RngStreamNotFoundError: at `init`, if the module needs a missing stream.
            InvalidRngError: if a key is drawn from a stream that `apply` was not given.
            LayerVariablesError: if a variable cannot be made, or a parameter has another shape.
        """
        scope: Any = self.scope
        rngs = draw_keys(self)
        model = NNXModel(self.nnx_class, *self.args, **self.kwargs)
        model.takes_rngs = not self.skip_rng
        model.abstract = self.abstract_init
        model.metadata_fn = self.metadata_fn
        variables = self.variables
        if self.is_initializing() and not any(variables.values()):
            module = self._make_module(model, rngs)
            model.init_wrapped_layers(module, args, kwargs, nnx_method)
            store_variables(self, model.boxes(model.collections(module)))
            return model.call(module, args, kwargs, nnx_method)
        merged = model.merge_values(variables, rngs, scope.mutable)
        store_variables(self, model.boxes(merged.new_variables))
        out = model.call(merged.module, args, kwargs, nnx_method)
        if not self.is_initializing():
            changed = model.changes(merged.module, merged.values, scope.mutable)
            store_variables(self, rebox_all(variables, changed))
        return out

    def _make_module(self, model: NNXModel, rngs: Keys) -> Layer:
        try:
            return model.make(rngs)
        except errors.RngStreamNotFoundError as error:
            error.add_note(
                f"{model.name} is made by a module of Linen, whose streams are its own: give "
                "`init` a key for each, as in init({'params': key, 'dropout': other_key}, ...)."
            )
            raise


def to_linen(
    nnx_class: Callable[..., Any],
    *args: PyTree,
    metadata_fn: Callable[[Any], Any] | None = to_linen_var,
    name: str | None = None,
    skip_rng: bool = False,
    abstract_init: bool = True,
    **kwargs: PyTree,
) -> ToLinen:
    """Returns an NNX module as a module of Linen.

    Args:
        metadata_fn: converts a variable to its entry in a collection; by default the value, in an
            `NNXMeta` if there is metadata. None for the bare value.
        skip_rng: whether the class does not take `rngs`.
        abstract_init: whether `apply` skips computing the initial values.
        **kwargs: for the class, except `rngs`.

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


M = TypeVar("M")


@dataclasses.dataclass
class Functional(Generic[M]):
    """Class and arguments of an NNX module, which `init` makes and `apply` calls."""

    module_type: type[M]
    graphdef: nnx.GraphDef | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def init(self, *, rngs: nnx.Rngs | None = None) -> nnx.State:
        """Makes the module and returns its state; `rngs` go to the class if it takes streams."""
        kwargs = self.kwargs
        if rngs is not None:
            kwargs = {**kwargs, "rngs": rngs}
        module = self.module_type(*self.args, **kwargs)
        self.graphdef, state = nnx.split(module)
        return state

    def apply(self, *states: PyTree) -> Any:
        """Returns a callable like the module, on the given state or its parts; see `nnx.call`.

        Calls return the result, description and state. Raises GraphStructureError before `init`.
        """
        if self.graphdef is None:
            raise errors.GraphStructureError(
                f"the structure of {self.module_type.__name__} is known after `init` was called; "
                "call it once before `apply`."
            )
        return self.graphdef.apply(*states)


def functional(cls: type[M]) -> Callable[..., Functional[M]]:
    """Returns a class of modules whose instances are made by `init`.

    >>> linear = functional(nnx.Linear)(3, 2)
    >>> state = linear.init(rngs=nnx.Rngs(0))
    >>> y, (graphdef, state) = linear.apply(state)(jnp.ones((1, 3)))
    >>> y.shape
    (1, 2)
    """
    return lambda *args, **kwargs: Functional(cls, None, args, kwargs)
