"""A network that knows even digits learns the odd ones through LoRA, with its weights as they were.

`python examples/nnx_lora.py` takes a few seconds and needs no download: the images, 8 × 8 pixels
each, come with scikit-learn. What to look at: a layer of a trained model is replaced by an
`nnx.LoRA` around it, by assignment. The class of a variable says what is trained: a filter picks
`LoRAParam` for the gradient and for the optimizer, and nothing else moves.
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
    """Images in [0, 1] as vectors, and what they show."""

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
    """The mean cross entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


def train(model, wrt, digits: Digits, steps: int, learning_rate: float) -> float:
    """Trains the variables of a class, and gives the loss of the last batch."""
    optimizer = nnx.Optimizer(model, optax.adam(learning_rate), wrt=wrt)

    @nnx.jit
    def step(model, optimizer, images, labels):
        of_part = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, wrt))
        loss, grads = of_part(model, images, labels)
        optimizer.update(model, grads)
        return loss

    rng, loss = np.random.default_rng(0), jnp.nan
    for _ in range(steps):
        batch = rng.integers(0, len(digits.labels), BATCH)
        loss = step(model, optimizer, digits.images[batch], digits.labels[batch])
    return float(loss)


@nnx.jit
def accuracy(model, images, labels):
    """How many images are recognised, from 0 to 1."""
    return jnp.mean(model(images).argmax(-1) == labels)


def add_lora(model: nnx.Module, rank: int, rngs: nnx.Rngs) -> None:
    """Adds a parallel low-rank map to each linear layer of a model."""
    for _, module in list(nnx.iter_modules(model)):
        for name, layer in list(module.iter_children()):
            if isinstance(layer, nnx.Linear):
                sizes = layer.in_features, rank, layer.out_features
                setattr(module, name, nnx.LoRA(*sizes, base_module=layer, rngs=rngs))


def remove_lora(model: nnx.Module) -> None:
    """Takes the maps of low rank away."""
    for _, module in list(nnx.iter_modules(model)):
        for name, layer in list(module.iter_children()):
            if isinstance(layer, nnx.LoRA):
                setattr(module, name, layer.base_module)


def size(state) -> int:
    """How many numbers a state has."""
    return sum(x.size for x in jax.tree.leaves(state))


def read_digits() -> tuple[dict[str, Digits], dict[str, Digits]]:
    """Even and odd digits: four fifths to train with, the others to test with."""
    digits = load_digits()
    images = (digits.data / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    parts = []
    for part in np.split(order, [len(images) * 4 // 5]):
        is_odd = digits.target[part] % 2 == 1
        each = {"even": part[~is_odd], "odd": part[is_odd]}
        parts.append({name: Digits(images[at], digits.target[at]) for name, at in each.items()})
    return parts[0], parts[1]


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, adapts, and prints how many digits of each kind are recognised."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rank", type=int, default=4)
    args = parser.parse_args(argv)

    digits, test = read_digits()
    rngs = nnx.Rngs(0)
    model = MLP(rngs=rngs)

    def report(when: str) -> None:
        even, odd = (float(accuracy(model, *test[name])) for name in ("even", "odd"))
        print(f"{when:20} even digits {even:7.2%}  odd digits {odd:7.2%}", flush=True)

    train(model, nnx.Param, digits["even"], args.steps, 2e-3)
    report("trained on even")

    add_lora(model, args.rank, rngs)
    # A LoRAParam is a Param as well, so the others are those that are not a LoRAParam.
    others = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))
    before = nnx.to_pure_dict(nnx.state(model, others))
    trained, kept = size(nnx.state(model, nnx.LoRAParam)), size(before)
    print(f"LoRA of rank {args.rank}: {trained:,} numbers to train, {kept:,} stay")
    train(model, nnx.LoRAParam, digits["odd"], args.steps, 1e-2)
    report("with LoRA for odd")
    after = nnx.to_pure_dict(nnx.state(model, others))
    same = jax.tree.all(jax.tree.map(np.array_equal, before, after))
    print(f"the other weights are as they were: {same}")

    remove_lora(model)
    report("without it again")


if __name__ == "__main__":
    main()
