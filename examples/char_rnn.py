"""An LSTM writes Python, letter by letter, after reading the standard library.

`python examples/char_rnn.py` takes 15 seconds on two cores. What to look at: each row is one
long stream of text, so the LSTM's carry goes from batch to batch, as a value like any other.
"""

import argparse
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from weft import linen as nn
from weft.input import Corpus, Split, stdlib_corpus
from weft.training.train_state import TrainState

ROWS, LENGTH = 32, 48
LETTERS = 128  # ASCII


class CharRNN(nn.Module):
    """Predicts the next letter from all letters before it."""

    features: int = 192
    embedding: int = 64

    @nn.compact
    def __call__(self, carry, letters):
        x = nn.Embed(LETTERS, self.embedding)(letters)
        cell = nn.OptimizedLSTMCell(self.features)
        carry, x = nn.RNN(cell, return_carry=True)(x, initial_carry=carry)
        return carry, nn.Dense(LETTERS)(x)

    @nn.nowrap
    def begin(self, rows: int):
        """The carry before the first letter."""
        cell = nn.OptimizedLSTMCell(self.features, parent=None)
        return cell.initialize_carry(jax.random.key(0), (rows, self.embedding))


def bits_per_letter(state, params, carry, letters):
    """The carry after the letters, and the bits that each of them but the first took."""
    carry, logits = state.apply_fn({"params": params}, carry, letters[:, :-1])
    loss = optax.softmax_cross_entropy_with_integer_labels(
        logits, letters[:, 1:]
    )
    return loss.mean() / jnp.log(2), carry


@jax.jit
def train_step(state, carry, letters):
    """One step of the optimizer; gradients stop at the carry that came in."""
    loss_of = functools.partial(
        bits_per_letter, state, carry=carry, letters=letters
    )
    (bits, carry), grads = jax.value_and_grad(loss_of, has_aux=True)(
        state.params
    )
    return state.apply_gradients(grads=grads), carry, bits


@functools.partial(jax.jit, static_argnames="length")
def sample(state, carry, letter, key, length: int):
    """Letters that follow a letter, drawn at a temperature of 0.7."""

    def step(before, key):
        carry, letter = before
        carry, logits = state.apply_fn(
            {"params": state.params}, carry, letter[None, None]
        )
        letter = jax.random.categorical(key, logits[0, 0] / 0.7)
        return (carry, letter), letter

    return jax.lax.scan(step, (carry, letter), jax.random.split(key, length))[1]


def read_rows(corpus: Corpus, split: Split) -> np.ndarray:
    """The text of all files in a random order, cut into rows that are read side by side."""
    files = corpus.split(split)
    order = np.random.default_rng(0).permutation(len(files))
    text = np.frombuffer(b"".join(files[i].text for i in order), np.uint8)
    text = text[text < LETTERS]
    return text[: len(text) // ROWS * ROWS].reshape(ROWS, -1).astype(np.int32)


def entropy(text: np.ndarray) -> float:
    """The bits per letter of guessing by frequency alone."""
    p = np.bincount(text.ravel()) / text.size
    return float(-np.sum(p[p > 0] * np.log2(p[p > 0])))


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, and prints bits per letter and a sample."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args(argv).steps

    corpus = stdlib_corpus()
    text, held_out = read_rows(corpus, "train"), read_rows(corpus, "held_out")
    model = CharRNN()
    carry = model.begin(ROWS)
    params = jax.jit(model.init)(jax.random.key(0), carry, text[:, :LENGTH])[
        "params"
    ]
    state = TrainState.create(
        apply_fn=model.apply, params=params, tx=optax.adam(4e-3)
    )

    for step in range(1, steps + 1):
        at = (step - 1) * LENGTH % (text.shape[1] - LENGTH)
        # One letter more than is read: the last one is only to be predicted.
        state, carry, bits = train_step(
            state, carry, text[:, at : at + LENGTH + 1]
        )
        if step in (1, steps) or step % 50 == 0:
            print(f"step {step:4}  {bits:.2f} bits per letter", flush=True)

    bits, _ = jax.jit(bits_per_letter)(
        state, state.params, model.begin(ROWS), held_out[:, :400]
    )
    print(
        f"held-out files: {bits:.2f} bits per letter; by frequency alone {entropy(held_out):.2f}"
    )
    written = sample(
        state,
        model.begin(1),
        jnp.int32(ord("\n")),
        jax.random.key(1),
        length=300,
    )
    print("it writes:\n" + bytes(written.tolist()).decode("ascii"))


if __name__ == "__main__":
    main()
