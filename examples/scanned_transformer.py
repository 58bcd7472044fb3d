"""A transformer whose layers are one `nn.scan` over a rematerialised block.

`python examples/scanned_transformer.py` takes a minute on two cores. What to look at: the block is
traced and compiled once, whatever the depth; its parameters have a leading axis of layers. The data
are the bytes of Python's standard library, the loss is in bits per byte.
"""

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from weft import linen as nn
from weft.input import Corpus, Split, stdlib_corpus
from weft.training.train_state import TrainState

ROWS, LENGTH = 16, 64


class Block(nn.Module):
    """Causal attention and an MLP, each on a branch of its own."""

    heads: int

    @nn.compact
    def __call__(self, x, mask):
        width = x.shape[-1]
        attention = nn.MultiHeadDotProductAttention(num_heads=self.heads)
        x = x + attention(nn.LayerNorm()(x), mask=mask)
        h = nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x)))
        return x + nn.Dense(width)(h), None


class Decoder(nn.Module):
    """Predicts the next byte from all bytes before it."""

    width: int = 96
    layers: int = 4

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(256, self.width, name="tokens")(tokens)
        positions = nn.Embed(LENGTH, self.width, name="positions")
        x = x + positions(jnp.arange(tokens.shape[-1]))[None]
        # In the backward pass a block is computed again, so that only its input is kept.
        blocks = nn.scan(
            nn.remat(Block, prevent_cse=False),  # a scan needs no protection against it
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=self.layers,
        )
        x, _ = blocks(heads=4, name="blocks")(x, nn.make_causal_mask(tokens))
        return nn.Dense(256, name="out")(nn.LayerNorm(name="norm")(x))


def bits_per_byte(params, apply_fn, text):
    """The bits that each byte but the first takes."""
    logits = apply_fn({"params": params}, text[:, :-1])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:])
    return loss.mean() / jnp.log(2)


@jax.jit
def train_step(state, text):
    """One step of the optimizer."""
    bits, grads = jax.value_and_grad(bits_per_byte)(state.params, state.apply_fn, text)
    return state.apply_gradients(grads=grads), bits


def read_bytes(corpus: Corpus, split: Split) -> np.ndarray:
    """The bytes of all files of one part."""
    return np.frombuffer(b"".join(file.text for file in corpus.split(split)), np.uint8)


def windows(text: np.ndarray, rng: np.random.Generator, rows: int) -> np.ndarray:
    """Random pieces of the text, one byte longer than what is read at once."""
    starts = rng.integers(0, len(text) - LENGTH, rows)
    return text[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int32)


def entropy(text: np.ndarray) -> float:
    """The bits per byte of guessing by frequency alone."""
    p = np.bincount(text) / len(text)
    return float(-np.sum(p[p > 0] * np.log2(p[p > 0])))


def main(argv: Sequence[str] | None = None) -> None:
    """Shows the parameters, trains, and prints bits per byte."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args(argv)

    corpus = stdlib_corpus()
    text, held_out = read_bytes(corpus, "train"), read_bytes(corpus, "held_out")
    rng = np.random.default_rng(0)
    model = Decoder(layers=args.layers)
    example = windows(text, rng, ROWS)[:, :-1]
    print(model.tabulate(jax.random.key(0), example, depth=1, console_kwargs={"width": 100}))

    params = jax.jit(model.init)(jax.random.key(0), example)["params"]
    schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, 20, max(args.steps, 21))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    for step in range(1, args.steps + 1):
        state, bits = train_step(state, windows(text, rng, ROWS))
        if step in (1, args.steps) or step % 25 == 0:
            print(f"step {step:4}  {bits:.2f} bits per byte", flush=True)

    test = windows(held_out, np.random.default_rng(1), 128)
    bits = jax.jit(bits_per_byte, static_argnums=1)(state.params, model.apply, test)
    print(f"held-out files: {bits:.2f} bits per byte; by frequency alone {entropy(held_out):.2f}")


if __name__ == "__main__":
    main()
