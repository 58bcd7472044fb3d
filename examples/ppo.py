"""Proximal policy optimization learns to balance a pole on a cart.

`python examples/ppo.py` takes ten seconds on two cores. The environment is the cart and pole of
Barto, Sutton and Anderson (1983), in JAX: 64 carts run side by side, a rollout is one `lax.scan`,
and an iteration (rollout, advantages, 32 updates) is one compiled function. The parameters of a
Linen module are a pytree, so they pass through these loops as arrays do.
"""

import argparse
import collections
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

from weft import linen as nn
from weft.training.train_state import TrainState

CARTS, STEPS, UPDATES, BATCH = 64, 128, 32, 1024
DISCOUNT, TRACE, CLIP = 0.99, 0.95, 0.2
LIMIT = 500  # steps of an evaluation


def new_carts(key):
    """Returns a position, a velocity, an angle and an angular velocity per cart, all near 0."""
    return jax.random.uniform(key, (CARTS, 4), minval=-0.05, maxval=0.05)


def push(carts, action):
    """Pushes carts to the left (0) or right (1) for 0.02 s; returns them, and which have failed."""
    gravity, mass, pole_mass, half_length = 9.8, 1.1, 0.1, 0.5
    _, velocity, angle, spin = carts.T
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    force = jnp.where(action == 1, 10.0, -10.0)
    base = (force + pole_mass * half_length * spin**2 * sin) / mass
    turn = (gravity * sin - base * cos) / (
        half_length * (4 / 3 - pole_mass * cos**2 / mass)
    )
    acceleration = base - pole_mass * half_length * turn * cos / mass
    carts += 0.02 * jnp.stack([velocity, acceleration, spin, turn], axis=-1)
    return carts, (jnp.abs(carts[:, 0]) > 2.4) | (
        jnp.abs(carts[:, 2]) > jnp.deg2rad(12)
    )


class ActorCritic(nn.Module):
    """Returns the logits of both actions, and the value of the state."""

    @nn.compact
    def __call__(self, x):
        def mlp(size):
            return nn.Sequential(
                [nn.Dense(64), nn.tanh, nn.Dense(64), nn.tanh, nn.Dense(size)]
            )(x)

        return mlp(2), mlp(1)[..., 0]


# What carts did: state, action, its negative log likelihood, value of the state, end of an episode.
Steps = collections.namedtuple("Steps", "carts action nll value failed")


def rollout(state: TrainState, carts, key):
    """Runs all carts for `STEPS` steps; those that fail are replaced by new ones."""

    def step(carts, key):
        draw, start = jax.random.split(key)
        logits, value = state.apply_fn(state.params, carts)
        action = jax.random.categorical(draw, logits)
        moved, failed = push(carts, action)
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, action)
        taken = Steps(carts, action, nll, value, failed)
        return jnp.where(failed[:, None], new_carts(start), moved), taken

    return jax.lax.scan(step, carts, jax.random.split(key, STEPS))


def advantages_of(steps: Steps, last_value):
    """Computes generalized advantage estimates (Schulman et al., 2016); each step's reward is 1."""

    def backwards(after, step):
        advantage, next_value = (jnp.where(step.failed, 0, x) for x in after)
        advantage = 1 + DISCOUNT * (next_value + TRACE * advantage) - step.value
        return (advantage, step.value), advantage

    return jax.lax.scan(
        backwards, (jnp.zeros(CARTS), last_value), steps, reverse=True
    )[1]


def loss_of(params, apply_fn, steps: Steps, advantage):
    """Returns the clipped loss of the policy, with the loss of the values and an entropy bonus."""
    logits, value = apply_fn(params, steps.carts)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, steps.action)
    ratio = jnp.exp(steps.nll - nll)
    scaled = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    gain = jnp.minimum(
        ratio * scaled, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * scaled
    )
    value_loss = optax.l2_loss(value, steps.value + advantage)
    entropy = jax.scipy.special.entr(nn.softmax(logits)).sum(-1)
    return jnp.mean(value_loss - gain - 0.01 * entropy)


@jax.jit
def iteration(state: TrainState, carts, key):
    """Runs the carts, and updates the parameters by what happened."""
    run, draw = jax.random.split(key)
    carts, steps = rollout(state, carts, run)
    data = steps, advantages_of(steps, state.apply_fn(state.params, carts)[1])
    data = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), data)

    def update(state, rows):
        batch = jax.tree.map(lambda x: x[rows], data)
        grads = jax.grad(loss_of)(state.params, state.apply_fn, *batch)
        return state.apply_gradients(grads=grads), None

    rows = jax.random.randint(draw, (UPDATES, BATCH), 0, CARTS * STEPS)
    return jax.lax.scan(update, state, rows)[0], carts


@jax.jit
def mean_return(state: TrainState, key, at_random=False):
    """Returns the number of steps until new carts fail, at most `LIMIT`, on average."""

    def step(carry, key):
        carts, alive = carry
        logits = state.apply_fn(state.params, carts)[0]
        random = jax.random.bernoulli(key, shape=(CARTS,))
        carts, failed = push(
            carts, jnp.where(at_random, random, logits.argmax(-1))
        )
        return (carts, alive & ~failed), alive

    carry = new_carts(key), jnp.ones(CARTS, bool)
    return (
        jax.lax.scan(step, carry, jax.random.split(key, LIMIT))[1].sum(0).mean()
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, and prints how long poles stay up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=20)
    iterations = parser.parse_args(argv).iterations

    model, key = ActorCritic(), jax.random.key(0)
    tx = optax.adam(optax.linear_schedule(2.5e-3, 0.0, iterations * UPDATES))
    params, carts = model.init(key, jnp.zeros(4)), new_carts(key)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    up = mean_return(state, key, at_random=True)
    print(f"pushed at random: up for {up:.0f} of {LIMIT} steps")
    for i in range(iterations + 1):
        if i % 5 == 0:
            steps, up = i * CARTS * STEPS, mean_return(state, jax.random.key(1))
            print(
                f"trained on {steps:7,} steps: up for {up:3.0f} of {LIMIT}",
                flush=True,
            )
        state, carts = iteration(state, carts, jax.random.fold_in(key, i))


if __name__ == "__main__":
    main()
