"""A variational autoencoder of handwritten digits, with a PRNG stream of its own.

`python examples/vae.py` takes ten seconds on two cores, and ends with drawings of digits that the
model reconstructs and generates. What to look at: the encoder's noise comes from the stream
`latent`, for which `apply` gets a key; initial parameters come from `params`. The images are
scikit-learn's, 8 × 8 pixels, made black and white.
"""

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from weft import linen as nn
from weft.training.train_state import TrainState

BATCH = 64


class VAE(nn.Module):
    """Encodes an image as a Gaussian, and decodes the chance of ink for each pixel."""

    latents: int = 8

    def setup(self):
        self.encoder = nn.Sequential(
            [nn.Dense(128), nn.gelu, nn.Dense(2 * self.latents)]
        )
        self.decoder = nn.Sequential([nn.Dense(128), nn.gelu, nn.Dense(64)])

    def __call__(self, x):
        mean, log_std = jnp.split(self.encoder(x), 2, axis=-1)
        noise = jax.random.normal(self.make_rng("latent"), mean.shape)
        return self.decoder(mean + jnp.exp(log_std) * noise), mean, log_std

    def reconstruct(self, x):
        """Decodes the mean of the code."""
        mean, _ = jnp.split(self.encoder(x), 2, axis=-1)
        return nn.sigmoid(self.decoder(mean))

    def generate(self, n: int):
        """Decodes random codes, so that nobody wrote these digits."""
        codes = jax.random.normal(self.make_rng("latent"), (n, self.latents))
        return nn.sigmoid(self.decoder(codes))


def loss_of(params, apply_fn, x, key):
    """The negative evidence lower bound in nats per image (Kingma and Welling, 2013)."""
    logits, mean, log_std = apply_fn(
        {"params": params}, x, rngs={"latent": key}
    )
    log_likelihood = -optax.sigmoid_binary_cross_entropy(logits, x).sum(-1)
    divergence = 0.5 * (mean**2 + jnp.exp(2 * log_std) - 1 - 2 * log_std).sum(
        -1
    )
    return (divergence - log_likelihood).mean()


@jax.jit
def train_step(state, x, key):
    """One step of the optimizer, with noise that depends on the step."""
    key = jax.random.fold_in(key, state.step)
    loss, grads = jax.value_and_grad(loss_of)(
        state.params, state.apply_fn, x, key
    )
    return state.apply_gradients(grads=grads), -loss


def drawn(images: np.ndarray) -> str:
    """Images of 8 × 8 pixels side by side, as text."""
    shades = np.array(list(" .:*#"))
    pixels = shades[
        np.minimum((np.asarray(images) * 5).astype(int), 4)
    ].reshape(-1, 8, 8)
    return "\n".join(
        "  ".join("".join(p * 2 for p in row) for row in line)
        for line in pixels.transpose(1, 0, 2)
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, and prints the evidence lower bound and digits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=60)
    epochs = parser.parse_args(argv).epochs

    images = (load_digits().data / 16 > 0.5).astype(np.float32)
    rng = np.random.default_rng(0)
    train, test = np.split(rng.permutation(images), [len(images) * 4 // 5])
    model, key = VAE(), jax.random.key(0)
    params = model.init({"params": key, "latent": key}, train[:1])["params"]
    state = TrainState.create(
        apply_fn=model.apply, params=params, tx=optax.adam(3e-3)
    )
    for epoch in range(1, epochs + 1):
        order = rng.permutation(len(train))
        bounds = []
        for i in range(0, len(order) - BATCH + 1, BATCH):
            state, bound = train_step(state, train[order[i : i + BATCH]], key)
            bounds.append(bound)
        if epoch in (1, epochs) or epoch % 10 == 0:
            print(
                f"epoch {epoch:3}  ELBO {np.mean(bounds):.2f} nats per image",
                flush=True,
            )

    bound = -jax.jit(loss_of, static_argnums=1)(
        state.params, model.apply, test, key
    )
    ink = train.mean(0).clip(1e-3, 1 - 1e-3)
    alone = (test * np.log(ink) + (1 - test) * np.log(1 - ink)).sum(1).mean()
    print(f"test images: ELBO {bound:.2f}; each pixel by itself {alone:.2f}")
    variables = {"params": state.params}
    pictures = {
        "digits": test[:4],
        "reconstructed": model.apply(variables, test[:4], method="reconstruct"),
        "generated": model.apply(
            variables, 4, method="generate", rngs={"latent": key}
        ),
    }
    for title, images in pictures.items():
        print(f"\n{title}\n{drawn(images)}")


if __name__ == "__main__":
    main()
