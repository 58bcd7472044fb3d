"""Layouts of the library's transformer on a mesh of named axes: `MESH_AXIS_NAMES`.

A parameter of a feed-forward layer is sharded as (fsdp, model), an activation as ((data, expert,
fsdp), seq, model). Sources: Rajbhandari et al., https://arxiv.org/abs/1910.02054 (fsdp); Xu et al.,
https://arxiv.org/abs/2105.04663 (weights over two axes); Korthikanti et al.,
https://arxiv.org/abs/2205.05198 (seq).
"""

from collections.abc import Collection
from typing import Any

from weft import errors
from weft.config import ConfigBase, InstantiableConfig
from weft.hierarchy.attention.feed_forward import TransformerFeedForwardLayer
from weft.hierarchy.attention.multihead_attention import MultiheadAttention
from weft.hierarchy.causal_lm import Model
from weft.hierarchy.config_setters import (
    for_each_config,
    innermost_linear,
    set_attention_partition_specs,
    set_feed_forward_partition_specs,
)
from weft.hierarchy.decoder import Decoder, LmHead
from weft.hierarchy.layers.embedding import (
    Embedding,
    TransformerTextEmbeddings,
)
from weft.hierarchy.layers.normalization import LayerNorm, RMSNorm
from weft.hierarchy.mixture_of_experts import (
    ApproximateTokenDropFreeMoE,
    TransformerFeedForwardDropFreeMoE,
    TransformerFeedForwardMoE,
)
from weft.typing import PartitionSpec

MESH_AXIS_NAMES = ("pipeline", "data", "expert", "fsdp", "seq", "model")
BATCH_AXIS_NAMES = ("data", "expert", "fsdp")
_VECTORS = (BATCH_AXIS_NAMES, "seq", None)
# Keyed by axis letters, as in `weft.hierarchy.mixture_of_experts.feed_forward`. Groups of tokens
# are sharded like the rows of a batch, in the order of its axes, so that tokens move over the
# expert axis only.
_GROUPS = ("expert", "fsdp")
_OF_EXPERTS = {
    "me": ("fsdp", None),
    "emh": ("expert", "fsdp", "model"),
    "ehm": ("expert", "model", "fsdp"),
    "ogsm": ("data", _GROUPS, None, None),
    "ogse": ("data", _GROUPS, None, None),
    "ogsec": ("data", _GROUPS, None, None, None),
    "oegcm": ("data", "expert", "fsdp", None, None),
    "oegch": ("data", "expert", "fsdp", None, "model"),
}
# There, devices along the expert axis exchange tokens.
_WHERE_NOTHING_IS_DROPPED = {
    "bsm": _VECTORS,
    "emh": ("expert", None, "model"),
    "ehm": ("expert", "model", None),
}


def set_partition_specs_recursively(
    cfg: ConfigBase, mesh_axis_names: Collection[str] = MESH_AXIS_NAMES
) -> bool:
    """Sets the layouts of the library's layers in a config, in place.

    Args:
        mesh_axis_names: those of the mesh, some of `MESH_AXIS_NAMES`. Nothing is sharded over the
            others.

    Returns whether there is an attention or feed-forward layer.

    Raises MeshError for another name.

    >>> from weft.hierarchy import TransformerLayer
    >>> cfg = TransformerLayer.default_config()
    >>> set_partition_specs_recursively(cfg, ["fsdp", "model"])
    True
    >>> cfg.feed_forward.linear1.param_partition_spec
    ('fsdp', 'model')
    """
    for name in mesh_axis_names:
        if name not in MESH_AXIS_NAMES:
            raise errors.MeshError(
                f"the mesh has the axis {name!r}, over which no layer is sharded; expected some of "
                f"{', '.join(MESH_AXIS_NAMES)}. "
                f"{errors.did_you_mean(name, MESH_AXIS_NAMES)}"
            )
    mesh = _MeshAxes(mesh_axis_names)
    has_layers = False

    def set_specs(layer: InstantiableConfig) -> None:
        nonlocal has_layers
        klass = getattr(layer, "klass", None)
        if isinstance(klass, type) and _set_layer(layer, klass, mesh):
            has_layers = True

    for_each_config(cfg, set_specs)
    return has_layers


class _MeshAxes:
    """The axes of a mesh, for layouts without the others."""

    def __init__(self, names: Collection[str]):
        self._names = names

    def entry(self, names: Any) -> Any:
        """Returns the mesh axes of one axis of an array; None for none."""
        if isinstance(names, tuple):
            present = tuple(name for name in names if name in self._names)
            return present or None
        return names if names in self._names else None

    def spec(self, names: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the layout of an array."""
        return tuple(map(self.entry, names))


def _set_layer(cfg: Any, klass: type, mesh: _MeshAxes) -> bool:
    """Sets the layout of one layer; returns whether it is an attention or feed-forward layer."""
    axes = {
        "batch_axis_names": mesh.entry(BATCH_AXIS_NAMES),
        "fsdp_axis_names": mesh.entry("fsdp"),
        "tp_axis_names": mesh.entry("model"),
        "seq_axis_names": mesh.entry("seq"),
    }
    if issubclass(klass, MultiheadAttention):
        set_attention_partition_specs(
            cfg, set_attn_activation_specs=True, **axes
        )
    elif issubclass(klass, TransformerFeedForwardLayer):
        set_feed_forward_partition_specs(cfg, **axes)
        # The same as for the residual stream and attention's output, to avoid resharding.
        linear2: Any = innermost_linear(cfg.linear2)
        linear2.output_partition_spec = mesh.spec(_VECTORS)
    elif issubclass(klass, TransformerFeedForwardMoE):
        cfg.dim_to_mesh_axis_map = {
            letters: PartitionSpec(*mesh.spec(names))
            for letters, names in _OF_EXPERTS.items()
        }
        if issubclass(klass, TransformerFeedForwardDropFreeMoE):
            cfg.input_dim_to_partition_spec = {
                letters: PartitionSpec(*mesh.spec(names))
                for letters, names in _WHERE_NOTHING_IS_DROPPED.items()
            }
            if issubclass(klass, ApproximateTokenDropFreeMoE):
                # Its capacity is of tokens that all devices along the expert axis have.
                cfg.input_dim_to_partition_spec["bsm"] = PartitionSpec(
                    *mesh.spec((("data", "fsdp"), "seq", None))
                )
            cfg.output_dim_to_partition_spec = {
                "bsm": PartitionSpec(*mesh.spec(_VECTORS))
            }
    else:
        _set_around(cfg, klass, mesh)
        return False
    return True


def _set_around(cfg: Any, klass: type, mesh: _MeshAxes) -> None:
    """Sets the layout of a language model's parts around its attention and feed-forward layers."""
    if issubclass(klass, Embedding):
        # The table is gathered over fsdp where it is used, like a layer's weights.
        cfg.set(
            param_partition_spec=mesh.spec(("model", "fsdp")),
            embedding_partition_spec=mesh.spec(("model", None)),
            output_partition_spec=mesh.spec(_VECTORS),
        )
    elif issubclass(klass, TransformerTextEmbeddings):
        if cfg.type_emb is not None:
            # There are often two types, too few to divide.
            cfg.type_emb.set(
                param_partition_spec=mesh.spec((None, "fsdp")),
                embedding_partition_spec=(None, None),
            )
    elif issubclass(klass, LmHead):
        cfg.param_partition_spec = mesh.spec(("model", "fsdp"))
    elif issubclass(klass, RMSNorm | LayerNorm):
        cfg.param_partition_spec = mesh.spec(("fsdp",))
    elif issubclass(klass, Decoder):
        cfg.hidden_state_partition_spec = mesh.spec(_VECTORS)
        cfg.logits_partition_spec = mesh.spec(
            (BATCH_AXIS_NAMES, "seq", "model")
        )
    elif issubclass(klass, Model):
        cfg.set(
            batch_axis_names=mesh.entry(BATCH_AXIS_NAMES),
            seq_axis_names=mesh.entry(("seq",)),
        )
