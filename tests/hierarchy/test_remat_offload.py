"""Values that wait for the backward pass in the memory of the host, in the three styles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from tests.keys import quick_key
from weft import linen as nn
from weft import nnx
from weft.cli import configs
from weft.hierarchy import RepeatedTransformerLayer, build_remat_spec
from weft.hierarchy import functional as run
from weft.hierarchy.attention import save_and_offload_these_names_regex

LAYERS, DIM = 3, 4
X = jnp.linspace(-1, 1, 2 * DIM).reshape(2, DIM)
POLICY = save_and_offload_these_names_regex(names_which_can_be_offloaded=".*hidden")


def hierarchy_loss(offloads):
    cfg = RepeatedTransformerLayer.default_config().set(
        name="stack", input_dim=DIM, num_layers=LAYERS
    )
    cfg.layer.self_attention.attention.num_heads = 2
    cfg.layer.feed_forward.set(hidden_dim=6)
    if offloads:
        cfg.layer.remat_spec = build_remat_spec(
            cfg, save_pattern=None, offload_pattern=r".*\.(q_proj|linear1_0)"
        )
    stack = cfg.instantiate(parent=None)

    def loss(state):
        output, _ = run(stack, None, state, (X[None],), is_training=True)
        return (output.data**2).sum()

    return loss, stack.initialize_parameters_recursively(quick_key(0))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        hidden = checkpoint_name(nn.tanh(nn.Dense(6)(x)), "hidden")
        return x + nn.Dense(DIM)(hidden), None


def linen_loss(offloads):
    block = nn.remat(Block, prevent_cse=False, policy=POLICY) if offloads else Block
    model = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
    variables = model().init(quick_key(0), X, None)
    return lambda variables: (model().apply(variables, X, None)[0] ** 2).sum(), variables


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(DIM, 6, rngs=rngs)
        self.down = nnx.Linear(6, DIM, rngs=rngs)

    def __call__(self, x):
        return x + self.down(checkpoint_name(nnx.tanh(self.up(x)), "hidden"))


def nnx_loss(offloads):
    @nnx.vmap
    def make(key):
        return NnxBlock(nnx.Rngs(key))

    graph, state = nnx.split(make(jax.random.split(quick_key(0), LAYERS)))

    def call(block, x):
        return block(x)

    if offloads:
        call = nnx.remat(call, prevent_cse=False, policy=POLICY)

    def loss(state):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run_all(block, x):
            return call(block, x)

        return (run_all(nnx.merge(graph, state), X) ** 2).sum()

    return loss, state


@pytest.mark.parametrize("loss_of", [hierarchy_loss, linen_loss, nnx_loss])
def test_offloaded_values(loss_of):
    loss, params = loss_of(False)
    offloading_loss, _ = loss_of(True)
    expected = jax.jit(jax.grad(loss))(params)
    gradient = jax.jit(jax.grad(offloading_loss))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        gradient(params),
        expected,
    )
    for platform in ("tpu", "cuda"):
        # They are moved to the memory of the host, and back.
        text = gradient.trace(params).lower(lowering_platforms=(platform,)).as_text()
        assert '_xla_buffer_placement = "pinned_host"' in text
        assert '_xla_buffer_placement = "device"' in text
        plain = jax.jit(jax.grad(loss)).trace(params).lower(lowering_platforms=(platform,))
        assert "_xla_buffer_placement" not in plain.as_text()


SPEC = (
    "weft.hierarchy.RematSpec(prevent_cse=False, policy=config_for_function("
    "weft.hierarchy.save_and_offload_these_names_regex)"
    "(names_which_can_be_offloaded='.*[.]linear1_[01]'))"
)


@pytest.mark.parametrize(
    "override",
    [
        f"model.decoder.transformer.layer.remat_spec={SPEC}",
        "config_modifiers=[weft.trainer.RematSpecModifier.Config("
        f"remat_policies={{'model.decoder.transformer.layer': {SPEC}}})]",
    ],
    ids=["field", "modifier"],
)
def test_offloading_on_the_command_line(override):
    overrides = ["input.source.sequence_length=16", override]
    cfg = configs.load_config("lm-tiny", overrides).set(dir="", evalers={})
    trainer = cfg.instantiate(parent=None)
    with trainer.mesh():
        traced = trainer.trace_train_step(*trainer._step_shapes())
    assert "pinned_host" in traced.lower(lowering_platforms=("tpu",)).as_text()
