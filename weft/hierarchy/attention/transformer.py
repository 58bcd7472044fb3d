"""Transformer layers: attention and a feed-forward layer, each with a skip connection.

All layers can be applied to a whole sequence (`forward`), or in decoding (`init_states`,
`extend_step`) to a prompt and then to single positions.
"""

from collections.abc import Collection
from typing import Any, ClassVar, NamedTuple

from weft.config import REQUIRED, InstantiableConfig, Required
from weft.errors import ArgumentValueError, LayerConfigError
from weft.hierarchy.attention.bias import BaseAttentionBias
from weft.hierarchy.attention.feed_forward import (
    ResidualLayer,
    TransformerFeedForwardLayer,
)
from weft.hierarchy.attention.kv_cache import KVPages, KVState
from weft.hierarchy.attention.multihead_attention import (
    ForwardMode,
    MultiheadAttention,
)
from weft.hierarchy.base_layer import BaseLayer
from weft.hierarchy.layers.normalization import LayerNorm
from weft.hierarchy.module import Module
from weft.typing import DType, NestedTensor, Tensor


class TransformerAttentionLayer(ResidualLayer):
    """Attention with a skip connection."""

    class Config(ResidualLayer.Config):
        target_dim: Required[int] = REQUIRED
        source_dim: Required[int] = REQUIRED
        attention: InstantiableConfig = MultiheadAttention.default_config()
        residual_weight: float = 1.0
        """Factor of the attention's output in the sum."""

    Output = MultiheadAttention.Output

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._add_norms(cfg.target_dim)
        attention = cfg.attention.set(
            query_dim=cfg.target_dim, output_dim=cfg.target_dim
        )
        attention.set(key_dim=cfg.source_dim, value_dim=cfg.source_dim)
        self._add_child("attention", attention)
        self._add_dropouts()

    def forward(
        self,
        *,
        target: Tensor,
        source: Tensor | KVState | None = None,
        attention_logit_biases: BaseAttentionBias | Tensor | None = None,
        segment_ids: Tensor | None = None,
        target_positions: Tensor | None = None,
        return_aux: Collection[str] | None = None,
    ) -> Output:
        """Attends over a whole sequence; see `MultiheadAttention.forward`.

        Args:
          target: `Float[Array, "batch target target_dim"]`.
          source: `Float[Array, "batch source source_dim"]` to attend to, or keys and values of
            another layer; None for `target`.
          target_positions: `Int[Array, "#batch target"]`; None counts from 0.
        """
        skipped, x = self._enter_branch(target)
        output = self.attention(
            x,
            **_source_kwargs(source),
            attention_logit_biases=attention_logit_biases,
            segment_ids=segment_ids,
            query_positions=target_positions,
            return_aux=return_aux,
        )
        return output._replace(data=self._sum(skipped, output.data))

    def _sum(self, skipped: Tensor, y: Tensor) -> Tensor:
        weight = self.config.residual_weight
        return self._leave_branch(skipped, y, weight=weight)

    def init_states(
        self, *, batch_size: int, max_len: int, dtype: DType
    ) -> NestedTensor:
        """Returns the initial state of decoding; see `MultiheadAttention.init_states`."""
        states = self.attention.init_states(
            batch_size=batch_size, max_len=max_len, dtype=dtype
        )
        return {"attention": states}

    def extend_step(
        self,
        cached_states: dict[str, Any],
        target: Tensor,
        *,
        is_prefill: bool = False,
        source: Tensor | KVState | None = None,
        segment_ids: Tensor | None = None,
        attention_logit_biases: BaseAttentionBias | Tensor | None = None,
        return_aux: Collection[str] | None = None,
        page_pool: KVPages | None = None,
    ) -> tuple[dict[str, Any], Output]:
        """Attends from the next positions; see `MultiheadAttention.extend_step`.

        Args:
          cached_states: from `init_states` or the previous step; unchanged if `source` is an array.
          target: `Float[Array, "batch step target_dim"]`.
          source: as for `forward`; None for the cache.
        """
        skipped, x = self._enter_branch(target)
        kwargs = _source_kwargs(source)
        kwargs |= {
            "attention_logit_biases": attention_logit_biases,
            "return_aux": return_aux,
        }
        if "key" in kwargs:
            output = self.attention(x, **kwargs)
        else:
            states, output = self.attention.extend_step(
                cached_states["attention"],
                x,
                is_prefill=is_prefill,
                segment_ids=segment_ids,
                page_pool=page_pool,
                **kwargs,
            )
            cached_states = {**cached_states, "attention": states}
        return cached_states, output._replace(
            data=self._sum(skipped, output.data)
        )


def _source_kwargs(source: Tensor | KVState | None) -> dict[str, Any]:
    if isinstance(source, KVState):
        return {"kv_state": source}
    return {} if source is None else {"key": source, "value": source}


class BaseTransformerLayer(BaseLayer):
    """Base of layers, and stacks of layers, that keep the shape of their input."""

    class Config(BaseLayer.Config):
        input_dim: Required[int] = REQUIRED

    class Output(NamedTuple):
        """Output of the layer; optional fields are set if named in `return_aux`.

        Attributes:
          data: `Float[Array, "batch target input_dim"]`.
          self_attention_probs: `Float[Array, "batch heads target target"]`, with a leading axis of
            layers for a stack.
          self_attention_kv_state: keys and values for another layer.
          cross_attention_probs: `Float[Array, "batch heads target source"]`, with a leading axis of
            layers for a stack.
        """

        data: Tensor
        self_attention_probs: Tensor | None = None
        self_attention_kv_state: KVState | None = None
        cross_attention_probs: Tensor | None = None

    _decoding_child: ClassVar[str | None] = (
        None  # the child with the state of decoding
    )

    def forward(self, data: Tensor, **kwargs: Any) -> Output:
        """Applies the layer to a whole sequence.

        Args:
          data: `Float[Array, "batch target input_dim"]`.
          self_attention_kv_state: keys and values of another layer, if this one projects none.
          self_attention_logit_biases: `Float[Array, "#batch #heads target target"]`.
          cross_attention_data: `Float[Array, "batch source source_dim"]`.
          cross_attention_logit_biases: `Float[Array, "#batch #heads target source"]`.
          target_segment_ids: `Int[Array, "batch target"]`: positions attend within a segment, which
            hides finite values of `data` only; see `MultiheadAttention.forward`.
          target_positions: `Int[Array, "#batch target"]`; None counts from 0.
        """
        data = self._remat_name(data, "input")
        return self._forward_for_mode(ForwardMode.FORWARD, {}, data, **kwargs)[
            1
        ]

    def init_states(
        self, *, batch_size: int, max_len: int, dtype: DType
    ) -> NestedTensor:
        """Returns the initial state for decoding sequences of up to `max_len` positions."""
        if self._decoding_child is None:
            raise NotImplementedError(type(self))
        child: Any = self.children[self._decoding_child]
        states = child.init_states(
            batch_size=batch_size, max_len=max_len, dtype=dtype
        )
        return {self._decoding_child: states}

    def extend_step(
        self,
        cached_states: dict[str, Any],
        data: Tensor,
        *,
        is_prefill: bool = False,
        **kwargs: Any,
    ) -> tuple[dict[str, Any], Output]:
        """Applies the layer to the next positions of each sequence; see also `forward`.

        Args:
          cached_states: from `init_states` or the previous step.
          data: `Float[Array, "batch step input_dim"]`.
          self_attention_logit_biases: `Float[Array, "#batch #heads step source"]`, where source is
            `step` in a prefill, else `max_len`.
          target_segment_ids: `Int[Array, "batch step"]`: 0 for padding after a sequence's last
            token, which is not cached.
          page_pool: for a `PagedKVCache`, a state whose pages to use; for a stack, with a leading
            axis of layers.
        """
        mode = ForwardMode.PREFILL if is_prefill else ForwardMode.EXTEND_STEP
        return self._forward_for_mode(mode, cached_states, data, **kwargs)

    def _forward_for_mode(
        self,
        mode: ForwardMode,
        cached_states: dict[str, Any],
        data: Tensor,
        **kwargs: Any,
    ) -> tuple[dict[str, Any], Output]:
        """Applies the layer; the default calls the child with the state of decoding."""
        if self._decoding_child is None:
            raise NotImplementedError(type(self))
        return self._call_child(
            self._decoding_child, mode, cached_states, data, **kwargs
        )

    def _call_child(
        self,
        name: str,
        mode: ForwardMode,
        cached_states: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[dict[str, Any], Any]:
        """Calls `forward` of a child, or its `extend_step` with its entry of the states."""
        child: Any = self._children[name]
        if mode is ForwardMode.FORWARD:
            return cached_states, child(*args, **kwargs)
        states, output = child.extend_step(
            cached_states[name],
            *args,
            is_prefill=mode is ForwardMode.PREFILL,
            **kwargs,
        )
        return {**cached_states, name: states}, output


def _part_return_aux(return_aux: Collection[str] | None, part: str) -> set[str]:
    return {
        name.removeprefix(part)
        for name in return_aux or ()
        if name.startswith(part)
    }


class TransformerLayer(BaseTransformerLayer):
    """Self attention, optional cross attention and a feed-forward layer."""

    class Config(BaseTransformerLayer.Config):
        """Configures a TransformerLayer; without `cross_attention`, it attends only to itself."""

        self_attention: InstantiableConfig = (
            TransformerAttentionLayer.default_config()
        )
        cross_attention: InstantiableConfig | None = None
        feed_forward: InstantiableConfig = (
            TransformerFeedForwardLayer.default_config()
        )

    _decoding_child = "self_attention"

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        dim = cfg.input_dim
        self._add_child(
            "self_attention",
            cfg.self_attention.set(target_dim=dim, source_dim=dim),
        )
        self._add_child("feed_forward", cfg.feed_forward.set(input_dim=dim))
        self._maybe_add_child(
            "cross_attention", cfg.cross_attention, target_dim=dim
        )

    def _forward_for_mode(
        self,
        mode: ForwardMode,
        cached_states: dict[str, Any],
        data: Tensor,
        *,
        self_attention_kv_state: KVState | None = None,
        self_attention_logit_biases: BaseAttentionBias | Tensor | None = None,
        cross_attention_data: Tensor | None = None,
        cross_attention_logit_biases: BaseAttentionBias | Tensor | None = None,
        target_segment_ids: Tensor | None = None,
        target_positions: Tensor | None = None,
        page_pool: KVPages | None = None,
        return_aux: Collection[str] | None = None,
    ) -> tuple[dict[str, Any], BaseTransformerLayer.Output]:
        self._check_cross_attention(cross_attention_data)
        if mode is ForwardMode.FORWARD:
            mode_arguments: dict[str, Any] = {
                "target_positions": target_positions
            }
        else:
            mode_arguments = {"page_pool": page_pool}
        cached_states, self_attention = self._call_child(
            "self_attention",
            mode,
            cached_states,
            target=data,
            source=self_attention_kv_state,
            attention_logit_biases=self_attention_logit_biases,
            segment_ids=target_segment_ids,
            return_aux=_part_return_aux(return_aux, "self_attention_"),
            **mode_arguments,
        )
        data, cross_probs = self_attention.data, None
        if cross_attention_data is not None:
            cross_attention = self.cross_attention(
                target=data,
                source=cross_attention_data,
                attention_logit_biases=cross_attention_logit_biases,
                return_aux=_part_return_aux(return_aux, "cross_attention_"),
            )
            data, cross_probs = cross_attention.data, cross_attention.probs
        return cached_states, self.Output(
            data=self.feed_forward(data),
            self_attention_probs=self_attention.probs,
            self_attention_kv_state=self_attention.kv_state,
            cross_attention_probs=cross_probs,
        )

    def _check_cross_attention(
        self, cross_attention_data: Tensor | None
    ) -> None:
        has_layer = self.config.cross_attention is not None
        if has_layer and cross_attention_data is None:
            raise ArgumentValueError(
                f"{self.path()} has a cross_attention, but was given no cross_attention_data; pass "
                "an array to attend to."
            )
        if cross_attention_data is not None and not has_layer:
            raise ArgumentValueError(
                f"{self.path()} was given cross_attention_data, but has no cross_attention; set "
                "cross_attention to TransformerAttentionLayer.default_config()."
            )


class ParallelTransformerLayer(BaseTransformerLayer):
    """`x + attention(norm(x)) + feed_forward(norm(x))` (Wang and Komatsuzaki, 2021)."""

    class Config(BaseTransformerLayer.Config):
        """Configures a ParallelTransformerLayer; `feed_forward` has no norm and skip connection."""

        norm: InstantiableConfig = LayerNorm.default_config()
        feed_forward_norm: InstantiableConfig | None = None
        """Norm of the feed-forward layer's input, as in GPT-NeoX; None for `norm`, whose output
        both branches then share."""
        self_attention: MultiheadAttention.Config = (
            MultiheadAttention.default_config()
        )
        feed_forward: TransformerFeedForwardLayer.Config = (
            TransformerFeedForwardLayer.default_config().set(structure="nonorm")
        )
        dropout: InstantiableConfig | None = None
        """Dropout of the attention's output; None for none. That of the other branch is part of
        `feed_forward`."""

    _decoding_child = "self_attention"

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        dim = cfg.input_dim
        self._add_child("norm", cfg.norm.set(input_dim=dim))
        self._maybe_add_child(
            "feed_forward_norm", cfg.feed_forward_norm, input_dim=dim
        )
        self._maybe_add_child("dropout", cfg.dropout)
        self._add_child(
            "self_attention",
            cfg.self_attention.set(
                query_dim=dim, key_dim=dim, value_dim=dim, output_dim=dim
            ),
        )
        self._add_child("feed_forward", cfg.feed_forward.set(input_dim=dim))

    def _forward_for_mode(
        self,
        mode: ForwardMode,
        cached_states: dict[str, Any],
        data: Tensor,
        *,
        self_attention_logit_biases: BaseAttentionBias | Tensor | None = None,
        target_segment_ids: Tensor | None = None,
        target_positions: Tensor | None = None,
        page_pool: KVPages | None = None,
        return_aux: Collection[str] | None = None,
    ) -> tuple[dict[str, Any], BaseTransformerLayer.Output]:
        x = self.norm(data)
        if mode is ForwardMode.FORWARD:
            mode_arguments: dict[str, Any] = {
                "query_positions": target_positions
            }
        else:
            mode_arguments = {"page_pool": page_pool}
        cached_states, attention = self._call_child(
            "self_attention",
            mode,
            cached_states,
            x,
            attention_logit_biases=self_attention_logit_biases,
            segment_ids=target_segment_ids,
            return_aux=_part_return_aux(return_aux, "self_attention_"),
            **mode_arguments,
        )
        if self.config.feed_forward_norm is not None:
            x = self.feed_forward_norm(data)
        y = attention.data
        if self.config.dropout is not None:
            y = self.dropout(y)
        return cached_states, self.Output(
            data=data + y + self.feed_forward(x),
            self_attention_probs=attention.probs,
            self_attention_kv_state=attention.kv_state,
        )


class BottleNeckAdapterTransformerLayer(BaseTransformerLayer):
    """Layer followed by a narrow feed-forward layer (Houlsby et al., 2019).

    To fine-tune a model, train the adapters and freeze the rest.
    """

    class Config(BaseTransformerLayer.Config):
        """Configures the adapter: its hidden dimension is `bottleneck_ratio` times `input_dim`."""

        layer: BaseTransformerLayer.Config = TransformerLayer.default_config()
        adapter: TransformerFeedForwardLayer.Config = (
            TransformerFeedForwardLayer.default_config().set(
                structure="postnorm"
            )
        )
        bottleneck_ratio: float = 0.5

    _decoding_child = "layer"

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        hidden_dim = int(cfg.input_dim * cfg.bottleneck_ratio)
        if hidden_dim < 1:
            raise LayerConfigError(
                f"{self.path()}: bottleneck_ratio={cfg.bottleneck_ratio} of input_dim="
                f"{cfg.input_dim} has no dimensions; expected at least 1."
            )
        self._add_child("layer", cfg.layer.set(input_dim=cfg.input_dim))
        self._add_child(
            "adapter",
            cfg.adapter.set(input_dim=cfg.input_dim, hidden_dim=hidden_dim),
        )

    def _forward_for_mode(
        self,
        mode: ForwardMode,
        cached_states: dict[str, Any],
        data: Tensor,
        **kwargs: Any,
    ) -> tuple[dict[str, Any], BaseTransformerLayer.Output]:
        states, output = super()._forward_for_mode(
            mode, cached_states, data, **kwargs
        )
        return states, output._replace(data=self.adapter(output.data))
