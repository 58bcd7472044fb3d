"""A mixer of patches and channels from the layers of einops, trained in Linen."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops.layers.flax import EinMix, Rearrange, Reduce


class Mixer(nn.Module):
    @nn.compact
    def __call__(self, images):
        patches = {"p": 2, "q": 2}
        x = Rearrange("b (h p) (w q) c -> b (h w) (p q c)", patches)(images)
        x = x + EinMix("b t c -> b u c", "t u", "u", {"t": 4, "u": 4})(nn.LayerNorm()(x))
        x = nn.gelu(EinMix("b t c -> b t d", "c d", "d", {"c": 12, "d": 8})(x))
        return nn.Dense(2)(Reduce("b t d -> b d", "mean")(x))


images = jax.random.normal(jax.random.key(0), (3, 4, 4, 3))
model = Mixer()
params = model.init(jax.random.key(1), images)


@jax.jit
def step(params):
    def loss_fn(params):
        return jnp.square(model.apply(params, images) - images[:, 0, 0, :2]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


losses = []
for _ in range(4):
    loss, params = step(params)
    losses.append(float(loss))
print(json.dumps([losses, jax.tree.map(lambda a: list(a.shape), params)]))
