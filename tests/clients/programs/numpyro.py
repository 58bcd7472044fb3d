"""Regressions of NumPyro whose mean is a network, in Linen and in NNX, fitted by SVI."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpyro
from flax import nnx
from numpyro import distributions as dist
from numpyro.contrib.module import random_flax_module, random_nnx_module
from numpyro.infer import SVI, Trace_ELBO, autoguide


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.tanh(nn.Dense(4)(x)))


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(1, 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.tanh(self.first(x)))


def fit(make_net):
    def model(x, y):
        mean = make_net()(x)
        numpyro.sample("y", dist.Normal(mean, 0.1), obs=y)

    x = jnp.linspace(-1, 1, 16)[:, None]
    svi = SVI(model, autoguide.AutoDelta(model), numpyro.optim.Adam(0.01), Trace_ELBO())
    fitted = svi.run(jax.random.key(1), 8, x, jnp.sin(3 * x), progress_bar=False)
    return sorted(fitted.params), fitted.losses.tolist()


normal = dist.Normal(0, 1)
nets = [
    lambda: random_flax_module("net", LinenNet(), normal, input_shape=(1,)),
    lambda: random_nnx_module("net", NNXNet(nnx.Rngs(0)), normal),
]
print(json.dumps([fit(net) for net in nets]))
