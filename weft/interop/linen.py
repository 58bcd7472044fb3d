"""Layers of Linen in other models, and layers of other libraries in models of Linen."""

from collections.abc import Mapping
from typing import Any

from weft import linen
from weft.core.filters import Filter
from weft.errors import UnknownLayerError
from weft.interop.models import Model, Variables, boxed_like, flat, method_of, nested, with_mode
from weft.interop.recognition import model_of
from weft.linen.running import alone

__all__ = ["InLinen", "LinenModel", "as_linen", "linen_streams"]


def linen_streams(rngs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the streams for a Linen module; `default` replaces a missing `params`."""
    streams = dict(rngs)
    if "default" in streams:
        default = streams.pop("default")
        streams.setdefault("params", default)
    return streams


class LinenModel(Model):
    """A Linen module, or a class of modules with its arguments."""

    def __init__(self, module: Any, *args: Any, **kwargs: Any):
        with self._outside():
            made = module(*args, **kwargs) if isinstance(module, type) else module
            if not isinstance(made, self._kind()):
                raise UnknownLayerError(
                    f"a module of Linen was to be used, and a {type(made).__name__} was given; "
                    "give one, or let weft.interop.model_of say what it is."
                )
            self.module = made.clone(parent=None)

    @staticmethod
    def _kind() -> type:
        """Returns the module base class of the library."""
        return linen.Module

    @staticmethod
    def _outside() -> Any:
        """Returns a context in which new modules have no parent."""
        return alone()

    @property
    def name(self) -> str:
        return type(self.module).__name__

    def init(self, rngs, *args, training=None, method=None, **kwargs):
        kwargs = self._arguments(method, kwargs, training)
        with self._outside():
            return self._out(self.module.init(linen_streams(rngs), *args, **kwargs))

    def apply(self, variables, *args, rngs, mutable, training=None, method=None, **kwargs):
        kwargs = self._arguments(method, kwargs, training)
        streams, given = linen_streams(rngs), self._in(variables)
        with self._outside():
            filtered = self._filter(mutable)
            out = self.module.apply(given, *args, rngs=streams, mutable=filtered, **kwargs)
        if mutable is False:
            return out, {}
        out, changed = out
        return out, _changes(variables, self._out(changed))

    def _arguments(self, method: Any, kwargs: dict[str, Any], training: bool | None) -> Any:
        called = method_of(self.module, method, self.name)
        # Of the module itself, `__call__` is what says how it is called.
        called = called if method else getattr(self.module, "__call__", called)  # noqa: B004
        given = {} if method is None else {"method": method}
        return {**given, **with_mode(called, kwargs, training)}

    def _filter(self, mutable: Filter) -> Any:
        """Converts a filter of collections for the library."""
        return mutable

    def _in(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Converts variables for the library."""
        return variables

    def _out(self, variables: Mapping[str, Any]) -> Variables:
        """Converts variables of the library for Weft."""
        return dict(variables)


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Variables:
    """Returns the entries that are other objects than before."""
    old = flat(before)
    return nested({p: v for p, v in flat(after).items() if p not in old or old[p] is not v})


class InLinen(linen.Module):
    """A layer of any library as a module of Linen.

    Attributes:
        model: the layer.
        training: whether it is called in training mode; None does not set the mode.
    """

    model: Any
    training: bool | None = None

    @linen.compact
    def __call__(
        self, *args: Any, training: bool | None = None, method: str | None = None, **kwargs: Any
    ) -> Any:
        """Calls the layer, or its method named `method`; `training` overrides the attribute."""
        scope: Any = self.scope
        training = self.training if training is None else training
        how = {"training": training, "method": method, **kwargs}
        variables = self.variables
        if self.is_initializing() and not any(variables.values()):
            variables = self.model.init(self._streams(), *args, **how)
            self._put(variables)
        out, changed = self.model.apply(
            variables, *args, rngs=self._streams(), mutable=scope.mutable, **how
        )
        if not self.is_initializing():
            self._put(boxed_as(variables, changed))
        return out

    def _streams(self) -> dict[str, Any]:
        scope: Any = self.scope
        return {name: self.make_rng(name) for name in scope.rngs}

    def _put(self, variables: Mapping[str, Any]) -> None:
        for col, entries in variables.items():
            if self.is_mutable_collection(col):
                for name, value in entries.items():
                    self.put_variable(col, name, value)


def boxed_as(before: Mapping[str, Any], changed: Mapping[str, Any]) -> Variables:
    """Returns changed variables in the boxes they were in before."""
    old = flat(before)
    return nested({path: boxed_like(old.get(path), v) for path, v in flat(changed).items()})


def as_linen(
    x: Any, /, *args: Any, name: str | None = None, training: bool | None = None, **kwargs: Any
) -> linen.Module:
    """Returns a layer of any library as a module of Linen.

    Its variables are those of the layer, with their axis metadata, in `params` and the layer's
    other collections. Keys come from the streams of Linen.

    Args:
        x: the layer, see `weft.interop.model_of`, or a class of layers. Modules of Linen are
            returned unchanged. If the layer holds arrays itself, `init` copies them.
        *args: for a class.
        name: of the module in its parent.
        training: whether the layer is called in training mode, a default for calls; None does not
            set the mode.
        **kwargs: for a class.

    Raises:
        UnknownLayerError: if the library of `x` is unknown.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from weft import linen as nn, nnx
        >>> class Model(nn.Module):
        ...     @nn.compact
        ...     def __call__(self, x):
        ...         return as_linen(nnx.Linear, 3, 2, name="head")(x)
        >>> variables = Model().init(jax.random.key(0), jnp.ones((1, 3)))
        >>> jax.tree.map(jnp.shape, variables)
        {'params': {'head': {'bias': (2,), 'kernel': (3, 2)}}}
    """
    if isinstance(x, linen.Module) and not (args or kwargs):
        return x if name is None else x.copy(name=name)
    if isinstance(x, type) and issubclass(x, linen.Module):
        return x(*args, **kwargs, **({} if name is None else {"name": name}))
    return InLinen(model_of(x, *args, **kwargs), training, name=name)
