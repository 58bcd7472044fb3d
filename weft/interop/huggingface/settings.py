"""Settings of a `config.json`, and their counterparts in Weft."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from weft import errors, functional, hierarchy

ACTIVATIONS = {
    "silu": "nn.silu",
    "swish": "nn.silu",
    "relu": "nn.relu",
    "gelu": "exact_gelu",
    "gelu_new": "nn.gelu",
    "gelu_fast": "nn.gelu",
    "gelu_pytorch_tanh": "nn.gelu",
    "quick_gelu": "quick_gelu",
}
"""Activations of Weft by their names in `config.json`; the first name of each is written."""

MAX_SIZE = 2**31 - 1
MAX_WIDTH = 2**24  # of heads and features: index arrays have as many elements
MAX_LAYERS = 10_000
MAX_EXPERTS = 10_000
_LEAST_FACTOR = 1e-6

Setting = Any
"""Value of a setting, as JSON has them."""

NO_PADDING = -1
"""The id that pads where a tokenizer has none: no token is mistaken for it."""


class Settings:
    """Settings of a model, by the content of a `config.json`.

    Those that are read must exist and be supported, or they raise HuggingFaceConfigError.
    """

    def __init__(self, values: Mapping[str, Any], source: str = "config.json"):
        self.values = values
        self.source = source

    def get(self, name: str, *default: Setting) -> Setting:
        """Returns a setting, or `default` if it is missing or null."""
        value = self.values.get(name)
        if value is not None:
            return value
        if default:
            return default[0]
        owner = ""
        for type_name in ("model_type", "rope_type", "type"):
            kind = self.values.get(type_name)
            if isinstance(kind, str):
                owner = f", which {type_name}={kind!r} has"
                break
        raise errors.HuggingFaceConfigError(
            f"{self.source} lacks {name!r}{owner}. Add it, or copy the file again."
        )

    def size(self, name: str, *default: int, most: int = MAX_WIDTH) -> int:
        """Returns a number of heads, layers, features or tokens, an integer from 1 to `most`."""
        value = self.get(name, *default)
        if type(value) is not int or not 1 <= value <= most:
            raise self.refusal(
                name, value, f"can be a whole number from 1 to {most}"
            )
        return value

    def number(
        self, name: str, *default: float, least: float = 0.0, most: float = 1e30
    ) -> float:
        """Returns a number from `least` to `most`, such as a rate or factor."""
        value = self.get(name, *default)
        if type(value) not in (int, float) or not least <= value <= most:
            raise self.refusal(
                name, value, f"can be a number from {least:g} to {most:g}"
            )
        return float(value)

    def numbers(self, name: str) -> list[float]:
        """Returns a list of positive numbers."""
        values = self.get(name)
        if not isinstance(values, list):
            raise self.refusal(name, values, "can be a list of numbers")
        for value in values:
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise self.refusal(
                    name, value, "can be a list of positive numbers"
                )
        return [float(value) for value in values]

    def flag(self, name: str, default: bool) -> bool:
        """Returns a boolean setting, or `default` if it is missing or null."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.refusal(name, value, "can be true or false")
        return value

    def require(self, name: str, *allowed: Setting) -> None:
        """Checks that a setting is missing, null or one of the `allowed` values."""
        value = self.values.get(name)
        if value is not None and value not in allowed:
            raise self.refusal(name, value, _can_be(allowed))

    def refusal(
        self, name: str, value: Setting, can: str
    ) -> errors.HuggingFaceConfigError:
        """Returns the error about an unsupported setting; `can` is like "can be 1"."""
        return errors.HuggingFaceConfigError(
            f"{self.source} has {name}={value!r}, which has no counterpart in Weft: {name} {can}. "
            "Choose another checkpoint, or convert this one first."
        )

    def activation(self, name: str, default: str) -> str:
        """Returns Weft's name of the activation in the setting `name`."""
        value = self.get(name, default)
        if not (isinstance(value, str) and value in ACTIVATIONS):
            raise self.refusal(name, value, _can_be(ACTIVATIONS))
        return ACTIVATIONS[value]

    def dropout(self, name: str, default: float) -> hierarchy.Dropout.Config:
        """Returns the dropout config for the rate in the setting `name`."""
        return hierarchy.Dropout.default_config().set(
            rate=self.number(name, default, most=1.0)
        )

    def special_tokens(self) -> dict[str, Any]:
        """Returns the id of padding, and that of the end of a sequence, or a tuple of several."""
        pad = self.get("pad_token_id", NO_PADDING)
        self._check_token("pad_token_id", pad, pad)
        ends: Any = self.end_ids()
        if len(ends) == 1:
            ends = ends[0]
        return {"pad_token_id": pad, "eos_token_id": ends}

    def end_ids(self) -> tuple[int, ...]:
        """Returns the ids that end a sequence; the first separates documents."""
        value = self.get("eos_token_id", NO_PADDING)
        ids: list[Setting] = [value]
        if isinstance(value, list) and value:
            ids = value
        for i in ids:
            self._check_token("eos_token_id", value, i)
        return tuple(ids)

    def token(self, name: str, default: int) -> int:
        """Returns the id of a token."""
        value = self.get(name, default)
        self._check_token(name, value, value)
        return value

    def _check_token(self, name: str, value: Setting, token: Setting) -> None:
        if type(token) is not int or not NO_PADDING <= token <= MAX_SIZE:
            raise self.refusal(
                name, value, f"can be the id of a token, or {NO_PADDING}"
            )

    def partial_rotary_factor(self, default: float = 1.0) -> float | None:
        """Returns which part of a head's dimensions is rotated; None for all."""
        value = self.number(
            "partial_rotary_factor", default, least=_LEAST_FACTOR, most=1.0
        )
        rope = self.get("rope_parameters", None)
        if isinstance(rope, dict):
            value = Settings(rope, f"{self.source}: rope_parameters").number(
                "partial_rotary_factor", value, least=_LEAST_FACTOR, most=1.0
            )
        return None if value == 1 else value

    def rotary(
        self, layer_type: str | None = None, *, theta: float = 10000.0
    ) -> hierarchy.RoFormerSinusoidalPositionalEmbedding.Config:
        """Returns the config of rotary positions.

        Args:
            layer_type: kind of layers, where each kind has positions of its own.
            theta: the base if the setting is missing.
        """
        # Since 2025 all is in "rope_parameters"; before, the base was outside "rope_scaling".
        values = self.get("rope_parameters", None) or self.get(
            "rope_scaling", {}
        )
        if isinstance(values, dict) and layer_type in values:
            values = values[layer_type]
        if not isinstance(values, dict):
            raise self.refusal("rope_parameters", values, "can be an object")
        rope = Settings(values, f"{self.source}: rope_parameters")
        rope_type = values.get("rope_type", values.get("type", "default"))
        if not (isinstance(rope_type, str) and rope_type in _ROTARY):
            raise rope.refusal("rope_type", rope_type, _can_be(_ROTARY))
        default_theta = self.number("rope_theta", theta, least=1.0)
        theta = rope.number("rope_theta", default_theta, least=1.0)
        length = self.size("max_position_embeddings", 2048, most=MAX_SIZE)
        # Phi-3 has it outside.
        length_before = self.size(
            "original_max_position_embeddings", length, most=MAX_SIZE
        )
        original_length = rope.size(
            "original_max_position_embeddings", length_before, most=MAX_SIZE
        )
        lengths = _Lengths(original_length, length)
        return _ROTARY[rope_type](rope, lengths).set(theta=theta)


def _can_be(options: Iterable[Setting]) -> str:
    # All but `require` name at least one value; theirs may be missing.
    texts = [repr(option) for option in options]
    return f"can be {' or '.join(texts) or 'left out'}"


Rotary = hierarchy.RoFormerSinusoidalPositionalEmbedding.Config


class _Lengths(NamedTuple):
    """Longest sequences before the context was extended, and after that."""

    original: int
    extended: int


def _plain(rope: Settings, lengths: _Lengths) -> Rotary:
    return hierarchy.RoFormerSinusoidalPositionalEmbedding.default_config()


def _linear(rope: Settings, lengths: _Lengths) -> Rotary:
    """Divides all frequencies, as YaRN without exceptions; the length does not matter."""
    factor = rope.number("factor", least=_LEAST_FACTOR)
    return hierarchy.YaRNSinusoidalPositionalEmbedding.default_config().set(
        original_max_seq_length=1,
        scaling_factor=factor,
        extrapolation_factor=0.0,
        attn_factor=1 / functional.yarn_magnitude(factor),
    )


def _yarn(rope: Settings, lengths: _Lengths) -> Rotary:
    factor = rope.number("factor", least=_LEAST_FACTOR)
    magnitude = functional.yarn_magnitude(factor)
    attention_factor = magnitude
    if rope.get("mscale", None) and rope.get("mscale_all_dim", None):
        # DeepSeek's: a factor of queries and keys over that of the logits.
        attention_factor = _magnitude(
            factor, rope.number("mscale")
        ) / _magnitude(factor, rope.number("mscale_all_dim"))
    attention_factor = rope.number("attention_factor", attention_factor)
    return hierarchy.YaRNSinusoidalPositionalEmbedding.default_config().set(
        original_max_seq_length=lengths.original,
        scaling_factor=factor,
        attn_factor=attention_factor / magnitude,
        beta_fast=rope.number("beta_fast", 32.0, least=_LEAST_FACTOR),
        beta_slow=rope.number("beta_slow", 1.0, least=_LEAST_FACTOR),
        truncate=rope.flag("truncate", True),
    )


def _magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _dynamic(rope: Settings, lengths: _Lengths) -> Rotary:
    cls = hierarchy.DynamicNTKSinusoidalPositionalEmbedding
    # Theirs grows beyond `max_position_embeddings`, whatever the length before is.
    return cls.default_config().set(
        original_max_seq_length=lengths.extended,
        scaling_factor=rope.number("factor", least=1.0),
    )


def _longrope(rope: Settings, lengths: _Lengths) -> Rotary:
    factor = rope.number("factor", lengths.extended / lengths.original)
    attention_factor = 1.0
    if factor > 1 and lengths.original > 1:
        attention_factor = math.sqrt(
            1 + math.log(factor) / math.log(lengths.original)
        )
    cls = hierarchy.LongRoPESinusoidalPositionalEmbedding
    return cls.default_config().set(
        original_max_seq_length=lengths.original,
        short_factors=rope.numbers("short_factor"),
        long_factors=rope.numbers("long_factor"),
        attn_factor=rope.number("attention_factor", attention_factor),
    )


def _llama3(rope: Settings, lengths: _Lengths) -> Rotary:
    low = rope.number("low_freq_factor", least=_LEAST_FACTOR)
    high = rope.number("high_freq_factor", least=_LEAST_FACTOR)
    if not low < high:
        raise rope.refusal(
            "high_freq_factor", high, f"can be above low_freq_factor={low:g}"
        )
    return hierarchy.Llama3SinusoidalPositionalEmbedding.default_config().set(
        original_max_seq_length=rope.size(
            "original_max_position_embeddings", most=MAX_SIZE
        ),
        scaling_factor=rope.number("factor", least=_LEAST_FACTOR),
        low_freq_factor=low,
        high_freq_factor=high,
    )


_ROTARY = {
    "default": _plain,
    "linear": _linear,
    "dynamic": _dynamic,
    "longrope": _longrope,
    "yarn": _yarn,
    "llama3": _llama3,
    "su": _longrope,  # an earlier name
}


def rotary_settings(
    cfg: hierarchy.RoFormerSinusoidalPositionalEmbedding.Config,
) -> dict[str, Any]:
    """Returns rotary positions as in `config.json`: the inverse of `Settings.rotary`."""
    values: dict[str, Any] = {"rope_theta": float(cfg.theta)}
    if isinstance(cfg, hierarchy.Llama3SinusoidalPositionalEmbedding.Config):
        values |= {
            "rope_type": "llama3",
            "factor": float(cfg.scaling_factor),
            "low_freq_factor": float(cfg.low_freq_factor),
            "high_freq_factor": float(cfg.high_freq_factor),
            "original_max_position_embeddings": cfg.original_max_seq_length,
        }
    elif isinstance(
        cfg, hierarchy.DynamicNTKSinusoidalPositionalEmbedding.Config
    ):
        values |= {
            "rope_type": "dynamic",
            "factor": float(cfg.scaling_factor),
        }
    elif isinstance(
        cfg, hierarchy.LongRoPESinusoidalPositionalEmbedding.Config
    ):
        values |= {
            "rope_type": "longrope",
            "short_factor": list(cfg.short_factors),
            "long_factor": list(cfg.long_factors),
            "attention_factor": float(cfg.attn_factor),
            "original_max_position_embeddings": cfg.original_max_seq_length,
        }
    elif isinstance(cfg, hierarchy.YaRNSinusoidalPositionalEmbedding.Config):
        factor = float(cfg.scaling_factor)
        attention = functional.yarn_magnitude(factor, cfg.attn_factor)
        values["factor"] = factor
        if cfg.extrapolation_factor == 0 and math.isclose(attention, 1.0):
            values["rope_type"] = "linear"
        else:
            values |= {
                "rope_type": "yarn",
                "attention_factor": attention,
                "beta_fast": float(cfg.beta_fast),
                "beta_slow": float(cfg.beta_slow),
                "original_max_position_embeddings": cfg.original_max_seq_length,
                "truncate": cfg.truncate,
            }
    else:
        values["rope_type"] = "default"
    return values


def rope_settings(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Returns rotary positions under the names of `transformers` 5, and those of earlier ones.

    >>> rope_settings({"rope_theta": 1e4, "rope_type": "default"})["rope_scaling"] is None
    True
    """
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    is_scaled = scaling["rope_type"] != "default"
    return {
        "rope_parameters": dict(rope),
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling if is_scaled else None,
    }


ROPE_NAMES = frozenset(("rope_parameters", "rope_theta", "rope_scaling"))
"""The names of `rope_settings`."""


def changed_rope_settings(
    base_settings: Mapping[str, Any],
    rope: Mapping[str, Any],
    base_rope: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns settings of other rotary positions than a base's, under the names that it has.

    Args:
        base_settings: the content of the base's `config.json`.
        rope: the positions, as `rotary_settings` returns them.
        base_rope: those of the base.

    >>> old = {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}
    >>> base = {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}
    >>> changed_rope_settings(old, {**base, "factor": 4.0}, base)
    {'rope_scaling': {'type': 'linear', 'factor': 4.0}, 'rope_theta': 10000.0}
    """
    all_settings = rope_settings(rope)
    names = sorted(ROPE_NAMES & base_settings.keys())
    if not names:
        names = sorted(ROPE_NAMES)
    elif "rope_parameters" not in names:
        names = ["rope_scaling", "rope_theta"]
    changes: dict[str, Any] = {}
    for name, value in rope.items():
        if base_rope.get(name) != value:
            changes[name] = value
    settings: dict[str, Any] = {}
    for name in names:
        value = all_settings[name]
        base_value = base_settings.get(name)
        if (
            isinstance(base_value, dict)
            and isinstance(value, dict)
            and "rope_type" not in changes
        ):
            value = {**base_value}
            for key in changes.keys() & all_settings[name].keys():
                value[key] = changes[key]
        settings[name] = value
    return settings
