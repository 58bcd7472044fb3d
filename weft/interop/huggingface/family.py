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
    turn = ROTARY if rotary else IDENTITY

    return Conversion(
        lambda x: turn.to_weft(x.T.reshape(x.shape[1], num_heads, -1)),
        lambda x: turn.to_hf(x).reshape(x.shape[0], -1).T,
    )


def head_biases(num_heads: int, *, rotary: bool = False) -> Conversion:
    """Returns the change of the bias `(heads × dim,)` of `input_heads`."""
    turn = ROTARY if rotary else IDENTITY
    return Conversion(
        lambda x: turn.to_weft(x.reshape(num_heads, -1)), lambda x: turn.to_hf(x).reshape(-1)
    )


def output_heads(num_heads: int) -> Conversion:
    """Returns the change of a kernel `(model_dim, heads × dim)` from heads to the model."""
    return Conversion(
        lambda x: x.reshape(x.shape[0], num_heads, -1), lambda x: x.reshape(x.shape[0], -1)
    )


def output_heads_of_conv(num_heads: int) -> Conversion:
    """Returns the change of a Conv1D kernel `(heads × dim, model_dim)`."""
    inner = output_heads(num_heads)
    return Conversion(lambda x: inner.to_weft(x.T), lambda x: inner.to_hf(x).T)


def fused_heads_of_conv(num_heads: int) -> Conversion:
    """Returns the change of a kernel `(model_dim, 3 × heads × dim)` to queries, keys and values."""
    return Conversion(
        lambda x: x.reshape(x.shape[0], 3, num_heads, -1).transpose(1, 0, 2, 3),
        lambda x: x.transpose(1, 0, 2, 3).reshape(x.shape[1], -1),
    )


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
    s: Settings, layer: object, *, num_layers: int, dim: int, norm: object
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


def special_tokens(decoder: object) -> dict[str, Any]:
    """Returns the special tokens for `config.json`: the inverse of `Settings.special_tokens`."""
    tokens = {name: getattr(decoder, name) for name in ("pad_token_id", "eos_token_id")}
    several = {name: list(ids) for name, ids in tokens.items() if isinstance(ids, Sequence)}
    return {name: None if i == NO_PADDING else i for name, i in tokens.items()} | several


def dropout_rate(decoder: hierarchy.Decoder.Config, dropout: hierarchy.Dropout.Config) -> float:
    """Returns the rate of a dropout config in training, by default the decoder's."""
    return decoder.dropout_rate if dropout.rate is None else dropout.rate


def activation_name(activation: str) -> str:
    """Returns the name of an activation in `config.json`.

    Raises HuggingFaceConfigError if there is none.
    """
    names = {weft_name: hf_name for hf_name, weft_name in reversed(ACTIVATIONS.items())}
    if activation not in names:
        raise errors.HuggingFaceConfigError(
            f"the activation {activation!r} has no name in Hugging Face's configs; there are "
            f"{', '.join(sorted(names))}."
        )
    return names[activation]


def hidden_dim(feed_forward: hierarchy.TransformerFeedForwardLayer.Config, input_dim: int) -> int:
    """Returns the hidden dimension of a feed-forward config, computed if it is a function."""
    value = feed_forward.hidden_dim
    return value if isinstance(value, int) else value.clone(input_dim=input_dim).instantiate()


def linear_entries(
    hf_name: str, weft_name: str, kernel: Conversion = IDENTITY, bias: Conversion | None = None
) -> list[TensorMapping]:
    """Returns the entries of a linear layer or table, from the changes of its kernel and bias."""
    changes = {"weight": kernel} if bias is None else {"weight": kernel, "bias": bias}
    return [TensorMapping(f"{hf_name}.{n}", f"{weft_name}.{n}", c) for n, c in changes.items()]


def norm_entries(hf_name: str, weft_name: str, *, bias: bool = False) -> list[TensorMapping]:
    """Returns the entries of a norm."""
    names = {"weight": "scale", "bias": "bias"} if bias else {"weight": "scale"}
    return [TensorMapping(f"{hf_name}.{a}", f"{weft_name}.{b}", IDENTITY) for a, b in names.items()]
