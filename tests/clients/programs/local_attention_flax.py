"""Attention within windows, trained in Linen."""

import json

import jax
import jax.numpy as jnp
from local_attention_flax import LocalAttention

model = LocalAttention(dim=8, window_size=4, heads=2, dim_head=4)
x = jax.random.normal(jax.random.key(0), (12, 8))
variables = model.init(jax.random.key(1), x)


@jax.jit
def step(variables):
    loss_fn = lambda v: jnp.square(model.apply(v, x) - jnp.roll(x, 1, axis=0)).mean()  # noqa: E731
    loss, grads = jax.value_and_grad(loss_fn)(variables)
    return loss, jax.tree.map(lambda p, g: p - 0.5 * g, variables, grads)


losses = []
for _ in range(4):
    loss, variables = step(variables)
    losses.append(float(loss))
print(json.dumps([losses, model.apply(variables, x).tolist()]))
