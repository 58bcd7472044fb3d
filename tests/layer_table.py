"""How to build each public layer class with tiny shapes, and what to call it with.

A test that walks `LAYERS` walks every layer of the three ways of writing: `missing()` names the
layer classes of the public tables that are in neither `LAYERS` nor `BASES`.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from tests.keys import quick_key
from weft import hierarchy, nnx
from weft import linen as nn
from weft.hierarchy.module import functional as run_method

RNG = np.random.default_rng(0)
TOKENS = RNG.normal(size=(4, 8, 8)).astype(np.float32)  # batch, time, features
IMAGES = RNG.normal(size=(4, 8, 8, 4)).astype(np.float32)
VIDEOS = RNG.normal(size=(4, 4, 4, 4, 4)).astype(np.float32)
HEADS = RNG.normal(size=(4, 8, 2, 4)).astype(np.float32)  # batch, time, heads, features
ROWS = RNG.normal(size=(4, 8)).astype(np.float32)
IDS = RNG.integers(0, 8, (4, 8))
PADDINGS = np.repeat(np.arange(8)[None] >= 6, 4, axis=0)
POSITIONS = np.repeat(np.arange(8)[None], 4, axis=0)
SEGMENTS = np.ones((4, 8), int)
LABELS = RNG.integers(0, 8, 4)


@dataclasses.dataclass
class Layer:
    """Attributes:
    init: returns parameters and other state that `apply` reads.
    apply: `apply(variables, inputs)` returns a tree of arrays.
    inputs: a tree of arrays.
    """

    init: Callable[[], Any]
    apply: Callable[[Any, Any], Any]
    inputs: Any


def nnx_layer(make: Callable[[nnx.Rngs], Any], *inputs: Any, **kwargs: Any) -> Layer:
    """A layer of NNX, called with the inputs."""

    def split() -> tuple[Any, Any]:
        graph, variables = nnx.split(make(nnx.Rngs(0, params=quick_key(0))))
        graphs.append(graph)
        return variables

    graphs: list[Any] = []

    def apply(variables: Any, inputs: tuple[Any, ...]) -> Any:
        return nnx.merge(graphs[0], variables, copy=True)(*inputs, **kwargs)

    return Layer(split, apply, inputs)


def linen_layer(module: nn.Module, *inputs: Any, **kwargs: Any) -> Layer:
    """A layer of Linen, called with the inputs."""
    keys = {"params": quick_key(0), "dropout": jax.random.key(1)}

    def init() -> Any:
        return module.init(keys, *inputs, **kwargs)

    def apply(variables: Any, inputs: tuple[Any, ...]) -> Any:
        return module.apply(variables, *inputs, mutable=True, rngs=keys, **kwargs)[0]

    return Layer(init, apply, inputs)


def layer(
    cls: type[hierarchy.BaseLayer],
    inputs: Any,
    *,
    method: str = "forward",
    result: Callable[[Any], Any] = lambda y: y,
    **fields: Any,
) -> Layer:
    """A layer of the hierarchy: a method is called with positional or named inputs."""

    @functools.cache
    def build() -> Any:
        return cls.default_config().set(name="layer", **fields).instantiate(parent=None)

    def init() -> Any:
        return build().initialize_parameters_recursively(quick_key(0))

    def apply(variables: Any, inputs: Any) -> Any:
        y, _ = run_method(
            build(), jax.random.key(0), variables, inputs, is_training=True, method=method
        )
        return result(y)

    return Layer(init, apply, inputs)


NNX = {
    "BatchNorm": nnx_layer(lambda rngs: nnx.BatchNorm(8, rngs=rngs), TOKENS),
    "Bidirectional": nnx_layer(
        lambda rngs: nnx.Bidirectional(
            nnx.RNN(nnx.GRUCell(8, 4, rngs=rngs)), nnx.RNN(nnx.GRUCell(8, 4, rngs=rngs)), rngs=rngs
        ),
        TOKENS,
    ),
    "Conv": nnx_layer(lambda rngs: nnx.Conv(4, 8, (3, 3), rngs=rngs), IMAGES),
    "ConvTranspose": nnx_layer(lambda rngs: nnx.ConvTranspose(4, 8, (3, 3), rngs=rngs), IMAGES),
    "Dropout": nnx_layer(lambda rngs: nnx.Dropout(0.5, rngs=rngs), TOKENS),
    "Einsum": nnx_layer(lambda rngs: nnx.Einsum("btd,df->btf", (8, 4), (4,), rngs=rngs), TOKENS),
    "Embed": nnx_layer(lambda rngs: nnx.Embed(8, 4, rngs=rngs), IDS),
    "GRUCell": nnx_layer(lambda rngs: nnx.GRUCell(8, 4, rngs=rngs), ROWS[:, :4], ROWS),
    "GroupNorm": nnx_layer(lambda rngs: nnx.GroupNorm(8, num_groups=2, rngs=rngs), TOKENS),
    "InstanceNorm": nnx_layer(lambda rngs: nnx.InstanceNorm(8, rngs=rngs), TOKENS),
    "LSTMCell": nnx_layer(
        lambda rngs: nnx.LSTMCell(8, 4, rngs=rngs), (ROWS[:, :4], ROWS[:, 4:]), ROWS
    ),
    "LayerNorm": nnx_layer(lambda rngs: nnx.LayerNorm(8, rngs=rngs), TOKENS),
    "Linear": nnx_layer(lambda rngs: nnx.Linear(8, 4, rngs=rngs), TOKENS),
    "LinearGeneral": nnx_layer(
        lambda rngs: nnx.LinearGeneral((2, 4), 6, axis=(-2, -1), rngs=rngs), HEADS
    ),
    "LoRA": nnx_layer(lambda rngs: nnx.LoRA(8, 2, 4, rngs=rngs), TOKENS),
    "LoRALinear": nnx_layer(lambda rngs: nnx.LoRALinear(8, 4, lora_rank=2, rngs=rngs), TOKENS),
    "MultiHeadAttention": nnx_layer(
        lambda rngs: nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs), TOKENS
    ),
    "OptimizedLSTMCell": nnx_layer(
        lambda rngs: nnx.OptimizedLSTMCell(8, 4, rngs=rngs), (ROWS[:, :4], ROWS[:, 4:]), ROWS
    ),
    "PReLU": nnx_layer(lambda rngs: nnx.PReLU(), TOKENS),
    "RMSNorm": nnx_layer(lambda rngs: nnx.RMSNorm(8, rngs=rngs), TOKENS),
    "RNN": nnx_layer(lambda rngs: nnx.RNN(nnx.GRUCell(8, 4, rngs=rngs)), TOKENS),
    "Sequential": nnx_layer(
        lambda rngs: nnx.Sequential(nnx.Linear(8, 4, rngs=rngs), nnx.relu), TOKENS
    ),
    "SimpleCell": nnx_layer(lambda rngs: nnx.SimpleCell(8, 4, rngs=rngs), ROWS[:, :4], ROWS),
    "SpectralNorm": nnx_layer(
        lambda rngs: nnx.SpectralNorm(nnx.Linear(8, 4, rngs=rngs), rngs=rngs),
        TOKENS,
        update_stats=True,
    ),
    "WeightNorm": nnx_layer(
        lambda rngs: nnx.WeightNorm(nnx.Linear(8, 4, rngs=rngs), rngs=rngs), TOKENS
    ),
}

CARRY = (ROWS[:, :4], ROWS[:, 4:])
PRODUCT = (((2,), (0,)), ((), ()))  # of tokens and a matrix
MATRIX = RNG.normal(size=(8, 4)).astype(np.float32)


class _Product(nn.Module):
    """An fp8 product of tokens and a parameter."""

    op: type[nn.Module]

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.ones, (8, 4))
        if self.op is nn.Fp8Einsum:
            return self.op()("btd,df->btf", x, kernel)
        return self.op()(x, kernel, PRODUCT)


class _Normed(nn.Module):
    """A norm of the weights of a layer."""

    norm: type[nn.Module]
    options: dict[str, Any]

    @nn.compact
    def __call__(self, x):
        return self.norm(nn.Dense(4))(x, **self.options)


LINEN = {
    "BatchNorm": linen_layer(nn.BatchNorm(use_running_average=False), TOKENS),
    "Bidirectional": linen_layer(
        nn.Bidirectional(nn.RNN(nn.GRUCell(4)), nn.RNN(nn.GRUCell(4))), TOKENS
    ),
    "Conv": linen_layer(nn.Conv(8, (3, 3)), IMAGES),
    "ConvLSTMCell": linen_layer(nn.ConvLSTMCell(4, (3, 3)), (IMAGES, IMAGES), IMAGES),
    "ConvLocal": linen_layer(nn.ConvLocal(8, (3, 3)), IMAGES),
    "ConvTranspose": linen_layer(nn.ConvTranspose(8, (3, 3)), IMAGES),
    "Dense": linen_layer(nn.Dense(4), TOKENS),
    "DenseGeneral": linen_layer(nn.DenseGeneral(6, axis=(-2, -1)), HEADS),
    "Dropout": linen_layer(nn.Dropout(0.5, deterministic=False), TOKENS),
    "Einsum": linen_layer(nn.Einsum((8, 4), "btd,df->btf"), TOKENS),
    "Embed": linen_layer(nn.Embed(8, 4), IDS),
    **{
        op.__name__: linen_layer(_Product(op), TOKENS)
        for op in (
            nn.Fp8DirectDotGeneralOp,
            nn.Fp8DotGeneralOp,
            nn.Fp8Einsum,
            nn.NANOOFp8DotGeneralOp,
        )
    },
    "Fp8DotGeneral": linen_layer(_Product(nn.Fp8DotGeneral), TOKENS),
    "GRUCell": linen_layer(nn.GRUCell(4), ROWS[:, :4], ROWS),
    "GroupNorm": linen_layer(nn.GroupNorm(num_groups=2), TOKENS),
    "InstanceNorm": linen_layer(nn.InstanceNorm(), TOKENS),
    "LSTMCell": linen_layer(nn.LSTMCell(4), CARRY, ROWS),
    "LayerNorm": linen_layer(nn.LayerNorm(), TOKENS),
    "MGUCell": linen_layer(nn.MGUCell(4), ROWS[:, :4], ROWS),
    **{
        cls.__name__: linen_layer(cls(num_heads=2), TOKENS)
        for cls in (nn.MultiHeadAttention, nn.MultiHeadDotProductAttention, nn.SelfAttention)
    },
    "OptimizedLSTMCell": linen_layer(nn.OptimizedLSTMCell(4), CARRY, ROWS),
    "PReLU": linen_layer(nn.PReLU(), TOKENS),
    "RMSNorm": linen_layer(nn.RMSNorm(), TOKENS),
    "RNN": linen_layer(nn.RNN(nn.OptimizedLSTMCell(4)), TOKENS),
    "Sequential": linen_layer(nn.Sequential([nn.Dense(4), nn.relu]), TOKENS),
    "SimpleCell": linen_layer(nn.SimpleCell(4), ROWS[:, :4], ROWS),
    "SpectralNorm": linen_layer(_Normed(nn.SpectralNorm, {"update_stats": True}), TOKENS),
    "WeightNorm": linen_layer(_Normed(nn.WeightNorm, {}), TOKENS),
}

h = hierarchy
DIMS = {"input_dim": 8, "output_dim": 8}
QKV = {"query_dim": 8, "key_dim": 8, "value_dim": 8, "num_heads": 2}
PER_HEAD = {"model_dim": 8, "num_heads": 2, "per_head_dim": 4}
ADAPTER = {"rank": 2, "alpha": 4.0}
SEQUENCE = {"tokens": TOKENS, "paddings": PADDINGS}


def attention(cls: type[h.MultiheadAttention], **fields: Any) -> Layer:
    return layer(cls, [TOKENS], result=lambda y: y.data, **QKV, **fields)


def qkv_linear(cls: type[h.BaseQKVLinear], **fields: Any) -> Layer:
    return layer(cls, [TOKENS], per_head_dim=4, **QKV, **fields)


def transformer_config() -> h.TransformerLayer.Config:
    cfg = h.TransformerLayer.default_config()
    cfg.self_attention.attention.num_heads = 2
    cfg.feed_forward.hidden_dim = 4
    return cfg


def parallel_config() -> h.ParallelTransformerLayer.Config:
    cfg = h.ParallelTransformerLayer.default_config()
    cfg.self_attention.num_heads = 2
    cfg.feed_forward.hidden_dim = 4
    return cfg


def transformer(cls: type[h.BaseTransformerLayer], **fields: Any) -> Layer:
    return layer(cls, [TOKENS], result=lambda y: y.data, input_dim=8, **fields)


def pooling(cls: type[h.BasePoolingLayer], **fields: Any) -> Layer:
    return layer(cls, SEQUENCE, **DIMS, **fields)


def bias(cls: type[h.AttentionLogitBiasLayer], **fields: Any) -> Layer:
    return layer(cls, {"segment_ids": SEGMENTS, "positions": POSITIONS}, **fields)


def experts(cls: type[h.TransformerFeedForwardMoE], **fields: Any) -> Layer:
    inputs = {"inputs": TOKENS, "paddings": PADDINGS}
    fields = {"hidden_dim": 4, "num_experts": 4, "structure": "prenorm", **fields}
    fields["dim_to_mesh_axis_map"] = {}
    return layer(cls, inputs, input_dim=8, **fields)


def gating(cls: type[h.BaseGating], **fields: Any) -> Layer:
    logits = RNG.normal(size=(2, 2, 4, 4)).astype(np.float32)  # outer, group, token, expert
    if issubclass(cls, h.TopKDropFreeGating):
        logits = TOKENS
        fields["num_experts"] = 8
    return layer(
        cls,
        [logits],
        result=lambda y: (y.combine_tensor, y.load_balance_loss),
        **{"num_experts": 4, **fields},
    )


def cache(cls: type[h.BaseKVCache], **fields: Any) -> Layer:
    built = cls.default_config().set(name="cache", **fields).instantiate(parent=None)
    states = jax.tree.map(np.asarray, built.init_states(HEADS.shape, dtype=jnp.float32))
    heads = HEADS[:, :2]
    inputs = {"cached_states": states, "k_proj": heads, "v_proj": heads}
    inputs["key_positions"] = POSITIONS[:, :2]
    return layer(cls, inputs, method="extend_step", result=lambda y: y[1][:2], **fields)


def loss_metrics(cls: type[h.BaseLossMetrics], **fields: Any) -> Layer:
    batch = {"target_labels": IDS, "target_num_bytes": np.full(4, 8)}
    inputs = {"input_batch": batch, "predict_outputs": {"logits": TOKENS}, "module_outputs": {}}
    return layer(cls, inputs, result=lambda y: y[0].mean, **fields)


def feed_forward(cls: type[h.BaseLayer], **fields: Any) -> Layer:
    return layer(cls, [TOKENS], input_dim=8, hidden_dim=4, **fields)


def answers_metrics(cls: type[h.BaseLossMetrics], **extra: Any) -> Layer:
    batch = {"target_labels": IDS, "live_targets": SEGMENTS.astype(bool), **extra}
    inputs = {"input_batch": batch, "predict_outputs": {"logits": TOKENS}, "module_outputs": {}}
    return layer(cls, inputs, result=lambda y: y[0].mean)


STACK = {"num_layers": 2, "layer": transformer_config()}
PATCHES = {"dim": 8, "image_size": (8, 8), "patch_size": (4, 4), "num_channels": 4}
SAME2 = {"padding": "SAME", "window": (3, 3)}
SAME3 = {"padding": "SAME", "window": (3, 3, 3)}
VOCABULARY = h.ModalityVocabInfo("text", 0, 0, vocab_start=0, vocab_end=8)
PADDED_IMAGES = {"x": IMAGES, "paddings": PADDINGS}
PADDED_TOKENS = {"x": TOKENS, "paddings": PADDINGS}
DROP_FREE = {
    "input_dim_to_partition_spec": {"bsm": PartitionSpec("data"), "emh": None, "ehm": None},
    "output_dim_to_partition_spec": {},
}
CELL = h.LSTMCell.default_config()
ROPE = {"positions": POSITIONS}

HIERARCHY = {
    "ALiBiAttentionLogitBiasLayer": bias(h.ALiBiAttentionLogitBiasLayer, num_heads=2),
    "AdaptiveLoadBalanceLoss": layer(
        h.AdaptiveLoadBalanceLoss,
        [np.float32(0.5)],
        max_value=0.1,
        moving_average=h.MovingAverage.default_config().set(min_weight=0.1),
    ),
    "ApproximateTokenDropFreeMoE": experts(h.ApproximateTokenDropFreeMoE, **DROP_FREE),
    "AttentionPooling": pooling(h.AttentionPooling),
    "AuxLossMetrics": loss_metrics(h.AuxLossMetrics),
    "AveragePooling": pooling(h.AveragePooling),
    "BatchNorm": layer(h.BatchNorm, [TOKENS], input_dim=8),
    "BinaryClassificationMetric": layer(
        h.BinaryClassificationMetric, {"logits": ROWS[:, 0], "labels": LABELS % 2}
    ),
    "BottleNeckAdapterTransformerLayer": transformer(
        h.BottleNeckAdapterTransformerLayer, layer=transformer_config()
    ),
    "CategoricalHingeLossMetric": layer(
        h.CategoricalHingeLossMetric, {"logits": ROWS, "labels": LABELS}, num_classes=8
    ),
    "CausalAttentionLogitBiasLayer": bias(h.CausalAttentionLogitBiasLayer),
    "ClassificationMetric": layer(
        h.ClassificationMetric, {"logits": ROWS, "labels": LABELS}, num_classes=8
    ),
    "CompositeLossMetrics": loss_metrics(
        h.CompositeLossMetrics,
        metrics={
            "lm": h.CrossEntropyLossMetrics.default_config(),
            "aux": h.AuxLossMetrics.default_config(),
        },
    ),
    "Conv1D": layer(h.Conv1D, [TOKENS], window=3, padding="SAME", **DIMS),
    "Conv1DTranspose": layer(h.Conv1DTranspose, PADDED_TOKENS, window=3, padding="SAME", **DIMS),
    "Conv1DWithPadding": layer(
        h.Conv1DWithPadding, PADDED_TOKENS, window=3, padding="SAME", **DIMS
    ),
    "Conv2D": layer(h.Conv2D, [IMAGES], input_dim=4, output_dim=8, **SAME2),
    "Conv2DTranspose": layer(h.Conv2DTranspose, [IMAGES], input_dim=4, output_dim=8, **SAME2),
    "Conv2DTransposeWith1DPadding": layer(
        h.Conv2DTransposeWith1DPadding,
        PADDED_IMAGES,
        input_dim=4,
        output_dim=8,
        **SAME2,
    ),
    "Conv2DWith1DPadding": layer(
        h.Conv2DWith1DPadding, PADDED_IMAGES, input_dim=4, output_dim=8, **SAME2
    ),
    "Conv3D": layer(h.Conv3D, [VIDEOS], input_dim=4, output_dim=8, **SAME3),
    "Conv3DTranspose": layer(h.Conv3DTranspose, [VIDEOS], input_dim=4, output_dim=8, **SAME3),
    "CrossEntropyLossMetrics": loss_metrics(h.CrossEntropyLossMetrics),
    "Decoder": layer(
        h.Decoder,
        [{"input_ids": IDS}],
        result=lambda y: y["logits"],
        dim=8,
        vocab_size=8,
        transformer=h.StackedTransformerLayer.default_config().set(**STACK),
        logits_partition_spec=(None, None, None),
        attention_mask=None,
    ),
    "DropToken": layer(h.DropToken, [TOKENS], num_cls_tokens=0, rate=0.5),
    "Dropout": layer(h.Dropout, [TOKENS], rate=0.5),
    "DynamicNTKSinusoidalPositionalEmbedding": layer(
        h.DynamicNTKSinusoidalPositionalEmbedding, ROPE, dim=4, original_max_seq_length=4
    ),
    "Embedding": layer(h.Embedding, [IDS], num_embeddings=8, dim=4),
    "Encoder": layer(
        h.Encoder,
        {"input_batch": {"image": IMAGES}},
        dim=8,
        emb=h.PatchEmbedding.default_config().set(**PATCHES),
        transformer=h.RepeatedTransformerLayer.default_config().set(**STACK),
        output_norm=h.LayerNorm.default_config(),
        pooler=h.PoolingWithProjection.default_config().set(
            output_dim=8, pooler=h.FirstNTokenPooling.default_config()
        ),
    ),
    "FirstNTokenPooling": pooling(h.FirstNTokenPooling),
    "FullAttentionLogitBiasLayer": bias(h.FullAttentionLogitBiasLayer),
    "FusedGroupedQKVLinear": qkv_linear(h.FusedGroupedQKVLinear, num_kv_heads=1),
    "FusedQKVLinear": qkv_linear(h.FusedQKVLinear),
    "GradientMonitor": layer(h.GradientMonitor, [TOKENS]),
    "GroupNorm": layer(h.GroupNorm, [TOKENS], input_dim=8, num_groups=2),
    "GroupedQKVLinear": qkv_linear(h.GroupedQKVLinear, num_kv_heads=1),
    "GroupedQueryAttention": attention(
        h.GroupedQueryAttention,
        input_linear=h.GroupedQKVLinear.default_config().set(num_kv_heads=1),
    ),
    "GumbelSoftmaxVectorQuantizer": layer(
        h.GumbelSoftmaxVectorQuantizer,
        {"inputs": TOKENS, "paddings": PADDINGS},
        result=lambda y: y.quantized_vectors,
        input_dim=8,
        codebook_size=3,
        codebook_dim=4,
        num_codebooks=2,
    ),
    "IdentityCell": layer(h.IdentityCell, [TOKENS], input_dim=8),
    "KVCache": cache(h.KVCache),
    "KmeansVectorQuantizer": layer(
        h.KmeansVectorQuantizer,
        {"inputs": TOKENS, "paddings": PADDINGS},
        result=lambda y: y.quantized_vectors,
        codebook_size=3,
        codebook_dim=4,
        num_codebooks=2,
    ),
    "L2Norm": layer(h.L2Norm, [TOKENS]),
    "LSTMCell": layer(h.LSTMCell, [TOKENS], input_dim=8),
    "LastNTokenPooling": pooling(h.LastNTokenPooling),
    "LayerNorm": layer(h.LayerNorm, [TOKENS], input_dim=8),
    "LayerNormStateless": layer(h.LayerNormStateless, [TOKENS], input_dim=8),
    "LearnedPositionalEmbedding": layer(h.LearnedPositionalEmbedding, [IDS], dim=4, shape=(8,)),
    "Linear": layer(h.Linear, [TOKENS], **DIMS),
    "Llama3SinusoidalPositionalEmbedding": layer(
        h.Llama3SinusoidalPositionalEmbedding, ROPE, dim=4, original_max_seq_length=8
    ),
    "LmHead": layer(h.LmHead, [TOKENS], embedding_dim=8, vocab_size=6),
    "LoraDownFusedLinear": layer(h.LoraDownFusedLinear, [TOKENS], num_enabled=2, **DIMS),
    "LoraDownMultiheadLinear": layer(h.LoraDownMultiheadLinear, [HEADS], **PER_HEAD),
    "LoraExperts": layer(
        h.LoraExperts,
        {"inputs": TOKENS, "paddings": PADDINGS},
        input_dim=8,
        layer=h.TransformerFeedForwardDropFreeMoE.default_config().set(
            hidden_dim=4, num_experts=4, dim_to_mesh_axis_map={}, **DROP_FREE
        ),
        adapter=h.lora.LoraExpertsAdapter.default_config().set(**ADAPTER),
    ),
    "LoraFusedQKVAdapter": layer(
        h.LoraFusedQKVAdapter,
        [TOKENS],
        num_heads=2,
        **DIMS | {"output_dim": 4},
        **ADAPTER,
        enable_lora={"query": True, "key": False, "value": True},
    ),
    "LoraFusedQKVLinear": qkv_linear(
        h.LoraFusedQKVLinear,
        adapter=h.LoraFusedQKVAdapter.default_config().set(
            enable_lora={"query": True, "key": False, "value": True}, **ADAPTER
        ),
    ),
    "LongRoPESinusoidalPositionalEmbedding": layer(
        h.LongRoPESinusoidalPositionalEmbedding,
        ROPE,
        dim=4,
        original_max_seq_length=4,
        short_factors=(1.0, 1.5),
        long_factors=(1.0, 3.0),
    ),
    "LoraLinear": layer(
        h.LoraLinear, [TOKENS], adapter=h.LoraLinearAdapter.default_config().set(**ADAPTER), **DIMS
    ),
    "LoraLinearAdapter": layer(h.LoraLinearAdapter, [TOKENS], **DIMS, **ADAPTER),
    "LoraMultiheadOutputAdapter": layer(
        h.LoraMultiheadOutputAdapter, [HEADS], num_heads=2, **DIMS, **ADAPTER
    ),
    "LoraMultiheadOutputLinear": layer(
        h.LoraMultiheadOutputLinear,
        [HEADS],
        adapter=h.LoraMultiheadOutputAdapter.default_config().set(**ADAPTER),
        **PER_HEAD,
    ),
    "LoraUpFusedLinear": layer(
        h.LoraUpFusedLinear, [HEADS], num_enabled=4, input_dim=4, num_heads=2, per_head_dim=4
    ),
    "LoraUpGroupedLinear": layer(
        h.LoraUpGroupedLinear, [[ROWS, ROWS]], input_dim=8, num_heads=(1, 1), per_head_dim=4
    ),
    "MaxPool2D": layer(h.MaxPool2D, [IMAGES], window=(2, 2), strides=(2, 2)),
    "MaxPooling": pooling(h.MaxPooling),
    "ModalityEmbedding": layer(
        h.ModalityEmbedding, [{"inputs": IDS}], dim=4, modality_vocab_info=VOCABULARY
    ),
    "ModalityLossMetrics": loss_metrics(h.ModalityLossMetrics, modalities={"text": VOCABULARY}),
    "MovingAverage": layer(h.MovingAverage, [np.float32(1)], min_weight=0.1),
    "MultiLinear": layer(h.MultiLinear, [TOKENS], num_outputs=2, **DIMS),
    "MultiheadAttention": attention(h.MultiheadAttention),
    "MultiheadAttentionXL": attention(h.MultiheadAttentionXL),
    "MultiheadInputLinear": layer(h.MultiheadInputLinear, [TOKENS], **PER_HEAD),
    "MultiheadOutputLinear": layer(h.MultiheadOutputLinear, [HEADS], **PER_HEAD),
    "MultiheadRelativePositionLinear": layer(h.MultiheadRelativePositionLinear, [ROWS], **PER_HEAD),
    "PagedKVCache": cache(h.PagedKVCache, page_size=4),
    "ParallelTransformerLayer": layer(
        h.ParallelTransformerLayer,
        [TOKENS],
        result=lambda y: y.data,
        input_dim=8,
        self_attention=parallel_config().self_attention,
        feed_forward=parallel_config().feed_forward,
    ),
    "PatchEmbedding": layer(h.PatchEmbedding, {"input_batch": {"image": IMAGES}}, **PATCHES),
    "PerDimScale": layer(h.PerDimScale, [HEADS], dim=4),
    "PipelinedTransformerLayer": transformer(
        h.PipelinedTransformerLayer,
        num_layers=2,
        num_stages=2,
        num_microbatches=2,
        layer=transformer_config(),
    ),
    "PoolingWithProjection": pooling(
        h.PoolingWithProjection, pooler=h.AveragePooling.default_config()
    ),
    "QKVLinear": qkv_linear(h.QKVLinear),
    "QLinear": layer(
        h.QLinear,
        {"query": TOKENS, "kv_state": h.KVState(HEADS, HEADS, POSITIONS)},
        per_head_dim=4,
        **QKV,
    ),
    "MultiheadRMSNorm": layer(h.MultiheadRMSNorm, [HEADS], num_heads=2, input_dim=4),
    "PolicyLossMetrics": answers_metrics(
        h.PolicyLossMetrics, advantages=ROWS[:, 0], rewards=ROWS[:, 1]
    ),
    "PreferenceLossMetrics": answers_metrics(h.PreferenceLossMetrics),
    "RMSNorm": layer(h.RMSNorm, [TOKENS], input_dim=8),
    "RMSNormStateless": layer(h.RMSNormStateless, [TOKENS], input_dim=8),
    "RandomVectorQuantizer": layer(
        h.RandomVectorQuantizer,
        {"inputs": TOKENS, "paddings": PADDINGS},
        result=lambda y: y.quantized_vectors,
        input_dim=8,
        codebook_size=3,
        codebook_dim=4,
        num_codebooks=2,
    ),
    "RelativePositionAttentionLogitBiasLayer": bias(
        h.RelativePositionAttentionLogitBiasLayer, num_heads=2
    ),
    "RepeatedRNNLayer": layer(h.RepeatedRNNLayer, [TOKENS], input_dim=8, num_layers=2, layer=CELL),
    "RepeatedTransformerLayer": transformer(h.RepeatedTransformerLayer, **STACK),
    "RingKVCache": cache(h.RingKVCache),
    "RoFormerQKVLinear": qkv_linear(h.RoFormerQKVLinear, rotary_value=False),
    "RoFormerSinusoidalPositionalEmbedding": layer(
        h.RoFormerSinusoidalPositionalEmbedding, ROPE, dim=4
    ),
    "ScaleKey": layer(h.ScaleKey, {"proj": HEADS, "positions": POSITIONS}, per_head_dim=4),
    "ScaleQuery": layer(h.ScaleQuery, {"proj": HEADS, "positions": POSITIONS}, per_head_dim=4),
    "SeparableSpaceTimePositionalEmbedding": layer(
        h.SeparableSpaceTimePositionalEmbedding,
        [IDS],
        dim=4,
        spatial_embeddings=h.Embedding.default_config().set(num_embeddings=4),
        temporal_embeddings=h.Embedding.default_config().set(num_embeddings=2),
    ),
    "SigmoidAttention": attention(h.SigmoidAttention, seq_len=8),
    "SinusoidalPositionalEmbedding": layer(h.SinusoidalPositionalEmbedding, [POSITIONS], dim=4),
    "SlidingWindowKVCache": cache(h.SlidingWindowKVCache, cached_kv_length=4),
    "SqueezeExcitation": layer(h.SqueezeExcitation, [IMAGES], input_dim=4, num_reduced_filters=2),
    "StackOverTime": layer(h.StackOverTime, {"inputs": TOKENS, "paddings": PADDINGS}, stride=2),
    "StackedRNNLayer": layer(h.StackedRNNLayer, [TOKENS], input_dim=8, layers=[CELL, CELL]),
    "StackedTransformerLayer": transformer(h.StackedTransformerLayer, **STACK),
    "StochasticDepth": layer(h.StochasticDepth, [TOKENS], rate=0.5),
    "SourceEncoder": layer(
        h.SourceEncoder,
        {"x": TOKENS, "segment_ids": SEGMENTS},
        dim=8,
        attention_mask=h.FullAttentionLogitBiasLayer.default_config(),
        transformer=h.StackedTransformerLayer.default_config().set(
            num_layers=1, layer=transformer_config()
        ),
    ),
    "SymmetricALiBiAttentionLogitBiasLayer": bias(
        h.SymmetricALiBiAttentionLogitBiasLayer, num_heads=2
    ),
    "Top2Gating": gating(h.Top2Gating),
    "TopKBiasGating": gating(h.TopKBiasGating),
    "TopKDropFreeGating": gating(h.TopKDropFreeGating),
    "TopKGating": gating(h.TopKGating),
    "TransformerAttentionLayer": layer(
        h.TransformerAttentionLayer,
        {"target": TOKENS},
        result=lambda y: y.data,
        target_dim=8,
        source_dim=8,
        attention=h.MultiheadAttention.default_config().set(num_heads=2),
    ),
    "TransformerFeedForwardDropFreeMoE": experts(h.TransformerFeedForwardDropFreeMoE, **DROP_FREE),
    "TransformerFeedForwardLayer": feed_forward(h.TransformerFeedForwardLayer),
    "TransformerFeedForwardMoE": experts(h.TransformerFeedForwardMoE, num_groups=2),
    "TransformerLayer": transformer(
        h.TransformerLayer,
        self_attention=transformer_config().self_attention,
        feed_forward=transformer_config().feed_forward,
    ),
    "TransformerTextEmbeddings": layer(
        h.TransformerTextEmbeddings,
        [{"inputs": IDS}],
        dim=4,
        vocab_size=8,
        pos_emb=h.LearnedPositionalEmbedding.default_config().set(shape=(8,)),
    ),
    "UnitNormLinear": layer(h.UnitNormLinear, [TOKENS], **DIMS),
    "YaRNSinusoidalPositionalEmbedding": layer(
        h.YaRNSinusoidalPositionalEmbedding, ROPE, dim=4, original_max_seq_length=8
    ),
}

BASES = {
    # bases of a user's layer that runs another one
    *("Pipeline", "RedirectToSharedModule", "Repeat", "ResidualLayer"),
    # models of a trainer, which lays out its batches
    *("EncoderClassifier", "EncoderDecoderModel", "MaskedLanguageModel"),
    *("ModelWithReference", "PolicyModel", "PreferenceModel"),
    # an output layer with the weight of another layer
    "MaskedLmHead",
    # a layer without a computation of its own
    *("AttentionLogitBiasLayer", "Dict", "List", "Module", "RNNCellBase"),
}

LAYERS = {
    **{f"nnx.{name}": case for name, case in NNX.items()},
    **{f"nn.{name}": case for name, case in LINEN.items()},
    **HIERARCHY,
}


def missing() -> list[str]:
    """Returns the public layer classes that are in no table."""
    tables: list[tuple[ModuleType, type, str]] = [
        (nnx, nnx.Module, "nnx."),
        (nn, nn.Module, "nn."),
        (hierarchy, hierarchy.BaseLayer, ""),
    ]
    names = []
    for package, base, prefix in tables:
        for name in dir(package):
            value = getattr(package, name)
            if not (inspect.isclass(value) and issubclass(value, base)):
                continue
            is_base = name in BASES or name.startswith("Base")
            if not is_base and prefix + name not in LAYERS:
                names.append(prefix + name)
    return names
