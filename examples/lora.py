"""LoRA fine-tunes a classifier: it knows even digits and learns odd ones, its weights frozen.

`python examples/lora.py` takes ten seconds on two cores and needs no download: the images, 8 × 8
pixels each, come with scikit-learn. Each linear layer of the trained model is replaced by an
`nnx.LoRA` around it, by assignment. The type of a variable says what is trained: the filter
`nnx.LoRAParam` selects variables for the gradient and for the optimizer. Without its LoRA layers,
the model is what it was.
"""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from weft import nnx

BATCH = 32


class Digits(NamedTuple):
    """Images as vectors in [0, 1], and their labels."""

    images: np.ndarray
    labels: np.ndarray


class MLP(nnx.Module):
    """A perceptron with two hidden layers."""

    def __init__(self, width: int = 128, *, rngs: nnx.Rngs):
        self.first = nnx.Linear(64, width, rngs=rngs)
        self.second = nnx.Linear(width, width, rngs=rngs)
        self.out = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.second(nnx.relu(self.first(x)))))


def loss_of(model, images, labels):
    """Returns the mean cross entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(
        model(images), labels
    ).mean()


def train(model, wrt, digits: Digits, steps: int, learning_rate: float) -> None:
    """Trains the variables that the filter `wrt` selects."""
    optimizer = nnx.Optimizer(model, optax.adam(learning_rate), wrt=wrt)

    @nnx.jit
    def train_step(model, optimizer, images, labels):
        grad_fn = nnx.grad(loss_of, argnums=nnx.DiffState(0, wrt))
        optimizer.update(model, grad_fn(model, images, labels))

    rng = np.random.default_rng(0)
    for _ in range(steps):
        batch = rng.integers(0, len(digits.labels), BATCH)
        train_step(model, optimizer, digits.images[batch], digits.labels[batch])


@nnx.jit
def accuracy(model, images, labels):
    """Returns the share of images that are classified correctly."""
    return jnp.mean(model(images).argmax(-1) == labels)


def add_lora(model: nnx.Module, rank: int, rngs: nnx.Rngs) -> None:
    """Puts a low-rank map next to each linear layer of a model."""
    for _, module in list(nnx.iter_modules(model)):
        for name, layer in list(nnx.iter_children(module)):
            if isinstance(layer, nnx.Linear):
                sizes = layer.in_features, rank, layer.out_features
                setattr(
                    module,
                    str(name),
                    nnx.LoRA(*sizes, base_module=layer, rngs=rngs),
                )


def remove_lora(model: nnx.Module) -> None:
    """Puts the linear layers back."""
    for _, module in list(nnx.iter_modules(model)):
        for name, layer in list(nnx.iter_children(module)):
            if isinstance(layer, nnx.LoRA):
                setattr(module, str(name), layer.base_module)


def size(state) -> int:
    """Returns the number of values in a state."""
    return sum(x.size for x in jax.tree.leaves(state))


def read_digits() -> tuple[dict[str, Digits], dict[str, Digits]]:
    """Returns even and odd digits, four fifths of them to train and the others to test."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = (images[order] / 16).astype(np.float32), labels[order]
    parts = []
    for rows in (slice(1437), slice(1437, None)):
        x, y = images[rows], labels[rows]
        parts.append(
            {
                n: Digits(x[y % 2 == i], y[y % 2 == i])
                for i, n in enumerate(("even", "odd"))
            }
        )
    return parts[0], parts[1]


def main(argv: Sequence[str] | None = None) -> None:
    """Trains on even digits, then LoRA on odd ones, and prints the accuracy on both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rank", type=int, default=4)
    args = parser.parse_args(argv)

    digits, test = read_digits()
    rngs = nnx.Rngs(0)
    model = MLP(rngs=rngs)

    def report(when: str) -> None:
        even, odd = (
            float(accuracy(model, *test[name])) for name in ("even", "odd")
        )
        print(
            f"{when:20} even digits {even:7.2%}  odd digits {odd:7.2%}",
            flush=True,
        )

    train(model, nnx.Param, digits["even"], args.steps, 2e-3)
    report("trained on even")

    add_lora(model, args.rank, rngs)
    # A LoRAParam is a Param, too.
    frozen = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))
    before = nnx.to_pure_dict(nnx.state(model, frozen))
    trained = size(nnx.state(model, nnx.LoRAParam))
    print(
        f"LoRA of rank {args.rank}: {trained:,} values to train, {size(before):,} frozen"
    )
    train(model, nnx.LoRAParam, digits["odd"], args.steps, 1e-2)
    report("LoRA trained on odd")
    after = nnx.to_pure_dict(nnx.state(model, frozen))
    same = jax.tree.all(jax.tree.map(np.array_equal, before, after))
    print(f"frozen weights unchanged: {same}")

    remove_lora(model)
    report("LoRA removed")


if __name__ == "__main__":
    main()
