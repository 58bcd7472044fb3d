from weft.errors._base import WeftError
from weft.errors._scopes import InvalidRngError


class MissingModeError(WeftError, ValueError):
    """A layer was called without its mode."""

    def __init__(self, layer: str, name: str):
        super().__init__(
            f"{layer} was called with {name}=None, and has {name}=None itself; set it when the "
            f"layer is called or created, as {name}=True or False, or for all layers of a "
            f"model by model.train(), model.eval() or nnx.view(model, {name}=True)."
        )


class MissingCacheError(WeftError, ValueError):
    """A layer was called with `decode=True` and has no cache."""

    def __init__(self, layer: str, in_features: int):
        super().__init__(
            f"{layer} was called with decode=True and has no cache; create one for all "
            f"positions first: layer.init_cache((batch, length, {in_features})), or for all "
            "layers of a model nnx.view(model, decode=True, batch_size=batch, "
            "max_length=length)."
        )


class RngArgumentError(InvalidRngError, TypeError):
    """The argument `rngs` is not a set of PRNG streams."""
