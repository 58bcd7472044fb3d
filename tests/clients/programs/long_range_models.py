"""Sequence models with the layers LRU and S5 of long_range_models, trained in Linen."""

import json

import jax
import jax.numpy as jnp
from long_range_models import ContinuousSequenceModel, LRULayer, S5Layer

x = jax.random.normal(jax.random.key(0), (2, 6, 3))


def train(layer):
    model = ContinuousSequenceModel(layer, out_dim=2, emb_dim=8, pool=True)
    variables = jax.jit(model.init)(jax.random.key(1), x)

    @jax.jit
    def step(variables):
        def loss_fn(variables):
            return jnp.square(model.apply(variables, x) - x[:, -1, :2]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(variables)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g.conj(), variables, grads)

    losses = []
    for _ in range(4):
        loss, variables = step(variables)
        losses.append(float(loss))
    return losses


print(json.dumps([train(LRULayer(8, 4)), train(S5Layer(8, 4))]))
