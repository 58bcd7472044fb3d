"""A network of evosax whose parameters evolve, with its dataclasses of state."""

import json

import jax
import jax.numpy as jnp
import optax
from evosax.algorithms import CMA_ES, Open_ES
from evosax.problems.networks import MLP, tanh_output_fn

x = jnp.linspace(-1, 1, 8)[:, None]
net = MLP(layer_sizes=(8, 1), output_fn=tanh_output_fn)
params = net.init(jax.random.key(0), x)


def evolve(strategy):
    hyper = strategy.default_params
    state = strategy.init(jax.random.key(1), params, hyper)

    @jax.jit
    def generation(key, state):
        ask, tell = jax.random.split(key)
        found, state = strategy.ask(ask, state, hyper)
        fitness = jax.vmap(lambda p: jnp.square(net.apply(p, x) - x**2).mean())(found)
        state, metrics = strategy.tell(tell, found, fitness, state, hyper)
        return state, metrics["best_fitness"]

    best = []
    for i in range(4):
        state, fitness = generation(jax.random.key(i), state)
        best.append(float(fitness))
    return best, strategy.get_mean(state)["params"]["Dense_0"]["kernel"].tolist()


strategies = [Open_ES(8, params, optimizer=optax.adam(0.05)), CMA_ES(8, params)]
print(json.dumps([evolve(strategy) for strategy in strategies]))
