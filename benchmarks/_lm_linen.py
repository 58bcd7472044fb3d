"""Model of the recipe `lm-nnx`, written in Linen."""

import math

import jax.numpy as jnp

from weft import functional
from weft import linen as nn
from weft.recipes.lm import VOCAB_SIZE


class Block(nn.Module):
    """Attention and a gated feed-forward layer, as `weft.recipes.lm_nnx.Block`."""

    num_heads: int
    hidden_dim: int
    window: int
    variance: float

    @nn.compact
    def __call__(self, x, _):
        """Returns the residual stream after the block, and nothing for the scan."""
        batch, time, dim = x.shape

        def linear(name: str, features: int, x, variance: float = 1.0):
            init = nn.initializers.variance_scaling(variance, "fan_in", "normal")
            return nn.Dense(features, use_bias=False, kernel_init=init, name=name)(x)

        y = nn.RMSNorm(name="norm_1")(x)
        query, key, value = (
            linear(name, dim, y).reshape(batch, time, self.num_heads, -1)
            for name in ("query", "key", "value")
        )
        sin, cos = functional.rotary_sincos(jnp.arange(time), dim=dim // self.num_heads)
        query, key = (
            functional.apply_rotary(heads, sin[:, None], cos[:, None]) for heads in (query, key)
        )
        mask = functional.sliding_window_causal_mask(self.window)
        y = functional.dot_product_attention(query, key, value, mask=mask)
        x = x + linear("out", dim, y.reshape(batch, time, dim), self.variance)
        y = nn.RMSNorm(name="norm_2")(x)
        y = nn.silu(linear("gate", self.hidden_dim, y)) * linear("up", self.hidden_dim, y)
        return x + linear("down", dim, y, self.variance), None


class LanguageModel(nn.Module):
    """Language model as `weft.recipes.lm_nnx.LanguageModel`."""

    dim: int = 96
    num_layers: int = 3
    num_heads: int = 4
    hidden_dim: int = 256
    window: int = 127

    @nn.compact
    def __call__(self, input_batch):
        """Returns the mean loss of the tokens except padding, and no auxiliary outputs."""
        init = nn.initializers.normal(self.dim**-0.5)
        embed = nn.Embed(VOCAB_SIZE, self.dim, embedding_init=init)
        layers = nn.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.num_layers,
        )(self.num_heads, self.hidden_dim, self.window, 1 / (2 * self.num_layers))
        x, _ = layers(embed(input_batch["input_ids"]) * math.sqrt(self.dim), None)
        labels = input_batch["target_labels"]
        logits = embed.attend(nn.RMSNorm()(x))
        live = input_batch["live_targets"]
        return functional.cross_entropy(logits, labels, live_targets=live)[0], {}
