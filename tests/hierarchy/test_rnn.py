"""Recurrent layers, against a loop over time in numpy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft.errors import LayerConfigError
from weft.hierarchy.layers import LayerNorm, Linear, MultiLinear
from weft.hierarchy.module import functional as F
from weft.hierarchy.rnn import (
    IdentityCell,
    LSTMCell,
    RepeatedRNNLayer,
    StackedRNNLayer,
)

TIME, BATCH, DIM = 5, 2, 3


def made(cls, **fields):
    cfg = cls.default_config().set(name="rnn", input_dim=DIM, **fields)
    return cfg.instantiate(parent=None)


def run(layer, state, x, method="forward"):
    @jax.jit
    def compiled(state, x):
        return F(layer, None, state, x, is_training=False, method=method)[0]

    return compiled(state, x)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def normalized(gates, norm):
    gates = (gates - gates.mean(-1, keepdims=True)) / gates.std(-1, keepdims=True)
    return gates * norm["scale"] + norm["bias"]


def lstm(state, x, hidden_dim, *, bound=np.inf):
    """Returns the outputs of an LSTM, step by step."""
    state = jax.tree.map(np.asarray, state)
    weight = state["input_proj"]["weight"]
    output_dim = len(weight) - x.shape[-1]
    c, m = np.zeros((x.shape[1], hidden_dim)), np.zeros((x.shape[1], output_dim))
    outputs = []
    for inputs in np.asarray(x):
        gates = np.einsum("bi,igh->bgh", np.concatenate([inputs, m], -1), weight)
        if "norm" in state:
            gates = normalized(gates, state["norm"])
        g, f, i, o = np.moveaxis(gates, 1, 0)
        c = np.clip(sigmoid(f) * c + sigmoid(i) * np.tanh(g), -bound, bound)
        m = sigmoid(o) * np.tanh(c)
        if "output_proj" in state:
            m = m @ state["output_proj"]["weight"]
        outputs.append(m)
    return np.stack(outputs)


def lstm_of_two_maps(state, x):
    """Returns the outputs of an LSTM of Weft 0.2, step by step."""
    state = jax.tree.map(np.asarray, state)
    c = m = np.zeros((x.shape[1], 4))
    outputs = []
    for inputs in np.asarray(x):
        gates = np.einsum("bi,igh->bgh", inputs, state["input_proj"]["weight"])
        gates += state["input_proj"]["bias"]
        gates += np.einsum("bi,igh->bgh", m, state["hidden_proj"]["weight"])
        gates = normalized(gates.reshape(len(gates), -1), state["norm"]).reshape(gates.shape)
        i, f, g, o = np.moveaxis(gates, 1, 0)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        m = sigmoid(o) * np.tanh(c)
        outputs.append(m)
    return np.stack(outputs)


CELLS = {
    "plain": {"output_dim": 4},
    "bounded": {"output_dim": 4, "max_cell_value": 0.05},
    "projected and normalized": {
        "output_dim": 2,
        "hidden_dim": 4,
        "output_proj": Linear.default_config().set(bias=False),
        "norm": LayerNorm.default_config(),
    },
}


@pytest.mark.parametrize("name", CELLS)
def test_lstm_equals_a_loop(name, filled, wave):
    cell = made(LSTMCell, **CELLS[name])
    state, x = filled(cell), wave((TIME, BATCH, DIM))
    expected = lstm(state, x, 4, bound=cell.config.max_cell_value or np.inf)
    np.testing.assert_allclose(run(cell, state, (x,)), expected, rtol=1e-4, atol=1e-5)


def test_inputs_and_state_may_have_a_map_each(filled, wave):
    cell = made(
        LSTMCell,
        output_dim=4,
        input_proj=MultiLinear.default_config(),
        hidden_proj=MultiLinear.default_config().set(bias=False),
        norm=LayerNorm.default_config(),
    )
    state, x = filled(cell), wave((TIME, BATCH, DIM))
    expected = lstm_of_two_maps(state, x)
    np.testing.assert_allclose(run(cell, state, (x,)), expected, rtol=1e-4, atol=1e-5)


def lstm_config():
    return LSTMCell.default_config()


STACKS = {
    "cell": (LSTMCell, {"output_dim": 4}),
    "stacked": (
        StackedRNNLayer,
        {"layers": [lstm_config().set(output_dim=4), IdentityCell.default_config(), lstm_config()]},
    ),
    "repeated": (RepeatedRNNLayer, {"layer": lstm_config(), "num_layers": 3}),
}


@pytest.mark.parametrize("name", STACKS)
def test_steps_equal_the_whole_sequence(name, filled, wave):
    cls, fields = STACKS[name]
    layer, x = made(cls, **fields), wave((TIME, BATCH, DIM))
    state = filled(layer)
    whole = run(layer, state, (x,))
    cached, outputs = layer.init_states(batch_size=BATCH), []
    for inputs in x:
        cached, y = run(layer, state, {"inputs": inputs, "cached_states": cached}, "extend_step")
        outputs.append(y)
    np.testing.assert_allclose(jnp.stack(outputs), whole, rtol=1e-5, atol=1e-6)
    assert whole.shape == (TIME, BATCH, layer.output_dim)


def test_stacks_apply_their_cells_in_order(filled, wave):
    x = wave((TIME, BATCH, DIM))
    stacked, repeated = (made(STACKS[n][0], **STACKS[n][1]) for n in ("stacked", "repeated"))
    state = filled(stacked)
    expected = lstm(state["layer2"], lstm(state["layer0"], x, 4), 4)
    np.testing.assert_allclose(run(stacked, state, (x,)), expected, rtol=1e-4, atol=1e-5)
    state, expected = filled(repeated), x
    for i in range(3):
        expected = lstm(jax.tree.map(lambda p, i=i: p[i], state["repeat"]["layer"]), expected, DIM)
    np.testing.assert_allclose(run(repeated, state, (x,)), expected, rtol=1e-4, atol=1e-5)


def test_state_keeps_its_dtype(filled, wave):
    cell = made(LSTMCell, output_dim=4)
    state, x = filled(cell), wave((TIME, BATCH, DIM))
    halved = jax.tree.map(lambda p: p.astype(jnp.bfloat16), (state, x))
    y = run(cell, halved[0], (halved[1],))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y, run(cell, state, (x,)), atol=0.02)


def test_invalid_dims_raise():
    with pytest.raises(LayerConfigError, match=r"rnn: hidden_dim=8 differs from output_dim=4, and"):
        made(LSTMCell, output_dim=4, hidden_dim=8, output_proj=None)
    said = r"rnn: output_dim=4, but the outputs of this {} have the size {}; set"
    for cls, fields, size in (
        (IdentityCell, {"output_dim": 4}, 3),
        (StackedRNNLayer, {"layers": [lstm_config().set(output_dim=2)], "output_dim": 4}, 2),
        (RepeatedRNNLayer, {"layer": lstm_config().set(output_dim=4), "num_layers": 2}, 3),
    ):
        with pytest.raises(LayerConfigError, match=re.escape(said.format(cls.__name__, size))):
            made(cls, **fields)
