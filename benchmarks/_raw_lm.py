"""The default recipe's model and step by hand, on JAX and optax alone."""

import functools

import jax
import jax.numpy as jnp
import optax


def from_weft(params):
    """Returns the parameters of the recipe's model, laid out as this file takes them."""
    decoder = params["decoder"]
    layer = decoder["transformer"]["repeat"]["layer"]
    attention, feed_forward = layer["self_attention"], layer["feed_forward"]
    return {
        "embedding": decoder["emb"]["token_emb"]["weight"],
        "final_norm": decoder["output_norm"]["scale"],
        "layers": {
            "norm1": attention["norm"]["scale"],
            "norm2": feed_forward["norm"]["scale"],
            "qkv": attention["attention"]["i_proj"]["i_proj"]["qkv_proj"]["weight"],
            "out": attention["attention"]["o_proj"]["weight"],
            "gate": feed_forward["linear1_0"]["weight"],
            "up": feed_forward["linear1_1"]["weight"],
            "down": feed_forward["linear2"]["weight"],
        },
    }


def _rms_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-8) * scale


def _rotate(x):
    """Applies rotary positions to neighboring pairs of x [batch, time, heads, size]."""
    time, size = x.shape[1], x.shape[3]
    angle = jnp.arange(time)[:, None] * 10000.0 ** (-jnp.arange(0, size, 2) / size)
    cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]
    even, odd = x[..., ::2], x[..., 1::2]
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)


def logits(params, ids, unroll=False):
    """Returns next-token logits [batch, time, vocab] of ids [batch, time].

    With `unroll`, the layers are written out one after another, not in a loop.
    """
    time, dim = ids.shape[1], params["embedding"].shape[1]
    mask = jnp.tril(jnp.ones((time, time), bool))

    def layer(x, w):
        h = _rms_norm(x, w["norm1"])
        q, k, v = jnp.einsum("btd,kdhp->kbthp", h, w["qkv"])
        q, k = _rotate(q) * q.shape[-1] ** -0.5, _rotate(k)
        scores = jnp.where(mask, jnp.einsum("bthp,bshp->bhts", q, k), -1e15)
        probs = jax.nn.softmax(scores, -1)
        x = x + jnp.einsum("bthp,dhp->btd", jnp.einsum("bhts,bshp->bthp", probs, v), w["out"])
        h = _rms_norm(x, w["norm2"])
        return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], None

    x = params["embedding"][ids] * dim**0.5
    x, _ = jax.lax.scan(layer, x, params["layers"], unroll=unroll)
    return _rms_norm(x, params["final_norm"]) @ params["embedding"].T


def schedule(peak_lr: float, max_step: int):
    """Returns the learning rate as a function of the number of updates before."""
    of_step = optax.warmup_cosine_decay_schedule(
        0.0, peak_lr, max_step // 20, max_step, 0.1 * peak_lr
    )
    return lambda count: of_step(count + 1)


def make_step(peak_lr: float, max_step: int, unroll: bool = False):
    """Returns the optimizer, and a jitted step (params, state, batch) -> (params, state, loss)."""
    learning_rate = schedule(peak_lr, max_step)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(learning_rate, b1=0.9, b2=0.95, weight_decay=0.1),
    )

    def loss_fn(params, batch):
        labels = batch["target_labels"]
        nll = optax.softmax_cross_entropy_with_integer_labels(
            logits(params, batch["input_ids"], unroll), labels
        )
        live = batch["live_targets"]
        return jnp.sum(nll * live) / jnp.sum(live)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return optimizer, step
