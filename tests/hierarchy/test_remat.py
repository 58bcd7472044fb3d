import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from weft.hierarchy.module import functional as F
from weft.hierarchy.remat import (
    RematRegexSavePatterns,
    build_remat_spec,
    save_and_offload_these_names_regex,
)
from weft.hierarchy.stack import RepeatedTransformerLayer, StackedTransformerLayer


def named(x):
    y = checkpoint_name(jnp.sin(x), "Layer.q_proj")
    return checkpoint_name(jnp.cos(y), "Layer.linear1_0").sum()


def computed_again(policy):
    """How often sine and cosine stand in the whole of forward and backward pass."""
    jaxpr = str(jax.make_jaxpr(jax.grad(jax.checkpoint(named, policy=policy)))(jnp.ones(3)))
    return jaxpr.count("= sin"), jaxpr.count("= cos"), jaxpr


def test_names_that_are_saved():
    policy = save_and_offload_these_names_regex
    everything, *_ = computed_again(None)
    nothing, *_ = computed_again(policy(r".*"))
    one, *_ = computed_again(policy(r".*\.q_proj"))
    assert one == nothing < everything
    partly, *_ = computed_again(policy(r"q_proj"))  # the whole name must match
    assert partly == everything


def test_names_that_are_offloaded():
    jaxpr = computed_again(
        save_and_offload_these_names_regex(names_which_can_be_offloaded=r".*\.q_proj")
    )[2]
    assert "Host" in jaxpr or "pinned_host" in jaxpr


@pytest.mark.parametrize(
    "pattern, matching",
    [
        ("QKV_PROJ", ["q_proj", "k_proj", "v_proj"]),
        ("O_PROJ", ["o_proj"]),
        ("CONTEXT", ["context"]),
        ("LINEAR1_X", ["linear1_0", "linear1_1"]),
        ("LINEAR2_X", ["linear2_0"]),
        ("NATIVE_ATTENTION", ["q_proj", "k_proj", "v_proj", "context", "o_proj"]),
        ("FEED_FORWARD", ["linear1_0", "linear1_1", "linear2_0"]),
    ],
)
def test_patterns_match_what_layers_name(pattern, matching, filled, wave):
    loss, state = stack_loss(StackedTransformerLayer, filled, wave)
    names = set(re.findall(r"name=([\w.]+)", str(jax.make_jaxpr(loss)(state))))
    found = [name for name in names if re.fullmatch(RematRegexSavePatterns[pattern].value, name)]
    assert {name.split(".")[-1] for name in found} == set(matching)


def stack_loss(cls, filled, wave, remat=False):
    """A loss of a stack, as a function of its state, and the state."""
    cfg = cls.default_config().set(name="stack", input_dim=4, num_layers=1)
    cfg.layer.self_attention.attention.num_heads = 2
    cfg.layer.feed_forward.set(hidden_dim=6, activation=("nn.silu", "linear"))
    cfg.layer.remat_spec = build_remat_spec(cfg) if remat else None
    module, x = cfg.instantiate(parent=None), wave((1, 3, 4))

    def loss(state):
        return (F(module, None, state, (x,), is_training=True)[0].data ** 2).sum()

    return loss, filled(module)


@pytest.mark.parametrize("cls", [StackedTransformerLayer, RepeatedTransformerLayer])
def test_remat_saves_and_changes_nothing(cls, filled, wave):
    loss, state = stack_loss(cls, filled, wave)
    again, _ = stack_loss(cls, filled, wave, remat=True)
    expected, got = (jax.jit(jax.grad(fn))(state) for fn in (loss, again))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)
    products = [
        str(jax.make_jaxpr(jax.grad(fn))(state)).count("dot_general") for fn in (loss, again)
    ]
    # Six projections and the context are saved; logits and the feed-forward layer are not.
    assert products[0] < products[1] <= products[0] + 4


@pytest.mark.parametrize("cls", [StackedTransformerLayer, RepeatedTransformerLayer])
def test_spec_of_a_stack(cls):
    spec = build_remat_spec(cls.default_config())
    assert spec.prevent_cse == (cls is StackedTransformerLayer)


def test_equal_specs_are_equal():
    cfg = RepeatedTransformerLayer.default_config()
    assert build_remat_spec(cfg) == build_remat_spec(cfg)
    assert build_remat_spec(cfg) != build_remat_spec(cfg, save_pattern=None)
