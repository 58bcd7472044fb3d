"""One small transformer, written as configs of the hierarchy, in Linen and in NNX; and bigrams."""

import jax
import numpy as np
import optax

from weft import linen, nnx
from weft.config import config_class
from weft.functional import cross_entropy
from weft.hierarchy.attention import TransformerLayer
from weft.hierarchy.base_layer import BaseModel
from weft.hierarchy.layers import Embedding, LayerNorm, Linear
from weft.traverse_util import flatten_dict, unflatten_dict

VOCAB, DIM, HEADS, HIDDEN = 16, 8, 2, 16
EPSILON = 1e-6
# Sharding of the hidden axis, by its names in Linen and NNX.
RULES = (("embed", None), ("hidden", "model"))
NAMES = ("embed", "hidden")
fan_in = jax.nn.initializers.lecun_normal()


def mean_loss(logits, input_batch):
    labels = input_batch["target_labels"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class Bigrams(BaseModel):
    """A language model that compiles in no time, for tests of what the trainer does around it."""

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        self._add_child("table", Embedding.default_config().set(num_embeddings=264, dim=264))

    def forward(self, input_batch):
        return cross_entropy(self.table(input_batch["input_ids"]), input_batch["target_labels"])


class HierarchyLM(BaseModel):
    """Of the library's transformer layers."""

    @config_class
    class Config(BaseModel.Config):
        num_layers: int = 1

    def __init__(self, cfg, *, parent):
        super().__init__(cfg, parent=parent)
        norm = LayerNorm.default_config().set(eps=EPSILON)
        layer = TransformerLayer.default_config().set(input_dim=DIM)
        layer.self_attention.norm = layer.feed_forward.norm = norm
        layer.self_attention.attention.set(num_heads=HEADS, causal=True)
        layer.feed_forward.set(hidden_dim=HIDDEN, activation="nn.relu")
        layer.feed_forward.linear1.param_partition_spec = (None, "model")
        layer.feed_forward.linear2.param_partition_spec = ("model", None)
        emb = Embedding.default_config().set(num_embeddings=VOCAB, dim=DIM)
        self._add_child("emb", emb)
        for i in range(cfg.num_layers):
            self._add_child(f"layer_{i}", layer)
        self._add_child("norm", norm.clone(input_dim=DIM))
        self._add_child("head", Linear.default_config().set(input_dim=DIM, output_dim=VOCAB))

    def forward(self, input_batch):
        x = self.emb(input_batch["input_ids"])
        for i in range(self.config.num_layers):
            x = self.children[f"layer_{i}"](x).data
        logits = self.head(self.norm(x))
        return mean_loss(logits, input_batch), {"logits": logits}


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x):
        mask = linen.make_causal_mask(x[..., 0])
        h = linen.LayerNorm(epsilon=EPSILON, name="norm_1")(x)
        x += linen.MultiHeadDotProductAttention(HEADS, name="attention")(h, mask=mask)
        h = linen.LayerNorm(epsilon=EPSILON, name="norm_2")(x)
        up = linen.with_logical_partitioning(fan_in, NAMES)
        down = linen.with_logical_partitioning(fan_in, NAMES[::-1])
        h = linen.Dense(HIDDEN, kernel_init=up, name="up")(h)
        h = linen.with_logical_constraint(linen.relu(h), (None, None, "hidden"))
        return x + linen.Dense(DIM, kernel_init=down, name="down")(h)


class LinenLM(linen.Module):
    """Of Linen's layers."""

    num_layers: int = 1

    @linen.compact
    def __call__(self, input_batch):
        x = linen.Embed(VOCAB, DIM, name="emb")(input_batch["input_ids"])
        for i in range(self.num_layers):
            x = LinenBlock(name=f"layer_{i}")(x)
        x = linen.LayerNorm(epsilon=EPSILON, name="norm")(x)
        logits = linen.Dense(VOCAB, name="head")(x)
        return mean_loss(logits, input_batch), {"logits": logits}


class NNXBlock(nnx.Module):
    def __init__(self, *, rngs):
        up = nnx.with_partitioning(fan_in, NAMES)
        down = nnx.with_partitioning(fan_in, NAMES[::-1])
        self.norm_1 = nnx.LayerNorm(DIM, epsilon=EPSILON, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, DIM, decode=False, rngs=rngs)
        self.norm_2 = nnx.LayerNorm(DIM, epsilon=EPSILON, rngs=rngs)
        self.up = nnx.Linear(DIM, HIDDEN, kernel_init=up, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, DIM, kernel_init=down, rngs=rngs)

    def __call__(self, x):
        x += self.attention(self.norm_1(x), is_causal=True)
        return x + self.down(nnx.relu(self.up(self.norm_2(x))))


class NNXLM(nnx.Module):
    """Of NNX's layers."""

    def __init__(self, num_layers: int = 1, *, rngs: nnx.Rngs):
        self.emb = nnx.Embed(VOCAB, DIM, rngs=rngs)
        for i in range(num_layers):
            setattr(self, f"layer_{i}", NNXBlock(rngs=rngs))
        self.norm = nnx.LayerNorm(DIM, epsilon=EPSILON, rngs=rngs)
        self.head = nnx.Linear(DIM, VOCAB, rngs=rngs)
        self.num_layers = num_layers

    def __call__(self, input_batch):
        x = self.emb(input_batch["input_ids"])
        for i in range(self.num_layers):
            x = getattr(self, f"layer_{i}")(x)
        logits = self.head(self.norm(x))
        return mean_loss(logits, input_batch), {"logits": logits}


# Where the parameters of the hierarchy are in the other two, which have the same paths.
_BELOW_LAYER = {
    ("self_attention", "norm"): ("norm_1",),
    ("self_attention", "attention", "i_proj", "q_proj"): ("attention", "query"),
    ("self_attention", "attention", "i_proj", "k_proj"): ("attention", "key"),
    ("self_attention", "attention", "i_proj", "v_proj"): ("attention", "value"),
    ("self_attention", "attention", "o_proj"): ("attention", "out"),
    ("feed_forward", "norm"): ("norm_2",),
    ("feed_forward", "linear1"): ("up",),
    ("feed_forward", "linear2"): ("down",),
}


def from_hierarchy(params):
    """Returns the parameters of `LinenLM` and `NNXLM` for those of `HierarchyLM`, by path."""
    return {
        "params": unflatten_dict(dict(_moved(path, x) for path, x in flatten_dict(params).items()))
    }


def _moved(path, x):
    *above, name = path
    if above[0].startswith("layer_"):
        above = [above[0], *_BELOW_LAYER[tuple(above[1:])]]
    name = {"weight": "embedding" if above == ["emb"] else "kernel"}.get(name, name)
    if above[-1] == "out" and name == "kernel":
        x = np.moveaxis(x, 0, -1)  # the model's axis is the first in one, the last in the others
    return (*above, name), x
