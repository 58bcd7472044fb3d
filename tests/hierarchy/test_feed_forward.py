import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from weft.errors import LayerConfigError
from weft.hierarchy.feed_forward import TransformerFeedForwardLayer, scaled_hidden_dim
from weft.hierarchy.layers import Dropout, set_dropout_rate_recursively
from weft.hierarchy.module import functional as F

DIM = 4


def config(**fields):
    fields = {"hidden_dim": 6, **fields}
    return TransformerFeedForwardLayer.default_config().set(name="ffn", input_dim=DIM, **fields)


def layer(**fields):
    return config(**fields).instantiate(parent=None)


def run(layer, state, x, key=None, is_training=False):
    return F(layer, key, state, (x,), is_training=is_training)


def test_gated(filled, wave):
    ffn, x = layer(structure="nonorm", activation=("nn.tanh", "linear")), wave((2, 3, DIM))
    state = filled(ffn)
    names = ("linear1_0", "linear1_1", "linear2")
    x, a, b, c = jax.tree.map(np.asarray, (x, *(state[name] for name in names)))
    hidden = np.tanh(x @ a["weight"] + a["bias"]) * (x @ b["weight"] + b["bias"])
    expected = hidden @ c["weight"] + c["bias"]
    np.testing.assert_allclose(run(ffn, state, x)[0], expected, rtol=1e-5, atol=1e-6)


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
def test_where_things_are_dropped(structure, dropouts):
    names = [name for name in layer(structure=structure).children if name.startswith("dropout")]
    assert names == (["dropout"] if dropouts == 1 else ["dropout1", "dropout2"])


@pytest.mark.parametrize("structure", ["nonorm", "postnorm"])
def test_what_is_hidden_may_be_dropped_by_another_rate(structure):
    cfg = config(structure=structure, hidden_dropout=Dropout.default_config().set(rate=0.5))
    cfg.dropout.rate = 0.25
    ffn = cfg.instantiate(parent=None)
    assert (ffn.dropout1.config.rate, ffn.dropout2.config.rate) == (0.5, 0.25)


def test_dropout_in_training(filled, wave):
    cfg = config(structure="nonorm")
    set_dropout_rate_recursively(cfg, 0.5)
    ffn, x = cfg.instantiate(parent=None), wave((2, 16, DIM))
    state = filled(ffn)
    y, _ = run(ffn, state, x, key=jax.random.PRNGKey(0), is_training=True)
    assert 0.3 < np.mean(y == 0) < 0.7
    assert np.all(run(ffn, state, x)[0] != 0)


def test_summaries(filled, wave):
    ffn = layer(
        structure="nonorm",
        add_dead_neuron_summary=True,
        add_value_rms_norm_summary=["linear1_outputs", "linear2_outputs"],
    )
    state, x = filled(ffn), wave((2, 3, DIM))
    state["linear1"]["bias"] = jnp.array([-9.0, 0.0, -9.0, 0.0, 0.0, 0.0])
    y, outputs = run(ffn, state, x)
    assert outputs.summaries["dead_neurons/0_nn.relu"] == 2
    hidden = np.add(x @ state["linear1"]["weight"], state["linear1"]["bias"])
    for name, value in (("linear1_outputs", hidden), ("linear2_outputs", y)):
        rms = np.sqrt(np.mean(np.square(value)))
        np.testing.assert_allclose(outputs.summaries[f"rms_norm/{name}"], rms, rtol=1e-5)


def test_unknown_summary():
    with pytest.raises(LayerConfigError, match="add_value_rms_norm_summary has \\['outputs'\\]"):
        layer(add_value_rms_norm_summary=["outputs"])
