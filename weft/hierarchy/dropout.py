"""Layers that drop things at random in training, and pass everything on otherwise."""

from weft.config import config_class
from weft.functional import drop_tokens, dropout, stochastic_depth
from weft.hierarchy.base_layer import BaseLayer
from weft.hierarchy.module import nowrap
from weft.typing import Tensor


class Dropout(BaseLayer):
    """Zeros elements at random in training, and scales up the others."""

    @config_class
    class Config(BaseLayer.Config):
        """Configures a Dropout.

        Attributes:
            rate: the probability of an element to be dropped; None or 0 drops nothing.
        """

        rate: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Drops elements.

        Args:
            x: `Float[Array, "*shape"]`.
        """
        rate = self.config.rate
        if not self.is_training or not rate:
            return x
        return dropout(x, rate=rate, prng_key=self.get_prng_key())

    @nowrap
    def get_prng_key(self) -> Tensor:
        """The key that draws what is dropped."""
        return self.require_prng_key("dropout")


class StochasticDepth(BaseLayer):
    """Drops a residual branch at random in training, and scales it up where it stays."""

    @config_class
    class Config(BaseLayer.Config):
        """Configures a StochasticDepth.

        Attributes:
            rate: the probability of the branch to be dropped; None or 0 drops nothing.
            mode: "row" decides for each example, "batch" once for all of them.
        """

        rate: float | None = None
        mode: str = "row"

    def forward(self, x: Tensor) -> Tensor:
        """Drops the branch.

        Args:
            x: `Float[Array, "batch *rest"]`, the branch's output.
        """
        cfg = self.config
        if not self.is_training or not cfg.rate:
            return x
        prng_key = self.require_prng_key("stochastic depth")
        return stochastic_depth(x, rate=cfg.rate, prng_key=prng_key, mode=cfg.mode)


class DropToken(BaseLayer):
    """Removes a random set of tokens from each example in training, which makes it shorter."""

    @config_class
    class Config(BaseLayer.Config):
        """Configures a DropToken.

        Attributes:
            rate: the fraction of tokens to remove.
            num_cls_tokens: how many tokens at the front always stay, and do not count.
        """

        rate: float = 0
        num_cls_tokens: int = 0

    def forward(self, x: Tensor) -> Tensor:
        """Removes tokens.

        Args:
            x: `Float[Array, "batch tokens dim"]`.

        Returns:
            `Float[Array, "batch kept dim"]`.
        """
        cfg = self.config
        if not self.is_training or not cfg.rate:
            return x
        return drop_tokens(
            x,
            rate=cfg.rate,
            prng_key=self.require_prng_key("the removal of tokens"),
            num_cls_tokens=cfg.num_cls_tokens,
        )
