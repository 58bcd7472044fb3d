"""A sweep over the learning rate and the width of a network, from a recipe of one's own.

`python examples/sweep.py` takes half a minute on two cores. What to look at: a recipe is a function
that returns the config of a run, here for a network that classifies scikit-learn's images of
digits. The program trains one run for each setting, one after the other, and prints them sorted.
The command line does the same with several processes, and writes a page with all curves:

    weft sweep examples/sweep.py:recipe --jobs 2 \
        --over learning_rate=1e-3,1e-2,1e-1 --over width=8,64
"""

import argparse
import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

from weft import linen as nn
from weft.config import config_for_class, config_for_function
from weft.hierarchy import WeightedScalar
from weft.input import ArrayInput, Arrays
from weft.trainer import (
    Learner,
    SpmdEvaler,
    SpmdTrainer,
    train_and_evaluate,
)

LEARNING_RATES = (1e-3, 1e-2, 1e-1)
WIDTHS = (8, 64)


class Net(nn.Module):
    """Classifies images of digits, and returns its own loss."""

    width: int

    @nn.compact
    def __call__(self, input_batch):
        x = nn.relu(nn.Dense(self.width)(input_batch["image"]))
        logits = nn.Dense(10)(x)
        label = input_batch["label"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
        correct = jnp.mean(logits.argmax(axis=-1) == label)
        accuracy = WeightedScalar(correct, len(label))
        self.sow("summaries", "accuracy", accuracy)
        return losses.mean(), {"logits": logits}


def images(split: str) -> Arrays:
    """Returns the images to train on, or those held out."""
    digits = load_digits()
    rows = slice(448, None) if split == "train" else slice(448)
    return Arrays(
        {"image": digits.data[rows] / 16, "label": digits.target[rows]}
    )


def recipe(
    width: int = 64,
    learning_rate: float = 1e-2,
    batch_size: int = 64,
    steps: int = 200,
) -> SpmdTrainer.Config:
    """Returns the config of a run.

    Args:
        width: Number of hidden units.
    """

    def data(split: str) -> ArrayInput.Config:
        arrays = config_for_function(images).set(split=split)
        return ArrayInput.default_config().set(
            arrays=arrays, global_batch_size=batch_size
        )

    optimizer = config_for_function(optax.adam).set(learning_rate=learning_rate)
    held_out = SpmdEvaler.default_config().set(input=data("held_out"))
    held_out.eval_policy.n = 50
    return SpmdTrainer.default_config().set(
        name="trainer",
        dir="runs/sweep",
        max_step=steps,
        model=config_for_class(Net).set(width=width),
        input=data("train"),
        evalers={"held_out": held_out},
        learner=Learner.default_config().set(optimizer=optimizer),
        mesh_shape=(-1, 1),
        mesh_axis_names=("data", "model"),
    )


class Row(NamedTuple):
    """Setting and result of one run."""

    loss: float
    accuracy: float
    learning_rate: float
    width: int


def main(argv: Sequence[str] | None = None) -> None:
    """Trains a run for each setting, and prints them, the best one first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dir", type=Path, help="default: a temporary folder")
    arguments = parser.parse_args(argv)
    folder = arguments.dir or Path(tempfile.mkdtemp())

    rows = []
    for learning_rate, width in itertools.product(LEARNING_RATES, WIDTHS):
        cfg = recipe(width, learning_rate, steps=arguments.steps)
        cfg.dir = str(folder / f"learning_rate={learning_rate:g},width={width}")
        held_out = train_and_evaluate(cfg, progress=False)["held_out"]
        loss, accuracy = held_out["loss"], held_out["accuracy"]
        rows.append(Row(loss, accuracy, learning_rate, width))
        print(f"{cfg.dir}: loss {loss:.3f}", file=sys.stderr, flush=True)

    print("learning rate  width    loss  accuracy")
    for row in sorted(rows):
        print(
            f"{row.learning_rate:13g}  {row.width:5}  {row.loss:6.3f}  "
            f"{row.accuracy:8.2%}"
        )


if __name__ == "__main__":
    main()
