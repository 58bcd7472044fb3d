"""Families of Hugging Face models: the conversions between their checkpoints and Weft's models.

A `Family` has one table of tensors, used in both directions, and two functions for `config.json`.
A `Conversion` of a tensor's layout goes both ways: `to_hf(to_weft(x))` is `x`. Kernels of torch's
Linear are `(outputs, inputs)`, those of GPT-2's Conv1D `(inputs, outputs)` as in Weft, where heads
have a separate axis: `(model_dim, num_heads, per_head_dim)`.

Rotary pair `i` is `(i, i + dim / 2)` in Hugging Face's files and `(2 i, 2 i + 1)` in Weft's layers,
so query and key kernels get their dimensions permuted; inner products do not change.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from weft import errors, hierarchy
from weft.hierarchy.causal_lm import Model
from weft.interop.huggingface.settings import ACTIVATIONS, MAX_SIZE, NO_PADDING, Settings
from weft.typing import Tensor


class Conversion(NamedTuple):
    """A change of layout and its inverse, of NumPy arrays and JAX tracers."""

    to_weft: Callable[[Any], Any]
    to_hf: Callable[[Any], Any]


class TensorMapping(NamedTuple):
    """A tensor under both names.

    Attributes:
        hf_name: name in Hugging Face's files, with `{}` for the layer number.
        weft_name: path in Weft's parameters, relative to the layer if it belongs to one.
        change: of its layout.
    """

    hf_name: str
    weft_name: str
    change: Conversion


IDENTITY = Conversion(lambda x: x, lambda x: x)
"""Vectors, tables, and kernels of the same layout."""

TRANSPOSED = Conversion(lambda x: x.T, lambda x: x.T)
"""Kernels of torch's Linear."""

POSITIONS = Conversion(lambda x: x[None], lambda x: x[0])
"""A table of learned positions."""


def _interleaved(dim: int) -> np.ndarray:
    """Returns the dimension in Hugging Face's order of each dimension in Weft's order."""
    return np.arange(dim).reshape(2, -1).T.ravel()


ROTARY = Conversion(
    lambda x: x[..., _interleaved(x.shape[-1])],
    lambda x: x[..., np.argsort(_interleaved(x.shape[-1]))],
)
"""A vector for the dimensions of a head that is rotated."""


def input_heads(num_heads: int, *, rotary: bool = False) -> Conversion:
    """Returns the change of a kernel `(heads × dim, model_dim)` to (perhaps rotary) heads."""
    head_order = ROTARY if rotary else IDENTITY

    def to_weft(kernel: Tensor) -> Tensor:
        heads = kernel.T.reshape(kernel.shape[1], num_heads, -1)
        return head_order.to_weft(heads)

    def to_hf(kernel: Tensor) -> Tensor:
        return head_order.to_hf(kernel).reshape(kernel.shape[0], -1).T

    return Conversion(to_weft, to_hf)


def head_biases(num_heads: int, *, rotary: bool = False) -> Conversion:
    """Returns the change of the bias `(heads × dim,)` of `input_heads`."""
    head_order = ROTARY if rotary else IDENTITY
    return Conversion(
        lambda bias: head_order.to_weft(bias.reshape(num_heads, -1)),
        lambda bias: head_order.to_hf(bias).reshape(-1),
    )


def output_heads(num_heads: int) -> Conversion:
    """Returns the change of a kernel `(model_dim, heads × dim)` from heads to the model."""
    return Conversion(
        lambda kernel: kernel.reshape(kernel.shape[0], num_heads, -1),
        lambda kernel: kernel.reshape(kernel.shape[0], -1),
    )


def output_heads_of_conv(num_heads: int) -> Conversion:
    """Returns the change of a Conv1D kernel `(heads × dim, model_dim)`."""
    linear = output_heads(num_heads)
    return Conversion(
        lambda kernel: linear.to_weft(kernel.T), lambda kernel: linear.to_hf(kernel).T
    )


def fused_heads_of_conv(num_heads: int) -> Conversion:
    """Returns the change of a kernel `(model_dim, 3 × heads × dim)` to queries, keys and values."""

    def to_weft(kernel: Tensor) -> Tensor:
        return kernel.reshape(kernel.shape[0], 3, num_heads, -1).transpose(1, 0, 2, 3)

    def to_hf(kernel: Tensor) -> Tensor:
        return kernel.transpose(1, 0, 2, 3).reshape(kernel.shape[1], -1)

    return Conversion(to_weft, to_hf)


def fused_head_biases(num_heads: int) -> Conversion:
    """Returns the change of the bias `(3 × heads × dim,)` of `fused_heads_of_conv`."""
    return Conversion(lambda x: x.reshape(3, num_heads, -1), lambda x: x.reshape(-1))


class Family(NamedTuple):
    """A family of models.

    Attributes:
        model_type: name in `config.json`.
        architecture: class of `transformers` that has its logits.
        prefix: of tensor names, optional in files.
        write: makes the content of `config.json` for the config of a model; raises AttributeError
          or the like for a model of another kind.
        entries: tensors of a layer, and tensors outside of layers.
        extra_allowed: returns whether a file may have another tensor, by its name without prefix.
    """

    model_type: str
    architecture: str
    prefix: str
    read: Callable[[Settings], Model.Config]
    write: Callable[[Any], dict[str, Any]]
    entries: Callable[[Settings], list[TensorMapping]]
    extra_allowed: str


def decoder_config(
    s: Settings,
    layer: hierarchy.TransformerLayer.Config,
    *,
    num_layers: int,
    dim: int,
    norm: hierarchy.BaseNormalizationLayer.Config,
) -> hierarchy.Decoder.Config:
    """Returns the config of a decoder with tied embeddings, without positions.

    `dim` is the model dimension, and `norm` follows the last layer.
    """
    transformer = hierarchy.RepeatedTransformerLayer.default_config()
    transformer.set(num_layers=num_layers, layer=layer)
    decoder = hierarchy.Decoder.default_config().set(dim=dim, output_norm=norm)
    tokens = s.special_tokens()
    return decoder.set(
        vocab_size=s.size("vocab_size", most=MAX_SIZE), transformer=transformer, **tokens
    )


def special_tokens(decoder: hierarchy.Decoder.Config) -> dict[str, Any]:
    """Returns the special tokens for `config.json`: the inverse of `Settings.special_tokens`."""
    tokens: dict[str, int | list[int] | None] = {}
    for name in ("pad_token_id", "eos_token_id"):
        ids = getattr(decoder, name)
        if isinstance(ids, Sequence):
            tokens[name] = list(ids)
        else:
            tokens[name] = None if ids == NO_PADDING else ids
    return tokens


def dropout_rate(decoder: hierarchy.Decoder.Config, dropout: hierarchy.Dropout.Config) -> float:
    """Returns the rate of a dropout config in training, by default the decoder's."""
    return decoder.dropout_rate if dropout.rate is None else dropout.rate


def activation_name(activation: str) -> str:
    """Returns the name of an activation in `config.json`.

    Raises HuggingFaceConfigError if there is none.
    """
    names: dict[str, str] = {}
    for hf_name, weft_name in ACTIVATIONS.items():
        names.setdefault(weft_name, hf_name)
    if activation not in names:
        raise errors.HuggingFaceConfigError(
            f"the activation {activation!r} has no name in Hugging Face's configs; there are "
            f"{', '.join(sorted(names))}."
        )
    return names[activation]


def hidden_dim(feed_forward: hierarchy.TransformerFeedForwardLayer.Config, input_dim: int) -> int:
    """Returns the hidden dimension of a feed-forward config, computed if it is a function."""
    if isinstance(feed_forward.hidden_dim, int):
        return feed_forward.hidden_dim
    return feed_forward.hidden_dim.clone(input_dim=input_dim).instantiate()


def linear_entries(
    hf_name: str, weft_name: str, kernel: Conversion = IDENTITY, bias: Conversion | None = None
) -> list[TensorMapping]:
    """Returns the entries of a linear layer or table, from the changes of its kernel and bias."""
    entries = [TensorMapping(f"{hf_name}.weight", f"{weft_name}.weight", kernel)]
    if bias is not None:
        entries.append(TensorMapping(f"{hf_name}.bias", f"{weft_name}.bias", bias))
    return entries


def norm_entries(hf_name: str, weft_name: str, *, bias: bool = False) -> list[TensorMapping]:
    """Returns the entries of a norm."""
    entries = [TensorMapping(f"{hf_name}.weight", f"{weft_name}.scale", IDENTITY)]
    if bias:
        entries.append(TensorMapping(f"{hf_name}.bias", f"{weft_name}.bias", IDENTITY))
    return entries
