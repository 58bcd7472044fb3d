import re

import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import LayerConfigError
from weft.hierarchy.module import functional as F
from weft.hierarchy.poolings import (
    AttentionPooling,
    AveragePooling,
    FirstNTokenPooling,
    LastNTokenPooling,
    MaxPooling,
    PoolingWithProjection,
)

DIM, OUT = 4, 6
# On the right, on the left and in between; all of it; nothing.
PADDINGS = np.array(
    [[0, 0, 0, 1, 1], [1, 1, 0, 0, 0], [0, 1, 0, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]], bool
)
TOKENS = np.random.default_rng(0).normal(size=(5, 5, DIM)).astype("f")


def pooling(cls, **fields):
    cfg = cls.default_config().set(name="pool", input_dim=DIM, output_dim=DIM)
    return cfg.set(**fields).instantiate(parent=None)


def run(layer, *args, state=None):
    return F(layer, None, state or {}, tuple(map(jnp.asarray, args)), is_training=False)[0]


def reference(pick, n):
    rows = []
    for tokens, paddings in zip(TOKENS, PADDINGS, strict=True):
        live = list(tokens[~paddings])
        zeros = [np.zeros(DIM, "f")] * max(0, n - len(live))
        rows.append((live[:n] if pick == "first" else live[::-1][:n]) + zeros)
    return np.array(rows)


@pytest.mark.parametrize("n", [1, 4])
def test_first_and_last_tokens(n):
    for cls, pick in ((FirstNTokenPooling, "first"), (LastNTokenPooling, "last")):
        layer = pooling(cls, num_outputs=n)
        np.testing.assert_array_equal(run(layer, TOKENS, PADDINGS), reference(pick, n))
    np.testing.assert_array_equal(run(pooling(FirstNTokenPooling), TOKENS), TOKENS[:, :1])
    np.testing.assert_array_equal(run(pooling(LastNTokenPooling), TOKENS), TOKENS[:, -1:])


def test_projection_behind_a_pooling(filled):
    layer = pooling(
        PoolingWithProjection,
        pooler=FirstNTokenPooling.default_config(),
        output_dim=OUT,
        num_outputs=2,
    )
    state = filled(layer)
    got = run(layer, TOKENS, PADDINGS, state=state)
    expected = reference("first", 2) @ state["proj"]["weight"] + state["proj"]["bias"][None, None]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_projection_keeps_the_number_of_outputs_of_its_pooling():
    cfg = PoolingWithProjection.default_config().set(name="pool", input_dim=DIM, output_dim=OUT)
    cfg.pooler = FirstNTokenPooling.default_config().set(num_outputs=3)
    assert cfg.instantiate(parent=None).pooler.config.num_outputs == 3
    with pytest.raises(LayerConfigError, match="num_outputs=2, but that of its pooler is 3; set"):
        cfg.set(num_outputs=2).instantiate(parent=None)


def test_attention_pooling_ignores_padding(filled):
    cfg = AttentionPooling.default_config().set(
        name="pool", input_dim=DIM, output_dim=OUT, num_outputs=2
    )
    assert cfg.cross_attention.attention.num_heads == 1
    cfg.cross_attention.attention.num_heads = 2
    layer = cfg.instantiate(parent=None)
    state = filled(layer)
    assert state["query_weight"].shape == (2, OUT)
    assert state["feed_forward"]["linear1"]["weight"].shape == (OUT, 4 * OUT)
    got = run(layer, TOKENS[:3], PADDINGS[:3], state=state)
    assert got.shape == (3, 2, OUT)
    # The same tokens in the same order give the same, wherever the padding is.
    alone = np.stack([tokens[~p] for tokens, p in zip(TOKENS[:3], PADDINGS[:3], strict=True)])
    np.testing.assert_allclose(got, run(layer, alone, state=state), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "cls, fields, said",
    [
        (MaxPooling, {"output_dim": OUT}, "pool: a MaxPooling keeps the size of tokens"),
        (AveragePooling, {"output_dim": OUT}, "input_dim=4 differs from output_dim=6"),
        (FirstNTokenPooling, {"output_dim": OUT}, "a FirstNTokenPooling keeps"),
        (LastNTokenPooling, {"output_dim": OUT}, "a LastNTokenPooling keeps"),
        (MaxPooling, {"num_outputs": 2}, "pool: a MaxPooling returns one vector"),
        (AveragePooling, {"num_outputs": 2}, "but num_outputs=2"),
    ],
    ids=["max", "mean", "first", "last", "maxima", "means"],
)
def test_invalid_poolings_raise(cls, fields, said):
    with pytest.raises(LayerConfigError, match=re.escape(said)):
        pooling(cls, **fields)
