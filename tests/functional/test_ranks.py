"""What layers compute says itself how shapes go together: nothing needs JAX to add axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft import functional as F
from weft import linen, nnx
from weft.functional.recurrent import flip_sequences

KEY = jax.random.key(0)
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 8)), jnp.float32)
MASK = jnp.arange(5)[None, :, None] < jnp.array([3, 5])[:, None, None]
HEADS = X.reshape(2, 5, 2, 4)
LABELS = jnp.array([[1, 2, 0, -1, 7], [1, 1, 1, 1, 1]])


def of_linen(module, *args, **kwargs):
    return module.init_with_output(KEY, *args, **kwargs)[0]


def in_evaluation(layer):
    layer.eval()
    return layer


PROGRAMS = {
    "dense": lambda: F.dense(X, jnp.ones((8, 3)), jnp.ones(3)),
    "project": lambda: F.project("btd,do->bto", X, jnp.ones((8, 3)), jnp.ones(3)),
    "masked moments": lambda: F.moments(X, axis=(0, 1), where=MASK),
    "masked layer norm": lambda: F.layer_norm(X, jnp.ones(8), jnp.ones(8), where=MASK),
    "masked group norm": lambda: F.group_norm(X, num_groups=2, where=MASK),
    "batch norm": lambda: F.batch_norm(X, jnp.zeros(8), jnp.ones(8), jnp.ones(8), jnp.ones(8)),
    "cross entropy": lambda: F.cross_entropy(X, LABELS)[0],
    "attention bias": lambda: F.attention_probs(
        F.attention_logits(HEADS, HEADS), jnp.zeros((5, 5)), logit_sink=jnp.zeros(2)
    ),
    "masks": lambda: F.or_masks(F.causal_mask, F.truncated_key_mask(2))(
        jnp.arange(5)[:, None], jnp.arange(5)
    ),
    "rotary": lambda: F.apply_rotary(X, *F.rotary_sincos(jnp.arange(5), dim=8)),
    "sinusoidal": lambda: F.sinusoidal_positions(jnp.arange(5)[None], dim=8),
    "alibi": lambda: F.alibi_bias(jnp.ones(2), jnp.arange(5)[None], jnp.arange(5)[None]),
    "top k": lambda: F.top_k_logits(2, break_ties="smallest_index")(X),
    "top p": lambda: F.top_p_logits(jnp.array([0.5, 1.0]))(X[:, 0]),
    "flipped": lambda: flip_sequences(X, jnp.array([2, 5]), axis=1),
    "linen batch norm": lambda: of_linen(linen.BatchNorm(use_running_average=True), X),
    "linen masked batch norm": lambda: of_linen(
        linen.BatchNorm(use_running_average=False), X, mask=MASK
    ),
    "linen attention": lambda: of_linen(
        linen.MultiHeadDotProductAttention(2), X, mask=linen.make_causal_mask(X[..., 0])
    ),
    "linen rnn": lambda: of_linen(
        linen.RNN(linen.LSTMCell(3), reverse=True), X, seq_lengths=jnp.array([2, 5])
    ),
    "nnx batch norm": lambda: in_evaluation(nnx.BatchNorm(8, rngs=nnx.Rngs(0)))(X),
    "nnx causal attention": lambda: nnx.dot_product_attention(
        HEADS, HEADS, HEADS, mask=jnp.ones(5, bool), is_causal=True
    ),
    "nnx gru": lambda: nnx.RNN(nnx.GRUCell(8, 3, rngs=nnx.Rngs(0)))(
        X, seq_lengths=jnp.array([2, 5])
    ),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_ranks_are_not_promoted(program):
    with jax.numpy_rank_promotion("allow"):
        expected = program()
    with jax.numpy_rank_promotion("raise"):
        given = program()
    jax.tree.map(np.testing.assert_array_equal, given, expected)
