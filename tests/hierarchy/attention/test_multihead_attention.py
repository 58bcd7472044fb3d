import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from tests.jaxprs import largest_array
from weft.errors import ArgumentValueError, LayerConfigError
from weft.hierarchy.attention.bias import (
    CausalAttentionBias,
    LeftRightWindowAttentionBias,
    SlidingWindowAttentionBias,
    make_causal_biases,
    make_sliding_window_causal_biases,
)
from weft.hierarchy.attention.multihead_attention import (
    GroupedQueryAttention,
    MultiheadAttention,
    MultiheadAttentionXL,
    SigmoidAttention,
)
from weft.hierarchy.attention.qkv_linear import (
    FusedQKVLinear,
    GroupedQKVLinear,
    QLinear,
    ScaleKey,
)
from weft.hierarchy.attention.rope import RoFormerQKVLinear
from weft.hierarchy.config_setters import set_attention_partition_specs
from weft.hierarchy.layers.linear import Dropout
from weft.hierarchy.layers.normalization import RMSNorm
from weft.hierarchy.module import functional as F

DIM, HEADS, BATCH, LENGTH = 8, 4, 2, 6
CAUSAL = CausalAttentionBias.default_config()
WINDOW = SlidingWindowAttentionBias.default_config(sliding_window_size=2)


def attention(cls=MultiheadAttention, **fields):
    return made(cls, **fields) if fields or cls is not MultiheadAttention else default_attention()


@functools.cache
def default_attention():
    return made(MultiheadAttention)


def made(cls, **fields):
    dims = {"query_dim": DIM, "key_dim": DIM, "value_dim": DIM, "num_heads": HEADS}
    cfg = cls.default_config().set(name="attention", **{**dims, **fields})
    return cfg.instantiate(parent=None)


def run(layer, state, query, method="forward", is_training=False, prng_key=None, **kwargs):
    inputs = {"query": query, **kwargs}
    static = {"is_prefill": inputs.pop("is_prefill")} if "is_prefill" in inputs else {}
    if "return_aux" in inputs:
        static["return_aux"] = tuple(inputs.pop("return_aux"))
    return compiled(layer, method, is_training, tuple(static.items()), prng_key, state, inputs)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def compiled(layer, method, is_training, static, prng_key, state, inputs):
    """Runs a method; one compilation takes less time than one for each operation."""
    inputs = {**inputs, **dict(static)}
    return F(layer, prng_key, state, inputs, method=method, is_training=is_training)[0]


@pytest.fixture
def x(wave):
    return wave((BATCH, LENGTH, DIM)) + wave((BATCH, LENGTH, 1), 0.3)


def rope(**fields):
    return RoFormerQKVLinear.default_config().set(rotary_value=False, **fields)


def grouped(**fields):
    return GroupedQKVLinear.default_config().set(num_kv_heads=2, **fields)


# Masks.


@pytest.mark.parametrize(
    "mask, biases",
    [
        (CAUSAL, make_causal_biases(LENGTH)),
        (WINDOW, make_sliding_window_causal_biases(LENGTH, 2)),
        (
            LeftRightWindowAttentionBias.default_config(left_context=None, right_context=0),
            make_causal_biases(LENGTH)[None],
        ),
    ],
    ids=["causal", "window", "left"],
)
def test_mask_equals_biases(mask, biases, filled, x):
    state = filled(attention())
    masked = run(attention(mask=mask), state, x).data
    np.testing.assert_allclose(
        masked, run(attention(), state, x, attention_logit_biases=biases).data, rtol=1e-5, atol=1e-6
    )
    assert not np.allclose(masked, run(attention(), state, x).data, atol=1e-3)


def test_segments_are_independent(filled, x):
    layer = attention(mask=CAUSAL, input_linear=rope())
    state = filled(layer)
    positions = jnp.array([[0, 1, 2, 0, 1, 2]])
    segments = jnp.array([[1, 1, 1, 2, 2, 2]] * BATCH)
    packed = run(layer, state, x, segment_ids=segments, query_positions=positions).data
    for part in (slice(0, 3), slice(3, 6)):
        alone = run(layer, state, x[:, part]).data
        np.testing.assert_allclose(packed[:, part], alone, rtol=1e-5, atol=1e-6)


# The parts of the computation.


def test_dimensions(filled, wave):
    layer = attention(hidden_dim=12, output_dim=5, key_dim=6, value_dim=7)
    assert (layer.hidden_dim(), layer.output_dim(), layer.per_head_dim()) == (12, 5, 3)
    inputs = {"key": wave((BATCH, 3, 6)), "value": wave((BATCH, 3, 7))}
    output = run(layer, filled(layer), wave((BATCH, 2, DIM)), return_aux=["probs"], **inputs)
    assert output.data.shape == (BATCH, 2, 5)
    assert output.probs.shape == (BATCH, HEADS, 2, 3)
    np.testing.assert_allclose(output.probs.sum(-1), 1.0, rtol=1e-5)


def test_sink_takes_probability(filled, x):
    layer = attention(logit_sink=True)
    state = filled(layer)
    state["sink"] = jnp.array([-1e9, 0.0, 5.0, 1e9])
    probs = run(layer, state, x, return_aux=["probs"]).probs
    plain = run(attention(), state, x, return_aux=["probs"]).probs
    np.testing.assert_allclose(probs[:, 0], plain[:, 0], rtol=1e-5)
    np.testing.assert_allclose(probs[:, 3], 0.0, atol=1e-6)
    sums = probs.sum(-1)
    assert np.all(sums[:, 1] < 1) and np.all(sums[:, 2] < sums[:, 1])
    spec = layer.create_parameter_specs_recursively()["sink"]
    assert (spec.shape, spec.mesh_axes) == ((HEADS,), PartitionSpec("model"))


def test_dropout_is_of_probabilities_and_in_training_only(filled, x):
    layer = attention()
    layer_with_dropout = attention(dropout=layer.config.dropout.set(rate=0.5))
    state = filled(layer)
    kwargs = {"prng_key": jax.random.PRNGKey(0), "return_aux": ["probs"]}
    plain = run(layer, state, x, is_training=True, **kwargs).probs
    dropped = run(layer_with_dropout, state, x, is_training=True, **kwargs).probs
    kept = dropped != 0
    assert 0.3 < np.mean(kept) < 0.7
    np.testing.assert_allclose(dropped[kept], 2 * plain[kept], rtol=1e-5)
    np.testing.assert_array_equal(run(layer_with_dropout, state, x, **kwargs).probs, plain)


@pytest.mark.parametrize("mask", [CAUSAL, WINDOW], ids=["causal", "window"])
def test_blocks_compute_the_same(filled, x, mask):
    fields = {
        "cls": GroupedQueryAttention,
        "input_linear": RoFormerQKVLinear.default_config().set(
            rotary_value=False, input_linear=grouped()
        ),
        "mask": mask,
        "logit_sink": True,
        "atten_logit_cap": 3.0,
    }
    of = {name: attention(**fields, implementation=name) for name in ("plain", "blockwise")}
    ids = jnp.array([[1, 1, 1, 2, 2, 0], [1] * 6])
    bias = 0.3 * jnp.sin(jnp.arange(HEADS * LENGTH**2.0)).reshape(1, HEADS, LENGTH, LENGTH)
    options = {"segment_ids": ids, "attention_logit_biases": bias}

    def loss(name, state, x):
        return jnp.sum(jnp.sin(run(of[name], state, x, **options).data))

    state = filled(of["plain"])
    grads = {
        name: jax.value_and_grad(functools.partial(loss, name), (0, 1))(state, x) for name in of
    }
    plain, blocks = map(jax.tree.leaves, grads.values())
    for a, b in zip(plain, blocks, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("mask", [CAUSAL, SlidingWindowAttentionBias.default_config(700)])
def test_long_sequences_have_no_array_of_all_pairs(mask):
    length, layer = 4096, attention(mask=mask, num_heads=1, input_linear=rope())
    shapes = jax.eval_shape(layer.initialize_parameters_recursively, jax.random.key(0))
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def loss(layer, state, x, ids):
        inputs = {"query": x, "segment_ids": ids}
        return jnp.sum(F(layer, jax.random.key(0), state, inputs, is_training=True)[0].data)

    x = jax.ShapeDtypeStruct((1, length, DIM), jnp.float32)
    step = jax.grad(functools.partial(loss, layer), (0, 1))
    assert largest_array(step, shapes, x, ids) < length**2 / 16


def test_dropout_in_blocks(filled, x):
    layer = attention(dropout=Dropout.default_config().set(rate=0.5), implementation="blockwise")
    state = filled(layer)
    first, same, other = (
        run(layer, state, x, is_training=True, prng_key=jax.random.key(i)).data for i in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, same)
    assert (first != other).any()
    np.testing.assert_allclose(
        run(layer, state, x).data, run(attention(), state, x).data, rtol=1e-5, atol=1e-6
    )


class _OwnDropout(Dropout):
    def forward(self, x):
        return x


@pytest.mark.parametrize(
    "layer, options, reason",
    [
        ({}, {"return_aux": ("probs",)}, "return_aux asks for the probabilities"),
        (
            {"cls": SigmoidAttention, "seq_len": 6},
            {},
            "SigmoidAttention has its own _compute_probs",
        ),
        ({"dropout": _OwnDropout.default_config()}, {"is_training": True}, "in its own way"),
    ],
    ids=["probs", "sigmoid", "dropout"],
)
def test_what_blocks_cannot_compute(filled, x, layer, options, reason):
    layer = attention(**layer, implementation="blockwise")
    with pytest.raises(ArgumentValueError, match=rf"attention: .*'blockwise' cannot.*{reason}"):
        run(layer, filled(layer), x, **options)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
@pytest.mark.parametrize("linear", [grouped(), rope(input_linear=grouped())])
def test_devices_share_heads_of_keys(filled, x, linear):
    plain = attention(GroupedQueryAttention, mask=CAUSAL, input_linear=linear)
    cfg = plain.config.clone()
    set_attention_partition_specs(
        cfg, batch_axis_names=None, fsdp_axis_names=None, set_attn_activation_specs=True
    )
    layer, state = cfg.instantiate(parent=None), filled(plain)
    # There are two heads of keys, for four devices.
    mesh = jax.make_mesh((1, 4), ("seq", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        specs = layer.create_parameter_specs_recursively()
        state = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding(mesh)), state, specs)
        out = run(layer, state, x).data
        cached = layer.init_states(batch_size=BATCH, max_len=LENGTH, dtype=jnp.float32)
        cached, first = run(
            layer, state, x[:, :4], "extend_step", cached_states=cached, is_prefill=True
        )
        _, last = run(layer, state, x[:, 4:], "extend_step", cached_states=cached)
    decoded = np.concatenate([first.data, last.data], axis=1)
    expected = run(plain, filled(plain), x).data
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(decoded, expected, rtol=1e-5, atol=1e-6)


def test_grouped_heads_share_keys(filled, x):
    layer = attention(GroupedQueryAttention, input_linear=grouped())
    assert layer.num_kv_heads == 2
    state = filled(layer)
    # The same with a copy of each key head for each of its query heads.
    full = {**state, "i_proj": dict(state["i_proj"])}
    for name in ("k_proj", "v_proj"):
        part = state["i_proj"][name]
        full["i_proj"][name] = {
            "weight": jnp.repeat(part["weight"], 2, axis=1),
            "bias": jnp.repeat(part["bias"], 2, axis=0),
        }
    np.testing.assert_allclose(
        run(layer, state, x).data, run(attention(), full, x).data, rtol=1e-5, atol=1e-6
    )


def test_sigmoid(filled, x):
    layer = attention(SigmoidAttention, seq_len=LENGTH, mask=CAUSAL)
    probs = run(layer, filled(layer), x, return_aux=["probs"]).probs
    assert np.all(np.triu(probs, 1) == 0)
    wider = attention(SigmoidAttention, seq_len=LENGTH, mask=CAUSAL, subtract_seq_len_bias=False)
    more = run(wider, filled(wider), x, return_aux=["probs"]).probs
    seen = np.tril(np.ones((LENGTH, LENGTH), bool))
    odds = (more / (1 - more))[..., seen], (probs / (1 - probs))[..., seen]
    np.testing.assert_allclose(odds[0], LENGTH * odds[1], rtol=1e-4)


def test_keys_scaled_once_or_in_every_step(filled, x):
    scale = ScaleKey.default_config().set(norm=RMSNorm.default_config())
    later, before = (
        attention(key_scale=scale, scale_kv_before_cache_update=before) for before in (None, True)
    )
    state = filled(later)
    np.testing.assert_allclose(run(later, state, x).data, run(before, state, x).data, rtol=1e-6)
    kept = [
        run(layer, state, x, return_aux=["kv_state"]).kv_state.k_proj for layer in (later, before)
    ]
    rms = [np.sqrt(np.mean(np.square(k), axis=-1)) for k in kept]
    assert np.std(rms[0]) > 0.01
    scale = state["scale_key"]["norm"]["scale"]
    by_scale = np.sqrt(np.mean(np.square(np.divide(kept[1], scale)), axis=-1))
    np.testing.assert_allclose(by_scale, 1.0, rtol=1e-3)


def test_shared_kv_state(filled, x):
    first = attention(mask=CAUSAL)
    second = attention(mask=CAUSAL, input_linear=QLinear.default_config())
    state = filled(first)
    kv_state = run(first, state, x, return_aux=["kv_state"]).kv_state
    shared = {**state, "i_proj": {"q_proj": state["i_proj"]["q_proj"]}}
    np.testing.assert_allclose(
        run(second, shared, x, kv_state=kv_state).data, run(first, state, x).data, rtol=1e-6
    )
    assert sorted(second.init_states(batch_size=2, max_len=3, dtype=jnp.float32)) == ["time_step"]


# Decoding.

DECODERS = {
    "rope": (MultiheadAttention, {"mask": CAUSAL, "input_linear": rope()}),
    "rope, groups, window, sink": (
        GroupedQueryAttention,
        {"mask": WINDOW, "input_linear": rope(input_linear=grouped()), "logit_sink": True},
    ),
    "fused, keys scaled before": (
        MultiheadAttention,
        {
            "mask": CAUSAL,
            "input_linear": FusedQKVLinear.default_config(),
            "key_scale": ScaleKey.default_config().set(norm=RMSNorm.default_config()),
            "scale_kv_before_cache_update": True,
        },
    ),
    "sigmoid": (SigmoidAttention, {"mask": CAUSAL, "seq_len": LENGTH}),
    "xl": (MultiheadAttentionXL, {"mask": CAUSAL}),
}


def decode(layer, state, x, steps):
    """Returns the outputs of steps of the given lengths, the first of them a prefill if it is
    negative.
    """
    cached = layer.init_states(batch_size=BATCH, max_len=LENGTH + 2, dtype=jnp.float32)

    @functools.partial(jax.jit, static_argnums=2)
    def step(cached, x, is_prefill):
        inputs = {"cached_states": cached, "query": x, "is_prefill": is_prefill}
        return F(layer, None, state, inputs, method="extend_step", is_training=False)[0]

    outputs, at = [], 0
    for length in steps:
        cached, output = step(cached, x[:, at : at + abs(length)], length < 0)
        outputs.append(output.data)
        at += abs(length)
    np.testing.assert_array_equal(cached["time_step"], at)
    return jnp.concatenate(outputs, axis=1)


@pytest.mark.parametrize("name", DECODERS)
def test_decoding_equals_the_whole_sequence(name, filled, x):
    cls, fields = DECODERS[name]
    layer = attention(cls, **fields)
    state = filled(layer)
    expected = run(layer, state, x).data
    got = decode(layer, state, x, [-3, 1, 1, 1])
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_prompts_of_different_lengths(filled, x):
    layer = attention(mask=CAUSAL, input_linear=rope())
    state = filled(layer)
    lengths = np.array([2, 4])
    expected = run(layer, state, x).data
    cached = layer.init_states(batch_size=BATCH, max_len=LENGTH, dtype=jnp.float32)
    segments = (np.arange(4) < lengths[:, None]).astype(np.int32)
    cached, output = run(
        layer,
        state,
        x[:, :4],
        "extend_step",
        cached_states=cached,
        is_prefill=True,
        segment_ids=segments,
    )
    np.testing.assert_array_equal(cached["time_step"], lengths)
    for b, length in enumerate(lengths):
        np.testing.assert_allclose(
            output.data[b, :length], expected[b, :length], rtol=1e-4, atol=1e-6
        )
    for i in range(2):
        rows = np.arange(BATCH)
        token = x[rows, lengths + i][:, None]
        cached, output = run(layer, state, token, "extend_step", cached_states=cached)
        np.testing.assert_allclose(
            output.data[:, 0], expected[rows, lengths + i], rtol=1e-4, atol=1e-6
        )


def test_biases_of_a_step(filled, x):
    """Without a mask of its own, a step sees all that is cached, but for what biases hide."""
    layer = attention()
    state = filled(layer)
    cached = layer.init_states(batch_size=BATCH, max_len=LENGTH + 2, dtype=jnp.float32)
    cached, _ = run(layer, state, x[:, :4], "extend_step", cached_states=cached, is_prefill=True)
    _, output = run(layer, state, x[:, 4:5], "extend_step", cached_states=cached)
    expected = run(layer, state, x[:, 4:5], key=x[:, :5]).data
    np.testing.assert_allclose(output.data, expected, rtol=1e-5, atol=1e-6)
    biases = jnp.where(jnp.arange(LENGTH + 2) == 1, -1e15, 0.0)[None]
    _, output = run(
        layer, state, x[:, 4:5], "extend_step", cached_states=cached, attention_logit_biases=biases
    )
    seen = x[:, jnp.array([0, 2, 3, 4])]
    expected = run(layer, state, x[:, 4:5], key=seen).data
    np.testing.assert_allclose(output.data, expected, rtol=1e-5, atol=1e-6)


def test_decoding_with_shared_kv_state(filled, x):
    first = attention(mask=CAUSAL)
    second = attention(mask=CAUSAL, input_linear=QLinear.default_config())
    states = filled(first), filled(second)
    kv_state = run(first, states[0], x, return_aux=["kv_state"]).kv_state
    expected = run(second, states[1], x, kv_state=kv_state).data
    cached = [
        layer.init_states(batch_size=BATCH, max_len=LENGTH, dtype=jnp.float32)
        for layer in (first, second)
    ]

    @jax.jit
    def step(cached, x):
        inputs = {"cached_states": cached[0], "query": x, "return_aux": ["kv_state"]}
        one, output = F(first, None, states[0], inputs, method="extend_step", is_training=False)[0]
        inputs = {"cached_states": cached[1], "query": x, "kv_state": output.kv_state}
        two, output = F(second, None, states[1], inputs, method="extend_step", is_training=False)[0]
        return (one, two), output.data

    for t in range(LENGTH):
        cached, y = step(tuple(cached), x[:, t : t + 1])
        np.testing.assert_allclose(y[:, 0], expected[:, t], rtol=1e-4, atol=1e-6)


# Errors.


@pytest.mark.parametrize(
    "cls, fields, message",
    [
        (
            MultiheadAttention,
            {"num_heads": 3},
            "num_heads=3 does not divide the hidden dimension 8",
        ),
        (MultiheadAttention, {"input_linear": grouped()}, "makes 2 key heads for num_heads=4"),
        (
            MultiheadAttention,
            {"causal": True, "mask": WINDOW},
            "mask=SlidingWindowAttentionBias are both",
        ),
        (
            SigmoidAttention,
            {"seq_len": 3, "logit_sink": True},
            "logit_sink applies to a softmax only",
        ),
        (MultiheadAttentionXL, {"input_linear": QLinear.default_config()}, "the layer's own keys"),
    ],
)
def test_invalid_fields(cls, fields, message):
    with pytest.raises(LayerConfigError, match=re.escape(message)):
        attention(cls, **fields)


def test_unknown_aux(filled, x):
    layer = attention()
    with pytest.raises(ArgumentValueError, match="attention: unknown return_aux \\['prob'\\]"):
        run(layer, filled(layer), x, return_aux=["prob"])


XL_DIM = 8


def xl_attention(**fields):
    cfg = MultiheadAttentionXL.default_config().set(name="xl", num_heads=2, **fields)
    return cfg.set(query_dim=XL_DIM, key_dim=XL_DIM, value_dim=XL_DIM).instantiate(parent=None)


def run_xl(layer, state, **inputs):
    return run(layer, state, **inputs)


def test_scaling_logits_or_queries(filled, wave):
    """Both are the same if `u` and `v`, which are added in between, are 0."""
    x = wave((2, 4, XL_DIM))
    position = MultiheadAttentionXL.ScalePosition
    by_logit, by_query = (xl_attention(scale_position=p) for p in (position.LOGIT, position.QUERY))
    state = filled(by_logit)
    zero = {name: jnp.zeros_like(state[name]) for name in ("u_bias", "v_bias")}
    outputs = [run_xl(layer, {**state, **zero}, query=x).data for layer in (by_logit, by_query)]
    np.testing.assert_allclose(*outputs, rtol=1e-5, atol=1e-6)
    outputs = [run_xl(layer, state, query=x).data for layer in (by_logit, by_query)]
    assert not np.allclose(*outputs, atol=1e-4)


def test_shifting_a_sequence_shifts_the_output(filled, wave):
    """Without a mask, only relative positions count."""
    layer = xl_attention()
    state, x = filled(layer), wave((1, 4, XL_DIM))
    biases = jnp.where(jnp.arange(5) < 4, 0.0, -1e15)[None]
    at_front = jnp.concatenate([x, x[:, :1]], axis=1)
    at_back = jnp.concatenate([x[:, :1], x], axis=1)
    front = run_xl(layer, state, query=at_front, attention_logit_biases=biases).data[:, :4]
    back = run_xl(layer, state, query=at_back, attention_logit_biases=biases[:, ::-1]).data[:, 1:]
    np.testing.assert_allclose(front, back, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["key", "value", "query_positions"])
def test_self_attention_only(name, filled, wave):
    layer = xl_attention()
    given = {name: jnp.arange(3)[None] if name == "query_positions" else wave((1, 3, XL_DIM))}
    with pytest.raises(ArgumentValueError, match=f"{name} given, but"):
        run_xl(layer, filled(layer), query=wave((1, 3, XL_DIM)), **given)
