"""Sizes of layers, in all ways of writing, and ids that are too large."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft import functional, linen, nnx
from weft.config import ConfigTypeError
from weft.errors import ArgumentValueError
from weft.hierarchy.embedding import Embedding
from weft.hierarchy.linear import Linear

X, IDS, KEY = jnp.ones((1, 4)), jnp.zeros((1,), int), jax.random.key(0)


def init(module, *args):
    return module.init(KEY, *(args or (X,)))


def of_cell(cell):
    return cell.init(KEY, (jnp.ones((1, 3)),) * 2, X)


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
            cfg.instantiate(parent=None).initialize_parameters_recursively(KEY)
    with pytest.raises(ConfigTypeError):
        layer.default_config().set(**{first: 2.5})


def test_integers_of_numpy_are_integers():
    assert nnx.Linear(np.int64(3), np.int32(2), **RNGS).kernel.shape == (3, 2)
    functional.check_sizes("a layer", sizes=[3, np.int8(2)], left_out=None)


LOOKUPS = {
    "functional": lambda ids: functional.lookup(jnp.ones((4, 2)), ids),
    "linen": lambda ids: linen.Embed(4, 2).init_with_output(KEY, ids)[0],
    "nnx": lambda ids: nnx.Embed(4, 2, **RNGS)(ids),
}


@pytest.mark.parametrize("make", LOOKUPS.values(), ids=LOOKUPS)
def test_ids_that_would_be_other_ids_are_refused(make):
    for ids in ([2**32 + 1], [0, -(2**32)], [2**40]):
        with pytest.raises(ArgumentValueError, match="do not fit into int32, the dtype JAX"):
            make(np.array(ids, np.int64))
    with pytest.raises(ArgumentValueError, match="ids of dtype uint64 range from 0 to 429496729"):
        make(np.array([0, 2**32], np.uint64))
    for dtype in (np.int64, np.uint64, np.int8):
        assert jnp.isfinite(make(np.array([0, 3], dtype))).all()
    assert jnp.isnan(make(np.array([7], np.int64))).all()
    assert make(np.array([], np.int64)).shape == (0, 2)
