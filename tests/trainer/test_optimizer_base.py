import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec

from weft import nnx
from weft.config import config_for_function
from weft.errors import TransformationTypeError
from weft.hierarchy.base_layer import ParameterSpec
from weft.hierarchy.module import InvocationContext, set_current_context
from weft.hierarchy.parameter_spec import TensorSpec
from weft.trainer import optimizers
from weft.trainer.optimizers.base import (
    OptParam,
    PartitionedGradientTransformation,
    chain,
    copy_partition,
    named_chain,
    report,
)

PARAMS = {"a": {"w": OptParam(jnp.ones((4, 6)))}, "w": OptParam(jnp.ones((6,)))}
SPECS = {
    "a": {"w": ParameterSpec((4, 6), jnp.float32, PartitionSpec("data", "model"))},
    "w": ParameterSpec((6,), jnp.bfloat16, PartitionSpec("model")),
}


def layouts(specs):
    return jax.tree.map(lambda spec: spec.partition_spec, specs)


@pytest.mark.parametrize(
    "tx",
    [
        optax.adam(0.1, mu_dtype=jnp.bfloat16),
        optax.chain(optax.clip(1.0), optax.adam(0.1)),
        optax.MultiSteps(optax.adam(0.1), every_k_schedule=2).gradient_transformation(),
        optax.masked(optax.adam(0.1), {"a": {"w": True}, "w": False}),
        optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    ],
    ids=["adam", "chain", "multi_steps", "masked", "inject_hyperparams"],
)
def test_optax_state_has_parameter_sharding(tx):
    specs = chain(tx).partition(SPECS)
    state = jax.eval_shape(lambda: chain(tx).init(PARAMS))
    assert jax.tree.structure(specs) == jax.tree.structure(state)
    by_shape = {
        (): PartitionSpec(),
        (4, 6): PartitionSpec("data", "model"),
        (6,): PartitionSpec("model"),
    }
    for spec, leaf in zip(jax.tree.leaves(specs), jax.tree.leaves(state), strict=True):
        assert spec.shape == leaf.shape
        assert spec.partition_spec == by_shape[leaf.shape]


def test_non_parameter_state_is_replicated():
    specs = chain(optax.adafactor(0.1, min_dim_size_to_factor=2)).partition(SPECS)[0][0]
    assert specs.v_row["a"]["w"] == TensorSpec((4,), jnp.float32, (None,))
    assert specs.v["w"].partition_spec == PartitionSpec("model")


def test_longest_matching_path_selects_parameter():
    specs = {
        "a": {"w": ParameterSpec((6,), jnp.float32, ("data",))},
        "w": ParameterSpec((6,), jnp.float32, ("model",)),
    }
    trace = optimizers.trace_partition(optax.trace(0.9)).partition(specs).trace
    assert layouts(trace) == {"a": {"w": PartitionSpec("data")}, "w": PartitionSpec("model")}


def test_chains_take_either_kind_and_configs():
    double = config_for_function(optimizers.scale).set(step_size=2.0)
    params = {"w": OptParam(jnp.zeros(()))}
    for tx, empty in (
        (chain(double, optax.scale(3.0)), (optax.EmptyState(), optax.EmptyState())),
        (
            named_chain(a=double, b=optax.scale(3.0)),
            {"a": optax.EmptyState(), "b": optax.EmptyState()},
        ),
    ):
        assert isinstance(tx, PartitionedGradientTransformation)
        assert tx.init(params) == tx.partition(params) == empty
        assert tx.update({"w": 1.0}, empty, params) == ({"w": 6.0}, empty)


def test_models_with_one_chain_share_one_trace():
    traces = []
    tx = optimizers.chain(optax.trace(0.9), optax.scale(2.0))

    class Training(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))
            self.optimizer = tx

    @nnx.jit
    def step(training):
        traces.append(1)

    step(Training())
    step(Training())
    assert len(traces) == 1


def test_chain_of_more_than_ten_keeps_its_order():
    state = chain(*[optax.scale(1.0)] * 10, optax.trace(0.9)).init({"w": OptParam(jnp.zeros(()))})
    assert isinstance(state[10], optax.TraceState)


def test_non_optimizer_is_rejected():
    with pytest.raises(TransformationTypeError, match=r"got 0\.1 of type float"):
        chain(0.1)


def test_memory_kind_needs_full_path_match():
    def kinds(pattern):
        specs = copy_partition(SPECS, pattern=pattern, memory_kind="pinned_host")
        return jax.tree.map(lambda spec: spec.memory_kind or "", specs)

    assert kinds("w") == {"a": {"w": ""}, "w": "pinned_host"}
    assert kinds("a/.*") == {"a": {"w": "pinned_host"}, "w": ""}
    assert kinds(None) == {"a": {"w": "pinned_host"}, "w": "pinned_host"}


def test_last_report_of_the_current_invocation_wins():
    report("gradient_norm", 1.0)  # there is none
    context = InvocationContext(
        "root", parent=None, module=None, state={}, is_training=True, prng_key=None
    )
    with set_current_context(context):
        report("gradient_norm", 2.0)
        report("gradient_norm", 3.0)
    assert context.get_summaries() == {"gradient_norm": 3.0}
