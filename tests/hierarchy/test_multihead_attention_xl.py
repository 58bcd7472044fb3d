import jax.numpy as jnp
import numpy as np
import pytest

from weft.config import REQUIRED
from weft.errors import ArgumentValueError
from weft.hierarchy.module import functional as F
from weft.hierarchy.multihead_attention_xl import MultiheadAttentionXL
from weft.hierarchy.normalization import RMSNorm
from weft.hierarchy.scale_qk import PerDimScale, ScaleQuery

DIM = 8


def attention(**fields):
    cfg = MultiheadAttentionXL.default_config().set(name="xl", num_heads=2, **fields)
    return cfg.set(query_dim=DIM, key_dim=DIM, value_dim=DIM).instantiate(parent=None)


def run(layer, state, **inputs):
    return F(layer, None, state, inputs, is_training=False)[0]


def test_scaling_logits_or_queries(filled, wave):
    """Both are the same if `u` and `v`, which are added in between, are 0."""
    x = wave((2, 4, DIM))
    position = MultiheadAttentionXL.ScalePosition
    by_logit, by_query = (attention(scale_position=p) for p in (position.LOGIT, position.QUERY))
    state = filled(by_logit)
    zero = {name: jnp.zeros_like(state[name]) for name in ("u_bias", "v_bias")}
    outputs = [run(layer, {**state, **zero}, query=x).data for layer in (by_logit, by_query)]
    np.testing.assert_allclose(*outputs, rtol=1e-5, atol=1e-6)
    outputs = [run(layer, state, query=x).data for layer in (by_logit, by_query)]
    assert not np.allclose(*outputs, atol=1e-4)


def test_norms_and_scales_of_queries(filled, wave):
    scale = ScaleQuery.default_config().set(
        norm=RMSNorm.default_config(), per_dim_scale=PerDimScale.default_config()
    )
    layer = attention(query_scale=scale)
    x = wave((2, 4, DIM))
    assert run(layer, filled(layer), query=x).data.shape == x.shape


def test_dimension_of_positions(filled, wave):
    layer = attention(pos_emb_dim=6)
    state = filled(layer)
    assert state["r_proj"]["weight"].shape == (6, 2, 4)
    assert sorted(state["r_proj"]) == ["weight"]
    assert run(layer, state, query=wave((1, 3, DIM))).data.shape == (1, 3, DIM)


def test_shifting_a_sequence_shifts_the_output(filled, wave):
    """Without a mask, only relative positions count."""
    layer = attention()
    state, x = filled(layer), wave((1, 4, DIM))
    biases = jnp.where(jnp.arange(5) < 4, 0.0, -1e15)[None]
    at_front = jnp.concatenate([x, x[:, :1]], axis=1)
    at_back = jnp.concatenate([x[:, :1], x], axis=1)
    front = run(layer, state, query=at_front, attention_logit_biases=biases).data[:, :4]
    back = run(layer, state, query=at_back, attention_logit_biases=biases[:, ::-1]).data[:, 1:]
    np.testing.assert_allclose(front, back, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["key", "value", "query_positions"])
def test_self_attention_only(name, filled, wave):
    layer = attention()
    given = {name: jnp.arange(3)[None] if name == "query_positions" else wave((1, 3, DIM))}
    with pytest.raises(ArgumentValueError, match=f"{name} given, but"):
        run(layer, filled(layer), query=wave((1, 3, DIM)), **given)


def test_defaults():
    assert MultiheadAttentionXL.default_config().scale_position is not REQUIRED
    assert not MultiheadAttentionXL.default_config().input_linear.layer.bias
