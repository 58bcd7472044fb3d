import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from weft.config import config_for_function
from weft.errors import LayerConfigError, MetricsError
from weft.functional.sampling import top_k_logits
from weft.hierarchy.attention.bias import CausalAttentionBias
from weft.hierarchy.attention.feed_forward import TransformerFeedForwardLayer
from weft.hierarchy.attention.stack import RepeatedTransformerLayer, StackedTransformerLayer
from weft.hierarchy.base_layer import RematSpec
from weft.hierarchy.causal_lm import (
    AuxLossMetrics,
    CompositeLossMetrics,
    CompositeLossWeights,
    CrossEntropyLossMetrics,
    ModalityLossMetrics,
    Model,
    Perplexity,
    gpt_decoder_config,
    layer_norm_config,
    metrics_config,
    residual_initializer_cfg,
    target_statistics,
)
from weft.hierarchy.decoder import LmHead
from weft.hierarchy.decoding import StopOnMaxLength
from weft.hierarchy.layers.embedding import ModalityVocabInfo, TransformerTextEmbeddings
from weft.hierarchy.module import functional

DIM, VOCAB, LENGTH = 8, 10, 6
BATCH = {
    "input_ids": jnp.array([[2, 3, 4, 5, 0, 0], [6, 7, 8, 9, 3, 1]]),
    "target_labels": jnp.array([[3, 4, 5, 1, -1, -1], [7, 8, 9, 3, 1, -1]]),
}
STACKS = {"stacked": StackedTransformerLayer, "repeated": RepeatedTransformerLayer}
NEVER = StopOnMaxLength(10**6)


def decoder_config(stack="stacked", **kwargs):
    return gpt_decoder_config(
        STACKS[stack].default_config(),
        **{
            "num_layers": 1,
            "hidden_dim": DIM,
            "num_heads": 2,
            "vocab_size": VOCAB,
            "max_position_embeddings": LENGTH,
            **kwargs,
        },
    )


@functools.cache
def default_model():
    return build(decoder_config())


def make(decoder=None, **fields):
    if decoder is None and not fields:
        return default_model()
    return build(decoder_config() if decoder is None else decoder, **fields)


def build(decoder, **fields):
    cfg = Model.default_config().set(name="model", decoder=decoder, **fields)
    model, rng = cfg.instantiate(parent=None), np.random.default_rng(0)

    def drawn(path, spec):
        value = 0.3 * rng.normal(size=spec.shape) + (path[-1].key == "scale")
        return jnp.asarray(value, jnp.float32)

    # Larger than at the start of a training, so that predictions differ.
    specs = model.create_parameter_specs_recursively()
    return model, jax.tree_util.tree_map_with_path(drawn, specs)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def run(model, method, is_training, static, state, prng_key, inputs):
    result, outputs = functional(
        model,
        prng_key=prng_key,
        state=state,
        inputs={**inputs, **dict(static)},
        method=method,
        is_training=is_training,
    )
    return result, outputs.summaries


def call(model, state, *, method="forward", is_training=False, seed=0, static=None, **inputs):
    """Returns result and summaries of a method, given its arrays and its static arguments."""
    static = tuple((static or {}).items())
    return run(model, method, is_training, static, state, jax.random.key(seed), inputs)


def loss_and_aux(model, state, batch=BATCH, **kwargs):
    return call(model, state, input_batch=batch, static={"return_aux": True}, **kwargs)


def means(summaries):
    return {name: float(value.mean) for name, value in summaries.items()}


def waves(specs):
    """Parameters that anyone can compute."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(specs)
    values = []
    paths = ["/".join(key.key for key in path) for path, _ in leaves]
    order = {path: i for i, path in enumerate(sorted(paths))}
    for path, (_, spec) in zip(paths, leaves, strict=True):
        value = 0.3 * np.sin(np.arange(np.prod(spec.shape)) + order[path]).reshape(spec.shape)
        values.append(jnp.array(value + path.endswith("scale"), jnp.float32))
    return jax.tree.unflatten(tree, values)


@pytest.mark.parametrize(
    "stack, expected, total",
    [
        (
            "stacked",
            {
                "loss": 2.12773418,
                "cross_entropy_loss": 2.12773418,
                "perplexity": 8.39582157,
                "accuracy": 1 / 9,
                "train_live_targets": 4.5,
            },
            2.19267535,
        ),
        (
            "repeated",
            {
                "loss": 2.36625457,
                "cross_entropy_loss": 2.36625457,
                "perplexity": 10.6573995,
                "accuracy": 0.0,
                "train_live_targets": 4.5,
            },
            2.43092775,
        ),
    ],
)
def test_loss_and_metrics_match_axlearn(stack, expected, total):
    # AXLearn 0.0.1 gives these numbers for this decoder, these parameters and this batch.
    model, _ = make(decoder_config(stack, num_layers=2))
    state = waves(model.create_parameter_specs_recursively())
    (loss, _), summaries = loss_and_aux(model, state)
    got = means(summaries)
    assert {name: got[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert {float(summaries[k].weight) for k in ("loss", "perplexity", "accuracy")} == {9.0}
    assert float(loss) == pytest.approx(expected["loss"], rel=1e-6)

    model, _ = make(decoder_config(stack, num_layers=2), metrics=metrics_config(z_loss_scale=0.01))
    (loss, _), summaries = loss_and_aux(model, state, is_training=True)
    assert float(loss) == pytest.approx(total, rel=1e-6)
    # The perplexity does not include the z-loss.
    assert float(summaries["perplexity"].mean) == pytest.approx(expected["perplexity"], rel=1e-5)


def reference(logits, labels, live):
    logits = np.asarray(logits, np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nll = -np.take_along_axis(log_probs, np.where(live, labels, 0)[..., None], -1)[..., 0]
    return np.where(live, nll, 0)


def test_padding_and_invalid_tokens_are_not_targets():
    decoder = decoder_config().set(pad_token_id=9)
    model, state = make(decoder)
    labels = np.array([[3, 9, 5, -1, 0, VOCAB], [7, 8, 9, 3, -100, 200]])
    live = np.array([[1, 0, 1, 0, 1, 0], [1, 1, 0, 1, 0, 0]], bool)
    batch = {**BATCH, "target_labels": jnp.array(labels)}
    (loss, aux), summaries = loss_and_aux(model, state, batch)
    nll = reference(aux["logits"], labels, live)
    np.testing.assert_array_equal(aux["metrics"]["live_targets"], live)
    np.testing.assert_allclose(aux["metrics"]["per_token_loss"], nll, rtol=1e-4, atol=1e-6)
    assert float(loss) == pytest.approx(nll.sum() / 6, rel=1e-5)
    assert float(summaries["loss"].weight) == 6
    scores, _ = call(model, state, method="score", input_batch=batch)
    np.testing.assert_allclose(scores["per_token_loss"], nll, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(scores["live_targets"], live)


def test_bits_per_byte_over_all_bytes():
    model, state = make()
    batch = {**BATCH, "target_num_bytes": jnp.array([7, 9])}
    (loss, _), summaries = loss_and_aux(model, state, batch)
    bits = summaries["bits_per_byte"]
    assert float(bits.mean) == pytest.approx(float(loss) * 9 / 16 / np.log(2), rel=1e-5)
    assert float(bits.weight) == 16


def test_batch_without_targets_has_no_loss():
    model, state = make()
    batch = {**BATCH, "target_labels": jnp.full((2, LENGTH), -1)}
    (loss, _), summaries = loss_and_aux(model, state, batch)
    assert float(loss) == 0
    assert float((summaries["loss"] + summaries["loss"]).mean) == 0
    assert all(np.isfinite(v) for v in means(summaries).values())


@functools.partial(jax.jit, static_argnums=0)
def grads_of(model, state):
    def loss(state):
        (loss, aux), outputs = functional(model, None, state, (BATCH, True), is_training=False)
        return loss, (aux, outputs.summaries)

    return jax.value_and_grad(loss, has_aux=True)(state)


TIED_AND_CAPPED = decoder_config()
TIED_AND_CAPPED.emb.soft_cap_logits = 2.0


@pytest.mark.parametrize(
    ("decoder", "fields"),
    [
        (decoder_config(), {"scan_chunk": 2}),
        (TIED_AND_CAPPED, {"vocab_chunk_size": 4}),
        (decoder_config().set(lm_head=LmHead.default_config()), {"vocab_chunk_size": 5}),
    ],
    ids=["positions", "tied", "untied"],
)
def test_logits_in_chunks_give_the_same_loss_and_gradients(decoder, fields):
    metrics = metrics_config(z_loss_scale=0.01)
    whole, state = make(decoder, metrics=metrics, vocab_chunk_size=VOCAB)
    chunked, _ = make(decoder, metrics=metrics, **fields)
    (loss, (aux, summaries)), grads = grads_of(whole, state)
    (chunked_loss, (chunked_aux, chunked_summaries)), chunked_grads = grads_of(chunked, state)
    assert ("logits" in chunked_aux) == ("vocab_chunk_size" in fields)
    np.testing.assert_allclose(
        chunked_aux["metrics"]["per_token_loss"], aux["metrics"]["per_token_loss"], rtol=1e-4
    )
    assert means(chunked_summaries) == pytest.approx(means(summaries), rel=1e-5)
    assert float(chunked_loss) == pytest.approx(float(loss), rel=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), grads, chunked_grads
    )
    logits = chunked_aux.get("logits")
    if logits is None:
        logits, _ = call(chunked, state, method="extract_logits", input_batch=BATCH)
    np.testing.assert_allclose(logits, aux["logits"], rtol=1e-5, atol=1e-6)
    scores, _ = call(chunked, state, method="score", input_batch=BATCH)
    per_token = statistics_of(aux["logits"])["nll"]
    np.testing.assert_allclose(scores["per_token_loss"], per_token, rtol=1e-4, atol=1e-6)


@functools.partial(jax.jit, static_argnums=0)
def loss_grads(model, state):
    def loss(state):
        return functional(model, None, state, (BATCH,), is_training=True)[0][0]

    return jax.grad(loss)(state)


@jax.jit
def statistics_of(logits):
    labels = BATCH["target_labels"]
    return target_statistics(logits, labels, labels > 0)


def test_large_vocabularies_are_computed_in_chunks_over_the_model_axis():
    temporary, logits, text = compiled_on_mesh(2**12)
    whole, _, text_of_whole = compiled_on_mesh(2**16)
    assert temporary < whole - logits
    pattern = rf"f32\[1,{LENGTH},(32768|65536)\]"  # logits of a device, and gathered ones
    assert re.search(pattern, text_of_whole) and not re.search(pattern, text)


def compiled_on_mesh(vocab_chunk_size):
    """Returns temporary and logits' bytes per device, and the program of a training step."""
    decoder = decoder_config(vocab_size=2**16)
    decoder.emb.token_emb.param_partition_spec = ("model", None)
    cfg = Model.default_config().set(name="model", decoder=decoder)
    model = cfg.set(vocab_chunk_size=vocab_chunk_size).instantiate(parent=None)
    state = model.create_parameter_specs_recursively()
    with mesh(data=2, model=2):
        devices = jax.sharding.get_mesh()
        shapes = jax.tree.map(
            lambda spec: jax.ShapeDtypeStruct(
                spec.shape,
                jnp.float32,
                sharding=NamedSharding(devices, PartitionSpec(*spec.mesh_axes)),
            ),
            state,
        )
        compiled = loss_grads.lower(model, shapes).compile()
    logits = BATCH["input_ids"].size // 2 * 2**16 // 2 * 4  # of a device, in bytes
    return compiled.memory_analysis().temp_size_in_bytes, logits, compiled.as_text()


class Doubled(LmHead):
    def forward(self, x):
        return 2 * super().forward(x)


def double(logits):
    return 2 * logits


@pytest.mark.parametrize("custom", ["lm_head", "modifier", "embedding", "method"])
def test_other_computations_of_logits_keep_their_meaning(custom):
    decoder, cls = decoder_config(), Model
    if custom == "lm_head":
        decoder.lm_head = Doubled.default_config()
    elif custom == "modifier":
        decoder.output_logits_modifier = double
    elif custom == "embedding":

        class Embeddings(TransformerTextEmbeddings):
            def attend(self, x):
                return 2 * super().attend(x)

        decoder.emb = Embeddings.default_config().set(pos_emb=decoder.emb.pos_emb)
    else:

        class cls(Model):
            def compute_logits(self, predictions):
                return 2 * super().compute_logits(predictions)

            def predict(self, input_batch):
                predictions = super().predict(input_batch)
                return {**predictions, "logits": 2 * predictions["logits"]}

    cfg = cls.default_config().set(name="model", decoder=decoder, vocab_chunk_size=2)
    model = cfg.instantiate(parent=None)
    state = waves(model.create_parameter_specs_recursively())
    (_, aux), _ = loss_and_aux(model, state)
    expected = statistics_of(aux["logits"])["nll"]
    np.testing.assert_allclose(aux["metrics"]["per_token_loss"], expected, rtol=1e-5)


def test_chunks_are_of_positions_or_of_the_vocabulary():
    with pytest.raises(LayerConfigError, match="scan_chunk=2 and vocab_chunk_size=3; set one"):
        make(scan_chunk=2, vocab_chunk_size=3)


class Balanced(TransformerFeedForwardLayer):
    """Wants its output to be small."""

    def forward(self, inputs):
        outputs = super().forward(inputs)
        self.add_module_output("aux_loss", jnp.mean(outputs**2))
        return outputs


@pytest.mark.parametrize("stack", STACKS)
def test_losses_of_layers_are_added(stack):
    decoder = decoder_config(stack, num_layers=2)
    if stack == "repeated":  # which drops outputs of its layers by default
        decoder.transformer.repeat.drop_output = config_for_function(lambda: lambda path: False)
    layer = decoder.transformer.layer
    feed_forward = layer.feed_forward
    layer.feed_forward = Balanced.default_config().set(
        hidden_dim=feed_forward.hidden_dim, linear2=feed_forward.linear2
    )
    model, state = make(decoder, metrics=metrics_config(aux_loss_regex=".*/aux_loss"))
    (loss, _), summaries = loss_and_aux(model, state)
    aux, nats = (float(summaries[k].mean) for k in ("aux_loss", "cross_entropy_loss"))
    assert aux > 0
    assert float(loss) == pytest.approx(aux + nats, rel=1e-5)
    assert float(summaries["loss"].weight) == 9


def test_greedy_decoding_through_the_cache_is_greedy():
    model, state = make()
    prefix = jnp.array([[2, 3, 4, 0, 0, 0], [5, 0, 0, 0, 0, 0]])
    static = {"logits_modifier": top_k_logits(1), "stop_decoding_condition": NEVER}
    outputs, _ = call(
        model,
        state,
        method="sample_decode",
        input_batch={"prefix": prefix},
        static=static,
    )
    for row, length in enumerate([3, 1]):
        ids = prefix
        for t in range(length, LENGTH):
            batch = {"input_ids": ids}
            logits, _ = call(model, state, method="extract_logits", input_batch=batch)
            ids = ids.at[row, t].set(jnp.argmax(logits[row, t - 1]))
        assert outputs.sequences[row, 0, : LENGTH - 1].tolist() == ids[row, 1:].tolist()
    assert len(set(outputs.sequences.ravel().tolist())) > 2


def test_scores_of_beams_are_sums_of_log_probabilities():
    model, state = make()
    prefix = jnp.array([[2, 3, 0, 0, 0, 0], [5, 0, 0, 0, 0, 0]])
    found, _ = call(
        model,
        state,
        method="beam_search_decode",
        input_batch={"prefix": prefix},
        static={"num_decodes": 2, "max_sequence_length": LENGTH - 1},
    )
    for sequences, scores, ended in (
        (found.sequences, found.scores, True),
        (found.live_sequences, found.live_scores, False),
    ):
        first = jnp.broadcast_to(prefix[:, None, :1], (2, 2, 1))
        labels = sequences.reshape(4, -1)
        inputs = jnp.concatenate([first, sequences], axis=2).reshape(4, -1)[:, :-1]
        losses = call(
            model,
            state,
            method="score",
            input_batch={"input_ids": inputs, "target_labels": labels},
        )[0]["per_token_loss"].reshape(2, 2, -1)
        # Of the first prompt, one token was given; what follows an end is padding.
        expected = -jnp.stack([losses[0, :, 1:].sum(-1), losses[1].sum(-1)])
        done = scores > -1e6
        assert done.any()
        np.testing.assert_allclose(
            jnp.where(done, scores, 0), jnp.where(done, expected, 0), rtol=1e-3, atol=1e-3
        )
        if ended:
            assert all(1 in s for s in sequences[done].tolist())


def mesh(**sizes):
    n = math.prod(sizes.values())
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.set_mesh(
        jax.make_mesh(
            tuple(sizes.values()), tuple(sizes), axis_types=auto, devices=jax.devices()[:n]
        )
    )


def test_batches_are_sharded():
    model, state = make()
    (loss, aux), summaries = loss_and_aux(model, state)
    with mesh(data=2, model=2):
        (sharded_loss, sharded), sharded_summaries = loss_and_aux(model, state)
    np.testing.assert_allclose(sharded_loss, loss, rtol=1e-5)
    np.testing.assert_allclose(sharded["logits"], aux["logits"], rtol=1e-4, atol=1e-5)
    assert means(sharded_summaries) == pytest.approx(means(summaries), rel=1e-5)
    assert sharded["logits"].sharding.spec == PartitionSpec("data", None, "model")


def test_mesh_may_have_other_axes():
    cfg = decoder_config().set(logits_partition_spec=(None, None, None))
    model, state = make(cfg, batch_axis_names=None)
    with mesh(fsdp=2):
        logits, _ = call(model, state, method="extract_logits", input_batch=BATCH)
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("stack", STACKS)
def test_gpt_decoders_are_initialized_as_in_gpt_2(stack):
    decoder = decoder_config(
        stack, num_layers=2, hidden_dim=64, vocab_size=200, max_position_embeddings=100
    )
    cfg = Model.default_config().set(name="model", decoder=decoder)
    model = cfg.instantiate(parent=None)
    state = model.initialize_parameters_recursively(jax.random.key(0))["decoder"]
    layers = state["transformer"]
    layer = layers["layer1"] if stack == "stacked" else layers["repeat"]["layer"]
    attention = layer["self_attention"]["attention"]
    expected = {
        "token_emb": (state["emb"]["token_emb"], 64**-0.5),
        "pos_emb": (state["emb"]["pos_emb"], 64**-0.5),
        "q_proj": (attention["i_proj"]["q_proj"], 0.02),
        "o_proj": (attention["o_proj"], 0.01),
        "linear1": (layer["feed_forward"]["linear1"], 0.02),
        "linear2": (layer["feed_forward"]["linear2"], 0.01),
    }
    for name, (parameters, std) in expected.items():
        assert float(jnp.std(parameters["weight"])) == pytest.approx(std, rel=0.06), name
    assert layer["feed_forward"]["linear1"]["weight"].shape[-2:] == (64, 256)


def test_gpt_decoders_follow_their_arguments():
    stack = StackedTransformerLayer.default_config()
    remat = RematSpec(prevent_cse=False)
    cfg = gpt_decoder_config(
        stack,
        num_layers=3,
        hidden_dim=DIM,
        num_heads=4,
        vocab_size=VOCAB,
        max_position_embeddings=5,
        activation_function="nn.gelu",
        layer_norm_epsilon=1e-3,
        dropout_rate=0.2,
        layer_remat=remat,
    )
    layer = cfg.transformer.layer
    assert layer.feed_forward.activation == "nn.gelu"
    assert layer.self_attention.norm.eps == layer.feed_forward.norm.eps == 1e-3
    assert cfg.output_norm.eps == 1e-3
    assert layer.remat_spec == remat
    assert layer.self_attention.attention.mask == CausalAttentionBias.default_config()
    assert (cfg.dropout_rate, cfg.emb.pos_emb.shape) == (0.2, (5,))
    assert stack == StackedTransformerLayer.default_config()
    assert len(cfg.set(name="decoder").instantiate(parent=None).transformer.children) == 3


def test_small_configs():
    assert layer_norm_config().eps == 1e-5
    assert layer_norm_config(eps=1e-6).eps == 1e-6
    cfg = residual_initializer_cfg(num_layers=8, scale=0.04)
    assert cfg.init_by_param_name[".*weight$"].scale == pytest.approx(0.01)


LOGITS = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)
LABELS = np.array([[0, 4, 2], [3, -1, 1]])
LIVE = LABELS >= 0
LOG_NORMALIZER = np.log(np.exp(LOGITS).sum(-1))
NLL = np.where(
    LIVE, LOG_NORMALIZER - np.take_along_axis(LOGITS, LABELS.clip(0)[..., None], -1)[..., 0], 0
)
MODULE_OUTPUTS = {
    "decoder": {
        "layer0": {"aux_loss": jnp.array(0.5), "router": {"aux_loss": jnp.array([1.0, 2.0])}},
        "layer1": {"aux_losses": jnp.array(100.0)},
    }
}


def measure(cfg, batch=None, outputs=None, module_outputs=MODULE_OUTPUTS):
    metrics = cfg.set(name="metrics").instantiate(parent=None)
    inputs = {
        "input_batch": {"target_labels": jnp.array(LABELS), **(batch or {})},
        "predict_outputs": outputs or {"logits": jnp.array(LOGITS)},
        "module_outputs": module_outputs,
    }
    return functional(metrics, None, {}, inputs, is_training=True)[0]


@pytest.mark.parametrize("scale", [None, 0.1])
def test_cross_entropy_metrics(scale):
    cfg = CrossEntropyLossMetrics.default_config().set(z_loss_scale=scale)
    loss, metrics = measure(cfg, {"target_num_bytes": jnp.array([4, 3])})
    z = np.square(LOG_NORMALIZER) * LIVE
    total = NLL + (scale or 0) * z
    nats = NLL.sum() / 5
    expected = {
        "cross_entropy_loss": (nats, 5),
        "cross_entropy": (nats, 5),
        "perplexity": (np.exp(nats), 5),
        "accuracy": ((LIVE & (LOGITS.argmax(-1) == LABELS)).sum() / 5, 5),
        "train_live_targets": (2.5, 2),
        "bits_per_byte": (NLL.sum() / 7 / np.log(2), 7),
    }
    if scale:
        expected["z_loss"] = (z.sum() / 5, 5)
    np.testing.assert_allclose(metrics.pop("per_token_loss"), total, rtol=1e-5)
    np.testing.assert_array_equal(metrics.pop("live_targets"), LIVE)
    assert metrics.pop("num_targets") == 5
    assert {k: (float(m.mean), float(m.weight)) for k, m in metrics.items()} == {
        k: pytest.approx(v, rel=1e-5) for k, v in expected.items()
    }
    assert (float(loss.mean), float(loss.weight)) == pytest.approx((total.sum() / 5, 5), rel=1e-5)


def test_batch_may_define_live_targets():
    live = jnp.array([[True, False, False], [True, False, False]])
    loss, _ = measure(CrossEntropyLossMetrics.default_config(), {"live_targets": live})
    assert float(loss.mean) == pytest.approx(NLL[:, 0].mean(), rel=1e-5)
    assert float(loss.weight) == 2


def test_perplexities_add_in_log_space():
    texts = [(2.0, 3.0), (0.5, 5.0), (1.0, 2.0)]  # nats per token, tokens
    total = Perplexity(np.exp(2.0), 3.0) + Perplexity(np.exp(0.5), 5.0)
    total = total.accumulate(Perplexity(np.exp(1.0), 2.0))
    nats = sum(n * w for n, w in texts) / 10
    assert isinstance(total, Perplexity)
    assert float(total.value()) == pytest.approx(np.exp(nats), rel=1e-5)
    assert float(total.weight) == 10


def test_auxiliary_losses_are_the_mean_over_layers():
    cfg = AuxLossMetrics.default_config().set(aux_loss_regex=".*/aux_loss")
    loss, metrics = measure(cfg)
    assert float(loss.mean) == (0.5 + (1.0 + 2.0) / 2) / 2
    assert float(loss.weight) == 5  # as the cross entropy
    assert float(metrics["aux_loss"].mean) == 1.0


def test_unmatched_pattern_is_reported(caplog):
    cfg = AuxLossMetrics.default_config().set(aux_loss_regex="aux_loss")
    loss, metrics = measure(cfg)
    assert float(loss.mean) == 0 and metrics.keys() == {"aux_loss"}
    assert "aux_loss_regex='aux_loss' of metrics matches none of the module outputs" in caplog.text
    assert "layer0/aux_loss" in caplog.text


class Halves(CompositeLossWeights):
    def forward(self, child_metrics):
        return {name: 0.5 / float(loss.weight) for name, (loss, _) in child_metrics.items()}


def test_losses_are_weighted():
    cfg = metrics_config(aux_loss_regex=".*/aux_loss")
    plain = measure(cfg.set(loss_weights=CompositeLossWeights.default_config()))[0]
    assert float(plain.mean) == pytest.approx(NLL.sum() / 5 + 1.0, rel=1e-5)
    loss, _ = measure(cfg.set(loss_weights=Halves.default_config()))
    assert float(loss.mean) == pytest.approx(0.1 * NLL.sum() / 5 + 0.1 * 1.0, rel=1e-5)


class FirstColumn(CrossEntropyLossMetrics):
    """Cross entropy of the first targets of each example."""

    def forward(self, input_batch, **kwargs):
        live = jnp.array([[True, False, False], [True, False, False]])
        return super().forward({**input_batch, "live_targets": live}, **kwargs)


def test_parts_of_one_kind_are_averaged_by_weight():
    parts = {"a": CrossEntropyLossMetrics.default_config()}
    parts["b"] = parts["a"].clone()
    parts["aux"] = AuxLossMetrics.default_config().set(aux_loss_regex=".*/aux_loss")
    parts["aux2"] = parts["aux"].clone()
    cfg = CompositeLossMetrics.default_config().set(metrics=parts, flatten_metrics=False)
    loss, metrics = measure(cfg)
    assert metrics.keys() == parts.keys() | {f"loss_{name}" for name in parts}
    assert float(metrics["loss_a"].mean) == pytest.approx(NLL.sum() / 5, rel=1e-5)
    assert float(loss.mean) == pytest.approx(NLL.sum() / 5 + 2 * 1.0, rel=1e-5)
    assert float(loss.weight) == 10
    cfg.metrics["b"] = FirstColumn.default_config()  # of another kind: added
    loss, _ = measure(cfg)
    assert float(loss.mean) == pytest.approx(NLL.sum() / 5 + NLL[:, 0].mean() + 2.0, rel=1e-5)
    cfg.metrics["b"] = cfg.metrics["a"]
    with pytest.raises(MetricsError, match=r"'b' of metrics has the metrics \['accuracy', .*False"):
        measure(cfg.set(flatten_metrics=None))


class OnlyLayer1(CompositeLossMetrics):
    def filter_module_outputs(self, path):
        return path == "decoder/transformer/layer1/feed_forward/aux_loss"


class OnlyRouter(AuxLossMetrics):
    def filter_module_outputs(self, path):
        return path == "decoder/layer0/router/aux_loss"


def test_metrics_receive_the_module_outputs_that_they_keep():
    aux = OnlyRouter.default_config().set(aux_loss_regex=".*")
    parts = {"all": AuxLossMetrics.default_config().set(aux_loss_regex=".*"), "router": aux}
    cfg = CompositeLossMetrics.default_config().set(metrics=parts, flatten_metrics=False)
    _, metrics = measure(cfg)
    assert float(metrics["loss_all"].mean) == (0.5 + 1.5 + 100) / 3
    assert float(metrics["loss_router"].mean) == 1.5


def test_model_passes_the_module_outputs_that_its_metrics_keep():
    decoder = decoder_config(num_layers=2)
    layer = decoder.transformer.layer
    layer.feed_forward = Balanced.default_config().set(
        hidden_dim=layer.feed_forward.hidden_dim, linear2=layer.feed_forward.linear2
    )
    losses = []
    for cls, regex in [
        (CompositeLossMetrics, ".*/layer1/.*/aux_loss"),
        (OnlyLayer1, ".*/aux_loss"),
        (CompositeLossMetrics, ".*/aux_loss"),
    ]:
        parts = {"aux": AuxLossMetrics.default_config().set(aux_loss_regex=regex)}
        model, state = make(decoder, metrics=cls.default_config().set(metrics=parts))
        losses.append(float(loss_and_aux(model, state)[0][0]))
    assert losses[0] == losses[1] != losses[2]


MODALITIES = {"low": ModalityVocabInfo("low", 0, 0, 0, 3), "high": "is_high"}
IS_HIGH = np.array([[0, 1, 0], [1, 1, 0]])  # a label of -1 does not count


@pytest.mark.parametrize("given", ["logits", "target_statistics"])
def test_loss_of_each_modality(given):
    cfg = ModalityLossMetrics.default_config().set(
        modalities=MODALITIES, loss_weights={"high": 0.5}, z_loss_scale=0.1
    )
    outputs = {"logits": jnp.array(LOGITS)}
    if given == "target_statistics":
        stats = target_statistics(outputs["logits"], jnp.array(LABELS), jnp.array(LIVE))
        outputs = {given: stats}
    batch = {"is_high": jnp.array(IS_HIGH), "target_num_bytes": jnp.array([4, 3])}
    loss, metrics = measure(cfg, batch, outputs)
    per_token = NLL + 0.1 * np.square(LOG_NORMALIZER) * LIVE
    masks = {"low": LIVE & (LABELS < 3), "high": LIVE & (IS_HIGH == 1)}
    assert [mask.sum() for mask in masks.values()] == [3, 2]
    for name, mask in masks.items():
        n, found = mask.sum(), metrics[name]
        nats = (NLL * mask).sum() / n
        expected = {
            "loss": (per_token * mask).sum() / n,
            "cross_entropy": nats,
            "perplexity": np.exp(nats),
            "accuracy": (mask & (LOGITS.argmax(-1) == LABELS)).sum() / n,
        }
        got = {key: float(found[key].mean) for key in expected}
        assert got == pytest.approx(expected, rel=1e-5)
        assert {float(found[key].weight) for key in expected} == {n}
        assert "bits_per_byte" not in found  # the bytes are those of all targets
        np.testing.assert_array_equal(found["live_targets"], mask)
    total = (per_token * (masks["low"] + 0.5 * masks["high"])).sum() / 5
    assert (float(loss.mean), float(loss.weight)) == pytest.approx((total, 5), rel=1e-5)
    assert float(metrics["cross_entropy"].mean) == pytest.approx(NLL.sum() / 5, rel=1e-5)
    assert float(metrics["bits_per_byte"].weight) == 7


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"modalities": {}}, "modalities of metrics is empty; expected at least one"),
        ({"loss_weights": {"hi": 1.0}}, r"names 'hi', .* Did you mean 'high'\?"),
        ({"modalities": {"high": "is_hig"}}, r"mask 'is_hig', .* Did you mean 'is_high'\?"),
        ({"modalities": {"accuracy": "is_high"}}, "has the name 'accuracy' of a metric of all"),
    ],
    ids=["empty", "weight", "mask", "name"],
)
def test_invalid_modalities(fields, message):
    cfg = ModalityLossMetrics.default_config().set(modalities=MODALITIES).set(**fields)
    with pytest.raises(MetricsError, match=message):
        measure(cfg, {"is_high": jnp.array(IS_HIGH)})


def test_empty_composite_is_rejected():
    with pytest.raises(MetricsError, match="metrics of metrics is empty; expected at least one"):
        measure(CompositeLossMetrics.default_config().set(metrics={}))
