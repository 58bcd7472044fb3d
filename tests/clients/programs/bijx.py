"""A normalizing flow of bijx, whose layers are copies run by a scan, fitted to samples."""

import json

import bijx
import jax
import jax.numpy as jnp
import optax
from flax import nnx

rngs = nnx.Rngs(0)


def spline(rngs):
    return bijx.MonotoneRQSpline(4, (), rngs=rngs)


flow = bijx.coupling_flow(4, spline, n_coupling_layers=2, n_copies=2, width=8, depth=1, rngs=rngs)
model = bijx.Transformed(bijx.IndependentNormal((4,), rngs=rngs), flow)
samples = jnp.tanh(jax.random.normal(jax.random.key(0), (16, 4)))
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


@nnx.jit
def step(model, optimizer):
    loss, grads = nnx.value_and_grad(lambda m: -m.log_density(samples).mean())(model)
    optimizer.update(model, grads)
    return loss


losses = [float(step(model, optimizer)) for _ in range(4)]
drawn, log_density = nnx.jit(lambda m: m.sample((3,), rng=jax.random.key(1)))(model)
print(json.dumps([losses, drawn.tolist(), log_density.tolist()]))
