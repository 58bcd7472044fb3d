"""A transformer of NNX writes Python; its layers are one `nnx.scan` over stacked blocks.

`python examples/nnx_transformer.py` takes a minute on two cores. What to look at: `nnx.vmap` makes
all blocks at once, and their variables have a leading axis of layers. So the loop traces one block,
whatever the depth, and `nnx.remat` computes it again in the backward pass. To write, each block is
given a cache of keys and values: variables like any other, which each letter changes.
"""

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from weft import nnx
from weft.input import Corpus, Split, stdlib_corpus

ROWS, LENGTH = 16, 64
LETTERS = 128  # ASCII


class Block(nnx.Module):
    """Causal attention and an MLP, each on a branch of its own."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
        self.norms = [nnx.LayerNorm(width, rngs=rngs) for _ in range(2)]
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x), is_causal=True)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Decoder(nnx.Module):
    """Predicts the next letter from all letters before it."""

    def __init__(self, layers: int, width: int = 96, heads: int = 4, *, rngs: nnx.Rngs):
        self.letters = nnx.Embed(LETTERS, width, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, width, rngs=rngs)

        # Each index has keys of its own, so each block begins with its own parameters.
        @nnx.split_rngs(splits=layers)
        @nnx.vmap
        def make(rngs):
            return Block(width, heads, rngs=rngs)

        self.blocks = make(rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.out = nnx.Linear(width, LETTERS, rngs=rngs)

    def __call__(self, letters, positions):
        """The logits of what follows each letter."""

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def through_block(x, block):
            return block(x)

        x = self.letters(letters) + self.positions(positions)[None]
        return self.out(self.norm(through_block(x, self.blocks)))


def bits_per_letter(model, text):
    """The bits that each letter but the first takes."""
    logits = model(text[:, :-1], jnp.arange(text.shape[1] - 1))
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:])
    return loss.mean() / jnp.log(2)


@nnx.jit
def train_step(model, optimizer, text):
    """One step of the optimizer."""
    bits, grads = nnx.value_and_grad(bits_per_letter)(model, text)
    optimizer.update(model, grads)
    return bits


def for_writing(model: Decoder, rows: int) -> Decoder:
    """The model with the same parameters, and with room for all positions of some rows."""
    writing = nnx.with_attributes(model, decode=True)
    nnx.vmap(lambda block: block.attention.init_cache((rows, LENGTH, block.up.in_features)))(
        writing.blocks
    )
    return writing


@nnx.jit(donate_argnums=0)
def next_letter(model, letter, position, rngs):
    """A letter that follows another, drawn at a temperature of 0.7."""
    logits = model(letter[:, None], position[None])[:, 0]
    return rngs.categorical(logits / 0.7)


def write(model: Decoder, prompt: str, rngs: nnx.Rngs) -> str:
    """The prompt and what the model makes of it, as long as there are positions."""
    writing, text = for_writing(model, rows=1), list(prompt.encode("ascii"))
    for position in range(LENGTH - 1):
        letter = next_letter(
            writing, jnp.array(text[position : position + 1]), jnp.array(position), rngs
        )
        if position + 1 == len(text):
            text.append(int(letter[0]))
    return bytes(text).decode("ascii")


def read_letters(corpus: Corpus, split: Split) -> np.ndarray:
    """The letters of all files of one part."""
    text = np.frombuffer(b"".join(file.text for file in corpus.split(split)), np.uint8)
    return text[text < LETTERS]


def windows(text: np.ndarray, rng: np.random.Generator, rows: int) -> np.ndarray:
    """Random pieces of the text, one letter longer than what is read at once."""
    starts = rng.integers(0, len(text) - LENGTH, rows)
    return text[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int32)


def entropy(text: np.ndarray) -> float:
    """The bits per letter of guessing by frequency alone."""
    p = np.bincount(text) / len(text)
    return float(-np.sum(p[p > 0] * np.log2(p[p > 0])))


def main(argv: Sequence[str] | None = None) -> None:
    """Shows the blocks, trains, and prints bits per letter and what the model writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args(argv)

    corpus = stdlib_corpus()
    text, held_out = read_letters(corpus, "train"), read_letters(corpus, "held_out")
    rngs = nnx.Rngs(0)
    model = Decoder(args.layers, rngs=rngs)
    print("all blocks:", jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(model.blocks.up))))

    schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, 20, max(args.steps, 21))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    rng = np.random.default_rng(0)
    for step in range(1, args.steps + 1):
        bits = train_step(model, optimizer, windows(text, rng, ROWS))
        if step in (1, args.steps) or step % 50 == 0:
            print(f"step {step:4}  {bits:.2f} bits per letter", flush=True)

    test = windows(held_out, np.random.default_rng(1), 128)
    bits = nnx.jit(bits_per_letter)(model, test)
    print(f"held-out files: {bits:.2f} bits per letter; by frequency alone {entropy(held_out):.2f}")
    for prompt in ("    def ", "import "):
        print(f"it writes: {write(model, prompt, rngs)!r}")


if __name__ == "__main__":
    main()
