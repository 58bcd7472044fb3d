"""Modules of NNX and of Linen as submodules of modules of the bridge."""

from collections.abc import Callable
from typing import Any, TypeVar

from weft.errors import BridgeContextError
from weft.interop.bridge.modules import Module, by_collection, next_name
from weft.interop.bridge.scopes import Scope, current_context
from weft.interop.bridge.to_nnx import ToNNX
from weft.interop.models import flat
from weft.interop.nnx import NNXModel
from weft.nnx.rngs import Rngs

__all__ = ["linen_in_bridge_mdl", "nnx_in_bridge_mdl"]

M = TypeVar("M")


def _parent(what: str) -> Module:
    context = current_context()
    if context is None:
        raise BridgeContextError(
            f"{what} was called outside of modules; call it in a method of a bridge.Module that "
            "`init` or `apply` runs."
        )
    return context.module


def nnx_in_bridge_mdl(factory: Callable[[Rngs], M], name: str | None = None) -> M:
    """Returns an NNX module as a submodule of the running bridge module.

    Args:
        factory: makes it from the streams.
        name: of the attribute, by default derived from the class.

    Raises:
        BridgeContextError: outside of modules, or of `init` and `apply`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from weft import nnx
        >>> from weft.nnx import bridge
        >>> class Head(bridge.Module):
        ...     @bridge.compact
        ...     def __call__(self, x):
        ...         return bridge.nnx_in_bridge_mdl(lambda rngs: nnx.Linear(3, 2, rngs=rngs))(x)
        >>> Head().init(0, jnp.ones((1, 3)))["params"]["Linear_0"]["kernel"].shape
        (3, 2)
    """
    parent = _parent("nnx_in_bridge_mdl")
    scope = parent._bound("the PRNG streams")
    if "params" in scope.rngs or "default" in scope.rngs:
        made = factory(scope.rngs)
        return _attached(parent, name or next_name(type(made)), made)
    # Without a key for parameters these were all given, and first values are not computed.
    model = NNXModel(lambda rngs: factory(rngs))
    keys = {stream: draw() for stream, draw in scope.rngs.items()}
    name = name or next_name(model.type_made(keys))
    given = by_collection(flat(scope.given.pop(name, {})))
    made = model.with_values(given, keys, mutable=False)[0]
    return _attached(parent, name, made)


def linen_in_bridge_mdl(linen_module: Any, name: str | None = None) -> ToNNX:
    """Returns a Linen module as a submodule of the running bridge module.

    Args:
        linen_module: the Linen module; `init` of the bridge module makes its variables.
        name: of the attribute, by default derived from the class.

    Raises:
        BridgeContextError: outside of modules, or of `init` and `apply`.
    """
    parent = _parent("linen_in_bridge_mdl")
    scope = parent._bound("the PRNG streams")
    made = _LinenModule(linen_module, scope)
    return _attached(parent, name or next_name(type(linen_module)), made)


def _attached(parent: Module, name: str, made: Any) -> Any:
    parent._attach(name, made)
    return getattr(parent, name)


class _LinenModule(ToNNX):
    """A Linen module whose first call makes its variables, if they were not given."""

    def __init__(self, module: Any, scope: Scope):
        super().__init__(module, scope.rngs)
        self.to_nnx__mutable = scope.mutable
        self.to_nnx__initializing = scope.initializing

    def __call__(self, *args: Any, mutable: Any = None, method: Any = None, **kwargs: Any) -> Any:
        if self.to_nnx__initializing and not self._held():
            self.lazy_init(*args, method=method, **kwargs)
        mutable = self.to_nnx__mutable if mutable is None else mutable
        return super().__call__(*args, mutable=mutable, method=method, **kwargs)


_LinenModule.__name__ = _LinenModule.__qualname__ = "ToNNX"
