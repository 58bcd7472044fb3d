"""The errors about how a layer of NNX is called."""

from weft.errors._base import WeftError
from weft.errors._scopes import InvalidRngError


class MissingModeError(WeftError, ValueError):
    """A layer was not told in which mode it is called."""

    def __init__(self, layer: str, name: str):
        super().__init__(
            f"{layer} was called with {name}=None, and has {name}=None itself; give it when the "
            f"layer is called or made, as {name}=True or False, or for all layers of a model by "
            f"model.train(), model.eval() or nnx.view(model, {name}=True)."
        )


class MissingCacheError(WeftError, ValueError):
    """A layer was to decode without a cache."""

    def __init__(self, layer: str, in_features: int):
        super().__init__(
            f"{layer} was called with decode=True and has no cache; make one for all positions "
            f"first: layer.init_cache((batch, length, {in_features})), or for all layers of a "
            "model nnx.view(model, decode=True, batch_size=batch, max_length=length)."
        )


class RngArgumentError(InvalidRngError, TypeError):
    """What was given as `rngs` are no PRNG streams."""
