"""Recognition of an object's library by its class's module, without importing the library."""

import importlib
from typing import Any

from weft.config import REQUIRED, ClassConfigBase, FunctionConfigBase, InstantiableConfig
from weft.errors import UnknownLayerError
from weft.interop.models import Model

_ADAPTERS = {
    "weft.linen.": "weft.interop.linen:LinenModel",
    "weft.nnx.": "weft.interop.nnx:NNXModel",
    "weft.hierarchy.": "weft.interop.hierarchy:HierarchyModel",
    "flax.linen.": "weft.interop.flax:FlaxLinenModel",
    "flax.nnx.": "weft.interop.flax:FlaxNNXModel",
    "equinox.": "weft.interop.equinox:EquinoxModel",
    "haiku.": "weft.interop.haiku:HaikuModel",
}


def adapter_of(x: Any) -> str:
    """Returns the module of the `Model` for a layer or class of layers; empty if there is none."""
    if isinstance(x, tuple) and len(x) == 2 and type(x) is tuple:
        x = x[0]  # a layer and its state
    # The root of the classes of a library comes first: a module of one may hold another's.
    for base in reversed((x if isinstance(x, type) else type(x)).__mro__):
        for prefix, adapter in _ADAPTERS.items():
            if f"{base.__module__}.".startswith(prefix):
                return adapter
    return ""


def model_of(x: Any, *args: Any, **kwargs: Any) -> Model:
    """Returns the `Model` of a layer.

    Args:
        x: a layer of Linen, NNX, Flax, Equinox or Haiku, a class of layers of these or the
            hierarchy, or a config that makes one. Also a hierarchy config, a pair of an Equinox
            layer and its state, a result of `haiku.transform`, or a `Model`.
        *args: for a class.
        **kwargs: for a class.

    Raises:
        UnknownLayerError: if `x` is something else, or arguments were given without a class.
    """
    if (args or kwargs) and not isinstance(x, type):
        raise UnknownLayerError(
            f"{x!r} is not a class, but was given the arguments {args} and {kwargs}; "
            "pass a class and its arguments, or a layer alone."
        )
    if isinstance(x, Model):
        return x
    adapter = adapter_of(x)
    if not adapter and isinstance(x, ClassConfigBase | FunctionConfigBase):
        return _of_config(x)
    if not adapter and isinstance(x, InstantiableConfig):
        return model_of(x.instantiate())
    if not adapter:
        raise UnknownLayerError(
            f"{x!r} is not a layer of a known library; pass a module of Linen or NNX, of "
            "Weft or Flax, a config of a hierarchy layer, a module of Equinox, a module or "
            "transformed function of Haiku, or derive from weft.interop.Model."
        )
    return _load(adapter)(x, *args, **kwargs)


class _Maker:
    """Function that makes the module of a config, complete except for its `rngs`."""

    def __init__(self, config: Any):
        self._config = config
        self.made = config.klass if isinstance(config, ClassConfigBase) else config.fn
        self.__name__ = self.made.__name__

    def __call__(self, *, rngs: Any) -> Any:
        return self._config.instantiate(rngs=rngs)


def _of_config(config: Any) -> Model:
    """Returns the `Model` of a config of a class or function."""
    if "rngs" not in config.keys() or config.rngs not in (None, REQUIRED):  # noqa: SIM118
        return model_of(config.instantiate())
    maker = _Maker(config)
    # Nothing but NNX gives streams by this name; a function that takes them makes such a module.
    adapter = adapter_of(maker.made) if isinstance(maker.made, type) else _ADAPTERS["weft.nnx."]
    return _load(adapter)(maker) if adapter else model_of(config.instantiate())


def _load(adapter: str) -> Any:
    module, _, name = adapter.partition(":")
    return getattr(importlib.import_module(module), name)
