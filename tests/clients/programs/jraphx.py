"""Networks of graphs of JraphX, trained to tell the nodes of a ring apart."""

import json

import jax.numpy as jnp
import optax
from flax import nnx
from jraphx.nn.models import GAT, GCN, GIN, GraphSAGE

nodes = jnp.arange(8)
edges = jnp.stack([jnp.concatenate([nodes, nodes + 1]), jnp.concatenate([nodes + 1, nodes])]) % 8
x, y = jnp.sin(nodes[:, None] * jnp.arange(1, 4)), nodes % 2


def train(kind):
    model = kind(3, 8, num_layers=2, out_features=2, dropout_rate=0.1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.05), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        def loss_fn(model):
            logits = model(x, edges)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    model.train()
    return [float(step(model, optimizer)) for _ in range(5)]


print(json.dumps([train(kind) for kind in (GCN, GAT, GraphSAGE, GIN)]))
