"""How the weights and activations of transformer layers lie over a mesh.

The weights of attention and feed-forward layers are sharded twice, over the axis of tensor
parallelism by heads or hidden dimensions, and over the axis of data parallelism by the model's
dimension (Xu et al., 2021).
"""

from collections.abc import Sequence
from typing import Any

from weft.hierarchy.multihead_attention import MultiheadAttention
from weft.hierarchy.transformer import TransformerLayer

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
    """Sets the partition specs of an attention layer.

    Args:
      cfg: changed in place.
      batch_axis_names: the mesh axes of the batch.
      fsdp_axis_names: the mesh axes of the model's dimension in weights.
      tp_axis_names: the mesh axes of heads.
      seq_axis_names: the mesh axes of positions.
      set_attn_activation_specs: whether to set those of queries, keys, values and the output.
    """
    weight = (fsdp_axis_names, tp_axis_names, None)
    input_linear: Any = cfg.input_linear
    while not hasattr(input_linear, "layer"):
        input_linear = input_linear.input_linear
    input_linear.layer.param_partition_spec = weight
    cfg.output_linear.param_partition_spec = weight
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
    """Sets the partition specs of a feed-forward layer.

    Args:
      cfg: of a `TransformerFeedForwardLayer`, changed in place.
      batch_axis_names: the mesh axes of the batch.
      fsdp_axis_names: the mesh axes of the model's dimension in weights.
      tp_axis_names: the mesh axes of the hidden dimension.
      seq_axis_names: the mesh axes of positions.
    """
    cfg.linear1.param_partition_spec = (fsdp_axis_names, tp_axis_names)
    cfg.linear2.param_partition_spec = (tp_axis_names, fsdp_axis_names)
    activations = (batch_axis_names, seq_axis_names, tp_axis_names)
    cfg.linear1.output_partition_spec = activations
    cfg.linear2.output_partition_spec = activations


def set_double_shard_weights_config(
    cfg: TransformerLayer.Config | Sequence[TransformerLayer.Config],
    *,
    batch_axis_names: AxisNames = ("data", "fsdp"),
    fsdp_axis_names: AxisNames = "fsdp",
    tp_axis_names: AxisNames = "model",
    seq_axis_names: AxisNames = "seq",
    set_attn_activation_specs: bool = False,
) -> None:
    """Sets the partition specs of transformer layers.

    Args:
      cfg: of one layer or of several, changed in place.
      batch_axis_names: the mesh axes of the batch.
      fsdp_axis_names: the mesh axes of the model's dimension in weights.
      tp_axis_names: the mesh axes of heads and hidden dimensions.
      seq_axis_names: the mesh axes of positions.
      set_attn_activation_specs: whether to set those of queries, keys, values and the output of
        attention.
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
