"""Multi-head attention, over a whole sequence or in decoding steps.

    query ── i_proj ── scale ─┐
    key ──── i_proj ── scale ─┴─ logits + biases ── softmax ── dropout ─┐
    value ── i_proj ────────────────────────────────────────────────────┴─ context ── o_proj

A decoding step first writes its keys and values to the cache, then reads those of all positions so
far. `time_step` counts the cached positions of each sequence.

The logits of Transformer-XL attention depend on relative positions (Dai et al., 2019):

    logit(i, j) = (q_i + u) · k_j  +  (q_i + v) · r(i - j)

`r` projects sinusoidal embeddings of the distance; `u` and `v` are learned for each head.
"""

import enum
import math
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from weft import errors, functional
from weft._door import EnumTypeWithHints
from weft.config import REQUIRED, ClassConfigBase, Required
from weft.core import logical, spmd
from weft.functional import arrays, attention
from weft.functional.fused_attention import (
    AttentionImplementation,
    fused_attention,
    is_plain,
)
from weft.hierarchy.attention import bias as bias_lib
from weft.hierarchy.attention import qkv_linear
from weft.hierarchy.attention.kv_cache import (
    BaseKVCache,
    KVCache,
    KVPages,
    KVState,
)
from weft.hierarchy.base_layer import BaseLayer, ParameterSpec
from weft.hierarchy.context import child_context
from weft.hierarchy.layers import embedding, linear
from weft.hierarchy.module import Module, nowrap
from weft.hierarchy.parameter_spec import (
    constant_spec,
    free_if_indivisible,
    maybe_shard,
    num_parts,
    pad_axes,
)
from weft.typing import DType, MeshAxes, NestedTensor, PartitionSpec, Tensor

PartitionSpecType = PartitionSpec | MeshAxes


class ForwardMode(enum.Enum, metaclass=EnumTypeWithHints):
    """Ways to call a layer that supports decoding."""

    FORWARD = 0
    """Whole sequence, without a cache."""
    PREFILL = 1
    """First positions of a sequence (the prompt), with an empty cache."""
    EXTEND_STEP = 2
    """Positions that follow those in the cache."""


def softmax_with_biases(
    logits: Tensor,
    attention_logit_biases: Tensor | None = None,
    logit_sink: Tensor | None = None,
) -> Tensor:
    """Computes `functional.attention_probs` in the dtype of the logits."""
    probs = functional.attention_probs(
        logits, attention_logit_biases, logit_sink=logit_sink
    )
    return probs.astype(logits.dtype)


def sigmoid_with_biases(
    logits: Tensor, attention_logit_biases: Tensor | None = None
) -> Tensor:
    """Computes `functional.sigmoid_attention_probs` in the dtype of the logits."""
    return functional.sigmoid_attention_probs(
        logits, attention_logit_biases
    ).astype(logits.dtype)


def compute_gqa_logits(q_proj: Tensor, k_proj: Tensor) -> Tensor:
    """Computes `functional.attention_logits`; consecutive query heads share a key head."""
    return functional.attention_logits(q_proj, k_proj)


def compute_gqa_context(probs: Tensor, v_proj: Tensor) -> Tensor:
    """Computes `functional.attention_context`; consecutive query heads share a value head."""
    return functional.attention_context(probs, v_proj)


# A subclass with its own one of these computes logits and probabilities of all pairs.
_PARTS_OF_PLAIN = (
    "_compute_attention",
    "_compute_logits",
    "_cap_logits",
    "_compute_probs",
    "_compute_context",
)


def _from_0(x: Tensor) -> Any:
    """Returns positions that are known when tracing, so that a kernel can be told of a mask."""
    return np.arange(x.shape[1], dtype=np.int32)[None]


class MultiheadAttention(BaseLayer):
    """Multi-head attention (Vaswani et al., 2017)."""

    class Config(BaseLayer.Config):
        """Configures a MultiheadAttention."""

        query_dim: Required[int] = REQUIRED
        key_dim: Required[int] = REQUIRED
        value_dim: Required[int] = REQUIRED
        num_heads: Required[int] = REQUIRED
        hidden_dim: int | None = None
        """Total size of all heads; None for `query_dim`."""
        output_dim: int | None = None
        """Size of the output; None for `query_dim`."""
        input_linear: qkv_linear.BaseQKVLinear.Config = (
            qkv_linear.QKVLinear.default_config()
        )
        output_linear: qkv_linear.MultiheadOutputLinear.Config = (
            qkv_linear.MultiheadOutputLinear.default_config()
        )
        query_scale: qkv_linear.BaseScaleQK.Config = (
            qkv_linear.ScaleQuery.default_config()
        )
        """Norm and scale of queries."""
        key_scale: qkv_linear.BaseScaleQK.Config | None = (
            qkv_linear.ScaleKey.default_config()
        )
        """Norm and scale of keys; None for none."""
        scale_kv_before_cache_update: bool | None = None
        """Whether keys are scaled once, before they are cached, instead of in each step."""
        dropout: linear.Dropout.Config = linear.Dropout.default_config()
        """Dropout of the probabilities."""
        mask: ClassConfigBase[bias_lib.MaskFnAttentionBias] | None = None
        """Attention mask by position, such as `CausalAttentionBias.default_config()`; None for full
        attention."""
        causal: bool | None = None
        """Shorthand for a causal `mask`."""
        atten_logit_cap: float | None = None
        """Bound c of c * tanh(logits / c); None for none."""
        logit_sink: bool | None = None
        """Whether each head learns a logit of an extra key without a value, so that it may attend
        to nothing."""
        implementation: AttentionImplementation | None = None
        """One of "plain", "blockwise", "cudnn" and "tokamax" (`weft.functional.fused_attention`);
        None chooses by device, lengths and what is asked for. Only "plain" computes probabilities,
        and logits or probabilities of subclasses."""
        context_parallelism: functional.ContextParallelism | None = None
        """How devices share attention if `q_partition_spec` splits positions over a mesh axis:
        "ring" moves keys and values around (computed as by the implementation "blockwise"),
        "all_to_all" exchanges positions for heads; None gathers keys and values on each device, as
        do lengths that the axis does not divide, such as that of a decoding step, and attention
        that only "plain" computes."""
        kv_cache: BaseKVCache.Config = KVCache.default_config()
        q_partition_spec: PartitionSpecType | None = None
        """Sharding of queries, (batch, time, heads, per_head_dim)."""
        k_partition_spec: PartitionSpecType | None = None
        """Sharding of keys, (batch, time, heads, per_head_dim)."""
        v_partition_spec: PartitionSpecType | None = None
        """Sharding of values, (batch, time, heads, per_head_dim)."""
        o_partition_spec: PartitionSpecType | None = None
        """Sharding of the output, (batch, time, dim)."""

    class Output(NamedTuple):
        """Output of attention.

        Attributes:
          data: `Float[Array, "batch target output_dim"]`.
          probs: `Float[Array, "batch heads target source"]`, if "probs" is in `return_aux`.
          kv_state: keys and values for another layer, if "kv_state" is in `return_aux`.
        """

        data: Tensor
        probs: Tensor | None = None
        kv_state: KVState | None = None

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        input_linear = cfg.input_linear.set(
            query_dim=cfg.query_dim,
            key_dim=cfg.key_dim,
            value_dim=cfg.value_dim,
            num_heads=cfg.num_heads,
            per_head_dim=self.per_head_dim(),
        )
        self._add_child("i_proj", input_linear)
        output_linear = cfg.output_linear.set(
            model_dim=self.output_dim(),
            num_heads=cfg.num_heads,
            per_head_dim=self.per_head_dim(),
        )
        self._add_child("o_proj", output_linear)
        self._add_child("dropout", cfg.dropout)
        self._add_child(
            "scale_query", cfg.query_scale.set(per_head_dim=self.per_head_dim())
        )
        self._maybe_add_child(
            "scale_key", cfg.key_scale, per_head_dim=self.per_head_dim()
        )
        self._shares_kv = cfg.input_linear.klass.is_kv_sharing(cfg.input_linear)
        if not self._shares_kv:
            self._add_child("kv_cache", cfg.kv_cache)
        self._mask = cfg.mask
        if cfg.causal:
            mask = cfg.mask
            if mask is not None and not issubclass(
                mask.klass, bias_lib.CausalAttentionBias
            ):
                raise errors.LayerConfigError(
                    f"{self.path()}: causal=True and mask={mask.klass.__name__} are both "
                    "set; causal=True already sets a mask, so set only one of them."
                )
            self._mask = bias_lib.CausalAttentionBias.default_config()
        self._check_window()
        if self.i_proj.num_kv_heads != self.num_kv_heads:
            raise errors.LayerConfigError(
                f"{self.path()}: {type(self.i_proj).__name__} makes {self.i_proj.num_kv_heads} "
                f"key heads for num_heads={cfg.num_heads}; use GroupedQueryAttention, in which "
                "query heads share key heads."
            )

    def _check_window(self) -> None:
        length = getattr(self.config.kv_cache, "cached_kv_length", None)
        if self._mask is None or length is None or self._shares_kv:
            return
        values = dict(self._mask.items())
        if issubclass(self._mask.klass, bias_lib.CausalAttentionBias):
            window = None
        elif "sliding_window_size" in values or "left_context" in values:
            window = values.get(
                "sliding_window_size", values.get("left_context")
            )
        else:
            return
        if window is None or window > length:
            raise errors.LayerConfigError(
                f"{self.path()}: kv_cache keeps cached_kv_length={length} positions, but the mask "
                f"lets a position attend to {'all' if window is None else window} before it; set "
                "mask=SlidingWindowAttentionBias.default_config(sliding_window_size="
                f"{length}), or another kv_cache."
            )

    @nowrap
    def hidden_dim(self) -> int:
        """Returns the total size of all heads."""
        return self.config.hidden_dim or self.config.query_dim

    @nowrap
    def output_dim(self) -> int:
        """Returns the size of the output."""
        return self.config.output_dim or self.config.query_dim

    @nowrap
    def per_head_dim(self) -> int:
        """Returns the size of a head, or raises LayerConfigError if it is not an integer."""
        hidden_dim, num_heads = self.hidden_dim(), self.config.num_heads
        if hidden_dim % num_heads:
            raise errors.LayerConfigError(
                f"{self.path()}: num_heads={num_heads} does not divide the hidden dimension "
                f"{hidden_dim}; set hidden_dim to a multiple, or change num_heads."
            )
        return hidden_dim // num_heads

    @property
    def num_kv_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.config.num_heads

    @staticmethod
    def default_query_scale_config() -> qkv_linear.BaseScaleQK.Config:
        """Returns the default of `query_scale`."""
        return qkv_linear.ScaleQuery.default_config()

    @staticmethod
    def default_key_scale_config() -> qkv_linear.BaseScaleQK.Config:
        """Returns the default of `key_scale`."""
        return qkv_linear.ScaleKey.default_config()

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        if not self.config.logit_sink:
            return {}
        # The heads of the projections are divided over this axis, too.
        return {
            "sink": constant_spec(
                (self.config.num_heads,), mesh_axes=("model",)
            )
        }

    def forward(
        self,
        query: Tensor,
        *,
        key: Tensor | None = None,
        value: Tensor | None = None,
        kv_state: KVState | None = None,
        attention_logit_biases: bias_lib.BaseAttentionBias
        | Tensor
        | None = None,
        segment_ids: Tensor | None = None,
        query_positions: Tensor | None = None,
        return_aux: Collection[str] | None = None,
    ) -> Output:
        """Attends over a whole sequence.

        Args:
          query: `Float[Array, "batch target query_dim"]`.
          key: `Float[Array, "batch source key_dim"]`; None for self attention.
          value: `Float[Array, "batch source value_dim"]`; None for `key`.
          kv_state: keys and values of another layer, if this one projects none.
          attention_logit_biases: `Float[Array, "#batch #heads target source"]`, added to the logits
            in addition to the layer's own mask.
          segment_ids: `Int[Array, "batch target"]`: positions attend within their own segment. They
            hide finite values only: 0 times NaN is NaN, in results and gradients. Where padding may
            be NaN, pass `jnp.where(segment_ids[..., None] != 0, query, 0)`.
          query_positions: `Int[Array, "#batch target"]`; None counts from 0.
          return_aux: optional outputs to return: "probs", "kv_state".
        """
        positions: Any = (
            _from_0(query) if query_positions is None else query_positions
        )
        proj = self._project(query, key, value, kv_state, positions)
        if kv_state is not None:
            key_positions = kv_state.key_positions
        else:
            key_positions = positions if key is None else _from_0(key)
        biases = bias_lib.as_attention_bias(attention_logit_biases)
        if segment_ids is not None:
            biases = biases + bias_lib.SegmentIdAttentionBias(segment_ids)
        kv_state = KVState(proj.key, proj.value, key_positions)
        return self._attend(proj.query, positions, kv_state, biases, return_aux)

    def init_states(
        self, *, batch_size: int, max_len: int, dtype: DType
    ) -> NestedTensor:
        """Returns the initial state for decoding sequences of up to `max_len` positions."""
        states: dict[str, Any] = {
            "time_step": jnp.zeros([batch_size], jnp.int32)
        }
        if not self._shares_kv:
            shape = (
                batch_size,
                max_len,
                self.num_kv_heads,
                self.per_head_dim(),
            )
            states["kv_cache"] = self.kv_cache.init_states(shape, dtype=dtype)
        return states

    def extend_step(
        self,
        cached_states: dict[str, Any],
        query: Tensor,
        *,
        is_prefill: bool = False,
        key: Tensor | None = None,
        value: Tensor | None = None,
        kv_state: KVState | None = None,
        segment_ids: Tensor | None = None,
        attention_logit_biases: bias_lib.BaseAttentionBias
        | Tensor
        | None = None,
        return_aux: Collection[str] | None = None,
        page_pool: KVPages | None = None,
    ) -> tuple[NestedTensor, Output]:
        """Attends from the next positions of each sequence to all positions so far.

        Args:
          cached_states: from `init_states` or the previous step.
          query: `Float[Array, "batch step query_dim"]`.
          is_prefill: whether the cache is empty, so that the step attends only to itself.
          key: `Float[Array, "batch step key_dim"]`; None for `query`.
          value: `Float[Array, "batch step value_dim"]`; None for `key`.
          kv_state, return_aux: as for `forward`.
          segment_ids: `Int[Array, "batch step"]`: 0 for padding, which may follow the last token of
            a sequence and is not cached. None for no padding.
          attention_logit_biases: `Float[Array, "#batch #heads step source"]`, added to the logits
            in addition to the layer's own mask. Source is `step` in a prefill, else `max_len`.
          page_pool: for a `PagedKVCache`, a state whose pages to use.
        """
        time_step = cached_states["time_step"]
        batch, step = query.shape[:2]
        positions = time_step[:, None] + jnp.arange(step)[None]
        unpadded_len = jnp.full([batch], step, jnp.int32)
        if segment_ids is not None:
            unpadded_len = jnp.sum(segment_ids != 0, axis=1, dtype=jnp.int32)
        # Angles may depend on the length of a sequence, which does not count padding.
        last = time_step + jnp.maximum(unpadded_len - 1, 0)
        projected_positions = jnp.minimum(positions, last[:, None])
        proj = self._project(query, key, value, kv_state, projected_positions)
        states = {**cached_states, "time_step": time_step + unpadded_len}
        if kv_state is None:
            states["kv_cache"], cached = self.kv_cache.extend_step(
                cached_states["kv_cache"],
                k_proj=proj.key,
                v_proj=proj.value,
                key_positions=positions,
                unpadded_len=None if segment_ids is None else unpadded_len,
                page_pool=page_pool,
            )
            cached = self.kv_cache.maybe_normalize_kv(cached)
            kv_state = (
                KVState(proj.key, proj.value, positions)
                if is_prefill
                else cached
            )
        else:
            # A projection may change the other layer's keys and values.
            kv_state = kv_state._replace(k_proj=proj.key, v_proj=proj.value)
        assert kv_state is not None
        key_positions = kv_state.key_positions
        filled = (key_positions >= 0) & (
            key_positions < states["time_step"][:, None]
        )
        biases = bias_lib.as_attention_bias(attention_logit_biases)
        if not is_prefill and (bias := biases.value()) is not None:
            # A cache may hold only some positions.
            bias_of_keys = jnp.take_along_axis(
                bias, key_positions[:, None, None], axis=-1, mode="clip"
            )
            biases = bias_lib.as_attention_bias(bias_of_keys)
        biases = biases + bias_lib.BoolTensorAttentionBias.from_tensor(
            filled[:, None, None]
        )
        return states, self._attend(
            proj.query, positions, kv_state, biases, return_aux
        )

    def _project(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_state: KVState | None,
        query_positions: Tensor,
    ) -> qkv_linear.BaseQKVLinear.Output:
        """Projects to queries, keys and values."""
        cfg = self.config
        proj = self.i_proj(
            query,
            key=key,
            value=value,
            kv_state=kv_state,
            query_positions=query_positions,
        )
        q_proj = self._projection("q_proj", proj.query, cfg.q_partition_spec)
        if kv_state is not None:
            return proj._replace(query=q_proj)
        k_proj = self._projection("k_proj", proj.key, cfg.k_partition_spec)
        v_proj = self._projection("v_proj", proj.value, cfg.v_partition_spec)
        if cfg.scale_kv_before_cache_update:
            k_proj = self._scale_key(k_proj, query_positions)
        return proj._replace(query=q_proj, key=k_proj, value=v_proj)

    def _projection(
        self, name: str, x: Tensor, spec: PartitionSpecType | None
    ) -> Tensor:
        """Shards a projection, names it for remat and reports it."""
        if x.ndim == 4:  # the third axis is that of heads
            spec = free_if_indivisible(spec, axis=2, size=x.shape[2])
        return self._add_tensor_stats(
            f"{name}_outputs", self._remat_name(maybe_shard(x, spec), name)
        )

    def _scale_key(self, k_proj: Tensor, positions: Tensor) -> Tensor:
        if self.config.key_scale is None:
            return k_proj
        return self.scale_key(k_proj, positions=positions)

    def _attend(
        self,
        q_proj: Tensor,
        query_positions: Tensor,
        kv_state: KVState,
        biases: bias_lib.BaseAttentionBias,
        return_aux: Collection[str] | None,
    ) -> Output:
        cfg = self.config
        aux = set(return_aux or ())
        if unknown := aux - {"probs", "kv_state"}:
            raise errors.ArgumentValueError(
                f"{self.path()}: unknown return_aux {sorted(unknown)}; expected 'probs' or "
                "'kv_state'."
            )
        k_proj, v_proj, key_positions, _ = kv_state
        if not cfg.scale_kv_before_cache_update:
            k_proj = self._scale_key(k_proj, key_positions)
        if self._mask is not None:
            biases = biases + self._mask.instantiate(
                target_positions=query_positions, source_positions=key_positions
            )
        k_proj = self._repeated_heads(k_proj)
        v_proj = self._repeated_heads(v_proj)
        q_proj, probs = self._scale_query(q_proj, query_positions), None
        context = self._attention_without_probs(
            q_proj, k_proj, v_proj, biases, "probs" in aux
        )
        if context is None:
            context, probs = self._compute_attention(
                q_proj=q_proj,
                k_proj=k_proj,
                v_proj=v_proj,
                attention_logit_biases=biases,
                query_positions=query_positions,
                key_positions=key_positions,
            )
        data = self.o_proj(self._remat_name(context, "context"))
        return self.Output(
            self._projection("o_proj", data, cfg.o_partition_spec),
            probs if "probs" in aux else None,
            kv_state if "kv_state" in aux else None,
        )

    def _repeated_heads(self, x: Tensor) -> Tensor:
        """Repeats heads of keys or values, so that each device has those of its queries.

        Heads that the mesh can split, or that are of no use to it, are returned as they are.
        """
        spec = self.config.q_partition_spec
        if spec is None:
            return x
        entry = pad_axes(logical.names_to_mesh_axes(spec), 4)[2]
        num_heads = x.shape[2]
        parts = num_parts(entry)
        repeats = parts // math.gcd(num_heads, parts)
        if repeats == 1 or self.config.num_heads % (num_heads * repeats):
            return x
        free = PartitionSpec.UNCONSTRAINED
        return maybe_shard(
            jnp.repeat(x, repeats, axis=2),
            PartitionSpec(free, free, entry, free),
        )

    def _scale_query(self, q_proj: Tensor, positions: Tensor) -> Tensor:
        return self.scale_query(q_proj, positions=positions)

    def _attention_without_probs(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        biases: bias_lib.BaseAttentionBias,
        wants_probs: bool,
    ) -> Tensor | None:
        """Returns the context, or None if the probabilities must be computed."""
        cfg = self.config
        rate = (self.dropout.config.rate if self.is_training else None) or 0.0
        only_plain = None
        if wants_probs:
            only_plain = "return_aux asks for the probabilities"
        elif changed := [
            name
            for name in _PARTS_OF_PLAIN
            if getattr(type(self), name)
            is not getattr(MultiheadAttention, name)
        ]:
            only_plain = f"{type(self).__name__} has its own {changed[0]}"
        elif (
            self.is_training
            and type(self.dropout).forward is not linear.Dropout.forward
        ):
            only_plain = f"{type(self.dropout).__name__} drops probabilities in its own way"
        context_axis = None
        if only_plain is None:
            context_axis = self._context_axis(q, k)
        try:
            sink = self.parameters["sink"] if cfg.logit_sink else None
            cap = cfg.atten_logit_cap or None
            if context_axis is None and is_plain(
                cfg.implementation, q.shape[1] * k.shape[1], only_plain
            ):
                if only_plain is not None:
                    return None
                drop, bias = self.dropout if rate else None, biases.value()
                return attention.plain_attention(
                    q,
                    k,
                    v,
                    bias=bias,
                    scale=1.0,
                    logit_cap=cap,
                    logit_sink=sink,
                    drop=drop,
                )
            mask, bias = bias_lib.as_mask_and_bias(biases)
            key = None
            if rate:
                with child_context("dropout"):
                    key = self.dropout.get_prng_key()
            options: dict[str, Any] = {
                "mask": mask,
                "bias": bias,
                "scale": 1.0,
                "logit_cap": cap,
                "logit_sink": sink,
                "dropout_rate": rate,
                "dropout_key": key,
            }
            if context_axis is None:
                return fused_attention(cfg.implementation, q, k, v, **options)
            options["axis_name"] = context_axis
            options["replicated_axes"] = self._axes_without_queries()
            if cfg.context_parallelism == "ring":
                return functional.ring_attention(q, k, v, **options)
            return functional.all_to_all_attention(
                q, k, v, implementation=cfg.implementation, **options
            )
        except (
            errors.ArgumentShapeError,
            errors.ArgumentValueError,
        ) as error:
            raise type(error)(f"{self.path()}: {error}") from error

    def _context_axis(self, q: Tensor, k: Tensor) -> str | None:
        """Returns the mesh axis whose devices share attention; None if each has all keys."""
        spec = self.config.q_partition_spec
        if self.config.context_parallelism is None or spec is None:
            return None
        mesh = jax.sharding.get_abstract_mesh()
        axis_types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        _, time_entry, *_ = pad_axes(logical.names_to_mesh_axes(spec), q.ndim)
        axes: list[str] = []
        for name in spmd.axes_of(time_entry):
            # Inside a shard_map over it, a device has a part of the arrays only.
            is_manual = axis_types.get(name) is AxisType.Manual
            if not is_manual and mesh.shape.get(name, 1) > 1:
                axes.append(name)
        if len(axes) != 1:
            return None
        size = mesh.shape[axes[0]]
        divides_both = q.shape[1] % size == 0 and k.shape[1] % size == 0
        return axes[0] if divides_both else None

    def _axes_without_queries(self) -> list[str]:
        """Returns the mesh axes over which queries are not split, such as that of a pipeline."""
        mesh = jax.sharding.get_abstract_mesh()
        axes_of_queries: set[str] = set()
        for entry in logical.names_to_mesh_axes(self.config.q_partition_spec):
            axes_of_queries.update(spmd.axes_of(entry))
        axes: list[str] = []
        for name, axis_type in zip(
            mesh.axis_names, mesh.axis_types, strict=True
        ):
            is_auto = axis_type is AxisType.Auto
            if is_auto and mesh.shape[name] > 1 and name not in axes_of_queries:
                axes.append(name)
        return axes

    def _compute_attention(
        self,
        *,
        q_proj: Tensor,
        k_proj: Tensor,
        v_proj: Tensor,
        attention_logit_biases: bias_lib.BaseAttentionBias,
        query_positions: Tensor,
        key_positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Computes context and probabilities from scaled queries and keys, and all biases."""
        logits = self._compute_logits(
            q_proj,
            k_proj,
            query_positions=query_positions,
            key_positions=key_positions,
        )
        logits = self._cap_logits(logits)
        probs = self.dropout(
            self._compute_probs(logits, attention_logit_biases.value())
        )
        return self._compute_context(probs, v_proj), probs

    def _compute_logits(
        self,
        q_proj: Tensor,
        k_proj: Tensor,
        *,
        query_positions: Tensor,
        key_positions: Tensor,
    ) -> Tensor:
        return functional.attention_logits(q_proj, k_proj)

    def _cap_logits(self, logits: Tensor) -> Tensor:
        cap = self.config.atten_logit_cap
        return logits if not cap else functional.cap_logits(logits, cap)

    def _compute_probs(self, logits: Tensor, bias: Tensor | None) -> Tensor:
        sink = self.parameters["sink"] if self.config.logit_sink else None
        return functional.attention_probs(logits, bias, logit_sink=sink)

    def _compute_context(self, probs: Tensor, v_proj: Tensor) -> Tensor:
        return functional.attention_context(probs, v_proj)


class GroupedQueryAttention(MultiheadAttention):
    """Attention in which consecutive query heads share a head of keys and values.

    `input_linear`, such as `GroupedQKVLinear`, sets the number of key heads.
    """

    @property
    def num_kv_heads(self) -> int:
        return self.i_proj.num_kv_heads


class SigmoidAttention(MultiheadAttention):
    """Attention with sigmoid probabilities, independent for each key (Ramapuram et al., 2024)."""

    class Config(MultiheadAttention.Config):
        """Configures a SigmoidAttention."""

        seq_len: Required[int] = REQUIRED
        """Expected number of keys."""
        subtract_seq_len_bias: bool = True
        """Whether to subtract log(`seq_len`) from logits, so that initial probabilities sum to
        about 1."""

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        if cfg.logit_sink:
            raise errors.LayerConfigError(
                f"{self.path()}: logit_sink applies to a softmax only; leave it unset, since a "
                "sigmoid can attend to nothing without it."
            )

    def _compute_probs(self, logits: Tensor, bias: Tensor | None) -> Tensor:
        if self.config.subtract_seq_len_bias:
            logits = logits - jnp.log(float(self.config.seq_len))
        return functional.sigmoid_attention_probs(logits, bias)


def xl_attention_logits(
    q_proj: Tensor,
    k_proj: Tensor,
    relative_pos_emb: Tensor,
    u: Tensor,
    v: Tensor,
) -> Tensor:
    """Computes `functional.xl_attention_logits`: content and relative position over a sequence."""
    return functional.xl_attention_logits(
        q_proj, k_proj, relative_pos_emb, u, v
    )


class MultiheadRelativePositionLinear(qkv_linear.MultiheadInputLinear):
    """Projection of relative position embeddings to the heads."""


class MultiheadAttentionXL(MultiheadAttention):
    """Self attention with relative positions."""

    class ScalePosition(enum.Enum):
        """Place where the scale factor of queries is applied."""

        LOGIT = 0
        """On the logits, after adding `u` and `v`."""
        QUERY = 1
        """On the queries, before adding `u` and `v`."""

    class Config(MultiheadAttention.Config):
        """Configures a MultiheadAttentionXL."""

        pos_emb_dim: int | None = None
        """Size of relative position embeddings; None for `query_dim`."""
        relative_pos_emb: embedding.SinusoidalPositionalEmbedding.Config = (
            embedding.SinusoidalPositionalEmbedding.default_config()
        )
        relative_pos_linear: MultiheadRelativePositionLinear.Config = (
            MultiheadRelativePositionLinear.default_config().set(bias=False)
        )
        scale_position: Required["MultiheadAttentionXL.ScalePosition"] = (
            REQUIRED
        )

    @classmethod
    def default_config(cls) -> Config:
        """Returns a config with one fused projection without bias."""
        cfg = (
            super().default_config().set(scale_position=cls.ScalePosition.LOGIT)
        )
        cfg.input_linear = qkv_linear.FusedQKVLinear.default_config()
        cfg.input_linear.layer.bias = False
        return cfg

    def __init__(self, cfg: Config, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        if self._shares_kv:
            raise errors.LayerConfigError(
                f"{self.path()}: relative positions need the layer's own keys; use an "
                "input_linear that projects to keys."
            )
        dim = cfg.pos_emb_dim or cfg.query_dim
        self._add_child("relative_pos_emb", cfg.relative_pos_emb.set(dim=dim))
        r_proj = cfg.relative_pos_linear.set(
            model_dim=dim, num_heads=cfg.num_heads
        )
        self._add_child("r_proj", r_proj.set(per_head_dim=self.per_head_dim()))

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        shape = (self.config.num_heads, self.per_head_dim())
        bias = ParameterSpec(shape, mesh_axes=("model", None))
        return {
            **super()._create_layer_parameter_specs(),
            "u_bias": bias,
            "v_bias": bias,
        }

    def forward(self, query, *, key=None, value=None, **kwargs):
        """Self-attends over a whole sequence; see `MultiheadAttention.forward`.

        Raises:
          ArgumentValueError: if `key`, `value` or `query_positions` is given; positions start at 0.
        """
        refused_arguments = {
            "key": key,
            "value": value,
            "query_positions": kwargs.get("query_positions"),
        }
        names = [name for name, x in refused_arguments.items() if x is not None]
        if names:
            raise errors.ArgumentValueError(
                f"{self.path()}: {', '.join(names)} given, but MultiheadAttentionXL is self "
                "attention with positions from 0; omit the argument or use MultiheadAttention."
            )
        return super().forward(query, **kwargs)

    def _scale_query(self, q_proj: Tensor, positions: Tensor) -> Tensor:
        if self.config.scale_position is self.ScalePosition.QUERY:
            return super()._scale_query(q_proj, positions)
        with child_context("scale_query"):
            return self.scale_query.apply_per_dim_scale(
                self.scale_query.apply_norm(q_proj)
            )

    def _compute_logits(
        self,
        q_proj: Tensor,
        k_proj: Tensor,
        *,
        query_positions: Tensor,
        key_positions: Tensor,
    ) -> Tensor:
        u, v = self.parameters["u_bias"], self.parameters["v_bias"]
        length = k_proj.shape[1]
        distances = jnp.arange(length - 1, -length, -1)
        r_proj = self.r_proj(
            self.relative_pos_emb(distances).astype(q_proj.dtype)
        )
        if q_proj.shape[1] == length:
            logits = xl_attention_logits(q_proj, k_proj, r_proj, u, v)
        else:
            # A decoding step has few queries, each with its own position.
            content_logits = functional.attention_logits(
                q_proj + arrays.to_ndim(u, 4), k_proj
            )
            logits_by_distance = functional.attention_logits(
                q_proj + arrays.to_ndim(v, 4), r_proj[None]
            )
            # The first of `distances` is length - 1.
            distance = query_positions[:, :, None] - key_positions[:, None, :]
            index = (length - 1 - distance)[:, None]
            position_logits = jnp.take_along_axis(
                logits_by_distance, index, axis=-1, mode="clip"
            )
            logits = content_logits + position_logits
        if self.config.scale_position is self.ScalePosition.LOGIT:
            with child_context("scale_logits", module=self.scale_query):
                return self.scale_query.apply_scale_factor(logits)
        return logits
