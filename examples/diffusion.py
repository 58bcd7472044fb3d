"""A diffusion model draws the digit that it is asked for, from noise.

`python examples/diffusion.py` takes a minute on two cores. It is trained by flow matching (Lipman
et al., 2022): a network learns the direction from noise to an image, and drawing follows it in
small steps. What to look at: the model, its moving average, the optimizer and the random streams
are objects that one jitted function changes. The images are scikit-learn's, 8 × 8 pixels.
"""

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.metrics.pairwise import euclidean_distances
from sklearn.neighbors import KNeighborsClassifier

from weft import nnx

BATCH, WIDTH, SAMPLING_STEPS = 128, 256, 50


class Block(nnx.Module):
    """A residual MLP whose input is scaled and shifted, depending on time and digit."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(
            WIDTH, use_bias=False, use_scale=False, rngs=rngs
        )
        self.modulation = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, condition):
        scale, shift = jnp.split(self.modulation(condition), 2, axis=-1)
        return x + self.down(
            nnx.gelu(self.up(self.norm(x) * (1 + scale) + shift))
        )


class Velocity(nnx.Module):
    """Predicts how the pixels change at a time from 0, which is noise, to 1, the image."""

    def __init__(self, layers: int = 3, *, rngs: nnx.Rngs):
        self.time = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.digit = nnx.Embed(10, WIDTH, rngs=rngs)
        self.inputs = nnx.Linear(64, WIDTH, rngs=rngs)
        self.blocks = [Block(rngs=rngs) for _ in range(layers)]
        self.out = nnx.Linear(WIDTH, 64, rngs=rngs)

    def __call__(self, x, time, digit):
        angles = time[:, None] * jnp.geomspace(1.0, 100.0, WIDTH // 2)[None]
        waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        condition = nnx.silu(self.time(waves) + self.digit(digit))
        x = self.inputs(x)
        for block in self.blocks:
            x = block(x, condition)
        return self.out(x)


def loss_of(model, images, digits, rngs):
    """The squared error of the velocity at random points between noise and images."""
    time, noise = rngs.uniform((len(images),)), rngs.normal(images.shape)
    x = noise + time[:, None] * (images - noise)
    return jnp.mean((model(x, time, digits) - (images - noise)) ** 2)


@nnx.jit
def train_step(model, average, optimizer, images, digits, rngs):
    """One step of the optimizer; the moving average follows the model."""
    loss, grads = nnx.value_and_grad(loss_of)(model, images, digits, rngs)
    optimizer.update(model, grads)
    new, old = nnx.state(model), nnx.state(average)
    nnx.update(
        average,
        jax.tree.map(lambda old, new: 0.99 * old + 0.01 * new, old, new),
    )
    return loss


@nnx.jit
def draw(model, digits, rngs):
    """Images of digits: noise that follows the velocity from time 0 to time 1."""

    def step(i, x):
        time = jnp.full(len(digits), i / SAMPLING_STEPS)
        return x + model(x, time, digits) / SAMPLING_STEPS

    return jax.lax.fori_loop(
        0, SAMPLING_STEPS, step, rngs.normal((len(digits), 64))
    )


def told_apart(images: np.ndarray, others: np.ndarray) -> float:
    """How often an image's nearest neighbor is of its own set; half of the time for equal sets."""
    both = np.concatenate([images, others])
    distances = euclidean_distances(both)
    np.fill_diagonal(distances, np.inf)
    is_other = np.arange(len(both)) >= len(images)
    return float(np.mean(is_other[distances.argmin(1)] == is_other))


def gaussians(images, digits, asked, rng) -> np.ndarray:
    """Draws digits from normal distributions, with mean and covariance of each digit's images."""
    drawn = np.empty((len(asked), images.shape[1]))
    for digit in range(10):
        of_digit, rows = images[digits == digit], asked == digit
        mean, covariance = of_digit.mean(0), np.cov(of_digit.T)
        drawn[rows] = rng.multivariate_normal(mean, covariance, rows.sum())
    return drawn


def drawing(images: np.ndarray) -> str:
    """Images of 8 × 8 pixels side by side, as text."""
    shades = np.array(list(" .:*#"))
    pixels = shades[np.clip((images + 1) * 2.5, 0, 4).astype(int)].reshape(
        -1, 8, 8
    )
    return "\n".join(
        "  ".join("".join(p * 2 for p in row) for row in line)
        for line in pixels.transpose(1, 0, 2)
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, and compares what it draws with real digits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    steps = parser.parse_args(argv).steps

    data, rng = load_digits(), np.random.default_rng(0)
    images, digits = (data.data / 8 - 1).astype(np.float32), data.target
    test, train = np.split(rng.permutation(len(images)), [360])

    rngs = nnx.Rngs(0)
    model = Velocity(rngs=rngs)
    average = nnx.clone(model)
    schedule = optax.cosine_decay_schedule(2e-3, steps)
    optimizer = nnx.Optimizer(model, optax.adam(schedule), wrt=nnx.Param)
    losses = []
    for step in range(1, steps + 1):
        rows = rng.choice(train, BATCH)
        losses.append(
            train_step(
                model, average, optimizer, images[rows], digits[rows], rngs
            )
        )
        if step in (1, steps) or step % 500 == 0:
            print(f"step {step:5}  loss {np.mean(losses):.3f}", flush=True)
            losses.clear()

    asked = digits[test]
    drawn = np.asarray(
        draw(average, np.concatenate([asked, np.arange(10)]), rngs)
    )
    sets = {
        "training digits": images[train[:360]],
        "drawn digits": drawn[:360],
        "normal distributions": gaussians(
            images[train], digits[train], asked, rng
        ),
    }
    for name, others in sets.items():
        print(
            f"{name:21} told apart from test digits {told_apart(images[test], others):.0%}"
        )
    right = (
        KNeighborsClassifier(3)
        .fit(images, digits)
        .score(sets["drawn digits"], asked)
    )
    print(f"{right:.0%} are recognized as the digit that was asked for:")
    rows = np.split(drawn[-10:], [4, 8])  # as wide as a terminal
    print("\n\n".join(drawing(row) for row in rows))


if __name__ == "__main__":
    main()
