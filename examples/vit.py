"""A vision transformer classifies handwritten digits, trained by `weft.fit` in one call.

`python examples/vit.py` takes half a minute on two cores. What to look at: the model is a plain
module of Linen, without loss, metrics or optimizer. The data is a Grain dataset that moves each
image at random, from which the transformer learns that neighboring pixels belong together. The
images are scikit-learn's, 8 × 8 pixels, which the model reads as sixteen patches.
"""

import argparse
from collections.abc import Sequence

import grain
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

import weft
from weft import linen as nn


class Block(nn.Module):
    """Attention and an MLP, each on a residual branch of its own."""

    heads: int = 4
    dropout: float = 0.1

    @nn.compact
    def __call__(self, x, training: bool):
        drop = nn.Dropout(self.dropout, deterministic=not training)
        attention = nn.MultiHeadDotProductAttention(num_heads=self.heads)
        x = x + drop(attention(nn.LayerNorm()(x)))
        h = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + drop(nn.Dense(x.shape[-1])(h))


class ViT(nn.Module):
    """Classifies images by a transformer over patches and a class token."""

    classes: int = 10
    patch: int = 2
    width: int = 64
    layers: int = 3

    @nn.compact
    def __call__(self, images, training: bool):
        size = (self.patch, self.patch)
        # A convolution whose windows do not overlap is a linear map of each patch.
        x = nn.Conv(self.width, size, strides=size, name="patches")(images)
        x = x.reshape(len(x), -1, self.width)
        # Positions vary as much as patches do, so that attention tells them apart from the start.
        normal = nn.initializers.normal(0.5)
        token = self.param("class_token", normal, (1, 1, self.width))
        x = jnp.concatenate([token.repeat(len(x), 0), x], axis=1)
        x = x + self.param("positions", normal, (1, x.shape[1], self.width))
        for _ in range(self.layers):
            x = Block()(x, training)
        return nn.Dense(self.classes, name="head")(nn.LayerNorm()(x[:, 0]))


class Shift(grain.transforms.RandomMap):
    """Moves an image by up to one pixel in each direction."""

    def random_map(self, element, rng):
        """Returns the element with its image moved; pixels that enter are empty."""
        row, column = rng.integers(0, 3, 2)
        padded = np.pad(element["image"], ((1, 1), (1, 1), (0, 0)))
        return {**element, "image": padded[row : row + 8, column : column + 8]}


def drawing(images: np.ndarray) -> str:
    """Images of 8 × 8 pixels side by side, as text."""
    shades = np.array(list(" .:*#"))
    pixels = shades[np.minimum((images * 5).astype(int), 4)].reshape(-1, 8, 8)
    return "\n".join(
        "  ".join("".join(p * 2 for p in row) for row in line)
        for line in pixels.transpose(1, 0, 2)
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, and compares the accuracy with that of a linear model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    steps = parser.parse_args(argv).steps

    digits = load_digits()
    images, labels = (
        (digits.images[..., None] / 16).astype(np.float32),
        digits.target,
    )
    test, train = np.split(
        np.random.default_rng(0).permutation(len(images)), [360]
    )
    examples = [{"image": images[i], "label": labels[i]} for i in train]
    data = (
        grain.MapDataset.source(examples)
        .seed(0)
        .shuffle()
        .repeat()
        .random_map(Shift())
    )

    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, steps // 10, steps)
    result = weft.fit(
        ViT(),
        data,
        "cross_entropy",
        steps=steps,
        batch_size=64,
        validation={"image": images[test], "label": labels[test]},
        metrics="accuracy",
        optimizer=optax.adamw(schedule),
    )
    pixels = images.reshape(len(images), -1)
    linear = LogisticRegression(max_iter=1000).fit(pixels[train], labels[train])
    print(
        f"test accuracy {result.history.validation['accuracy'][-1]:.2%};",
        end=" ",
    )
    print(f"logistic regression {linear.score(pixels[test], labels[test]):.2%}")

    chances = np.asarray(nn.softmax(result.last.predict(images[test])))
    unsure = chances.max(-1).argsort()[:4]
    print("the images that it is least sure of, with its guesses:")
    print(drawing(images[test][unsure]))
    guesses = [
        f"{chances[i].argmax()} ({chances[i].max():.0%}), is {labels[test[i]]}"
        for i in unsure
    ]
    print("".join(f"{guess:18}" for guess in guesses))


if __name__ == "__main__":
    main()
