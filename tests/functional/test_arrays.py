"""

Sizes of layers, in all ways of writing, and ids that are too large.

What layers compute says itself how shapes go together: nothing needs JAX to add axes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft import functional, linen, nnx
from weft import functional as F
from weft.config import ConfigTypeError
from weft.errors import ArgumentValueError
from weft.functional import canonicalize_dtype, over_batch_axes, promote_dtype
from weft.functional.recurrent import flip_sequences
from weft.hierarchy.layers.embedding import Embedding
from weft.hierarchy.layers.linear import Linear


@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (0, 3), (1, 2, 3)])
def test_function_gets_one_batch_axis(batch):
    seen = []

    def fn(x):
        seen.append(x.shape)
        return 2 * x[:, :, 0]

    x = jnp.arange(20 * np.prod(batch, dtype=int)).reshape(*batch, 4, 5)
    np.testing.assert_array_equal(over_batch_axes(fn, x, 2), 2 * x[..., 0])
    assert seen == [(int(np.prod(batch)), 4, 5)]


HALF, INT = jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.int32)


@pytest.mark.parametrize(
    ("args", "name"),
    [
        ((HALF, HALF), "bfloat16"),
        ((HALF, None, jnp.ones(2)), "float32"),
        ((HALF, 1.5), "bfloat16"),
        ((HALF, INT), "bfloat16"),
        ((INT,), "float32"),
        ((INT, INT), "float32"),
        ((1, [2, 3]), "float32"),
        ((np.ones(2),), "float32"),
        ((HALF, jnp.ones(2, jnp.complex64)), "complex64"),
    ],
)
def test_dtype_is_the_promoted_one(args, name):
    assert jnp.dtype(canonicalize_dtype(*args)).name == name
    promoted = promote_dtype(*args)
    assert [x is None for x in promoted] == [x is None for x in args]
    assert all(x.dtype.name == name for x in promoted if x is not None)


def test_weak_types_become_strong():
    def f(x):
        (y,) = promote_dtype(2.0 * x)
        return y + jnp.ones((), jnp.bfloat16)

    assert jax.eval_shape(f, 1.0).dtype == jnp.float32


def test_dtype_without_fractions_is_rejected():
    with pytest.raises(ArgumentValueError, match=r"dtype=int32 cannot hold fractions.*Leave"):
        promote_dtype(HALF, dtype=jnp.int32)


def test_no_dtype_or_array_fails():
    with pytest.raises(ArgumentValueError, match="neither a dtype nor an array"):
        promote_dtype(None)


SIZES_X, IDS, SIZES_KEY = jnp.ones((1, 4)), jnp.zeros((1,), int), jax.random.key(0)


def init(module, *args):
    return module.init(SIZES_KEY, *(args or (SIZES_X,)))


def of_cell(cell):
    return cell.init(SIZES_KEY, (jnp.ones((1, 3)),) * 2, SIZES_X)


LINEN = {
    "Dense features": lambda n: init(linen.Dense(n)),
    "DenseGeneral features": lambda n: init(linen.DenseGeneral((2, n))),
    "Conv features": lambda n: init(linen.Conv(n, (3,)), jnp.ones((1, 5, 2))),
    "Conv kernel_size": lambda n: init(linen.Conv(2, (n,)), jnp.ones((1, 5, 2))),
    "ConvTranspose features": lambda n: init(linen.ConvTranspose(n, (3,)), jnp.ones((1, 5, 2))),
    "Embed num_embeddings": lambda n: init(linen.Embed(n, 3), IDS),
    "Embed features": lambda n: init(linen.Embed(3, n), IDS),
    "LSTMCell features": lambda n: of_cell(linen.LSTMCell(n)),
    "OptimizedLSTMCell features": lambda n: of_cell(linen.OptimizedLSTMCell(n)),
    "MultiHeadDotProductAttention num_heads": lambda n: init(
        linen.MultiHeadDotProductAttention(n), jnp.ones((1, 2, 4))
    ),
    "GroupNorm num_groups": lambda n: init(linen.GroupNorm(n)),
}
RNGS = {"rngs": nnx.Rngs(0)}
NNX = {
    "Linear in_features": lambda n: nnx.Linear(n, 4, **RNGS),
    "Linear out_features": lambda n: nnx.Linear(4, n, **RNGS),
    "LinearGeneral out_features": lambda n: nnx.LinearGeneral(4, (2, n), **RNGS),
    "Conv in_features": lambda n: nnx.Conv(n, 4, (3,), **RNGS),
    "Conv kernel_size": lambda n: nnx.Conv(2, 4, (3, n), **RNGS),
    "ConvTranspose out_features": lambda n: nnx.ConvTranspose(2, n, (3,), **RNGS),
    "Embed num_embeddings": lambda n: nnx.Embed(n, 4, **RNGS),
    "Embed features": lambda n: nnx.Embed(4, n, **RNGS),
    "LayerNorm num_features": lambda n: nnx.LayerNorm(n, **RNGS),
    "RMSNorm num_features": lambda n: nnx.RMSNorm(n, **RNGS),
    "BatchNorm num_features": lambda n: nnx.BatchNorm(n, **RNGS),
    "GroupNorm num_groups": lambda n: nnx.GroupNorm(4, num_groups=n, **RNGS),
    "InstanceNorm num_features": lambda n: nnx.InstanceNorm(n, **RNGS),
    "LSTMCell hidden_features": lambda n: nnx.LSTMCell(3, n, **RNGS),
    "OptimizedLSTMCell in_features": lambda n: nnx.OptimizedLSTMCell(n, 3, **RNGS),
    "GRUCell hidden_features": lambda n: nnx.GRUCell(3, n, **RNGS),
    "SimpleCell hidden_features": lambda n: nnx.SimpleCell(3, n, **RNGS),
    "MultiHeadAttention num_heads": lambda n: nnx.MultiHeadAttention(
        num_heads=n, in_features=4, **RNGS
    ),
    "LoRA lora_rank": lambda n: nnx.LoRA(3, n, 4, **RNGS),
    "LoRALinear lora_rank": lambda n: nnx.LoRALinear(3, 4, lora_rank=n, **RNGS),
}
CASES = {
    **{f"linen {name}": make for name, make in LINEN.items()},
    **{f"nnx {name}": make for name, make in NNX.items()},
}


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "2"])
@pytest.mark.parametrize("case", CASES)
def test_sizes_are_positive_integers(case, size):
    _, layer, field = case.split()
    with pytest.raises(ArgumentValueError, match=rf"{layer} was given {field}=.*; expected .*pos"):
        CASES[case](size)


@pytest.mark.parametrize("layer", [Linear, Embedding])
@pytest.mark.parametrize("size", [0, -1, True])
def test_sizes_in_the_hierarchy(layer, size):
    first = "input_dim" if layer is Linear else "num_embeddings"
    last = "output_dim" if layer is Linear else "dim"
    for field, other in ((first, last), (last, first)):
        cfg = layer.default_config().set(name="layer", **{field: size, other: 4})
        with pytest.raises(ArgumentValueError, match=r"layer.* was given .*; expected .*positive"):
            cfg.instantiate(parent=None).initialize_parameters_recursively(SIZES_KEY)
    with pytest.raises(ConfigTypeError):
        layer.default_config().set(**{first: 2.5})


def test_numpy_integers_are_accepted():
    assert nnx.Linear(np.int64(3), np.int32(2), **RNGS).kernel.shape == (3, 2)
    functional.check_sizes("a layer", sizes=[3, np.int8(2)], left_out=None)


LOOKUPS = {
    "functional": lambda ids: functional.lookup(jnp.ones((4, 2)), ids),
    "linen": lambda ids: linen.Embed(4, 2).init_with_output(SIZES_KEY, ids)[0],
    "nnx": lambda ids: nnx.Embed(4, 2, **RNGS)(ids),
}


@pytest.mark.parametrize("make", LOOKUPS.values(), ids=LOOKUPS)
def test_overflowing_ids_are_rejected(make):
    for ids in ([2**32 + 1], [0, -(2**32)], [2**40]):
        with pytest.raises(ArgumentValueError, match="do not fit into int32, the dtype JAX"):
            make(np.array(ids, np.int64))
    with pytest.raises(ArgumentValueError, match="ids of dtype uint64 range from 0 to 429496729"):
        make(np.array([0, 2**32], np.uint64))
    for dtype in (np.int64, np.uint64, np.int8):
        assert jnp.isfinite(make(np.array([0, 3], dtype))).all()
    assert jnp.isnan(make(np.array([7], np.int64))).all()
    assert make(np.array([], np.int64)).shape == (0, 2)


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
    with jax.numpy_rank_promotion("raise"):  # at the time of the trace
        jax.eval_shape(program)
