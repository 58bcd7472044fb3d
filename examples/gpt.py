"""A GPT from scratch: it reads the Python standard library and writes Python, letter by letter.

`python examples/gpt.py` takes two minutes on two cores. `nnx.vmap` creates all blocks at once, with
a leading axis of layers, and `nnx.scan` runs them: one block is compiled, whatever the depth. To
sample, they get a cache of keys and values, a variable that a compiled loop over letters updates.
"""

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from weft import nnx
from weft.functional import apply_rotary, rotary_sincos
from weft.input import Split, stdlib_corpus

ROWS, LENGTH = 16, 128
LETTERS, LAYERS, WIDTH, HEADS = 128, 4, 96, 4


class Attention(nnx.Module):
    """Causal attention to at most `LENGTH` letters, with rotary positions."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.cache: nnx.Cache | None = nnx.data(None)

    def __call__(self, x, positions):
        qkv = self.qkv(x).reshape(*x.shape[:2], 3 * HEADS, -1)
        query, key, value = jnp.split(qkv, 3, axis=2)
        sin, cos = rotary_sincos(positions, dim=WIDTH // HEADS)
        query, key = (
            apply_rotary(a, sin[:, None], cos[:, None]) for a in (query, key)
        )
        key_positions = positions
        if self.cache is not None:
            self.cache[...] = (
                self.cache[...].at[:, :, positions].set(jnp.stack([key, value]))
            )
            key, value = self.cache[...]
            key_positions = jnp.arange(key.shape[1])
        distance = positions[:, None] - key_positions[None]
        mask = (distance >= 0) & (distance < LENGTH)
        y = nnx.dot_product_attention(query, key, value, mask=mask[None, None])
        return self.out(y.reshape(x.shape))


class Block(nnx.Module):
    """Attention and an MLP, each with a residual connection."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.norms = [nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)]
        self.attention = Attention(rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, positions):
        x = x + self.attention(self.norms[0](x), positions)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class GPT(nnx.Module):
    """Logits of the letter after each letter, from those before it."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(LETTERS, WIDTH, rngs=rngs)
        # Each block begins with its own parameters.
        create = nnx.vmap(lambda rngs: Block(rngs=rngs))
        self.blocks = nnx.split_rngs(splits=LAYERS)(create)(rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, LETTERS, rngs=rngs)

    def __call__(self, letters, positions):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, block):
            return block(x, positions)

        return self.out(self.norm(run(self.embed(letters), self.blocks)))


def bits_per_letter(model, text):
    """Returns the mean cross entropy of each letter but the first."""
    logits = model(text[:, :-1], jnp.arange(text.shape[1] - 1))
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:])
    return loss.mean() / jnp.log(2)


@nnx.jit
def train_step(model, optimizer, text):
    """Updates the model and the optimizer in place."""
    bits, grads = nnx.value_and_grad(bits_per_letter)(model, text)
    optimizer.update(model, grads)
    return bits


@nnx.jit(static_argnames="length")
def sample(model: GPT, prompt, rngs: nnx.Rngs, length: int):
    """Returns the letters that follow the prompts, drawn at a temperature of 0.7."""
    rows, start = prompt.shape
    model = nnx.view(model)  # with the same parameters
    cache = jnp.zeros((LAYERS, 2, rows, start + length, HEADS, WIDTH // HEADS))
    model.blocks.attention.cache = nnx.Cache(cache)
    logits = model(prompt, jnp.arange(start))[:, -1]  # the whole prompt at once

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 1))
    def step(carry, position):
        logits, model, rngs = carry
        letter = rngs.categorical(logits / 0.7)
        return (
            model(letter[:, None], position[None])[:, 0],
            model,
            rngs,
        ), letter

    return step((logits, model, rngs), start + jnp.arange(length))[1]


def read(split: Split, rows: int):
    """Yields random pieces of the files: `LENGTH` letters, and one more to predict."""
    rng = np.random.default_rng(0)
    text = np.frombuffer(
        b"".join(file.text for file in stdlib_corpus().split(split)), np.uint8
    )
    text = text[text < LETTERS].astype(np.int32)
    while True:
        starts = rng.integers(0, len(text) - LENGTH, rows)
        yield text[starts[:, None] + np.arange(LENGTH + 1)]


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, and prints bits per letter and a sample."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    steps = parser.parse_args(argv).steps

    rngs = nnx.Rngs(0)
    model = GPT(rngs=rngs)
    rate = optax.warmup_cosine_decay_schedule(0.0, 4e-3, 20, max(steps, 21))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for step, text in zip(range(steps), read("train", ROWS), strict=False):
        bits = train_step(model, optimizer, text)
        if step % 50 == 0:
            print(f"step {step:4}  {bits:.2f} bits per letter", flush=True)

    test = next(read("held_out", 128))
    bits = nnx.jit(bits_per_letter)(model, test)
    entropy = jax.scipy.special.entr(
        np.bincount(test.ravel()) / test.size
    ).sum() / np.log(2)
    print(
        f"held-out files: {bits:.2f} bits per letter; by frequency alone {entropy:.2f}"
    )
    written = sample(model, jnp.array([list(b"class ")]), rngs, 400)
    print("class " + bytes(written[0].tolist()).decode("ascii"))


if __name__ == "__main__":
    main()
