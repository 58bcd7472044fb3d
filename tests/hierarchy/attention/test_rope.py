import re

import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import ArgumentShapeError, ArgumentValueError, LayerConfigError
from weft.hierarchy.attention.kv_cache import KVState
from weft.hierarchy.attention.qkv_linear import (
    FusedGroupedQKVLinear,
    GroupedQKVLinear,
    QKVLinear,
    QLinear,
    ScaleKey,
    ScaleQuery,
)
from weft.hierarchy.attention.rope import (
    RoFormerQKVLinear,
    RoFormerSinusoidalPositionalEmbedding,
    apply_rotary_position_embeddings,
)
from weft.hierarchy.layers.normalization import RMSNorm
from weft.hierarchy.module import functional as F

DIM, HEADS, HEAD = 8, 2, 4


def embed(cls, inputs, **fields):
    layer = cls.default_config().set(name="p", dim=HEAD, **fields).instantiate(parent=None)
    return F(layer, None, {}, inputs, is_training=False)[0]


def rope(**fields):
    dims = {"query_dim": DIM, "key_dim": DIM, "value_dim": DIM, "num_heads": HEADS}
    fields = {"rotary_value": False, "per_head_dim": HEAD, **dims, **fields}
    return RoFormerQKVLinear.default_config().set(name="rope", **fields).instantiate(parent=None)


def run(layer, state, query, **kwargs):
    return F(layer, None, state, {"query": query, **kwargs}, is_training=False)[0]


@pytest.mark.parametrize("inputs", [{}, {"positions": jnp.zeros((1, 2)), "max_seq_len": 2}])
def test_positions_or_a_length(inputs):
    message = "needs positions" if not inputs else "expected only one of them"
    with pytest.raises(ArgumentValueError, match=message):
        embed(RoFormerSinusoidalPositionalEmbedding, inputs)


@pytest.mark.parametrize("inner", [QKVLinear.default_config(), None], ids=["plain", "grouped"])
def test_only_distances_count(inner, filled, wave):
    """Logits stay the same if all positions are shifted."""
    inner = inner or FusedGroupedQKVLinear.default_config().set(num_kv_heads=1)
    layer = rope(input_linear=inner)
    state, x = filled(layer), wave((1, 3, DIM))
    logits = []
    for first in (0, 100):
        out = run(layer, state, x, query_positions=first + jnp.arange(3)[None])
        logits.append(jnp.einsum("btnh,bsh->bnts", out.query, out.key[:, :, 0]))
    np.testing.assert_allclose(*logits, rtol=1e-3, atol=1e-4)
    assert layer.num_kv_heads == out.key.shape[2]


def test_rotating_a_part(filled, wave):
    layer = rope(partial_rope_factor=0.5)
    state, x = filled(layer), wave((1, 3, DIM))
    inner = F(layer.i_proj, None, state["i_proj"], (x,), is_training=False)[0]
    out = run(layer, state, x)
    np.testing.assert_array_equal(out.query[..., 2:], inner.query[..., 2:])
    angle = 2.0
    a, b = inner.key[0, 2, :, 0], inner.key[0, 2, :, 1]
    np.testing.assert_allclose(
        out.key[0, 2, :, 0], a * np.cos(angle) - b * np.sin(angle), rtol=1e-4
    )


def test_scales_precede_rotation(filled, wave):
    norm = {"norm": RMSNorm.default_config()}
    layer = rope(
        query_scale=ScaleQuery.default_config().set(**norm),
        key_scale=ScaleKey.default_config().set(**norm),
    )
    state = filled(layer)
    for name in ("query_scale", "key_scale"):
        state[name]["norm"]["scale"] = jnp.ones(HEAD)
    out = run(layer, state, wave((1, 3, DIM)))
    np.testing.assert_allclose(np.linalg.norm(out.key, axis=-1), 2.0, rtol=1e-3)
    np.testing.assert_allclose(np.linalg.norm(out.query, axis=-1), 1.0, rtol=1e-3)


def test_shared_keys_are_not_rotated_again(filled, wave):
    layer = rope(input_linear=QLinear.default_config())
    assert RoFormerQKVLinear.is_kv_sharing(layer.config)
    assert not RoFormerQKVLinear.is_kv_sharing(rope().config)
    kv = wave((1, 5, HEADS, HEAD))
    out = run(layer, filled(layer), wave((1, 3, DIM)), kv_state=KVState(kv, kv, None))
    np.testing.assert_array_equal(out.key, kv)
    assert out.query.shape == (1, 3, HEADS, HEAD)


def test_rotating_arrays(wave):
    x, y, z = (wave((1, 3, HEADS, HEAD), i) for i in range(3))
    sinusoids = embed(RoFormerSinusoidalPositionalEmbedding, {"max_seq_len": 3})[:, :, None]
    for key, value in ((False, False), (True, False), (True, True)):
        got = apply_rotary_position_embeddings(
            query=x, key=y, value=z, sinusoidal_pos=sinusoids, rotary_key=key, rotary_value=value
        )
        assert [not np.allclose(a, b) for a, b in zip(got, (x, y, z), strict=True)] == [
            True,
            key,
            value,
        ]


def test_key_length_mismatch(filled, wave):
    layer = rope()
    with pytest.raises(ArgumentShapeError, match="there are 3 queries and 4 keys"):
        run(layer, filled(layer), wave((1, 3, DIM)), key=wave((1, 4, DIM)))


@pytest.mark.parametrize("factor", [0.25, 1.5, 0.0])
def test_part_that_cannot_be_rotated(factor):
    message = f"rope: partial_rope_factor={factor} of per_head_dim=4 rotates"
    with pytest.raises(LayerConfigError, match=re.escape(message)):
        rope(partial_rope_factor=factor)


def test_grouped_heads(filled, wave):
    layer = rope(input_linear=GroupedQKVLinear.default_config().set(num_kv_heads=1))
    assert run(layer, filled(layer), wave((1, 3, DIM))).key.shape == (1, 3, 1, HEAD)
