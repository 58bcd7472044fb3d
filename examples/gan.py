"""Two networks against each other: one draws digits, the other tells them from real ones.

`python examples/gan.py` takes 15 seconds on two cores and needs no download: the images,
8 × 8 pixels each, come with scikit-learn. What to look at: two models and two optimizers go through
one jitted function. Each gradient is that of one argument, so the other model stays as it is; and
the noise comes from a stream that the generator holds.
"""

import argparse
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from weft import nnx

BATCH, NOISE, WIDTH = 64, 16, 192


class Generator(nnx.Module):
    """Draws digits from noise."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.layers = nnx.Sequential(
            nnx.Linear(NOISE, WIDTH, rngs=rngs),
            nnx.BatchNorm(WIDTH, momentum=0.9, rngs=rngs),
            nnx.relu,
            nnx.Linear(WIDTH, WIDTH, rngs=rngs),
            nnx.BatchNorm(WIDTH, momentum=0.9, rngs=rngs),
            nnx.relu,
            nnx.Linear(WIDTH, 64, rngs=rngs),
            nnx.sigmoid,
        )
        self.noise = rngs.noise.fork()

    def __call__(self, n: int):
        return self.layers(self.noise.normal((n, NOISE)))


class Critic(nnx.Module):
    """Says how real an image looks, as a logit."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.layers = nnx.Sequential(
            nnx.Linear(64, WIDTH, rngs=rngs),
            nnx.leaky_relu,
            nnx.Dropout(0.3, rngs=rngs),
            nnx.Linear(WIDTH, WIDTH, rngs=rngs),
            nnx.leaky_relu,
            nnx.Dropout(0.3, rngs=rngs),
            nnx.Linear(WIDTH, 1, rngs=rngs),
        )

    def __call__(self, images):
        return self.layers(images)[:, 0]


def loss_of_critic(critic, real, drawn):
    """How badly the critic tells them apart, and how often it is right."""
    logits = jnp.concatenate([critic(real), critic(drawn)])
    is_real = jnp.arange(len(logits)) < len(real)
    # Of real images it is to be only nine tenths sure, so that it does not run ahead.
    losses = optax.sigmoid_binary_cross_entropy(logits, 0.9 * is_real)
    return losses.mean(), jnp.mean((logits > 0) == is_real)


def loss_of_generator(generator, critic):
    """How badly the generator passes for real."""
    logits = critic(generator(BATCH))
    return optax.sigmoid_binary_cross_entropy(
        logits, jnp.ones_like(logits)
    ).mean()


@nnx.jit
def train_step(generator, critic, of_generator, of_critic, real):
    """One step of each optimizer; how often the critic was right."""
    drawn = generator(BATCH)
    (_, right), grads = nnx.value_and_grad(loss_of_critic, has_aux=True)(
        critic, real, drawn
    )
    of_critic.update(critic, grads)
    of_generator.update(
        generator, nnx.grad(loss_of_generator)(generator, critic)
    )
    return right


def distance(images: np.ndarray, others: np.ndarray) -> float:
    """How far the nearest of the others is from an image, on average."""
    return float(
        np.sqrt(np.square(images[:, None] - others).sum(-1)).min(1).mean()
    )


def drawing(images: np.ndarray) -> str:
    """Images of 8 × 8 pixels side by side, as text."""
    shades = np.array(list(" .:*#"))
    pixels = shades[np.minimum((images * 5).astype(int), 4)].reshape(-1, 8, 8)
    return "\n".join(
        "  ".join("".join(p * 2 for p in row) for row in line)
        for line in pixels.transpose(1, 0, 2)
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, and shows what was drawn and how near it is to real digits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4000)
    steps = parser.parse_args(argv).steps

    images = (load_digits().data / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    test, train = images[order[:360]], images[order[360:]]

    rngs = nnx.Rngs(0, noise=1)
    generator, critic = Generator(rngs=rngs), Critic(rngs=rngs)
    of_generator, of_critic = (
        nnx.Optimizer(model, optax.adam(5e-4, b1=0.5), wrt=nnx.Param)
        for model in (generator, critic)
    )
    draw = nnx.jit(lambda generator: generator(360))
    drawer = nnx.view(generator, use_running_average=True)
    print(
        f"real digits are {distance(test, train):.2f} from the nearest other one"
    )
    rng, rights = np.random.default_rng(0), []
    for step in range(1, steps + 1):
        batch = train[rng.integers(0, len(train), BATCH)]
        rights.append(
            train_step(generator, critic, of_generator, of_critic, batch)
        )
        if step in (1, steps) or step % 1000 == 0:
            near = distance(np.asarray(draw(drawer)), train)
            right = float(np.mean(rights))
            print(
                f"step {step:5}  critic right: {right:.0%}"
                f"  drawn digits are {near:.2f} from the nearest real one",
                flush=True,
            )
            rights.clear()
    print(drawing(np.asarray(draw(drawer))[:4]))


if __name__ == "__main__":
    main()
