"""Families of Hugging Face models: the conversions between their checkpoints and Weft's models.

A `Family` has one table of tensors, used in both directions, and two functions for `config.json`.
A `Conversion` of a tensor's layout goes both ways: `to_hf(to_weft(x))` is `x`. Kernels of torch's
Linear are `(outputs, inputs)`, those of GPT-2's Conv1D `(inputs, outputs)` as in Weft, where heads
have a separate axis: `(model_dim, num_heads, per_head_dim)`.

Rotary pair `i` is `(i, i + dim / 2)` in Hugging Face's files and `(2 i, 2 i + 1)` in Weft's layers,
so query and key kernels get their dimensions permuted; inner products do not change.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from weft import errors, hierarchy
from weft.interop.huggingface.settings import (
    ACTIVATIONS,
    MAX_SIZE,
    NO_PADDING,
    Setting,
    Settings,
)
from weft.typing import Tensor


class Conversion(NamedTuple):
    """A change of layout and its inverse, of NumPy arrays and JAX tracers."""

    to_weft: Callable[[Any], Any]
    to_hf: Callable[[Any], Any]


class TensorMapping(NamedTuple):
    """A tensor under both names.

    Attributes:
        hf_name: name in Hugging Face's files, with `{}` for the layer number, and `{expert}` where
          each expert has a tensor of its own.
        weft_name: path in Weft's parameters, relative to the layer if it belongs to one.
        change: of its layout.
        rows: the first and one after the last row of the tensor that the parameter is; None for the
          whole tensor.
        is_optional: whether a model may lack the parameter.
    """

    hf_name: str
    weft_name: str
    change: Conversion
    rows: tuple[int, int] | None = None
    is_optional: bool = False

    @property
    def has_experts(self) -> bool:
        """True if the tensors of all experts are one parameter."""
        return "{expert}" in self.hf_name

    @property
    def is_output_layer(self) -> bool:
        """True if the tensor is outside of the model to whose tensors the prefix belongs."""
        return self.weft_name.startswith("decoder.lm_head.")


IDENTITY = Conversion(lambda x: x, lambda x: x)
"""Vectors, tables, and kernels of the same layout."""

TRANSPOSED = Conversion(lambda x: x.T, lambda x: x.T)
"""Kernels of torch's Linear."""

POSITIONS = Conversion(lambda x: x[None], lambda x: x[0])
"""A table of learned positions."""


def _interleaved(dim: int) -> np.ndarray:
    """Returns the dimension in Hugging Face's order of each dimension in Weft's order."""
    return np.arange(dim).reshape(2, -1).T.ravel()


def rotary_order(rotary_dim: int | None = None) -> Conversion:
    """Returns the change of a vector for the dimensions of a head that is rotated.

    `rotary_dim` is the number of leading dimensions that are rotated; None for all.
    """

    def order(size: int) -> np.ndarray:
        rotated = _interleaved(rotary_dim or size)
        return np.concatenate([rotated, np.arange(len(rotated), size)])

    return Conversion(
        lambda x: x[..., order(x.shape[-1])],
        lambda x: x[..., np.argsort(order(x.shape[-1]))],
    )


ROTARY = rotary_order()
"""A vector for the dimensions of a head that is rotated."""


def input_heads(
    num_heads: int, *, rotary: bool = False, rotary_dim: int | None = None
) -> Conversion:
    """Returns the change of a kernel `(heads × dim, model_dim)` to (perhaps rotary) heads."""
    head_order = rotary_order(rotary_dim) if rotary else IDENTITY

    def to_weft(kernel: Tensor) -> Tensor:
        heads = kernel.T.reshape(kernel.shape[1], num_heads, -1)
        return head_order.to_weft(heads)

    def to_hf(kernel: Tensor) -> Tensor:
        return head_order.to_hf(kernel).reshape(kernel.shape[0], -1).T

    return Conversion(to_weft, to_hf)


def head_biases(
    num_heads: int, *, rotary: bool = False, rotary_dim: int | None = None
) -> Conversion:
    """Returns the change of the bias `(heads × dim,)` of `input_heads`."""
    head_order = rotary_order(rotary_dim) if rotary else IDENTITY
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
        lambda kernel: linear.to_weft(kernel.T),
        lambda kernel: linear.to_hf(kernel).T,
    )


def fused_heads_of_conv(num_heads: int) -> Conversion:
    """Returns the change of a kernel `(model_dim, 3 × heads × dim)` to queries, keys and values."""

    def to_weft(kernel: Tensor) -> Tensor:
        return kernel.reshape(kernel.shape[0], 3, num_heads, -1).transpose(
            1, 0, 2, 3
        )

    def to_hf(kernel: Tensor) -> Tensor:
        return kernel.transpose(1, 0, 2, 3).reshape(kernel.shape[1], -1)

    return Conversion(to_weft, to_hf)


def fused_parts_of_heads(
    num_heads: int, *, rotary_dim: int, is_bias: bool = False
) -> Conversion:
    """Returns the change of a kernel `(heads × 3 × dim, model_dim)`, or of its bias.

    Each head has its query, its key and its value. Of queries and keys, the first `rotary_dim`
    dimensions are rotated.
    """
    order = rotary_order(rotary_dim)

    def rows(size: int) -> np.ndarray:
        """Returns the row in Hugging Face's order of each in Weft's, `(3 × heads × dim,)`."""
        by_head = np.arange(size).reshape(num_heads, 3, -1)
        query, key, value = by_head.transpose(1, 0, 2)
        return np.stack([order.to_weft(query), order.to_weft(key), value])

    def to_weft(x: Tensor) -> Tensor:
        parts = x[rows(len(x))]
        return parts if is_bias else parts.transpose(0, 3, 1, 2)

    def to_hf(x: Tensor) -> Tensor:
        parts = x if is_bias else x.transpose(0, 2, 3, 1)
        flat = parts.reshape(-1, *parts.shape[3:])
        return flat[np.argsort(rows(len(flat)).ravel())]

    return Conversion(to_weft, to_hf)


def fused_head_biases(num_heads: int) -> Conversion:
    """Returns the change of the bias `(3 × heads × dim,)` of `fused_heads_of_conv`."""
    return Conversion(
        lambda x: x.reshape(3, num_heads, -1), lambda x: x.reshape(-1)
    )


ModelConfig = Any
"""The config of a causal LM, a sequence-to-sequence model, or an encoder, by the family."""


def no_settings(tensor_names: Collection[str]) -> dict[str, Setting]:
    """Returns no settings, for families whose `config.json` has them all."""
    del tensor_names
    return {}


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
        output_layer: name of the tensor of an output layer of its own.
        settings_of_files: makes settings that only the files tell, from the names of their tensors.
        copies: names of tensors that files may have twice, by the name of the copy.
        generates: whether the models generate text, with tokens that begin and end it.
        classifier: class of `transformers` that classifies by the encoder; None without one.
        has_source: whether the text is a target for a source, and does not continue it.
    """

    model_type: str
    architecture: str
    prefix: str
    read: Callable[[Settings], ModelConfig]
    write: Callable[[Any], dict[str, Any]]
    entries: Callable[[Settings], list[TensorMapping]]
    extra_allowed: str
    output_layer: str = "lm_head.weight"
    settings_of_files: Callable[[Collection[str]], dict[str, Setting]] = (
        no_settings
    )
    copies: Mapping[str, str] = {}
    generates: bool = True
    classifier: str | None = None
    has_source: bool = False


def decoder_config(
    s: Settings,
    layers: Sequence[hierarchy.BaseTransformerLayer.Config],
    *,
    dim: int,
    norm: hierarchy.BaseNormalizationLayer.Config,
) -> hierarchy.Decoder.Config:
    """Returns the config of a decoder with tied embeddings, without positions.

    `dim` is the model dimension, and `norm` follows the last layer.
    """
    decoder = hierarchy.Decoder.default_config().set(dim=dim, output_norm=norm)
    tokens = s.special_tokens()
    return decoder.set(
        vocab_size=s.size("vocab_size", most=MAX_SIZE),
        transformer=stack_of(
            layers, hierarchy.RepeatedTransformerLayer.default_config()
        ),
        **tokens,
    )


def stack_of(
    layers: Sequence[Any], stack: hierarchy.BaseStackedTransformerLayer.Config
) -> hierarchy.BaseStackedTransformerLayer.Config:
    """Returns a stack of the given layers, of the kind of another stack.

    Equal layers have one config. Where different ones alternate, a repeated stack repeats a block
    of them; without a period, each layer has its own parameters.
    """
    period = _period(layers)
    if period == 1:
        return stack.clone(num_layers=len(layers), layer=layers[0])
    block = hierarchy.StackedTransformerLayer.default_config()
    if isinstance(stack, hierarchy.StackedTransformerLayer.Config):
        return stack.clone(num_layers=len(layers), layer=list(layers))
    if period == len(layers):
        return block.set(num_layers=period, layer=list(layers))
    block.set(num_layers=period, layer=list(layers[:period]))
    return stack.clone(num_layers=len(layers) // period, layer=block)


def _period(layers: Sequence[Any]) -> int:
    """Returns after how many layers they repeat, a divisor of their number."""
    # Compared by number: configs are large.
    kinds: list[Any] = []
    numbers: list[int] = []
    for layer in layers:
        number = next(
            (i for i, kind in enumerate(kinds) if kind is layer), None
        )
        if number is None:
            number = next(
                (i for i, kind in enumerate(kinds) if kind == layer), len(kinds)
            )
        if number == len(kinds):
            kinds.append(layer)
        numbers.append(number)
    for period in range(1, len(numbers)):
        is_divisor = len(numbers) % period == 0
        if is_divisor and numbers[period:] == numbers[:-period]:
            return period
    return len(numbers)


def layers_of(stack: Any) -> list[Any]:
    """Returns the config of each layer of a stack, the inverse of `stack_of`."""
    if isinstance(stack.layer, list | tuple):
        blocks = list(stack.layer)
    else:
        blocks = [stack.layer] * stack.num_layers
    layers: list[Any] = []
    for block in blocks:
        if isinstance(block, hierarchy.BaseStackedTransformerLayer.Config):
            layers += layers_of(block)
        else:
            layers.append(block)
    return layers


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


def dropout_rate(
    decoder: hierarchy.Decoder.Config, dropout: hierarchy.Dropout.Config
) -> float:
    """Returns the rate of a dropout config in training, by default the decoder's."""
    return decoder.dropout_rate if dropout.rate is None else dropout.rate


def activation_name(activation: str) -> str:
    """Returns the name of an activation in `config.json`.

    Raises HuggingFaceConfigError if there is none, TypeError for those of a gated layer.
    """
    if not isinstance(activation, str):
        raise TypeError("the feed-forward layer is gated")
    names: dict[str, str] = {}
    for hf_name, weft_name in ACTIVATIONS.items():
        names.setdefault(weft_name, hf_name)
    if activation not in names:
        raise errors.HuggingFaceConfigError(
            f"the activation {activation!r} has no name in Hugging Face's configs; there are "
            f"{', '.join(sorted(names))}."
        )
    return names[activation]


def hidden_dim(
    feed_forward: hierarchy.TransformerFeedForwardLayer.Config, input_dim: int
) -> int:
    """Returns the hidden dimension of a feed-forward config, computed if it is a function."""
    if isinstance(feed_forward.hidden_dim, int):
        return feed_forward.hidden_dim
    return feed_forward.hidden_dim.clone(input_dim=input_dim).instantiate()


def linear_entries(
    hf_name: str,
    weft_name: str,
    kernel: Conversion = IDENTITY,
    bias: Conversion | None = None,
    *,
    rows: tuple[int, int] | None = None,
) -> list[TensorMapping]:
    """Returns the entries of a linear layer or table, from the changes of its kernel and bias.

    `rows` are those of a fused kernel and bias.
    """
    entries = [
        TensorMapping(f"{hf_name}.weight", f"{weft_name}.weight", kernel, rows)
    ]
    if bias is not None:
        entries.append(
            TensorMapping(f"{hf_name}.bias", f"{weft_name}.bias", bias, rows)
        )
    return entries


def norm_entries(
    hf_name: str, weft_name: str, *, bias: bool = False
) -> list[TensorMapping]:
    """Returns the entries of a norm."""
    entries = [
        TensorMapping(f"{hf_name}.weight", f"{weft_name}.scale", IDENTITY)
    ]
    if bias:
        entries.append(
            TensorMapping(f"{hf_name}.bias", f"{weft_name}.bias", IDENTITY)
        )
    return entries
