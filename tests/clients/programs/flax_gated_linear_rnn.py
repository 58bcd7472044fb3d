"""Gated linear recurrences, by an associative scan and by `nn.scan`, trained in Linen."""

import json

import jax
import jax.numpy as jnp
from flax_gated_linear_rnn import GatedLinearRNN

x = jax.random.normal(jax.random.key(0), (2, 6, 4))


def train(**kwargs):
    model = GatedLinearRNN(d_model=4, d_h=8, **kwargs)
    variables = model.init(jax.random.key(1), x)

    @jax.jit
    def step(variables):
        def loss_fn(variables):
            return jnp.square(model.apply(variables, x)[1] - jnp.cumsum(x, axis=1)).mean()

        loss, grads = jax.value_and_grad(loss_fn)(variables)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g, variables, grads)

    losses = []
    for _ in range(4):
        loss, variables = step(variables)
        losses.append(float(loss))
    return losses, model.apply(variables, x)[0].tolist()


print(json.dumps([train(), train(use_true_recurrence=True), train(use_tied_gates=False)]))
