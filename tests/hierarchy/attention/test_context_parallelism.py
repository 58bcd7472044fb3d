"""Attention layers whose positions are split over a mesh axis, on virtual devices."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from weft.cli.collectives import collectives_of
from weft.errors import ArgumentShapeError
from weft.hierarchy.attention.bias import CausalAttentionBias, SlidingWindowAttentionBias
from weft.hierarchy.attention.multihead_attention import GroupedQueryAttention, MultiheadAttention
from weft.hierarchy.attention.qkv_linear import GroupedQKVLinear
from weft.hierarchy.attention.rope import RoFormerQKVLinear
from weft.hierarchy.module import functional as F

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
DIM, HEADS, BATCH, LENGTH = 8, 4, 2, 16
CAUSAL = CausalAttentionBias.default_config()
WINDOW = SlidingWindowAttentionBias.default_config(sliding_window_size=2)
SPLIT = (None, "seq", None, None)
IN_TIME: Any = {"q_partition_spec": SPLIT, "k_partition_spec": SPLIT, "v_partition_spec": SPLIT}


def attention(cls=MultiheadAttention, num_heads=HEADS, **fields):
    cfg = cls.default_config().set(name="attention", query_dim=DIM, key_dim=DIM, value_dim=DIM)
    return cfg.set(num_heads=num_heads, **fields).instantiate(parent=None)


def mesh_of_sequences():
    return jax.set_mesh(
        jax.make_mesh((1, 4), ("data", "seq"), axis_types=(AxisType.Auto, AxisType.Auto))
    )


def run(layer, state, *, method="forward", is_training=False, **inputs):
    call = functools.partial(F, layer, None, method=method, is_training=is_training)
    return jax.jit(lambda state, arrays: call(state, {**inputs, **arrays})[0])(state, {})


def program_and_results(layer, state, query, inputs):
    """Returns the compiled loss with its gradients, and what it computes."""

    def loss(state, query):
        call_inputs = {**inputs, "query": query}
        y, _ = F(layer, None, state, call_inputs, is_training=True)
        return jnp.sum(jnp.sin(y.data))

    program = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(state, query).compile()
    return program, jax.tree.leaves(program(state, query))


@pytest.mark.parametrize("way", ["ring", "all_to_all"])
@pytest.mark.parametrize("mask", [CAUSAL, WINDOW], ids=["causal", "window"])
def test_equals_one_device(filled, wave, way, mask):
    grouped = GroupedQKVLinear.default_config().set(num_kv_heads=2)
    fields = {
        "input_linear": RoFormerQKVLinear.default_config().set(
            rotary_value=False, input_linear=grouped
        ),
        "mask": mask,
        "logit_sink": True,
        "atten_logit_cap": 3.0,
    }
    alone = attention(GroupedQueryAttention, **fields)
    parallel = attention(GroupedQueryAttention, **fields, **IN_TIME, context_parallelism=way)
    state, x = filled(alone), wave((BATCH, LENGTH, DIM))
    inputs = {
        "segment_ids": jnp.array([[1] * 6 + [2] * 9 + [0], [1] * 16]),
        # Positions of a packed sequence count from 0; the mask and the angles are by these.
        "query_positions": jnp.array([[*range(6), *range(9), 0], [*range(16)]]),
        "attention_logit_biases": wave((1, HEADS, LENGTH, LENGTH)),
    }
    _, expected = program_and_results(alone, state, x, inputs)
    with mesh_of_sequences():
        program, actual = program_and_results(parallel, state, x, inputs)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)
    collective = {"ring": "collective-permute(", "all_to_all": "all-to-all("}[way]
    assert collective in str(program.as_text())


def test_keys_move_as_far_as_a_window(filled, wave):
    def largest_number_of_steps(mask):
        layer = attention(mask=mask, **IN_TIME, context_parallelism="ring")
        state, x = filled(layer), wave((BATCH, LENGTH, DIM))
        program, _ = program_and_results(
            layer, state, x, {"segment_ids": jnp.ones((BATCH, LENGTH))}
        )
        moved = [c for c in collectives_of(program.as_text()) if c.kind == "collective-permute"]
        return max(c.times for c in moved)

    with mesh_of_sequences():
        assert largest_number_of_steps(CAUSAL) == 3
        assert largest_number_of_steps(WINDOW) == 1


@pytest.mark.parametrize("way", ["ring", "all_to_all"])
def test_keys_are_gathered_where_devices_cannot_share(filled, wave, way):
    layer = attention(mask=CAUSAL, **IN_TIME, context_parallelism=way)
    state, x = filled(layer), wave((BATCH, 8, DIM))
    whole = run(layer, state, query=x).data
    with mesh_of_sequences():
        y = run(layer, state, query=x, return_aux=["probs"])
        assert y.probs.shape == (BATCH, HEADS, 8, 8)
        np.testing.assert_allclose(y.data, whole, atol=1e-6)
        # A prompt whose length the axis divides, then a step of one position.
        cache = layer.init_states(batch_size=BATCH, max_len=8, dtype=jnp.float32)
        step = {"method": "extend_step", "query": x[:, :4], "is_prefill": True}
        cache, y = run(layer, state, cached_states=cache, **step)
        np.testing.assert_allclose(y.data, whole[:, :4], atol=1e-6)
        step = {"method": "extend_step", "query": x[:, 4:5]}
        _, y = run(layer, state, cached_states=cache, **step)
        np.testing.assert_allclose(y.data, whole[:, 4:5], atol=1e-6)


def test_dropout_is_of_probabilities(filled, wave):
    layer = attention(**IN_TIME, context_parallelism="ring")
    dropping = attention(
        **IN_TIME, context_parallelism="ring", dropout=layer.config.dropout.set(rate=0.5)
    )
    state, x = filled(layer), wave((BATCH, LENGTH, DIM))

    def output(layer, seed, is_training=True):
        key = jax.random.key(seed)
        return F(layer, key, state, {"query": x}, is_training=is_training)[0].data

    with mesh_of_sequences():
        np.testing.assert_array_equal(output(dropping, 0), output(dropping, 0))
        assert (output(dropping, 0) != output(dropping, 1)).any()
        np.testing.assert_allclose(output(dropping, 0, False), output(layer, 0), atol=1e-6)


def test_heads_that_the_axis_does_not_divide(filled, wave):
    layer = attention(num_heads=2, **IN_TIME, context_parallelism="all_to_all")
    with (
        mesh_of_sequences(),
        pytest.raises(ArgumentShapeError, match=r"^attention: 2 heads .* use ring_attention"),
    ):
        run(layer, filled(layer), query=wave((BATCH, 8, DIM)))
