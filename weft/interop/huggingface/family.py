"""A family of models: one table of tensors that is used in both directions, and two functions.

config.json     ── read ──►    Model.Config
                ◄── write ──
safetensors     ◄─ entries ─►  parameters
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from weft.errors import HuggingFaceConfigError
from weft.hierarchy.causal_lm import Model
from weft.hierarchy.decoder import Decoder
from weft.hierarchy.stack import RepeatedTransformerLayer
from weft.interop.huggingface.changes import SAME, Entry
from weft.interop.huggingface.settings import ACTIVATIONS, NO_PADDING, Settings


class Family(NamedTuple):
    """A family of models.

    Attributes:
        model_type: name in `config.json`.
        architecture: class of `transformers` that has its logits.
        prefix: of tensor names, optional in files.
        read: makes the config of a model.
        write: makes the content of `config.json` for the config of a model; raises AttributeError
          or the like for a model of another kind.
        entries: tensors of a layer, and tensors outside of layers.
        may_stand: returns whether a file may have another tensor, by its name without prefix.
    """

    model_type: str
    architecture: str
    prefix: str
    read: Callable[[Settings], Model.Config]
    write: Callable[[Any], dict[str, Any]]
    entries: Callable[[Settings], list[Entry]]
    may_stand: str


def decoder_config(
    s: Settings, layer: Any, *, num_layers: int, dim: int, norm: Any
) -> Decoder.Config:
    """Returns the config of a decoder with tied embeddings, without positions.

    `dim` is the model dimension, and `norm` follows the last layer.
    """
    stack = RepeatedTransformerLayer.default_config().set(num_layers=num_layers, layer=layer)
    return Decoder.default_config().set(
        vocab_size=s.size("vocab_size"),
        dim=dim,
        transformer=stack,
        output_norm=norm,
        **s.special_tokens(),
    )


def special_tokens(decoder: Any) -> dict[str, Any]:
    """Returns the special tokens for `config.json`: the inverse of `Settings.special_tokens`."""
    tokens = {name: getattr(decoder, name) for name in ("pad_token_id", "eos_token_id")}
    return {name: None if i == NO_PADDING else i for name, i in tokens.items()}


def dropout_rate(decoder: Any, dropout: Any) -> float:
    """Returns the rate of a dropout config in training, by default the decoder's."""
    return decoder.dropout_rate if dropout.rate is None else dropout.rate


def activation_name(activation: str) -> str:
    """Returns the name of an activation in `config.json`.

    Raises:
        HuggingFaceConfigError: if there is none.
    """
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    if activation not in names:
        raise HuggingFaceConfigError(
            f"the activation {activation!r} has no name in Hugging Face's configs; there are "
            f"{', '.join(sorted(names))}."
        )
    return names[activation]


def hidden_dim(feed_forward: Any, input_dim: int) -> int:
    """Returns the hidden dimension of a feed-forward config, computed if it is a function."""
    value = feed_forward.hidden_dim
    return value if isinstance(value, int) else value.clone(input_dim=input_dim).instantiate()


def norm_entries(theirs: str, ours: str, *, bias: bool = False) -> list[Entry]:
    """Returns the entries of a norm."""
    names = {"weight": "scale", "bias": "bias"} if bias else {"weight": "scale"}
    return [Entry(f"{theirs}.{a}", f"{ours}.{b}", SAME) for a, b in names.items()]
