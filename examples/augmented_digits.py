"""An image classifier that sees each digit moved and scaled, and stops by itself.

`python examples/augmented_digits.py` takes 40 seconds on two cores. What to look at: `moved` is
a function of a batch and a key, which `weft.fit` calls in the compiled step, in training alone.
`early_stopping` ends the run when the accuracy on held-out images no longer rises, and
`result.best` is the model of the best evaluation. The images are scikit-learn's, 8 × 8 pixels, and
the network learns from 300 of them.
"""

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import weft
from weft import linen as nn

PATIENCE = 10  # evaluations


class ConvNet(nn.Module):
    """Classifies images by two convolutions and a hidden layer."""

    width: int = 32
    classes: int = 10

    @nn.compact
    def __call__(self, images, training: bool):
        x = nn.relu(nn.Conv(self.width, (3, 3))(images))
        x = nn.relu(nn.Conv(2 * self.width, (3, 3))(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(4 * self.width)(x.reshape(len(x), -1)))
        x = nn.Dropout(0.3, deterministic=not training)(x)
        return nn.Dense(self.classes)(x)


def move(image: jax.Array, key: jax.Array) -> jax.Array:
    """Returns an image moved by up to a pixel and scaled by up to a tenth."""
    shift_key, scale_key = jax.random.split(key)
    shift = jax.random.uniform(shift_key, (2,), minval=-1, maxval=1)
    scale = jax.random.uniform(scale_key, (2,), minval=0.9, maxval=1.1)
    center = (np.array(image.shape[:2]) - 1) / 2
    # The pixel at `center` stays there, before the image is moved.
    translation = center - scale * center + shift
    return jax.image.scale_and_translate(
        image, image.shape, (0, 1), scale, translation, method="linear"
    )


def augment(batch, key):
    """Returns the batch with each image moved in a way of its own."""
    keys = jax.random.split(key, len(batch["image"]))
    return batch | {"image": jax.vmap(move)(batch["image"], keys)}


def drawing(images: np.ndarray) -> str:
    """Draws images of 8 × 8 pixels side by side, as text."""
    shades = np.array(list(" .:*#"))
    levels = np.clip(images[..., 0] * 5, 0, 4).astype(int)
    lines = []
    for row in range(levels.shape[1]):
        pixels = shades[levels[:, row].repeat(2, axis=-1)]
        lines.append("  ".join("".join(line) for line in pixels))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains with and without augmentation, and compares the accuracies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=150)
    epochs = parser.parse_args(argv).epochs

    digits = load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)
    train_images, images, train_labels, labels = train_test_split(
        images, digits.target, train_size=300, random_state=0
    )
    # Training stops by the first half; the second half is for the end.
    held_out = {"image": images[:700], "label": labels[:700]}
    test_images, test_labels = images[700:], labels[700:]

    keys = jax.random.split(jax.random.key(0), 3)
    print("an image of a digit, and what the network may see of it:")
    versions = jax.vmap(move, in_axes=(None, 0))(train_images[0], keys)
    print(drawing(np.stack([train_images[0], *np.asarray(versions)])))

    for name, transform in (("without", None), ("with", augment)):
        result = weft.fit(
            ConvNet(),
            {"image": train_images, "label": train_labels},
            "cross_entropy",
            epochs=epochs,
            batch_size=50,
            validation=held_out,
            metrics="accuracy",
            transform=transform,
            early_stopping=PATIENCE,
            best="accuracy",
            progress=False,
        )
        predicted = result.best.predict(test_images).argmax(axis=-1)
        accuracy = jnp.mean(predicted == test_labels)
        evaluations = len(result.history.validation["step"])
        print(
            f"{name + ' augmentation':21} {evaluations:3} epochs, "
            f"best at step {result.best.step}: test accuracy {accuracy:.2%}"
        )


if __name__ == "__main__":
    main()
