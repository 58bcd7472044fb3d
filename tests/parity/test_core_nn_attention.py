"""Attention as a function of a scope: the same programs on Flax and on Weft."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.keys import draw
from tests.parity.layers import KEY, initialized, named, same

TEXT, OTHER = draw(3, 2, 5, 8), draw(9, 2, 7, 8)
Q, K, V = draw(4, 2, 5, 4, 8), draw(5, 2, 6, 4, 8), draw(6, 2, 6, 4, 3)
GRID = draw(7, 2, 3, 4, 2, 5)
SEGMENTS = jnp.array([[1, 1, 2, 2, 3], [1] * 5])
ATTEND = "multi_head_dot_product_attention"


@named(
    [
        {},
        {"dropout_rate": 0.5},
        {"dropout_rate": 0.5, "broadcast_dropout": False},
        {"bias": draw(8, 2, 1, 5, 6)},
    ]
)
def test_dot_product_attention(kwargs):
    same(initialized("dot_product_attention", Q, K, V, **kwargs))


@pytest.mark.parametrize("axis", [2, (1, 2)])
@named([{}, {"dropout_rate": 0.5}, {"dropout_rate": 0.5, "broadcast_dropout": False}])
def test_attention_over_several_axes(axis, kwargs):
    same(initialized("dot_product_attention", GRID, GRID, GRID, axis=axis, **kwargs))


@named(
    [
        {},
        {"qkv_features": 16, "out_features": 3},
        {"causal_mask": True},
        {"bias": False},
        {"dropout_rate": 0.5},
        {"dropout_rate": 0.5, "deterministic": True},
        {"segmentation": SEGMENTS},
        {"segmentation": SEGMENTS[..., None], "causal_mask": True},
    ]
)
def test_multi_head_attention(kwargs):
    same(initialized(ATTEND, TEXT, TEXT, 4, **kwargs))


def test_multi_head_cross_attention():
    same(initialized(ATTEND, TEXT, OTHER, 4))
    same(initialized(ATTEND, TEXT, None, 2))
    grid = draw(10, 2, 3, 4, 8)
    kwargs = {"attention_axis": (1,), "causal_mask": True}
    same(initialized(ATTEND, grid, grid, 4, **kwargs))


@pytest.mark.parametrize("last_axis", [True, False])
def test_padding(last_axis):
    valid = np.array([[1, 1, 1, 0, 0], [1] * 5], bool)

    def program(core, nn):
        mask = valid[..., None] if last_axis else valid
        attend = core.init(getattr(nn, ATTEND))
        y, variables = attend(KEY, TEXT, TEXT, 4, padding_mask=mask)
        # Difference: Weft gives padded queries the mean of all values, Flax the sum.
        return y[valid], variables

    same(program)


def test_other_masks_for_keys():
    kwargs = {
        "segmentation": SEGMENTS,
        "key_segmentation": jnp.array([[1, 1, 2, 2, 3, 3, 1], [1] * 7]),
        "padding_mask": jnp.ones((2, 5), bool),
        "key_padding_mask": jnp.array([[1, 1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0, 0]], bool),
    }
    same(initialized(ATTEND, TEXT, OTHER, 4, **kwargs))


@pytest.mark.parametrize("dtypes", ["qkv", "qKV", "QKv"])
def test_dtypes(dtypes):
    full = {"Q": Q, "K": K, "V": V}
    half = {name.lower(): x.astype(jnp.bfloat16) for name, x in full.items()}
    q, k, v = ({**full, **half}[name] for name in dtypes)
    for dtype in (jnp.float32, jnp.bfloat16):
        same(initialized("dot_product_attention", q, k, v, dtype=dtype), 4e-2)


def test_half_precision():
    same(initialized(ATTEND, TEXT, None, 2, dtype=jnp.bfloat16), 3e-2)


def position(x, i, ndim):
    """Returns one position of the axes between batch and features, in the order of the flattened
    ones.
    """
    index = np.unravel_index(i, x.shape[1 : 1 + ndim])
    return x[(slice(None), *(slice(a, a + 1) for a in index))]


@pytest.mark.parametrize("shape", [(7,), (2, 3)], ids=str)
def test_decoding(shape):
    x = TEXT if shape == (7,) else draw(10, 2, *shape, 8)

    def program(core, nn):
        def attend(scope, x):
            return getattr(nn, ATTEND)(scope, x, None, 2, causal_mask=True, cache=True)

        y, variables = core.init(attend)(KEY, x)
        # Difference: the first call creates a function in Flax, a callable entry in Weft.
        cache = jax.tree.map(lambda f: f((2, *shape)), variables["cache"], is_leaf=callable)
        outputs, states = [y], []
        for i in range(4):
            variables = {"params": variables["params"], "cache": cache}
            step = position(x, i, len(shape))
            y, changed = core.apply(attend, mutable=["cache"])(variables, step)
            cache = changed["cache"]
            outputs.append(y)
            states.append([getattr(cache["entry"], name) for name in ("key", "value", "i")])
        return (outputs, states), {}

    same(program)
