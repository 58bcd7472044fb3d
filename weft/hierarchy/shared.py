"""A layer that redirects its calls to a shared module."""

import functools
from typing import Any

from weft.config import REQUIRED, Required, config_class
from weft.errors import LayerMethodError
from weft.hierarchy.base_layer import BaseLayer
from weft.hierarchy.module import Module, method_named


class RedirectToSharedModule(BaseLayer):
    """Layer without parameters that calls a module shared by an ancestor.

    For example, an output layer with the weights of the embedding: the decoder calls
    `_share_with_descendants(self.emb, shared_module_name="shared_emb")`, and a layer below it uses

        RedirectToSharedModule.default_config().set(
            shared_module="shared_emb", method_map={"forward": "attend"}
        )

    as output layer, whose `forward` is the embedding's `attend`.
    """

    @config_class
    class Config(BaseLayer.Config):
        """Configures a RedirectToSharedModule.

        Attributes:
            shared_module: name under which the module is shared.
            method_map: maps methods of this layer to those of the shared module; empty means
                `forward` to `forward`.
        """

        shared_module: Required[str] = REQUIRED
        method_map: dict[str, str] = {}

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        for name, target in (cfg.method_map or {"forward": "forward"}).items():
            if name != "forward" and (name.startswith("_") or hasattr(BaseLayer, name)):
                raise LayerMethodError(
                    f"{self.path()} cannot redirect {name!r} of its method_map; expected 'forward' "
                    "or a new public name."
                )
            setattr(self, name, functools.partial(self.redirect, target))

    def redirect(self, target: str, *args: Any, **kwargs: Any) -> Any:
        """Calls the method called `target` of the shared module."""
        shared = self.get_shared_module(self.config.shared_module).module
        method = method_named(shared, target)
        if method is None:
            raise LayerMethodError(
                f"{self.path()} redirects to {target!r} of {shared.path()}, but "
                f"{type(shared).__name__} has no public method of that name; "
                "change method_map."
            )
        return method(*args, **kwargs)
