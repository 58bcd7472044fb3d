"""A layer that stands for another one."""

import functools
from typing import Any

from weft.config import REQUIRED, Required, config_class
from weft.errors import LayerMethodError
from weft.hierarchy.base_layer import BaseLayer
from weft.hierarchy.module import Module, method_named


class RedirectToSharedModule(BaseLayer):
    """Passes its calls on to a module that one above it shares; it has no parameters of its own.

    An output layer with the weights of the embedding, for example: the decoder shares its embedding
    by `_share_with_descendants(self.emb, shared_module_name="shared_emb")`, and a layer below has

        RedirectToSharedModule.default_config().set(
            shared_module="shared_emb", method_map={"forward": "attend"}
        )

    as its output layer, whose `forward` then is the embedding's `attend`.
    """

    @config_class
    class Config(BaseLayer.Config):
        """Configures a RedirectToSharedModule.

        Attributes:
            shared_module: the name under which the module is shared.
            method_map: from methods of this layer to those of the shared module; with none,
                `forward` is `forward`.
        """

        shared_module: Required[str] = REQUIRED
        method_map: dict[str, str] = {}

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        for name, target in (cfg.method_map or {"forward": "forward"}).items():
            if name != "forward" and (name.startswith("_") or hasattr(BaseLayer, name)):
                raise LayerMethodError(
                    f"{self.path()} has {name!r} in its method_map, which is not a method that it "
                    "may redirect; expected 'forward' or a new public name."
                )
            setattr(self, name, functools.partial(self.redirect, target))

    def redirect(self, target: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the shared module.

        Args:
            target: the method's name.
            *args: for the method.
            **kwargs: for the method.
        """
        shared = self.get_shared_module(self.config.shared_module).module
        method = method_named(shared, target)
        if method is None:
            raise LayerMethodError(
                f"{self.path()} is to call {target!r} of {shared.path()}, and "
                f"{type(shared).__name__} has no public method of that name; "
                "name another in method_map."
            )
        return method(*args, **kwargs)
