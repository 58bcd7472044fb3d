"""A convolutional network with BatchNorm tells handwritten digits apart.

`python examples/digits_batch_norm.py` takes half a minute on two cores and needs no download: the
images, 8 × 8 pixels each, come with scikit-learn. What to look at: the running statistics are a
collection of their own, `batch_stats`, which training changes and evaluation reads.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from weft import linen as nn
from weft.training import train_state

BATCH = 64


class Net(nn.Module):
    """Two convolutions, each with BatchNorm, and a linear classifier."""

    @nn.compact
    def __call__(self, x, train: bool):
        for features in (32, 64):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        return nn.Dense(10)(x.reshape(len(x), -1))


class TrainState(train_state.TrainState):
    """A train state that has running statistics as well."""

    batch_stats: Any


@jax.jit
def train_step(state, images, labels):
    """One step of the optimizer; the running statistics move as well."""

    def loss_of(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, changed = state.apply_fn(variables, images, train=True, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, changed["batch_stats"]

    (loss, batch_stats), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss


@jax.jit
def accuracy(state, images, labels):
    """How many images are recognised, from 0 to 1."""
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, images, train=False)
    return jnp.mean(jnp.argmax(logits, axis=-1) == labels)


def read_digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Images in [0, 1] and labels: four fifths to train with, the others to test with."""
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = np.split(order, [len(images) * 4 // 5])
    return (images[train], digits.target[train]), (images[test], digits.target[test])


def nearest_mean_accuracy(train, test) -> float:
    """The accuracy of taking the digit whose mean image is nearest."""
    means = np.stack([train[0][train[1] == digit].mean(0) for digit in range(10)])
    distances = np.square(test[0][:, None] - means).sum((2, 3, 4))
    return float(np.mean(distances.argmin(1) == test[1]))


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, and prints loss and accuracy after each epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args(argv).epochs

    train, test = read_digits()
    print(f"{len(train[0])} images to train with, {len(test[0])} to test with")

    model = Net()
    variables = model.init(jax.random.key(0), train[0][:1], train=False)
    state = TrainState.create(apply_fn=model.apply, tx=optax.adam(2e-3), **variables)
    rng = np.random.default_rng(0)
    for epoch in range(1, epochs + 1):
        order = rng.permutation(len(train[0]))
        batches = [order[i : i + BATCH] for i in range(0, len(order) - BATCH + 1, BATCH)]
        losses = []
        for batch in batches:
            state, loss = train_step(state, train[0][batch], train[1][batch])
            losses.append(loss)
        right = accuracy(state, *test)
        print(f"epoch {epoch:2}  loss {np.mean(losses):.4f}  test accuracy {right:.2%}", flush=True)
    print(f"the nearest mean image would get {nearest_mean_accuracy(train, test):.2%}")


if __name__ == "__main__":
    main()
