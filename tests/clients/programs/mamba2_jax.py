"""A language model of Mamba2, trained for a few steps, then continued with its cache."""

import json

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from mamba2_jax import Mamba2Config, Mamba2ForCausalLM, count_parameters, create_empty_cache

config = Mamba2Config(
    vocab_size=16, hidden_size=16, state_size=8, head_dim=8, chunk_size=4, num_hidden_layers=2
)
model = Mamba2ForCausalLM(config, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
ids = jax.random.randint(jax.random.key(0), (2, 8), 0, 16)


@nnx.jit
def step(model, optimizer):
    loss, grads = nnx.value_and_grad(lambda m: m(ids, labels=ids)["loss"])(model)
    optimizer.update(model, grads)
    return loss


losses = [float(step(model, optimizer)) for _ in range(4)]


@nnx.jit
def next_logits(model):
    out = model(ids, cache=create_empty_cache(config, 2))
    return model(jnp.argmax(out["logits"][:, -1:], axis=-1), cache=out["cache"])["logits"]


print(json.dumps([losses, count_parameters(model), next_logits(model).tolist()]))
