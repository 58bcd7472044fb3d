"""Sharding of the weights and activations of transformer layers.

Weights of attention and feed-forward layers are sharded twice: heads or hidden dimensions over the
tensor-parallel axis, the model dimension over the data-parallel axis (Xu et al., 2021).
"""

from collections.abc import Sequence
from typing import Any

from weft.hierarchy.multihead_attention import MultiheadAttention
from weft.hierarchy.transformer import TransformerLayer
from weft.typing import PartitionSpec

AxisNames = str | Sequence[str] | None


def set_attention_partition_specs(
    cfg: MultiheadAttention.Config,
    *,
    batch_axis_names: AxisNames = ("data", "fsdp"),
    fsdp_axis_names: AxisNames = "fsdp",
    tp_axis_names: AxisNames = "model",
    seq_axis_names: AxisNames = "seq",
    set_attn_activation_specs: bool = False,
) -> None:
    """Sets the partition specs of an attention layer in place.

    Args:
      batch_axis_names: the mesh axes of the batch.
      fsdp_axis_names: the mesh axes of the model dimension in weights.
      tp_axis_names: the mesh axes of heads.
      seq_axis_names: the mesh axes of positions.
      set_attn_activation_specs: whether to set those of queries, keys, values and the output.
    """
    weight = (fsdp_axis_names, tp_axis_names, None)
    _innermost(cfg.input_linear).param_partition_spec = weight
    _innermost(cfg.output_linear).param_partition_spec = weight
    if set_attn_activation_specs:
        heads = (batch_axis_names, seq_axis_names, tp_axis_names, None)
        cfg.set(q_partition_spec=heads, k_partition_spec=heads, v_partition_spec=heads)
        cfg.o_partition_spec = (batch_axis_names, seq_axis_names, None)


def set_feed_forward_partition_specs(
    cfg: Any,
    *,
    batch_axis_names: AxisNames = ("data", "fsdp"),
    fsdp_axis_names: AxisNames = "fsdp",
    tp_axis_names: AxisNames = "model",
    seq_axis_names: AxisNames = "seq",
) -> None:
    """Sets the partition specs of a feed-forward layer in place.

    Args:
      cfg: of a `TransformerFeedForwardLayer`, or of a mixture of experts, which keeps the mesh axes
        of its experts.
      batch_axis_names: the mesh axes of the batch.
      fsdp_axis_names: the mesh axes of the model dimension in weights.
      tp_axis_names: the mesh axes of the hidden dimension.
      seq_axis_names: the mesh axes of positions.
    """
    if hasattr(cfg, "dim_to_mesh_axis_map"):
        _set_expert_partition_specs(
            cfg,
            batch=batch_axis_names,
            fsdp=fsdp_axis_names,
            tp=tp_axis_names,
            seq=seq_axis_names,
        )
        return
    linear1, linear2 = _innermost(cfg.linear1), _innermost(cfg.linear2)
    linear1.param_partition_spec = (fsdp_axis_names, tp_axis_names)
    linear2.param_partition_spec = (tp_axis_names, fsdp_axis_names)
    activations = (batch_axis_names, seq_axis_names, tp_axis_names)
    linear1.output_partition_spec = activations
    linear2.output_partition_spec = activations


def _innermost(cfg: Any) -> Any:
    while True:
        for name in ("input_linear", "layer"):
            if hasattr(cfg, name):
                cfg = getattr(cfg, name)
                break
        else:
            return cfg


def _set_expert_partition_specs(
    cfg: Any, *, batch: AxisNames, fsdp: AxisNames, tp: AxisNames, seq: AxisNames
) -> None:
    """Sets those of a mixture of experts, whose arrays are keyed by the letters of their axes."""
    batch, fsdp, tp, seq = (
        x if x is None or isinstance(x, str) else tuple(x) for x in (batch, fsdp, tp, seq)
    )
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
    cfg: TransformerLayer.Config | Sequence[TransformerLayer.Config],
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
