"""Default recipe's language model as an NNX module, on the same data.

The layers are the same: RMS norms, rotary positions, a window of causal attention, gated
feed-forward layers, tied embeddings. `nnx.vmap` creates all blocks at once and `nnx.scan` runs
them. The trainer's `logical_axis_rules` map the axis names of the weights to the mesh.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from weft import config, functional, nnx
from weft.hierarchy.metrics import WeightedScalar, bits_per_byte
from weft.input import ByteTokenizer
from weft.recipes.lm import VOCAB_SIZE, text_trainer_config

AXIS_RULES = (
    ("layers", None),
    ("embed", None),
    ("heads", "model"),
    ("hidden", "model"),
    ("vocab", "model"),
)


def lm_nnx(
    data_dir: str | None = None,
    tokenizer: str | None = None,
    *,
    text_key: str = "text",
    learning_rate: float = 6e-3,
    batch_size: int = 16,
    steps: int = 600,
) -> config.InstantiableConfig:
    """Returns an NNX language model that trains in minutes on two cores.

    Args:
        data_dir: A folder to train on, as in `weft.recipes.lm.lm`.
        tokenizer: As in `lm`.
        text_key: Field of a record that holds the text.
        learning_rate: Highest learning rate, after the warm-up.
        batch_size: Sequences per step.
        steps: Number of steps, and length of the schedule.
    """
    cfg = text_trainer_config(
        "runs/lm-nnx",
        data_dir,
        tokenizer,
        text_key=text_key,
        model=config.config_for_class(LanguageModel).set(
            dim=96, num_layers=3, num_heads=4, hidden_dim=256, window=127
        ),
        batch_size=batch_size,
        max_step=steps,
        peak_lr=learning_rate,
        eval_every=200,
    )
    return cfg.set(logical_axis_rules=AXIS_RULES)


def _weight(
    *names: str | None, variance: float = 1.0
) -> Callable[..., nnx.Param]:
    init = nnx.initializers.variance_scaling(variance, "fan_in", "normal")
    return nnx.with_partitioning(init, names)


class Block(nnx.Module):
    """Attention and a gated feed-forward layer, each in its own residual branch.

    A position attends to `window` previous ones; `variance` is that of each branch's output.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        hidden_dim: int,
        window: int,
        variance: float,
        *,
        rngs: nnx.Rngs,
    ):
        self.num_heads, self.window = num_heads, window
        self.norm_1 = nnx.RMSNorm(dim, rngs=rngs)
        self.norm_2 = nnx.RMSNorm(dim, rngs=rngs)

        def linear(n_in: int, n_out: int, kernel_init: Any) -> nnx.Linear:
            return nnx.Linear(
                n_in, n_out, use_bias=False, kernel_init=kernel_init, rngs=rngs
            )

        self.query = linear(dim, dim, _weight("embed", "heads"))
        self.key = linear(dim, dim, _weight("embed", "heads"))
        self.value = linear(dim, dim, _weight("embed", "heads"))
        self.out = linear(
            dim, dim, _weight("heads", "embed", variance=variance)
        )
        self.gate = linear(dim, hidden_dim, _weight("embed", "hidden"))
        self.up = linear(dim, hidden_dim, _weight("embed", "hidden"))
        self.down = linear(
            hidden_dim, dim, _weight("hidden", "embed", variance=variance)
        )

    def __call__(self, x):
        """Returns the residual stream after the block, `Float[Array, "batch time dim"]`."""
        x = x + self._attend(self.norm_1(x))
        y = self.norm_2(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))

    def _attend(self, x):
        batch, time, dim = x.shape
        positions = jnp.arange(time)
        sin, cos = functional.rotary_sincos(
            positions, dim=dim // self.num_heads
        )

        sin, cos = sin[:, None], cos[:, None]  # the same for all heads

        def heads(linear: nnx.Linear) -> jax.Array:
            return linear(x).reshape(batch, time, self.num_heads, -1)

        query = functional.apply_rotary(heads(self.query), sin, cos)
        key = functional.apply_rotary(heads(self.key), sin, cos)
        mask = functional.sliding_window_causal_mask(self.window)
        y = functional.dot_product_attention(
            query, key, heads(self.value), mask=mask
        )
        return self.out(y.reshape(batch, time, dim))


class LanguageModel(nnx.Module):
    """Language model that predicts each token from the previous ones.

    Arguments are as for `Block`; `pad_token_id` is left out of the loss where a batch does not say
    which targets count.
    """

    def __init__(
        self,
        dim: int,
        num_layers: int,
        num_heads: int,
        hidden_dim: int,
        window: int,
        vocab_size: int = VOCAB_SIZE,
        pad_token_id: int = ByteTokenizer.pad_id,
        *,
        rngs: nnx.Rngs,
    ):
        self.pad_token_id = pad_token_id
        embedding_init = nnx.with_partitioning(
            nnx.initializers.normal(dim**-0.5), ("vocab", "embed")
        )
        self.embed = nnx.Embed(
            vocab_size, dim, embedding_init=embedding_init, rngs=rngs
        )
        # Each block adds to the residual stream twice; the sum of all has the variance of one.
        variance = 1 / (2 * num_layers)

        @nnx.split_rngs(splits=num_layers)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
        def stacked_blocks(rngs: nnx.Rngs) -> Block:
            return Block(
                dim, num_heads, hidden_dim, window, variance, rngs=rngs
            )

        self.blocks = stacked_blocks(rngs)
        self.norm = nnx.RMSNorm(dim, rngs=rngs)

    def __call__(self, input_batch):
        """Returns the mean loss of the tokens except padding, and no auxiliary outputs.

        Args:
            input_batch: `input_ids` and `target_labels`, `Int[Array, "batch time"]`, and
                optionally `live_targets`, `Bool[Array, "batch time"]`, and `target_num_bytes`,
                `Int[Array, "batch"]`.
        """
        logits = self.predict(input_batch)["logits"]
        labels = input_batch["target_labels"]
        live_targets = input_batch.get(
            "live_targets", labels != self.pad_token_id
        )
        loss, aux = functional.cross_entropy(
            logits, labels, live_targets=live_targets
        )
        num_targets = aux["num_targets"]
        self.sow("summaries", "loss", WeightedScalar(loss, num_targets))
        if "target_num_bytes" in input_batch:
            bits = bits_per_byte(
                aux["per_target_loss"], input_batch["target_num_bytes"]
            )
            self.sow("summaries", "bits_per_byte", bits)
        return loss, {}

    def predict(self, input_batch):
        """Returns the logits after each token, `Float[Array, "batch time vocab"]`."""

        @nnx.scan(
            in_axes=(nnx.Carry, 0),
            out_axes=nnx.Carry,
            transform_metadata={nnx.PARTITION_NAME: "layers"},
        )
        def through_block(x: jax.Array, block: Block) -> jax.Array:
            return block(x)

        # The embeddings have variance 1 / dim, as the weights of the logits should.
        x = self.embed(input_batch["input_ids"]) * math.sqrt(
            self.embed.features
        )
        x = through_block(x, self.blocks)
        return {"logits": self.embed.attend(self.norm(x))}
