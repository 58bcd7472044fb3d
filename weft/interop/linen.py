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
    """The streams for a Linen module, in which `default` stands in for `params`."""
    streams = dict(rngs)
    if "default" in streams:
        default = streams.pop("default")
        streams.setdefault("params", default)
    return streams


class LinenModel(Model):
    """A Linen module.

    Args:
        module: the module, or a class of modules.
        *args: for a class.
        **kwargs: for a class.
    """

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
        """The class of the modules of the library."""
        return linen.Module

    @staticmethod
    def _outside() -> Any:
        """A context in which a module that is made is nobody's submodule."""
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
        """A filter of collections as the library takes it."""
        return mutable

    def _in(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Variables as the library takes them."""
        return variables

    def _out(self, variables: Mapping[str, Any]) -> Variables:
        """Variables as Weft takes them."""
        return dict(variables)


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Variables:
    """The entries that are other objects than before."""
    old = flat(before)
    return nested({p: v for p, v in flat(after).items() if p not in old or old[p] is not v})


class InLinen(linen.Module):
    """A layer of any library as a module of Linen.

    Attributes:
        model: the layer.
        training: whether it is called in training; None leaves it as it is.
    """

    model: Any
    training: bool | None = None

    @linen.compact
    def __call__(
        self, *args: Any, training: bool | None = None, method: str | None = None, **kwargs: Any
    ) -> Any:
        """Calls the layer.

        Args:
            *args: of the layer.
            training: in place of the attribute.
            method: what is called, by default the layer itself.
            **kwargs: of the layer.
        """
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
    """Changed variables in the boxes in which they were before."""
    old = flat(before)
    return nested({path: boxed_like(old.get(path), v) for path, v in flat(changed).items()})


def as_linen(
    x: Any, /, *args: Any, name: str | None = None, training: bool | None = None, **kwargs: Any
) -> linen.Module:
    """A layer of any library as a module of Linen.

    Its variables are those of the layer, with their axis metadata, in the collections `params` and
    such as the layer has. Keys come from the streams of Linen.

    Args:
        x: the layer, see `weft.interop.model_of`; or a class of layers. A module of Linen stays
            what it is. Of a layer that holds arrays itself, `init` gives copies of these.
        *args: for a class.
        name: of the module in its parent.
        training: whether the layer is called in training; None leaves it as it is. The call takes
            it as well.
        **kwargs: for a class.

    Raises:
        UnknownLayerError: if `x` is of no library that is known.

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
