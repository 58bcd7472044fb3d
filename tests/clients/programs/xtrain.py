"""The loop of xtrain around a module of Linen with BatchNorm and Dropout."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import xtrain


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, *, training=False):
        x = nn.BatchNorm(use_running_average=not training)(nn.Dense(8, use_bias=False)(x))
        return nn.Dense(1)(nn.Dropout(0.2, deterministic=not training)(nn.relu(x)))


def loss(batch, prediction):
    return jnp.square(prediction - batch[1]).mean()


x = np.linspace(-1, 1, 32, dtype="float32").reshape(4, 8, 1)
trainer = xtrain.Trainer(
    model=Net(), losses=loss, optimizer=optax.adam(0.01), mutable="batch_stats", seed=0
)
iterator = trainer.train([(a, a**2) for a in x], rng_cols=["dropout"], training=True)
losses = []
for _ in iterator:
    losses.append(jax.tree.map(float, iterator.loss))
sums = jax.tree.map(lambda a: float(jnp.abs(a).sum()), [iterator.parameters, iterator.variables])
print(json.dumps([losses, sums]))
