"""Functions that set dropout rates, norms, biases or sharding everywhere in a config, in place.

Weights of attention and feed-forward layers can be sharded twice: heads or hidden dimensions over
the tensor-parallel axis, the model dimension over the data-parallel axis (Xu et al., 2021).
"""

from collections.abc import Callable, Sequence
from typing import Any

from weft.config import REQUIRED, ConfigBase, InstantiableConfig
from weft.hierarchy.attention import multihead_attention, transformer
from weft.hierarchy.layers.linear import Dropout
from weft.hierarchy.layers.normalization import BaseNormalizationLayer, LayerNormStateless
from weft.typing import PartitionSpec


def set_dropout_rate_recursively(
    cfg: ConfigBase, dropout_rate: float | None, set_only_if_none: bool = False
) -> None:
    """Sets the rate of every Dropout, or only of those without one.

    >>> cfg = Dropout.default_config()
    >>> set_dropout_rate_recursively(cfg, 0.1)
    >>> cfg.rate
    0.1
    """
    _set_field(cfg, Dropout, "rate", dropout_rate, set_only_if_none)


def set_layer_norm_eps_recursively(
    cfg: ConfigBase, eps: float, set_only_if_none: bool = False
) -> None:
    """Sets `eps` of every LayerNorm, or only of those without one."""
    _set_field(cfg, LayerNormStateless, "eps", eps, set_only_if_none)


def _set_field(cfg: ConfigBase, cls: type, name: str, value: object, only_if_none: bool) -> None:
    def set_value(config: Any) -> None:
        if is_config_of(config, cls) and not (only_if_none and getattr(config, name) is not None):
            setattr(config, name, value)

    for_each_config(cfg, set_value)


def set_bias_recursively(cfg: ConfigBase, bias: bool = False) -> None:
    """Sets every field `bias`."""

    def set_bias(config: Any) -> None:
        if "bias" in config.keys():  # noqa: SIM118 - a config is not a mapping
            config.bias = bias

    for_each_config(cfg, set_bias)


def set_norm_recursively(cfg: ConfigBase, norm_cfg: InstantiableConfig) -> None:
    """Replaces every normalization layer; a new one without an `input_dim` gets the old one's."""

    def replaced(value: Any) -> Any:
        if is_config_of(value, BaseNormalizationLayer):
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
        return is_config_of(value, BaseNormalizationLayer)

    def set_norm(config: Any) -> None:
        for name, value in config.items():
            if has_norm(value):
                setattr(config, name, replaced(value))

    for_each_config(cfg, set_norm)


def is_config_of(value: object, cls: type | tuple[type, ...]) -> bool:
    """Returns whether a value is the config of one of the classes."""
    klass = getattr(value, "klass", None)
    return isinstance(value, ConfigBase) and isinstance(klass, type) and issubclass(klass, cls)


def for_each_config(root: ConfigBase, fn: Callable[[ConfigBase], None]) -> None:
    """Calls `fn` on every config inside `root`, inner ones first, and on `root` itself."""
    configs: list[ConfigBase] = []

    def enter(path: str, value: object, children: list | None) -> list | None:
        if isinstance(value, ConfigBase):
            configs.append(value)
        return children

    root.visit(visit_fn=lambda path, value: None, enter_fn=enter)
    for config in reversed(configs):
        fn(config)


AxisNames = str | Sequence[str] | None


def set_attention_partition_specs(
    cfg: multihead_attention.MultiheadAttention.Config,
    *,
    batch_axis_names: AxisNames = ("data", "fsdp"),
    fsdp_axis_names: AxisNames = "fsdp",
    tp_axis_names: AxisNames = "model",
    seq_axis_names: AxisNames = "seq",
    set_attn_activation_specs: bool = False,
) -> None:
    """Sets the partition specs of an attention layer in place.

    Args:
      fsdp_axis_names: the mesh axes of the model dimension in weights.
      tp_axis_names: the mesh axes of heads.
      set_attn_activation_specs: whether to set those of queries, keys, values, the output and the
        cache, whose positions are not split.
    """
    weight = (fsdp_axis_names, tp_axis_names, None)
    _innermost_linear(cfg.input_linear).param_partition_spec = weight
    _innermost_linear(cfg.output_linear).param_partition_spec = weight
    if set_attn_activation_specs:
        heads = (batch_axis_names, seq_axis_names, tp_axis_names, None)
        cfg.set(q_partition_spec=heads, k_partition_spec=heads, v_partition_spec=heads)
        cfg.o_partition_spec = (batch_axis_names, seq_axis_names, None)
        cfg.kv_cache.kv_partition_spec = (batch_axis_names, None, tp_axis_names, None)


def set_feed_forward_partition_specs(
    cfg: Any,
    *,
    batch_axis_names: AxisNames = ("data", "fsdp"),
    fsdp_axis_names: AxisNames = "fsdp",
    tp_axis_names: AxisNames = "model",
    seq_axis_names: AxisNames = "seq",
) -> None:
    """Sets the partition specs of a feed-forward layer in place.

    `cfg` is of a `TransformerFeedForwardLayer`, or of a mixture of experts, which keeps the mesh
    axes of its experts. `tp_axis_names` shards the hidden dimension; the other axes are as for
    `set_attention_partition_specs`.
    """
    if hasattr(cfg, "dim_to_mesh_axis_map"):
        axis_names = (batch_axis_names, fsdp_axis_names, tp_axis_names, seq_axis_names)
        _set_expert_partition_specs(cfg, *axis_names)
        return
    linear1, linear2 = _innermost_linear(cfg.linear1), _innermost_linear(cfg.linear2)
    linear1.param_partition_spec = (fsdp_axis_names, tp_axis_names)
    linear2.param_partition_spec = (tp_axis_names, fsdp_axis_names)
    activations = (batch_axis_names, seq_axis_names, tp_axis_names)
    linear1.output_partition_spec = activations
    linear2.output_partition_spec = activations


def _innermost_linear(cfg: Any) -> Any:
    for name in ("input_linear", "layer"):
        if hasattr(cfg, name):
            return _innermost_linear(getattr(cfg, name))
    return cfg


def _set_expert_partition_specs(cfg: Any, *axis_names: AxisNames) -> None:
    """Sets those of a mixture of experts, whose arrays are keyed by the letters of their axes."""
    batch, fsdp, tp, seq = (x if x is None or isinstance(x, str) else tuple(x) for x in axis_names)
    axes = dict(cfg.dim_to_mesh_axis_map)
    for dims, spec in axes.items():
        if dims[0] == "o" and spec is not None:
            axes[dims] = PartitionSpec(batch, *tuple(spec)[1:])
    experts = axes["emh"][0] if axes.get("emh") else None
    axes["me"] = PartitionSpec(fsdp, None)
    axes["emh"] = PartitionSpec(experts, fsdp, tp)
    axes["ehm"] = PartitionSpec(experts, tp, fsdp)
    cfg.dim_to_mesh_axis_map = axes
    if hasattr(cfg, "input_dim_to_partition_spec"):
        tokens = {"bsm": PartitionSpec(batch, seq, None)}
        cfg.output_dim_to_partition_spec = tokens
        cfg.input_dim_to_partition_spec = {
            **tokens,
            "emh": PartitionSpec(experts, None, tp),
            "ehm": PartitionSpec(experts, tp, None),
        }


def set_double_shard_weights_config(
    cfg: transformer.TransformerLayer.Config | Sequence[transformer.TransformerLayer.Config],
    *,
    batch_axis_names: AxisNames = ("data", "fsdp"),
    fsdp_axis_names: AxisNames = "fsdp",
    tp_axis_names: AxisNames = "model",
    seq_axis_names: AxisNames = "seq",
    set_attn_activation_specs: bool = False,
) -> None:
    """Sets the partition specs of one or several transformer layers in place.

    Arguments are as for `set_attention_partition_specs` and `set_feed_forward_partition_specs`.
    """
    axes = {
        "batch_axis_names": batch_axis_names,
        "fsdp_axis_names": fsdp_axis_names,
        "tp_axis_names": tp_axis_names,
        "seq_axis_names": seq_axis_names,
    }
    layers: Any = cfg if isinstance(cfg, list | tuple) else [cfg]
    for layer in layers:
        for attention in (layer.self_attention, layer.cross_attention):
            if attention is not None:
                set_attention_partition_specs(
                    attention.attention, set_attn_activation_specs=set_attn_activation_specs, **axes
                )
        set_feed_forward_partition_specs(layer.feed_forward, **axes)
