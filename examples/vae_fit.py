"""A variational autoencoder trained by `weft.fit`, and a plot of the two parts of its loss.

`python examples/vae_fit.py` takes ten seconds on two cores. What to look at: the loss function
returns the loss and a dict of its parts, which are in `result.history` next to the loss. At first
the code says little about the image, and `kl`, its divergence from the prior, is small. Then
it rises, and `bce`, the error of the pixels, falls by more. Held-out images are decoded from the
mean of their code, without noise. The images are scikit-learn's, and `result.plot()` needs
Matplotlib, in the extra `viz`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import weft
from weft import linen as nn


class VAE(nn.Module):
    """Encodes an image as a Gaussian, and decodes the logits of its pixels."""

    latents: int = 8

    @nn.compact
    def __call__(self, images, training: bool):
        x = nn.gelu(nn.Dense(128)(images))
        mean, log_std = jnp.split(nn.Dense(2 * self.latents)(x), 2, axis=-1)
        code = mean
        if training:
            noise = jax.random.normal(self.make_rng("latent"), mean.shape)
            code = mean + jnp.exp(log_std) * noise
        x = nn.gelu(nn.Dense(128)(code))
        logits = nn.Dense(images.shape[-1])(x)
        return {"logits": logits, "mean": mean, "log_std": log_std}


def negative_elbo(outputs, batch):
    """Returns the loss of each row in nats, and the means of its parts."""
    logits, mean = outputs["logits"], outputs["mean"]
    log_std = outputs["log_std"]
    bce = optax.sigmoid_binary_cross_entropy(logits, batch["y"]).sum(axis=-1)
    variance = jnp.exp(2 * log_std)
    kl = 0.5 * (mean**2 + variance - 1 - 2 * log_std).sum(axis=-1)
    return bce + kl, {"bce": bce, "kl": kl}


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, prints the parts of the loss, and plots them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--figure", type=Path, default=Path("vae_fit.png"))
    arguments = parser.parse_args(argv)

    images = (load_digits().data / 16 > 0.5).astype(np.float32)
    images = np.random.default_rng(0).permutation(images)
    train, held_out = images[:1437], images[1437:]
    result = weft.fit(
        VAE(),
        (train, train),
        negative_elbo,
        epochs=arguments.epochs,
        batch_size=64,
        learning_rate=3e-3,
        validation=(held_out, held_out),
    )
    history = result.history.validation
    print(" step    loss     bce      kl   of held-out images, in nats")
    for row in np.unique(
        np.linspace(0, len(history["step"]) - 1, 6).astype(int)
    ):
        values = [history[name][row] for name in ("loss", "bce", "kl")]
        print(f"{history['step'][row]:5}", *(f"{x:7.2f}" for x in values))
    result.plot().savefig(arguments.figure)
    print(f"plotted in {arguments.figure}")


if __name__ == "__main__":
    main()
