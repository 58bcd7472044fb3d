"""A pipelined stack of transformer layers computes what a stack does."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from weft.errors import ArgumentShapeError, LayerConfigError
from weft.hierarchy.attention import (
    PipelinedTransformerLayer,
    StackedTransformerLayer,
    TransformerLayer,
)
from weft.hierarchy.attention.bias import CausalAttentionBias
from weft.hierarchy.attention.stack import TransformerPipeline
from weft.hierarchy.module import functional as F
from weft.hierarchy.pipeline import InterleavedSchedule
from weft.struct import VDict

DIM, BATCH, TIME, LAYERS, STAGES = 8, 4, 3, 4, 2


def layer():
    cfg = TransformerLayer.default_config()
    cfg.self_attention.attention.set(num_heads=2, mask=CausalAttentionBias.default_config())
    cfg.feed_forward.hidden_dim = 6
    return cfg


def make(cls, **fields):
    cfg = cls.default_config().set(name="stack", input_dim=DIM, num_layers=LAYERS, layer=layer())
    return cfg.set(**fields).instantiate(parent=None)


def piped(**fields):
    return make(
        PipelinedTransformerLayer, **{"num_stages": STAGES, "num_microbatches": 2, **fields}
    )


@pytest.fixture(scope="module")
def stacked_state(filled):
    return filled(make(StackedTransformerLayer))


def in_stages(state):
    """Returns the same parameters, stacked by stages."""
    return in_parts(state, STAGES)


def in_parts(state, num_parts):
    per_stage = LAYERS // num_parts
    layers = {
        f"layer{j}": jax.tree.map(
            lambda *x: jnp.stack(x), *(state[f"layer{s * per_stage + j}"] for s in range(num_parts))
        )
        for j in range(per_stage)
    }
    return {"pipeline": {"layer": VDict(layers)}}


def inputs(wave):
    segments = jnp.array([[1, 1, 1], [1, 1, 2], [1, 2, 2], [1, 2, 3]])
    return {
        "data": wave((BATCH, TIME, DIM)),
        "target_segment_ids": segments,
        "self_attention_logit_biases": wave((TIME, TIME), 1.0),  # the same for all rows
        "target_positions": jnp.arange(TIME)[None],
    }


def results(module, state, kwargs):
    """Returns everything that comes back, and gradients."""

    def loss(state, data):
        aux = {"self_attention_probs", "self_attention_kv_state"}
        output, _ = F(
            module, None, state, {**kwargs, "data": data, "return_aux": aux}, is_training=True
        )
        return jnp.sum(jnp.square(output.data)), output

    (_, output), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(
        state, kwargs["data"]
    )
    return output, grads


def close(a, b, tolerance=1e-5):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=10 * tolerance, atol=tolerance), a, b
    )


@pytest.fixture(scope="module")
def expected(stacked_state, wave):
    return results(make(StackedTransformerLayer), stacked_state, inputs(wave))


def test_equals_a_stack(stacked_state, expected, wave):
    output, (grads, of_data) = results(piped(), in_stages(stacked_state), inputs(wave))
    expected_output, (expected_grads, of_expected_data) = expected
    assert output.self_attention_probs.shape == (LAYERS, BATCH, 2, TIME, TIME)
    # Positions, which are the same for all rows, come back with one for each.
    keys = expected_output.self_attention_kv_state
    keys = keys._replace(key_positions=jnp.broadcast_to(keys.key_positions, (BATCH, TIME)))
    close(output, expected_output._replace(self_attention_kv_state=keys))
    close(grads, in_stages(expected_grads), 1e-4)
    close(of_data, of_expected_data, 1e-4)


def interleaved(**fields):
    schedule = InterleavedSchedule.default_config().set(num_repeats=2)
    return piped(pipeline=TransformerPipeline.default_config().set(schedule=schedule), **fields)


def by_repeats(state):
    """Returns parameters with axes of repeats and stages, in the order of the layers."""
    parts = in_parts(state, LAYERS)
    return jax.tree.map(lambda x: x.reshape(2, STAGES, *x.shape[1:]), parts)


def test_interleaved_stages_equal_a_stack(stacked_state, expected, wave):
    output, (grads, of_data) = results(interleaved(), by_repeats(stacked_state), inputs(wave))
    expected_output, (expected_grads, of_expected_data) = expected
    close(output.data, expected_output.data)
    close(output.self_attention_probs, expected_output.self_attention_probs)
    close(grads, by_repeats(expected_grads), 1e-4)
    close(of_data, of_expected_data, 1e-4)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_on_a_mesh(stacked_state, expected, wave):
    module, kwargs = piped(), inputs(wave)
    auto = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.make_mesh((2, 2, 2), ("pipeline", "data", "model"), axis_types=auto)
    state = jax.tree.map(
        lambda spec, x: jax.device_put(x, spec.sharding(mesh)),
        module.create_parameter_specs_recursively(),
        in_stages(stacked_state),
    )
    rows = jax.NamedSharding(mesh, PartitionSpec("data"))
    kwargs["data"] = jax.device_put(kwargs["data"], rows)
    with jax.set_mesh(mesh):
        compiled = (
            jax.jit(lambda s, k: F(module, None, s, k, is_training=False)[0].data)
            .lower(state, kwargs)
            .compile()
        )
        got = compiled(state, kwargs)
    close(got, expected[0].data)
    text = compiled.as_text()
    assert "collective-permute" in text
    # Stages are never gathered: no weight has both of them.
    assert not re.search(rf"= f32\[{STAGES},{DIM},\d+\]\S* all-gather", text)


@pytest.mark.parametrize(
    ("make_stack", "stages_of"),
    [(piped, in_stages), (interleaved, by_repeats)],
    ids=["gpipe", "interleaved"],
)
def test_decoding_equals_the_whole_sequence(make_stack, stages_of, stacked_state, wave):
    module, data = make_stack(), wave((BATCH, TIME, DIM))
    state = stages_of(stacked_state)

    @jax.jit
    def decode(state, data):
        cache, _ = F(
            module,
            None,
            state,
            {"batch_size": BATCH, "max_len": TIME, "dtype": jnp.float32},
            method="init_states",
            is_training=False,
        )
        pieces = []
        for piece, is_prefill in ((data[:, :2], True), (data[:, 2:], False)):
            (cache, output), _ = F(
                module,
                None,
                state,
                {"cached_states": cache, "data": piece, "is_prefill": is_prefill},
                method="extend_step",
                is_training=False,
            )
            pieces.append(output.data)
        whole, _ = F(module, None, state, (data,), is_training=False)
        return jnp.concatenate(pieces, axis=1), whole.data

    close(*decode(state, data))


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"num_stages": 3}, "stack: num_layers=4 is not a multiple of num_stages=3"),
        ({"num_stages": 0}, "is not a multiple of num_stages=0"),
        ({"peak_stochastic_depth_rate": 0.1}, "stack: peak_stochastic_depth_rate=0.1 makes"),
        ({"scan_kwargs": ("x",)}, "stack: scan_kwargs=('x',) makes layers differ"),
        ({"carry": ("data", "self_attention_kv_state")}, "pass on only 'data'"),
    ],
    ids=["stages", "none", "depth", "scanned", "carry"],
)
def test_invalid_stacks_raise(fields, said):
    with pytest.raises(LayerConfigError, match=re.escape(said)):
        piped(**fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_layers": 6}, "stack: num_layers=6 do not divide into 4 equal parts, num_repeats=2 "),
        ({"num_microbatches": 3}, "num_microbatches=3 is not a multiple of num_stages=2, which an"),
    ],
    ids=["layers", "microbatches"],
)
def test_uneven_parts_raise(fields, said):
    with pytest.raises(LayerConfigError, match=re.escape(said)):
        interleaved(**fields)


def test_indivisible_rows(stacked_state, wave):
    with pytest.raises(ArgumentShapeError, match=r"stack.pipeline: a batch of shape \(4, 3, 8\)"):
        F(
            piped(num_microbatches=3),
            None,
            in_stages(stacked_state),
            (wave((4, 3, 8)),),
            is_training=False,
        )
