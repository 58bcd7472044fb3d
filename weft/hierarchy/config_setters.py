"""Functions that set dropout rates, norms or biases everywhere in a config.

They change the config in place, including configs in fields, lists and dicts.
"""

from collections.abc import Callable
from typing import Any

from weft.config import REQUIRED, ConfigBase, InstantiableConfig
from weft.hierarchy.dropout import Dropout
from weft.hierarchy.normalization import BaseNormalizationLayer, LayerNormStateless


def set_dropout_rate_recursively(
    cfg: ConfigBase, dropout_rate: float | None, set_only_if_none: bool = False
) -> None:
    """Sets the rate of every Dropout, or only of those without one.

    Example:
        >>> cfg = Dropout.default_config()
        >>> set_dropout_rate_recursively(cfg, 0.1)
        >>> cfg.rate
        0.1
    """

    def set_rate(config: Any) -> None:
        if _makes(config, Dropout) and not (set_only_if_none and config.rate is not None):
            config.rate = dropout_rate

    for_each_config(cfg, set_rate)


def set_layer_norm_eps_recursively(
    cfg: ConfigBase, eps: float, set_only_if_none: bool = False
) -> None:
    """Sets `eps` of every LayerNorm, or only of those without one."""

    def set_eps(config: Any) -> None:
        if _makes(config, LayerNormStateless) and not (set_only_if_none and config.eps is not None):
            config.eps = eps

    for_each_config(cfg, set_eps)


def set_bias_recursively(cfg: ConfigBase, bias: bool = False) -> None:
    """Sets every field `bias`."""

    def set_bias(config: Any) -> None:
        if "bias" in config.keys():  # noqa: SIM118 - a config is not a mapping
            config.bias = bias

    for_each_config(cfg, set_bias)


def set_norm_recursively(cfg: ConfigBase, norm_cfg: InstantiableConfig) -> None:
    """Replaces every normalization layer.

    Args:
        norm_cfg: the new layer; without an `input_dim`, it gets that of the replaced one.
    """

    def replaced(value: Any) -> Any:
        if _makes(value, BaseNormalizationLayer):
            new = norm_cfg.clone()
            if "input_dim" in new.keys() and new.input_dim is REQUIRED:  # noqa: SIM118
                new.input_dim = value.input_dim
            return new
        if isinstance(value, dict):
            return {key: replaced(child) for key, child in value.items()}
        return type(value)(map(replaced, value)) if type(value) in (list, tuple) else value

    def has_norm(value: Any) -> bool:
        if isinstance(value, dict):
            value = list(value.values())
        if type(value) in (list, tuple):
            return any(map(has_norm, value))
        return _makes(value, BaseNormalizationLayer)

    def set_norm(config: Any) -> None:
        for name, value in config.items():
            if has_norm(value):
                setattr(config, name, replaced(value))

    for_each_config(cfg, set_norm)


def _makes(value: Any, cls: type) -> bool:
    klass = getattr(value, "klass", None)
    return isinstance(value, ConfigBase) and isinstance(klass, type) and issubclass(klass, cls)


def for_each_config(root: ConfigBase, fn: Callable[[ConfigBase], None]) -> None:
    """Calls `fn` on every config inside `root`, inner ones first, and on `root` itself."""
    found: list[ConfigBase] = []

    def enter(path: str, value: Any, children: list | None) -> list | None:
        del path
        if isinstance(value, ConfigBase):
            found.append(value)
        return children

    root.visit(visit_fn=lambda path, value: None, enter_fn=enter)
    for config in reversed(found):
        fn(config)
