"""Drop-free experts over a mesh axis: tokens travel to them, and the results equal one device's."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from weft.cli.collectives import collectives_of
from weft.core.spmd import as_on_one_device
from weft.errors import LayerConfigError, ShardingWarning
from weft.hierarchy import set_partition_specs_recursively
from weft.hierarchy.mixture_of_experts import (
    ApproximateTokenDropFreeMoE,
    TransformerFeedForwardDropFreeMoE,
)
from weft.hierarchy.module import functional as F
from weft.trainer.flops import count_flops

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
BATCH, TIME, DIM, HIDDEN, EXPERTS = 16, 6, 10, 12, 8
RNG = np.random.default_rng(0)
STATE = {
    name: RNG.normal(size=shape).astype("f")
    for name, shape in {
        "gate_weight": (DIM, EXPERTS),
        "wi_0_weight": (EXPERTS, DIM, HIDDEN),
        "wi_1_weight": (EXPERTS, DIM, HIDDEN),
        "wo_weight": (EXPERTS, HIDDEN, DIM),
    }.items()
}
X = RNG.normal(size=(BATCH, TIME, DIM)).astype("f")
INPUTS = {
    "random": X,
    # All tokens choose the same two experts.
    "uneven": np.broadcast_to(X[:1, :1], X.shape),
}
PADDINGS = RNG.random((BATCH, TIME)) < 0.5


def layer(**specs):
    cfg = TransformerFeedForwardDropFreeMoE.default_config().set(
        name="moe",
        input_dim=DIM,
        hidden_dim=HIDDEN,
        num_experts=EXPERTS,
        activation=("nn.tanh", "linear"),
        structure="nonorm",
    )
    set_partition_specs_recursively(cfg)
    cfg.input_dim_to_partition_spec.update(specs)
    return cfg.instantiate(parent=None)


def mesh_of(axis_type=AxisType.Auto, **sizes):
    sizes = {name: sizes.get(name, 1) for name in ("data", "expert", "fsdp", "seq", "model")}
    types = (axis_type,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def step(moe):
    """Returns a function to outputs and gradients."""

    def loss(state, x, paddings):
        inputs = {"inputs": x, "paddings": paddings}
        y, _ = F(moe, None, state, inputs, is_training=True)
        return jnp.sum(jnp.sin(y)), y

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


@pytest.fixture(scope="module")
def on_one_device():
    return step(layer())


def placed(moe, mesh, x, paddings):
    specs = moe.create_parameter_specs_recursively()
    state = {n: jax.device_put(v, specs[n].sharding(mesh)) for n, v in STATE.items()}
    batch = jax.sharding.NamedSharding(mesh, PartitionSpec(("data", "expert", "fsdp"), "seq"))
    return state, jax.device_put(x, batch), jax.device_put(paddings, batch)


def assert_equal(results, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), results, expected
    )


MESHES = {
    "expert=8": {"expert": 8},
    "expert=4,fsdp=2": {"expert": 4, "fsdp": 2},
    "expert=2,fsdp=2,model=2": {"expert": 2, "fsdp": 2, "model": 2},
    "data=2,expert=2,seq=2": {"data": 2, "expert": 2, "seq": 2},
}


def assert_equal_to_one_device(moe, mesh, on_one_device):
    """Returns the compiled program."""
    with jax.set_mesh(mesh):
        program = step(moe).lower(*placed(moe, mesh, X, PADDINGS)).compile()
        for x in INPUTS.values():
            for paddings in (np.zeros_like(PADDINGS), PADDINGS):
                results = program(*placed(moe, mesh, x, paddings))
                assert_equal(results, on_one_device(STATE, x, paddings))
    return program


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_tokens_move_and_weights_do_not(sizes, on_one_device):
    moe, mesh = layer(), mesh_of(**sizes)
    state, *_ = placed(moe, mesh, X, PADDINGS)
    num_parts = sizes["expert"] * sizes.get("fsdp", 1) * sizes.get("model", 1)
    for name in ("wi_0_weight", "wi_1_weight", "wo_weight"):
        held = state[name].addressable_shards[0].data
        assert held.size * num_parts == state[name].size
    program = assert_equal_to_one_device(moe, mesh, on_one_device)
    found = collectives_of(program.as_text())
    over_experts = [c for c in found if "expert" in (c.axes(mesh.shape) or ())]
    assert {c.kind for c in over_experts} == {"all-to-all", "all-reduce"}
    # Besides tokens: numbers, and the gradient of the router, which all devices have.
    reduced = [c.bytes for c in over_experts if c.kind == "all-reduce"]
    assert max(reduced) <= STATE["gate_weight"].nbytes + 8


def test_equals_one_device_over_explicit_axes(on_one_device):
    mesh = mesh_of(AxisType.Explicit, expert=4, model=2)
    assert_equal_to_one_device(layer(), mesh, on_one_device)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_padding_is_no_operation_of_the_model(axis_type, is_sharded):
    def outputs(state, x):
        with as_on_one_device():
            return F(layer(), None, state, {"inputs": x}, is_training=True)[0]

    mesh, state, x = mesh_of(axis_type, expert=4, model=2), STATE, X
    with jax.set_mesh(mesh):
        if is_sharded:
            state, x, _ = placed(layer(), mesh, X, PADDINGS)
        flops = count_flops(outputs, state, x)
    assert flops == count_flops(outputs, STATE, X)


def test_tokens_that_do_not_divide_are_on_all_devices(on_one_device):
    moe, mesh = layer(), mesh_of(expert=8)
    x, paddings = X[:4], PADDINGS[:4]
    with jax.set_mesh(mesh), pytest.warns(ShardingWarning, match="cannot be split into 8 equal"):
        results = step(moe)(STATE, x, paddings)
    assert_equal(results, on_one_device(STATE, x, paddings))


def test_tokens_over_some_axes_of_experts():
    over_both = PartitionSpec(("expert", "model"), None, None)
    moe = layer(emh=over_both, ehm=over_both)
    said = (
        "moe: input_dim_to_partition_spec splits experts over ('expert', 'model'), and tokens over "
        "('data', 'expert', 'fsdp', 'seq')"
    )
    with (
        jax.set_mesh(mesh_of(expert=2, model=4)),
        pytest.raises(LayerConfigError, match=re.escape(said)),
    ):
        step(moe).lower(STATE, X, PADDINGS)


def test_devices_with_a_capacity_have_the_same_tokens():
    cfg = ApproximateTokenDropFreeMoE.default_config()
    set_partition_specs_recursively(cfg)
    tokens = PartitionSpec(("data", "fsdp"), "seq", None)
    assert cfg.input_dim_to_partition_spec["bsm"] == tokens
