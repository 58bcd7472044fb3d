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
        model_type: Its name in `config.json`.
        architecture: The class of `transformers` that has its logits.
        prefix: What the names of tensors begin with, which some files leave out.
        read: Makes the config of a model.
        write: The content of a `config.json` for the config of a model; raises AttributeError or
          the like for a model of another kind.
        entries: Its tensors, of a layer and beside the layers.
        may_stand: Tells which other tensors a file may have, after the prefix.
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
    """The config of a decoder with tied embeddings and without positions.

    Args:
        s: The model's settings.
        layer: The config of a layer.
        num_layers: How many there are.
        dim: The dimension of the model.
        norm: After the last layer.
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
    """What `config.json` says of special tokens: the inverse of `Settings.special_tokens`.

    Args:
        decoder: The config of a decoder.
    """
    tokens = {name: getattr(decoder, name) for name in ("pad_token_id", "eos_token_id")}
    return {name: None if i == NO_PADDING else i for name, i in tokens.items()}


def dropout_rate(decoder: Any, dropout: Any) -> float:
    """The rate that a dropout has in training.

    Args:
        decoder: The config of a decoder, whose rate is for those that have none.
        dropout: The config of a part of it.
    """
    return decoder.dropout_rate if dropout.rate is None else dropout.rate


def activation_name(activation: str) -> str:
    """The name that `config.json` has for an activation.

    Args:
        activation: Its name here.

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
    """The hidden dimension of a feed-forward layer's config, computed if it is a function.

    Args:
        feed_forward: The config.
        input_dim: The dimension of the model.
    """
    value = feed_forward.hidden_dim
    return value if isinstance(value, int) else value.clone(input_dim=input_dim).instantiate()


def norm_entries(theirs: str, ours: str, *, bias: bool = False) -> list[Entry]:
    """The parameters of a norm.

    Args:
        theirs: Its name in Hugging Face's files.
        ours: Its path.
        bias: Whether it has a bias.
    """
    names = {"weight": "scale", "bias": "bias"} if bias else {"weight": "scale"}
    return [Entry(f"{theirs}.{a}", f"{ours}.{b}", SAME) for a, b in names.items()]
