import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from weft.config import REQUIRED, config_for_function
from weft.errors import LayerConfigError
from weft.hierarchy.attention.bias import CausalAttentionBias, SlidingWindowAttentionBias
from weft.hierarchy.attention.kv_cache import PagedKVCache, SlidingWindowKVCache
from weft.hierarchy.attention.multihead_attention import GroupedQueryAttention
from weft.hierarchy.attention.qkv_linear import GroupedQKVLinear, QLinear
from weft.hierarchy.attention.rope import RoFormerQKVLinear
from weft.hierarchy.attention.stack import (
    RematRegexSavePatterns,
    RepeatedTransformerLayer,
    StackedTransformerLayer,
    build_remat_spec,
    save_and_offload_these_names_regex,
    update_data_with_skip_connection,
)
from weft.hierarchy.attention.transformer import TransformerLayer
from weft.hierarchy.module import functional as F
from weft.struct import VDict

DIM, HEADS, BATCH, LENGTH, LAYERS = 8, 4, 2, 5, 2
STACKS = [StackedTransformerLayer, RepeatedTransformerLayer]


def layer_config(**attention):
    cfg = TransformerLayer.default_config()
    linear = GroupedQKVLinear.default_config().set(num_kv_heads=2)
    cfg.self_attention.attention = GroupedQueryAttention.default_config().set(
        num_heads=HEADS,
        mask=CausalAttentionBias.default_config(),
        input_linear=RoFormerQKVLinear.default_config().set(
            rotary_value=False, input_linear=linear
        ),
    )
    cfg.self_attention.attention.set(**attention)
    cfg.feed_forward.set(hidden_dim=16, add_value_rms_norm_summary=["linear2_outputs"])
    return cfg


def stack(cls, layer=None, **fields):
    fields = {"num_layers": LAYERS, "layer": layer or layer_config(), **fields}
    cfg = cls.default_config().set(name="stack", input_dim=DIM, **fields)
    return cfg.instantiate(parent=None)


def unstacked(state):
    """Returns the state of a stack from that of a repeated stack."""
    layers = dict(state["repeat"]["layer"])
    return {f"layer{i}": jax.tree.map(lambda p, i=i: p[i], layers) for i in range(LAYERS)}


def states(filled):
    repeated = filled(stack(RepeatedTransformerLayer))
    return {StackedTransformerLayer: unstacked(repeated), RepeatedTransformerLayer: repeated}


def run(module, state, method="forward", prng_key=None, is_training=False, **inputs):
    static = {name: inputs.pop(name) for name in ("return_aux", "is_prefill") if name in inputs}

    def apply(state, inputs):
        inputs = {**inputs, **static}
        return F(module, prng_key, state, inputs, method=method, is_training=is_training)

    return jax.jit(apply)(state, inputs)


def assert_close(a, b, rtol=1e-4):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-5), a, b)


@pytest.fixture
def x(wave):
    return wave((BATCH, LENGTH, DIM)) + wave((BATCH, 1, DIM), 0.4)


def test_stacked_and_repeated_are_the_same(filled, x):
    aux = {"self_attention_probs", "self_attention_kv_state"}
    of = {
        cls: run(stack(cls), state, data=x, return_aux=aux) for cls, state in states(filled).items()
    }
    (output, stacked), (other, repeated) = of[STACKS[0]], of[STACKS[1]]
    assert_close(output, other)
    assert output.self_attention_probs.shape == (LAYERS, BATCH, HEADS, LENGTH, LENGTH)
    assert output.self_attention_kv_state.k_proj.shape == (BATCH, LENGTH, 2, 2)
    # Summaries have the same names, below the loop.
    assert sorted(stacked.summaries) == ["layer0", "layer1"]
    assert_close(stacked.summaries, repeated.summaries["repeat"])


WINDOW = {"mask": SlidingWindowAttentionBias.default_config(1)}
LAST = SlidingWindowKVCache.default_config()
PAGES = PagedKVCache.default_config().set(page_size=4)


@pytest.mark.parametrize(
    "cls, attention",
    [
        (STACKS[0], {}),
        (STACKS[1], {**WINDOW, "kv_cache": LAST.clone(cached_kv_length=1)}),
        (
            STACKS[0],
            {
                **WINDOW,
                "kv_cache": LAST.clone(cached_kv_length=2),
                "scale_kv_before_cache_update": True,
            },
        ),
        (STACKS[1], {"kv_cache": PAGES}),
    ],
    ids=["causal", "kept_window", "kept_more", "pages"],
)
def test_decoding_equals_the_whole_sequence(cls, attention, filled, x):
    module, state = stack(cls, layer_config(**attention)), states(filled)[cls]
    expected = run(module, state, data=x)[0].data
    cached = module.init_states(batch_size=BATCH, max_len=LENGTH + 1, dtype=jnp.float32)
    lengths = np.array([2, 3])
    segments = (np.arange(3) < lengths[:, None]).astype(np.int32)
    (cached, output), _ = run(
        module,
        state,
        "extend_step",
        cached_states=cached,
        data=x[:, :3],
        is_prefill=True,
        target_segment_ids=segments,
    )
    rows = np.arange(BATCH)
    assert_close(output.data[rows, lengths - 1], expected[rows, lengths - 1])
    step = jax.jit(
        lambda cached, x: F(
            module, None, state, (cached, x), method="extend_step", is_training=False
        )[0]
    )
    for i in range(2):
        cached, output = step(cached, x[rows, lengths + i][:, None])
        assert_close(output.data[:, 0], expected[rows, lengths + i])


def test_sequences_share_a_pool_of_pages(filled, x):
    cls = RepeatedTransformerLayer
    kv_cache = PagedKVCache.default_config().set(page_size=2, num_pages=5)
    cfg = layer_config(kv_cache=kv_cache)
    module, state = stack(cls, cfg), states(filled)[cls]
    expected = run(module, state, data=x)[0].data

    def layers_of(cached):
        """Returns the states of attention, with an axis of layers."""
        return cached["repeat"]["layer"]["self_attention"]["attention"]

    def cached_for(page_indices, pool, time_step):
        """Returns the states of sequences with some pages of the pool."""
        batch = len(page_indices)
        cached = module.init_states(batch_size=batch, max_len=6, dtype=jnp.float32)
        pages = layers_of(cached)["kv_cache"] if pool is None else pool
        indices = jnp.broadcast_to(jnp.array(page_indices), (LAYERS, batch, 3))
        steps = jnp.broadcast_to(jnp.array(time_step), (LAYERS, batch))
        attention = {"kv_cache": pages.replace(page_indices=indices), "time_step": steps}
        return {"repeat": VDict(layer={"self_attention": {"attention": attention}})}

    def pages_after(cached, x, **kwargs):
        (cached, output), _ = run(
            module, state, "extend_step", cached_states=cached, data=x, **kwargs
        )
        return layers_of(cached)["kv_cache"], output.data

    none = 5
    # The first sequence fills its pages; another prompt of three is written to others.
    pool, _ = pages_after(cached_for([[4, 0, 2]], None, [0]), x[:1, :5], is_prefill=True)
    empty = cached_for([[1, 3, none]], None, [0])
    pool, output = pages_after(empty, x[1:, :3], is_prefill=True, page_pool=pool)
    assert_close(output[0], expected[1, :3])
    # The first sequence starts again with two of its pages, and both are decoded together.
    pool, _ = pages_after(cached_for([[0, 4, none]], pool, [0]), x[:1, :2], is_prefill=True)
    pages = [[0, 4, none], [1, 3, none]]
    pool, output = pages_after(cached_for(pages, pool, [2, 3]), x[jnp.arange(2), [2, 3]][:, None])
    assert_close(output[:, 0], expected[jnp.arange(2), jnp.array([2, 3])])


def test_stochastic_depth_grows():
    module = stack(StackedTransformerLayer, num_layers=4, peak_stochastic_depth_rate=0.4)
    for part in ("self_attention", "feed_forward"):
        rates = [
            getattr(layer, part).stochastic_depth.config.rate for layer in module.children.values()
        ]
        np.testing.assert_allclose(rates, [0.1, 0.2, 0.3, 0.4])


def test_skip_connections(filled, x):
    merger = config_for_function(update_data_with_skip_connection).set(skip_connections={1: 0})
    module, plain = (
        stack(StackedTransformerLayer, data_merger=merger),
        stack(StackedTransformerLayer),
    )
    state = filled(plain)
    layers = [layer.config.clone().instantiate(parent=None) for layer in plain.children.values()]
    outputs = []
    for i, layer in enumerate(layers):
        data = outputs[-1] if outputs else x
        data = data + outputs[0] if i == 1 else data
        outputs.append(run(layer, state[f"layer{i}"], data=data)[0].data)
    assert_close(run(module, state, data=x)[0].data, outputs[-1])


class Sharing(StackedTransformerLayer):
    """Later layers attend to the keys of the first one."""

    def _update_layer_kwargs(self, layer_kwargs, *, all_layer_outputs):
        layer_kwargs["return_aux"] = {"self_attention_kv_state"}
        if all_layer_outputs:
            kv_state = all_layer_outputs[0].self_attention_kv_state
            layer_kwargs["self_attention_kv_state"] = kv_state


class ReversingQLinear(QLinear):
    """Attends to the other layer's keys, but with reversed components of its values."""

    def forward(self, query, **kwargs):
        output = super().forward(query, **kwargs)
        return output._replace(value=output.value[..., ::-1])


def test_layers_that_share_keys(filled, x):
    sharing = RoFormerQKVLinear.default_config().set(
        rotary_value=False, input_linear=ReversingQLinear.default_config()
    )
    cfgs = [layer_config(), layer_config(input_linear=sharing)]
    module = stack(Sharing, cfgs)
    state = filled(module)
    output, _ = run(module, state, data=x)
    assert output.self_attention_kv_state is None
    cached = module.init_states(batch_size=BATCH, max_len=LENGTH, dtype=jnp.float32)
    step = jax.jit(
        lambda cached, x: F(
            module, None, state, (cached, x), method="extend_step", is_training=False
        )[0]
    )
    for t in range(LENGTH):
        cached, got = step(cached, x[:, t : t + 1])
        assert_close(got.data[:, 0], output.data[:, t])


@pytest.mark.parametrize("cls", STACKS)
def test_arguments_for_each_layer(cls, filled, x):
    """Biases with an axis of layers: only the second layer sees no more than its own position."""
    module = stack(cls, scan_kwargs=["self_attention_logit_biases"])
    state = states(filled)[cls]
    own = jnp.where(jnp.eye(LENGTH, dtype=bool), 0.0, -1e15)[None, None]
    biases = jnp.stack([jnp.zeros_like(own), own])
    probs = run(
        module,
        state,
        data=x,
        self_attention_logit_biases=biases,
        return_aux={"self_attention_probs"},
    )[0].self_attention_probs
    alone = [np.allclose(p, np.eye(LENGTH)) for p in probs]
    assert alone == [False, True]


@pytest.mark.parametrize("cls", STACKS)
def test_carried_arguments(cls, filled, x):
    """Each layer attends to the keys of the layer before."""
    sharing = layer_config(input_linear=QLinear.default_config())
    module = stack(cls, sharing, carry=["data", "self_attention_kv_state"])
    first = TransformerLayer.default_config().set(name="l", input_dim=DIM)
    first.self_attention.attention = layer_config().self_attention.attention
    first.feed_forward.hidden_dim = 16
    first = first.instantiate(parent=None)
    kv_state = run(first, filled(first), data=x, return_aux={"self_attention_kv_state"})[
        0
    ].self_attention_kv_state
    output, _ = run(module, filled(module), data=x, self_attention_kv_state=kv_state)
    fixed, _ = run(stack(cls, sharing), filled(module), data=x, self_attention_kv_state=kv_state)
    assert_close(output.data, fixed.data)  # they hand on what they were given


@pytest.mark.parametrize(
    "cls, fields, message",
    [
        (
            StackedTransformerLayer,
            {"layer": [layer_config()]},
            "layer has 1 configs, but num_layers=2",
        ),
        (RepeatedTransformerLayer, {"peak_stochastic_depth_rate": 0.1}, "share one config"),
        (StackedTransformerLayer, {"carry": ["x"]}, "carry=('x',) lacks 'data'"),
        (
            RepeatedTransformerLayer,
            {"layer": layer_config().set(input_dim=4)},
            "layer.input_dim=4 differs from input_dim=8",
        ),
    ],
)
def test_invalid_fields(cls, fields, message):
    with pytest.raises(LayerConfigError, match=re.escape(message)):
        stack(cls, **fields)


@pytest.mark.parametrize("cls", STACKS)
def test_layer_of_none_is_to_be_set(cls):
    cfg = cls.default_config().set(name="stack", input_dim=DIM, num_layers=2, layer=None)
    with pytest.raises(LayerConfigError, match="layer is None; set the config of its layers"):
        cfg.instantiate(parent=None)


def test_layers_get_the_input_dimension_of_the_stack():
    for dim in (REQUIRED, DIM):
        module = stack(StackedTransformerLayer, layer_config().set(input_dim=dim))
        assert module.layer0.config.input_dim == DIM


def named(x):
    y = checkpoint_name(jnp.sin(x), "Layer.q_proj")
    return checkpoint_name(jnp.cos(y), "Layer.linear1_0").sum()


def count_recomputed(policy):
    """Returns the number of sines and cosines in the forward and backward pass."""
    jaxpr = str(jax.make_jaxpr(jax.grad(jax.checkpoint(named, policy=policy)))(jnp.ones(3)))
    return jaxpr.count("= sin"), jaxpr.count("= cos"), jaxpr


def test_names_that_are_saved():
    policy = save_and_offload_these_names_regex
    everything, *_ = count_recomputed(None)
    nothing, *_ = count_recomputed(policy(r".*"))
    one, *_ = count_recomputed(policy(r".*\.q_proj"))
    assert one == nothing < everything
    partly, *_ = count_recomputed(policy(r"q_proj"))  # the whole name must match
    assert partly == everything


def test_names_that_are_offloaded():
    jaxpr = count_recomputed(
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
        ("FLASH_CONTEXT", ["context"]),
        ("FLASH_ATTENTION", ["q_proj", "k_proj", "v_proj", "context", "o_proj"]),
        ("FEED_FORWARD", ["linear1_0", "linear1_1", "linear2_0"]),
        ("GATE_WEIGHTS", []),
        ("INPUT", ["input"]),
    ],
)
def test_patterns_match_checkpoint_names(pattern, matching, filled, wave):
    loss, state = stack_loss(StackedTransformerLayer, filled, wave)
    names = set(re.findall(r"name=([\w.]+)", str(jax.make_jaxpr(loss)(state))))
    found = [name for name in names if re.fullmatch(RematRegexSavePatterns[pattern].value, name)]
    assert {name.split(".")[-1] for name in found} == set(matching)
    # Names that a program gives itself need no class in front.
    bare = {name.split(".")[-1] for name in names}
    found = {name for name in bare if re.fullmatch(RematRegexSavePatterns[pattern].value, name)}
    assert found == set(matching)


def stack_loss(cls, filled, wave, remat=False):
    """Returns a loss of a stack, as a function of its state, and the state."""
    cfg = cls.default_config().set(name="stack", input_dim=4, num_layers=1)
    cfg.layer.self_attention.attention.num_heads = 2
    cfg.layer.feed_forward.set(hidden_dim=6, activation=("nn.silu", "linear"))
    cfg.layer.remat_spec = build_remat_spec(cfg) if remat else None
    module, x = cfg.instantiate(parent=None), wave((1, 3, 4))

    def loss(state):
        return (F(module, None, state, (x,), is_training=True)[0].data ** 2).sum()

    return loss, filled(module)


@pytest.mark.parametrize("cls", [StackedTransformerLayer, RepeatedTransformerLayer])
def test_remat_keeps_values(cls, filled, wave):
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
