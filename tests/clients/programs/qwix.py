"""Training aware of quantization, quantized weights and LoRA of qwix, for Linen and NNX."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import qwix
from flax import nnx


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.relu(nn.Conv(8, (3,))(x)))


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(4, 16, rngs=rngs), nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.first(x)))


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.MultiHeadDotProductAttention(2)(x)
        y = nn.relu(nn.DenseGeneral((2, 4))(y))
        return x + nn.Einsum((2, 4, 4), "btni,nio->bto")(y)


class LinenBlocks(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.remat(LinenBlock)()(x)[..., :3]


class ScannedBlocks(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.remat_scan(LinenBlock, lengths=(2,))()(x)[..., :3]


class NNXBlocks(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.LinearGeneral(4, (2, 4), rngs=rngs)
        self.down = nnx.Einsum("btni,nio->bto", (2, 4, 3), rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


x = jax.random.normal(jax.random.key(0), (2, 6, 4))
y = jnp.sin(x[..., :3])
rules = [qwix.QuantizationRule(weight_qtype="int8", act_qtype="int8")]


def train_linen(model):
    net = qwix.quantize_model(model, qwix.QtProvider(rules))
    params = jax.jit(net.init)(jax.random.key(1), x)["params"]

    def loss_fn(params):
        return jnp.square(net.apply({"params": params}, x) - y).mean()

    @jax.jit
    def step(params):
        loss, grads = jax.value_and_grad(loss_fn)(params)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    losses = []
    for _ in range(3):
        loss, params = step(params)
        losses.append(float(loss))
    return losses


def serve_linen(model):
    params = jax.jit(model.init)(jax.random.key(1), x)["params"]
    ptq = qwix.quantize_model(model, qwix.PtqProvider(rules))
    shapes = jax.eval_shape(ptq.init, jax.random.key(1), x)["params"]
    quantized = qwix.quantize_params(params, shapes)
    return jax.jit(ptq.apply)({"params": quantized}, x).tolist()


def objects(model):
    net = qwix.quantize_model(model(nnx.Rngs(0)), qwix.QtProvider(rules), x)
    optimizer = nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(net, optimizer):
        loss, grads = nnx.value_and_grad(lambda net: jnp.square(net(x) - y).mean())(net)
        optimizer.update(net, grads)
        return loss

    losses = [float(step(net, optimizer)) for _ in range(3)]
    quantized = qwix.quantize_model(model(nnx.Rngs(0)), qwix.PtqProvider(rules), x)
    return losses, quantized(x).tolist()


def lora():
    provider = qwix.LoraProvider(module_path=".*", rank=2, alpha=1.0)
    net = qwix.apply_lora_to_model(NNXNet(nnx.Rngs(0)), provider, x, rngs=nnx.Rngs(1))
    added = nnx.to_pure_dict(nnx.state(net, nnx.LoRAParam))
    return net(x).tolist(), jax.tree.map(lambda a: list(a.shape), added)


linen = [train_linen(model()) for model in (LinenNet, LinenBlocks, ScannedBlocks)]
linen += [serve_linen(model()) for model in (LinenNet, LinenBlocks)]
print(json.dumps([linen, objects(NNXNet), objects(NNXBlocks), lora()]))
