"""Biases of attention logits as structured objects, and layers that compute them.

Most biases are masks, 0 or `NEG_INF`, with a short description: causal, within a window, within a
segment. Until its `value()` is computed, a bias object keeps this description, so that an
implementation of attention can `split` a sum `a + b` and handle the parts it knows specially.

The layers return values, `Float[Array, "batch #heads time time"]`, for a model that shares one bias
among all layers. An attention layer can also mask by itself: see its field `mask`.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, Generic, Self, TypeVar

import jax.core
import jax.numpy as jnp
import numpy as np

from weft import config, errors, struct
from weft._door import current_door
from weft.functional import (
    alibi_bias,
    alibi_slopes,
    and_masks,
    attention_mask,
    bool_to_bias,
    lookup,
    relative_position_buckets,
)
from weft.functional.arrays import gathered, to_ndim
from weft.functional.attention_mask import AttentionMask, MaskFn, causal_mask
from weft.hierarchy.base_layer import BaseLayer, ParameterSpec
from weft.typing import DType, Tensor

B = TypeVar("B", bound="BaseAttentionBias")


class BaseAttentionBias(struct.PyTreeNode):
    """Bias added to attention logits. A subclass defines `_value`."""

    dtype: DType = struct.field(
        pytree_node=False, kw_only=True, default=jnp.float32
    )

    def __getattr__(self, name: str) -> Any:
        message = f"{type(self).__name__!r} object has no attribute {name!r}"
        hint = current_door().hint_for_name("BaseAttentionBias", name)
        raise AttributeError(message if hint is None else f"{message}. {hint}")

    def value(self) -> Tensor | None:
        """Returns `Float[Array, "#batch #heads target source"]`, or None for a bias of 0."""
        value = self._value()
        if value is None:
            return None
        return value.astype(self.dtype)

    def _value(self) -> Tensor | None:
        """Returns the value in any dtype."""
        raise NotImplementedError(type(self))

    def eval_shape(self) -> tuple[int, ...] | None:
        """Returns the shape of the value, or None if it has none."""
        value = jax.eval_shape(self.value)
        return None if value is None else value.shape

    def has_value(self) -> bool:
        """Returns False if the value is None."""
        return self.eval_shape() is not None

    def __add__(
        self, other: "BaseAttentionBias | Tensor | None"
    ) -> "BaseAttentionBias":
        parts = [*self._parts(), *as_attention_bias(other)._parts()]
        return CompositeAttentionBias(parts)._simplify()

    __radd__ = __add__

    def _parts(self) -> "list[BaseAttentionBias]":
        return [self] if self.has_value() else []

    @classmethod
    def from_sequence(
        cls, biases: "Sequence[BaseAttentionBias]"
    ) -> "BaseAttentionBias":
        """Returns one bias of this class equal to the sum; raises ArgumentValueError if none is."""
        if len(biases) == 1:
            return biases[0]
        raise errors.ArgumentValueError(
            f"{len(biases)} biases of the class {cls.__name__} cannot be combined into one; add "
            "them up, or `split` by a more general class."
        )

    def bias_and_residual(self, cls: type[B]) -> "BiasAndResidual[B]":
        """Splits the bias into the part of class `cls`, or None, and the rest."""
        parts_of_class: list[BaseAttentionBias] = []
        remaining_parts: list[BaseAttentionBias] = []
        for part in self._parts():
            if isinstance(part, cls):
                parts_of_class.append(part)
            else:
                remaining_parts.append(part)
        bias: Any = None
        if parts_of_class:
            bias = cls.from_sequence(parts_of_class)
        return BiasAndResidual(
            bias, CompositeAttentionBias(remaining_parts)._simplify()
        )

    def astype(self, dtype: DType) -> Self:
        """Returns the bias with a value of another dtype."""
        return self.replace(dtype=dtype)


class BiasAndResidual(struct.PyTreeNode, Generic[B]):
    """Pair of the part of a bias of the requested class, or None, and the rest; can be unpacked."""

    bias: B | None
    residual: BaseAttentionBias

    def __iter__(self):
        return iter((self.bias, self.residual))


class CompositeAttentionBias(BaseAttentionBias):
    """Sum of biases; masks among them are joined first."""

    biases: Sequence[BaseAttentionBias]

    def _parts(self) -> list[BaseAttentionBias]:
        parts: list[BaseAttentionBias] = []
        for bias in self.biases:
            parts.extend(as_attention_bias(bias)._parts())
        return parts

    def _simplify(self) -> BaseAttentionBias:
        if not self.biases:
            return ZeroAttentionBias()
        if len(self.biases) == 1:
            return self.biases[0]
        return self

    def value(self) -> Tensor | None:
        # Masks are joined first: several `NEG_INF` in one sum would leave the range of the dtype.
        masks: list[Any] = []
        values: list[Any] = []
        for part in self._parts():
            if isinstance(part, BoolAttentionBias):
                masks.append(part.bool_value())
            else:
                values.append(part.value())
        if masks:
            values.append(
                bool_to_bias(functools.reduce(jnp.logical_and, masks))
            )
        if not values:
            return None
        return functools.reduce(operator.add, values).astype(self.dtype)


class TensorAttentionBias(BaseAttentionBias):
    """Bias given by its value; see `from_tensor`."""

    _tensor: Tensor

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> "TensorAttentionBias":
        """Returns a bias of the given value, `Float[Array, "#batch #heads target source"]`.

        A value without the axis of heads, or batch and heads, is broadcast over these.
        """
        return cls(_add_heads_axis(tensor), dtype=tensor.dtype)

    def value(self) -> Tensor:
        return self._tensor.astype(self.dtype)

    @classmethod
    def from_sequence(
        cls, biases: Sequence[BaseAttentionBias]
    ) -> BaseAttentionBias:
        value = CompositeAttentionBias(list(biases)).value()
        if value is None:
            raise errors.ArgumentValueError(
                f"{cls.__name__}.from_sequence got {len(biases)} biases, and none has a value; "
                "give at least one that does."
            )
        return cls.from_tensor(value)


class BoolAttentionBias(BaseAttentionBias):
    """Mask: 0 where attending is allowed, `NEG_INF` elsewhere. A subclass defines `bool_value`."""

    def bool_value(self) -> Tensor | None:
        """Returns `Bool[Array, "#batch #heads target source"]`, or None if all is allowed."""
        raise NotImplementedError(type(self))

    def value(self) -> Tensor | None:
        mask = self.bool_value()
        if mask is None:
            return None
        return bool_to_bias(mask).astype(self.dtype)

    @classmethod
    def from_sequence(cls, biases: Sequence[Any]) -> BaseAttentionBias:
        if len(biases) == 1 or cls is not BoolAttentionBias:
            return super().from_sequence(biases)
        return BoolTensorAttentionBias.from_sequence(biases)


class BoolTensorAttentionBias(BoolAttentionBias):
    """Mask given by its value; see `from_tensor`."""

    _bool_value: Tensor

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> "BoolTensorAttentionBias":
        """Returns a mask, `Bool[Array, "#batch #heads target source"]`, True to attend.

        Without the axis of heads, or batch and heads, it is broadcast over these.

        Raises:
          ArgumentValueError: if it is not boolean.
        """
        if tensor.dtype != jnp.bool_:
            raise errors.ArgumentValueError(
                f"a mask of the dtype {tensor.dtype} was given; expected bool, True where "
                "attending is allowed. For a bias, use TensorAttentionBias."
            )
        return cls(_add_heads_axis(tensor))

    def bool_value(self) -> Tensor:
        return self._bool_value

    @classmethod
    def from_sequence(cls, biases: Sequence[Any]) -> BaseAttentionBias:
        masks = [bias.bool_value() for bias in biases]
        return cls.from_tensor(functools.reduce(jnp.logical_and, masks))


class MaskFnAttentionBias(BoolAttentionBias):
    """Mask computed by a function of positions.

    Attributes:
      mask: called with positions of the shapes (batch, target, 1) and (batch, 1, source).
      target_positions: `Int[Array, "*#batch target"]`, of the queries.
      source_positions: `Int[Array, "*#batch source"]`, of the keys.
    """

    mask: MaskFn = struct.field(pytree_node=False)
    target_positions: Tensor
    source_positions: Tensor

    @classmethod
    def default_config(cls, mask: config.ConfigOr[MaskFn]) -> Any:
        """Returns a config without positions, for the field `mask` of an attention layer."""
        return config.config_for_class(cls).set(mask=mask)

    def bool_value(self) -> Tensor:
        return attention_mask.evaluate_mask(
            self.mask, self.target_positions, self.source_positions
        )

    @classmethod
    def from_sequence(cls, biases: Sequence[Any]) -> BaseAttentionBias:
        if len(biases) > 1 and _have_equal_positions(biases):
            mask = and_masks(*(bias.mask for bias in biases))
            first = biases[0]
            return MaskFnAttentionBias(
                mask, first.target_positions, first.source_positions
            )
        return super().from_sequence(biases)


def _have_equal_positions(biases: Sequence[MaskFnAttentionBias]) -> bool:
    first = biases[0]
    for bias in biases[1:]:
        if not _known_to_be_equal(
            bias.target_positions, first.target_positions
        ):
            return False
        if not _known_to_be_equal(
            bias.source_positions, first.source_positions
        ):
            return False
    return True


def _known_to_be_equal(a: Tensor, b: Tensor) -> bool:
    """Returns whether two arrays are equal; of tracers, only the same one is known to be."""
    if a is b:
        return True
    if isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer):
        return False
    return np.array_equal(a, b)


class CausalAttentionBias(MaskFnAttentionBias):
    """Mask by which each position attends to itself and earlier positions."""

    mask: MaskFn = struct.field(
        pytree_node=False, default=causal_mask, kw_only=True
    )

    @classmethod
    def default_config(cls) -> Any:
        """Returns a config without positions, for the field `mask` of an attention layer."""
        return config.config_for_class(cls)

    @classmethod
    def from_sequence(cls, biases: Sequence[Any]) -> BaseAttentionBias:
        if _have_equal_positions(biases):
            return biases[0]
        return super().from_sequence(biases)


class SlidingWindowAttentionBias(MaskFnAttentionBias):
    """Mask for attention to each position itself and `sliding_window_size` positions before it."""

    sliding_window_size: int = struct.field(pytree_node=False, kw_only=True)

    def __post_init__(self) -> None:
        _check_window(
            self, "sliding_window_size", (self.sliding_window_size, 0)
        )

    @classmethod
    def default_config(cls, sliding_window_size: int) -> Any:
        """Returns a config without positions, for the field `mask` of an attention layer."""
        mask = config.config_for_function(
            attention_mask.sliding_window_causal_mask
        )
        return config.config_for_class(cls).set(
            mask=mask.set(sliding_window_size=sliding_window_size),
            sliding_window_size=sliding_window_size,
        )


class LeftRightWindowAttentionBias(MaskFnAttentionBias):
    """Mask by which each position attends to itself and some positions on both sides.

    Attributes:
      left_context: number of positions before it; None for all.
      right_context: number of positions after it; None for all.
    """

    left_context: int | None = struct.field(pytree_node=False, kw_only=True)
    right_context: int | None = struct.field(pytree_node=False, kw_only=True)

    def __post_init__(self) -> None:
        _check_window(
            self,
            "left_and_right_context",
            (self.left_context, self.right_context),
        )

    @classmethod
    def default_config(
        cls, left_context: int | None, right_context: int | None
    ) -> Any:
        """Returns a config without positions, for the field `mask` of an attention layer."""
        mask = config.config_for_function(attention_mask.left_right_window_mask)
        return config.config_for_class(cls).set(
            mask=mask.set(
                left_context=left_context, right_context=right_context
            ),
            left_context=left_context,
            right_context=right_context,
        )


def _check_window(
    bias: MaskFnAttentionBias, name: str, window: tuple[int | None, int | None]
) -> None:
    """Raises ArgumentValueError unless the mask of a bias is the window that its fields name."""
    mask_fields, is_window = attention_mask.window_of(bias.mask)
    mask_window = mask_fields.left_context, mask_fields.right_context
    if is_window and mask_window != window:
        raise errors.ArgumentValueError(
            f"{type(bias).__name__} has {name}={window} (positions before and after) and a mask "
            f"with {mask_window}: set the sizes of both, or replace both by "
            f"{type(bias).__name__}.default_config(...)."
        )


class SegmentIdAttentionBias(BoolAttentionBias):
    """Mask by which each position attends to its segment; ids are `Int[Array, "*batch time"]`."""

    segment_ids: Tensor

    def bool_value(self) -> Tensor:
        return attention_mask.segment_mask(self.segment_ids, self.segment_ids)


class ZeroAttentionBias(BoolAttentionBias):
    """No bias."""

    def bool_value(self) -> None:
        return None


def as_attention_bias(
    bias: BaseAttentionBias | Tensor | None,
) -> BaseAttentionBias:
    """Returns a bias as an object: itself, a wrapped value, or a `ZeroAttentionBias` for None."""
    if bias is None:
        return ZeroAttentionBias()
    if isinstance(bias, BaseAttentionBias):
        return bias
    return TensorAttentionBias.from_tensor(bias)


def split(
    bias: BaseAttentionBias, *cls: type[BaseAttentionBias]
) -> tuple[Any, ...]:
    """Splits a bias by class.

    Returns:
      The part of each class, in order, a `ZeroAttentionBias` where it has none, and the rest.

    >>> ids = jnp.array([[1, 1, 2]])
    >>> bias = make_causal_biases(3)[None, None] + SegmentIdAttentionBias(ids)
    >>> causal, segments, rest = split(bias, CausalAttentionBias, SegmentIdAttentionBias)
    >>> causal.has_value(), segments.segment_ids.tolist(), type(rest).__name__
    (False, [[1, 1, 2]], 'TensorAttentionBias')
    """
    parts: list[BaseAttentionBias] = []
    for part_type in cls:
        bias_and_residual = bias.bias_and_residual(part_type)
        parts.append(as_attention_bias(bias_and_residual.bias))
        bias = bias_and_residual.residual
    return (*parts, bias)


def as_mask_and_bias(
    bias: BaseAttentionBias,
) -> tuple[AttentionMask, Tensor | None]:
    """Returns a bias as a mask, described where its parts are, and the value of the other parts.

    >>> bias = CausalAttentionBias(np.arange(3), np.arange(3)) + jnp.zeros((3, 3))
    >>> mask, rest = as_mask_and_bias(bias)
    >>> mask, rest.shape
    (AttentionMask(mask_fn=<function causal_mask at ...>, query_positions=None, ...), (1, 1, 3, 3))
    """
    # An `AttentionMask` has room for functions of the same positions, and for ids of one kind of
    # segments. Other masks go into it by their values.
    mask_fn_parts: list[MaskFnAttentionBias] = []
    segment_ids: Tensor | None = None
    arrays: list[Any] = []
    bias_parts: list[BaseAttentionBias] = []
    for part in as_attention_bias(bias)._parts():
        if isinstance(part, MaskFnAttentionBias) and (
            not mask_fn_parts or _have_equal_positions([mask_fn_parts[0], part])
        ):
            mask_fn_parts.append(part)
        elif isinstance(part, SegmentIdAttentionBias) and segment_ids is None:
            segment_ids = part.segment_ids
        elif isinstance(part, BoolAttentionBias):
            arrays.append(part.bool_value())
        else:
            bias_parts.append(part)
    mask = AttentionMask(arrays=tuple(arrays))
    if segment_ids is not None:
        mask = mask.replace(query_segments=segment_ids)
    if mask_fn_parts:
        mask_fn = mask_fn_parts[0].mask
        if len(mask_fn_parts) > 1:
            mask_fn = and_masks(*(part.mask for part in mask_fn_parts))
        mask = mask.replace(
            mask_fn=mask_fn,
            query_positions=_positions_unless_from_0(
                mask_fn_parts[0].target_positions
            ),
            key_positions=_positions_unless_from_0(
                mask_fn_parts[0].source_positions
            ),
        )
    return mask, CompositeAttentionBias(bias_parts).value()


def _positions_unless_from_0(
    positions: Tensor | np.ndarray,
) -> Tensor | np.ndarray | None:
    """Returns positions for an `AttentionMask`, which takes None for those from 0 on."""
    is_from_0 = isinstance(positions, np.ndarray) and np.array_equal(
        positions.ravel(), np.arange(positions.shape[-1])
    )
    return None if is_from_0 else positions


def make_causal_biases(seq_len: int) -> Tensor:
    """Returns the bias of causal attention, `Float[Array, "seq_len seq_len"]`.

    >>> (make_causal_biases(2) < 0).tolist()
    [[False, True], [False, False]]
    """
    return _bias_from_mask(causal_mask, seq_len)


def make_sliding_window_causal_biases(
    seq_len: int, sliding_window_size: int
) -> Tensor:
    """Returns the bias of attention to `sliding_window_size` positions before each."""
    return _bias_from_mask(
        attention_mask.sliding_window_causal_mask(sliding_window_size), seq_len
    )


def make_segment_mask(
    *, source_segments: Tensor, target_segments: Tensor
) -> Tensor:
    """Returns the bias of attention within segments, `Float[Array, "batch 1 target source"]`.

    Segment ids are `Int[Array, "batch source"]` and `Int[Array, "batch target"]`.
    """
    return bool_to_bias(
        attention_mask.segment_mask(target_segments, source_segments)
    )


def _bias_from_mask(mask: MaskFn, seq_len: int) -> Tensor:
    positions = jnp.arange(seq_len)
    return bool_to_bias(mask(positions[:, None], positions[None]))


def _add_heads_axis(tensor: Tensor) -> Tensor:
    if tensor.ndim not in (2, 3, 4):
        raise errors.ArgumentShapeError(
            f"an attention bias has the shape {tensor.shape}; expected (batch, heads, target, "
            "source), (batch, target, source) or (target, source)."
        )
    if tensor.ndim == 2:
        tensor = tensor[None]
    return tensor if tensor.ndim == 4 else tensor[:, None]


def compute_padding_biases(
    input_ids: Tensor, *, pad_token_id: int | None
) -> Tensor:
    """Returns the bias that masks padding, `Float[Array, "batch 1 time time"]`.

    Args:
      input_ids: `Int[Array, "batch time"]`.
      pad_token_id: None if the inputs have no padding.

    >>> (compute_padding_biases(jnp.array([[5, 0]]), pad_token_id=0) == 0).tolist()
    [[[[True, False], [False, False]]]]
    """
    padding = (
        jnp.zeros(input_ids.shape)
        if pad_token_id is None
        else input_ids == pad_token_id
    )
    bias = padding * attention_mask.NEG_INF
    return bias[:, None, :, None] + bias[:, None, None, :]


def apply_attention_logit_biases(
    logits: Tensor, attention_logit_biases: Tensor | None = None
) -> Tensor:
    """Returns logits, `Float[Array, "batch heads target source"]`, plus a bias, in their dtype.

    A bias is `Float[Array, "#batch #heads #target #source"]`.
    """
    if attention_logit_biases is None:
        return logits
    return logits + to_ndim(attention_logit_biases, logits.ndim).astype(
        logits.dtype
    )


def alibi_get_slopes(num_heads: int) -> list[float]:
    """Returns the slope by which each head's logits fall with distance (Press et al., 2022).

    >>> alibi_get_slopes(4)
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    return alibi_slopes(num_heads).tolist()


class AttentionLogitBiasLayer(BaseLayer):
    """Layer whose bias lets positions attend to their own segment."""

    def forward(self, *, segment_ids: Tensor, positions: Tensor) -> Tensor:
        """Returns a bias, `Float[Array, "batch #heads time time"]`.

        Segment ids and positions, within the segments, are `Int[Array, "batch time"]`.
        """
        return make_segment_mask(
            source_segments=segment_ids, target_segments=segment_ids
        )


class FullAttentionLogitBiasLayer(AttentionLogitBiasLayer):
    """Layer whose bias lets positions attend to their whole segment."""


class CausalAttentionLogitBiasLayer(AttentionLogitBiasLayer):
    """Layer whose bias lets positions attend to themselves and earlier ones of their segment."""

    def forward(self, *, segment_ids: Tensor, positions: Tensor) -> Tensor:
        causal = bool_to_bias(
            attention_mask.evaluate_mask(causal_mask, positions, positions)
        )
        return causal + super().forward(
            segment_ids=segment_ids, positions=positions
        )


class _FallingLogits(AttentionLogitBiasLayer):
    """Base of layers whose logits fall with distance, with one slope per head."""

    class Config(AttentionLogitBiasLayer.Config):
        num_heads: config.Required[int] = config.REQUIRED

    def forward(self, *, segment_ids: Tensor, positions: Tensor) -> Tensor:
        falling = alibi_bias(
            alibi_slopes(self.config.num_heads), positions, positions
        )
        return falling + super().forward(
            segment_ids=segment_ids, positions=positions
        )


class ALiBiAttentionLogitBiasLayer(
    _FallingLogits, CausalAttentionLogitBiasLayer
):
    """Layer for causal attention whose logits fall with distance."""


class SymmetricALiBiAttentionLogitBiasLayer(
    _FallingLogits, FullAttentionLogitBiasLayer
):
    """Layer for bidirectional attention whose logits fall with distance."""


class RelativePositionAttentionLogitBiasLayer(AttentionLogitBiasLayer):
    """Layer with a learned bias for each head and bucket of distances (Raffel et al., 2020).

    Positions attend to their segment, or with `is_causal` to earlier ones of it only. Parameter:
    `weight` of shape (num_buckets, num_heads).
    """

    class Config(AttentionLogitBiasLayer.Config):
        """Configures a RelativePositionAttentionLogitBiasLayer.

        The fields are arguments of `functional.relative_position_buckets`.
        """

        num_heads: config.Required[int] = config.REQUIRED
        num_buckets: int = 32
        max_distance: int = 128
        is_causal: bool = False

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        shape = (self.config.num_buckets, self.config.num_heads)
        return {"weight": ParameterSpec(shape, mesh_axes=(None, "model"))}

    def forward(self, *, segment_ids: Tensor, positions: Tensor) -> Tensor:
        cfg = self.config
        keys = gathered(positions, -1)[:, None, :]  # (batch, 1, source)
        distances = keys - positions[:, :, None]
        buckets = relative_position_buckets(
            distances,
            num_buckets=cfg.num_buckets,
            max_distance=cfg.max_distance,
            is_causal=cfg.is_causal,
        )
        # (batch, target, source, heads) to (batch, heads, target, source)
        by_head = jnp.moveaxis(lookup(self.parameters["weight"], buckets), 3, 1)
        masks = super().forward(segment_ids=segment_ids, positions=positions)
        if cfg.is_causal:
            masks += bool_to_bias(
                attention_mask.evaluate_mask(causal_mask, positions, positions)
            )
        return by_head + masks
