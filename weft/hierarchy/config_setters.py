"""Functions that set dropout rates, norms, biases or sharding everywhere in a config, in place.

Weights of attention and feed-forward layers can be sharded twice: heads or hidden dimensions over
the tensor-parallel axis, the model dimension over the data-parallel axis (Xu et al., 2021).
"""

from collections.abc import Callable, Sequence
from typing import Any

from weft.config import REQUIRED, ConfigBase, InstantiableConfig
from weft.functional import WeightFormat
from weft.hierarchy.attention import (
    feed_forward,
    multihead_attention,
    transformer,
)
from weft.hierarchy.layers.linear import Dropout
from weft.hierarchy.layers.normalization import (
    BaseNormalizationLayer,
    LayerNormStateless,
)
from weft.typing import PartitionSpec, PyTree


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


def _set_field(
    cfg: ConfigBase,
    cls: type,
    name: str,
    value: float | None,
    only_if_none: bool,
) -> None:
    def set_value(config: InstantiableConfig) -> None:
        if not is_config_of(config, cls):
            return
        if only_if_none and getattr(config, name) is not None:
            return
        setattr(config, name, value)

    for_each_config(cfg, set_value)


def set_weight_format_recursively(
    cfg: ConfigBase, weight_format: WeightFormat | None
) -> None:
    """Sets `weight_format` of the linear maps of every attention and feed-forward layer.

    Adapters are added afterwards, so that their own weights are not stored in few bits.

    >>> cfg = transformer.TransformerLayer.default_config()
    >>> set_weight_format_recursively(cfg, "nf4")
    >>> cfg.feed_forward.linear1.weight_format
    'nf4'
    """
    layers = (
        multihead_attention.MultiheadAttention,
        feed_forward.TransformerFeedForwardLayer,
    )

    def set_format(config: InstantiableConfig) -> None:
        if hasattr(config, "weight_format"):
            config.weight_format = weight_format

    def set_in_layer(config: InstantiableConfig) -> None:
        if is_config_of(config, layers):
            for_each_config(config, set_format)

    for_each_config(cfg, set_in_layer)


def set_bias_recursively(cfg: ConfigBase, bias: bool = False) -> None:
    """Sets every field `bias`."""

    def set_bias(config: InstantiableConfig) -> None:
        if "bias" in config.keys():  # noqa: SIM118 - a config is not a mapping
            config.bias = bias

    for_each_config(cfg, set_bias)


def set_norm_recursively(cfg: ConfigBase, norm_cfg: InstantiableConfig) -> None:
    """Replaces every normalization layer; a new one without an `input_dim` gets the old one's."""

    def replaced(value: PyTree) -> PyTree:
        if is_config_of(value, BaseNormalizationLayer):
            norm = norm_cfg.clone()
            if "input_dim" in norm.keys() and norm.input_dim is REQUIRED:  # noqa: SIM118
                norm.input_dim = value.input_dim
            return norm
        if isinstance(value, dict):
            return {key: replaced(child) for key, child in value.items()}
        if type(value) in (list, tuple):
            return type(value)(map(replaced, value))
        return value

    def has_norm(value: PyTree) -> bool:
        if isinstance(value, dict):
            value = list(value.values())
        if type(value) in (list, tuple):
            return any(map(has_norm, value))
        return is_config_of(value, BaseNormalizationLayer)

    def set_norm(config: InstantiableConfig) -> None:
        for name, value in config.items():
            if has_norm(value):
                setattr(config, name, replaced(value))

    for_each_config(cfg, set_norm)


def is_config_of(value: object, cls: type | tuple[type, ...]) -> bool:
    """Returns whether a value is the config of one of the classes."""
    if not isinstance(value, ConfigBase):
        return False
    klass = getattr(value, "klass", None)
    return isinstance(klass, type) and issubclass(klass, cls)


def for_each_config(root: ConfigBase, fn: Callable[[Any], None]) -> None:
    """Calls `fn` on every config inside `root`, inner ones first, and on `root` itself."""
    configs: list[ConfigBase] = []

    def enter(path: str, value: PyTree, children: list | None) -> list | None:
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
    fsdp, tp = fsdp_axis_names, tp_axis_names
    innermost_linear(cfg.input_linear).param_partition_spec = (fsdp, tp, None)
    innermost_linear(cfg.output_linear).param_partition_spec = (fsdp, tp, None)
    _set_adapter_specs(
        cfg.input_linear,
        down=(None, fsdp, None),
        up=(None, None, tp, None),
    )
    _set_adapter_specs(
        cfg.output_linear, down=(None, tp, None), up=(None, fsdp)
    )
    if set_attn_activation_specs:
        heads = (batch_axis_names, seq_axis_names, tp_axis_names, None)
        cfg.set(
            q_partition_spec=heads,
            k_partition_spec=heads,
            v_partition_spec=heads,
        )
        cfg.o_partition_spec = (batch_axis_names, seq_axis_names, None)
        cache = (batch_axis_names, None, tp_axis_names, None)
        cfg.kv_cache.kv_partition_spec = cache


def set_feed_forward_partition_specs(
    cfg: InstantiableConfig,
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
        _set_expert_partition_specs(
            cfg,
            _mesh_axes(batch_axis_names),
            _mesh_axes(fsdp_axis_names),
            _mesh_axes(tp_axis_names),
            _mesh_axes(seq_axis_names),
        )
        return
    fsdp, tp = fsdp_axis_names, tp_axis_names
    linear1 = innermost_linear(cfg.linear1)
    linear2 = innermost_linear(cfg.linear2)
    linear1.param_partition_spec = (fsdp, tp)
    linear2.param_partition_spec = (tp, fsdp)
    _set_adapter_specs(cfg.linear1, down=(fsdp, None), up=(None, tp))
    _set_adapter_specs(cfg.linear2, down=(tp, None), up=(None, fsdp))
    activations = (batch_axis_names, seq_axis_names, tp_axis_names)
    linear1.output_partition_spec = activations
    linear2.output_partition_spec = activations


def innermost_linear(cfg: InstantiableConfig) -> InstantiableConfig:
    """Returns the config of a linear map within layers that rotate its outputs or adapt it."""
    inner = _inner_layer(cfg)
    return cfg if inner is None else innermost_linear(inner)


def _inner_layer(cfg: InstantiableConfig) -> InstantiableConfig | None:
    for name in ("input_linear", "layer"):
        if hasattr(cfg, name):
            return getattr(cfg, name)
    return None


def _set_adapter_specs(
    cfg: InstantiableConfig | None,
    *,
    down: Sequence[AxisNames],
    up: Sequence[AxisNames],
) -> None:
    """Sets the specs of the adapter of a linear map, if it has one.

    Inputs and outputs are sharded as those of the weight, and divide wherever they do; the rank,
    which may be smaller than an axis of the mesh, is not sharded.
    """
    while cfg is not None:
        if hasattr(cfg, "adapter"):
            cfg.adapter.lora_down.param_partition_spec = tuple(down)
            cfg.adapter.lora_up.param_partition_spec = tuple(up)
        cfg = _inner_layer(cfg)


def _mesh_axes(axis_names: AxisNames) -> str | tuple[str, ...] | None:
    """Returns the names in the form that a PartitionSpec takes."""
    if axis_names is None or isinstance(axis_names, str):
        return axis_names
    return tuple(axis_names)


def _set_expert_partition_specs(
    cfg: InstantiableConfig,
    batch: str | tuple[str, ...] | None,
    fsdp: str | tuple[str, ...] | None,
    tp: str | tuple[str, ...] | None,
    seq: str | tuple[str, ...] | None,
) -> None:
    """Sets those of a mixture of experts, whose arrays are keyed by the letters of their axes."""
    axes = dict(cfg.dim_to_mesh_axis_map)
    for dims, spec in axes.items():
        if dims[0] == "o" and spec is not None:
            axes[dims] = PartitionSpec(batch, *tuple(spec)[1:])
    experts = None
    if axes.get("emh"):
        experts = axes["emh"][0]
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
    cfg: transformer.TransformerLayer.Config
    | Sequence[transformer.TransformerLayer.Config],
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
    layers: Any = cfg
    if not isinstance(cfg, list | tuple):
        layers = [cfg]
    for layer in layers:
        for attention in (layer.self_attention, layer.cross_attention):
            if attention is not None:
                set_attention_partition_specs(
                    attention.attention,
                    set_attn_activation_specs=set_attn_activation_specs,
                    **axes,
                )
        set_feed_forward_partition_specs(layer.feed_forward, **axes)
