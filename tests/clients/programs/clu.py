"""Metrics and the table of parameters of clu, around a classifier in Linen."""

import json

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from clu import metrics, parameter_overview
from flax.training.train_state import TrainState


@flax.struct.dataclass
class Metrics(metrics.Collection):
    accuracy: metrics.Accuracy
    loss: metrics.Average.from_output("loss")


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.relu(nn.LayerNorm()(nn.Dense(16)(x))))


@jax.jit
def step(state, x, y):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), logits

    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    seen = Metrics.single_from_model_output(logits=logits, labels=y, loss=loss)
    return state.apply_gradients(grads=grads), seen


net = Net()
x = jax.random.normal(jax.random.key(0), (32, 5))
y = jnp.argmax(x[:, :3], axis=-1)
params = net.init(jax.random.key(1), x)["params"]
state = TrainState.create(apply_fn=net.apply, params=params, tx=optax.adam(0.05))
total = Metrics.empty()
for _ in range(5):
    state, seen = step(state, x, y)
    total = total.merge(seen)
results = {name: float(value) for name, value in total.compute().items()}
table = parameter_overview.get_parameter_overview(state.params, include_stats=False)
print(json.dumps([results, table.splitlines(), int(parameter_overview.count_parameters(params))]))
