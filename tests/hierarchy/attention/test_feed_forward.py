import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from weft.config import REQUIRED, Required, config_class
from weft.errors import LayerConfigError
from weft.hierarchy.attention.feed_forward import (
    NormPosition,
    ResidualLayer,
    TransformerFeedForwardLayer,
    scaled_hidden_dim,
)
from weft.hierarchy.layers import Dropout, LayerNorm, RMSNorm, set_dropout_rate_recursively
from weft.hierarchy.module import functional as F

DIM = 4
IN, RES, OUT = NormPosition.IN_NORM, NormPosition.RES_NORM, NormPosition.OUT_NORM


class Branch(ResidualLayer):
    """A branch that shifts, so that it does not commute with norms."""

    @config_class
    class Config(ResidualLayer.Config):
        dim: Required[int] = REQUIRED

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_norms(cfg.dim)
        self._add_dropouts()

    def forward(self, x, weight=1.0):
        skipped, y = self._enter_branch(x)
        return self._leave_branch(skipped, f(y), weight=weight)


def f(x):
    return 3 * x + jnp.broadcast_to(jnp.arange(DIM), x.shape)


def branch(**fields):
    cfg = Branch.default_config().set(name="branch", dim=DIM, **fields)
    return cfg.instantiate(parent=None)


def run(layer, state, *inputs, key=None):
    return F(layer, key, state, inputs, is_training=key is not None)[0]


def rms(scale):
    return lambda x: np.multiply(x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True)), scale)


def scales(state):
    return {name: rms(state[name]["scale"]) for name in state if "norm" in name}


RMS = RMSNorm.default_config()
STRUCTURES = {
    "prenorm": lambda x, norm: x + f(norm(x)),
    "postnorm": lambda x, norm: norm(x + f(x)),
    "hybridnorm": lambda x, prenorm, postnorm: x + postnorm(f(prenorm(x))),
    "hybridnorm_v2": lambda x, prenorm, postnorm: prenorm(x) + postnorm(f(prenorm(x))),
    "nonorm": lambda x: f(x),
}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_structures(structure, filled, wave):
    layer, x = branch(structure=structure, norm=RMS), wave((2, 3, DIM), 0.5)
    state = filled(layer)
    expected = STRUCTURES[structure](x, **scales(state))
    np.testing.assert_allclose(run(layer, state, x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("positions", [(), (IN,), (RES, OUT), (IN, RES, OUT)], ids=str)
def test_norms_by_choice(positions, filled, wave):
    layer = branch(structure="v2", norm=dict.fromkeys(positions, RMS))
    x, state = wave((2, DIM), 0.5), filled(layer)
    norms = {position: lambda x: x for position in NormPosition}
    norms |= {position: rms(state[position.value]["scale"]) for position in positions}
    expected = norms[OUT](x + norms[RES](f(norms[IN](x))))
    np.testing.assert_allclose(run(layer, state, x), expected, rtol=1e-4, atol=1e-5)


def test_different_norms_by_position():
    layer = branch(structure="hybridnorm", norm={IN: RMS, RES: LayerNorm.default_config()})
    assert type(layer.prenorm) is RMSNorm and type(layer.postnorm) is LayerNorm


def test_gate_and_weight(filled, wave):
    layer, x = branch(norm=RMS, residual_gate_init=0.25), wave((2, DIM))
    state = filled(layer)
    state["residual_gate_theta"] = jnp.float32(np.log(0.6 / 0.4))  # whose sigmoid is 0.6
    expected = 0.8 * x + 2.0 * 0.6 * f(rms(state["norm"]["scale"])(x))
    np.testing.assert_allclose(run(layer, state, x, 2.0), expected, rtol=1e-4, atol=1e-5)
    spec = layer.create_parameter_specs_recursively()["residual_gate_theta"]
    assert spec.shape == () and spec.weight_decay_scale == 0
    drawn = spec.initializer.initialize("g", prng_key=None, shape=(), dtype=jnp.float32)
    assert drawn == 0.25


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"structure": "pre"},
            "branch: structure='pre' is unknown; expected one of prenorm, postnorm",
        ),
        ({"structure": "v2"}, "structure='v2' needs a dict of norms by position"),
        (
            {"norm": {OUT: RMS}},
            "has norms at NormPosition.IN_NORM, but norm has NormPosition.OUT_NORM.",
        ),
    ],
)
def test_invalid_structures(fields, message):
    with pytest.raises(LayerConfigError, match=re.escape(message)):
        branch(**fields)


def config(**fields):
    fields = {"hidden_dim": 6, **fields}
    return TransformerFeedForwardLayer.default_config().set(name="ffn", input_dim=DIM, **fields)


def layer(**fields):
    return config(**fields).instantiate(parent=None)


def run_feed_forward(layer, state, x, key=None, is_training=False):
    return F(layer, key, state, (x,), is_training=is_training)


@pytest.mark.parametrize("hidden_dim", [16, scaled_hidden_dim(4), scaled_hidden_dim()])
def test_hidden_dim(hidden_dim):
    specs = layer(hidden_dim=hidden_dim).create_parameter_specs_recursively()
    assert specs["linear1"]["weight"].shape == (DIM, 16)
    assert specs["linear1"]["weight"].mesh_axes == PartitionSpec(None, "model")
    assert specs["linear2"]["weight"].mesh_axes == PartitionSpec("model", None)


@pytest.mark.parametrize(
    "structure, dropouts",
    [("prenorm", 2), ("postnorm", 1), ("hybridnorm", 2), ("nonorm", 2)],
)
def test_dropout_positions(structure, dropouts):
    names = [name for name in layer(structure=structure).children if name.startswith("dropout")]
    assert names == (["dropout"] if dropouts == 1 else ["dropout1", "dropout2"])


@pytest.mark.parametrize("structure", ["nonorm", "postnorm"])
def test_hidden_dropout_rate(structure):
    cfg = config(structure=structure, hidden_dropout=Dropout.default_config().set(rate=0.5))
    cfg.dropout.rate = 0.25
    ffn = cfg.instantiate(parent=None)
    assert (ffn.dropout1.config.rate, ffn.dropout2.config.rate) == (0.5, 0.25)


def test_dropout_in_training(filled, wave):
    cfg = config(structure="nonorm")
    set_dropout_rate_recursively(cfg, 0.5)
    ffn, x = cfg.instantiate(parent=None), wave((2, 16, DIM))
    state = filled(ffn)
    y, _ = run_feed_forward(ffn, state, x, key=jax.random.PRNGKey(0), is_training=True)
    assert 0.3 < np.mean(y == 0) < 0.7
    assert np.all(run_feed_forward(ffn, state, x)[0] != 0)


def test_summaries(filled, wave):
    ffn = layer(
        structure="nonorm",
        add_dead_neuron_summary=True,
        add_value_rms_norm_summary=["linear1_outputs", "linear2_outputs"],
    )
    state, x = filled(ffn), wave((2, 3, DIM))
    state["linear1"]["bias"] = jnp.array([-9.0, 0.0, -9.0, 0.0, 0.0, 0.0])
    y, outputs = run_feed_forward(ffn, state, x)
    assert outputs.summaries["dead_neurons/0_nn.relu"] == 2
    hidden = np.add(x @ state["linear1"]["weight"], state["linear1"]["bias"])
    for name, value in (("linear1_outputs", hidden), ("linear2_outputs", y)):
        rms = np.sqrt(np.mean(np.square(value)))
        np.testing.assert_allclose(outputs.summaries[f"rms_norm/{name}"], rms, rtol=1e-5)


def test_unknown_summary():
    with pytest.raises(LayerConfigError, match="add_value_rms_norm_summary has \\['outputs'\\]"):
        layer(add_value_rms_norm_summary=["outputs"])
