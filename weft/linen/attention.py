"""Multi-head attention layers, and attention as a function of queries, keys and values.

A layer's `attention_fn` is a function with some or all parameters of `dot_product_attention`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from weft import errors, functional
from weft.functional import (
    AttentionImplementation,
    attention,
    attention_mask,
    initializers,
    promote_dtype,
)
from weft.functional.attention_mask import AttentionMask, MaskFn, combine_masks
from weft.linen.apply import merge_param
from weft.linen.linear import (
    DenseGeneral,
    DotGeneral,
    Initializer,
    default_kernel_init,
)
from weft.linen.methods import compact, nowrap
from weft.linen.module import Module
from weft.linen.normalization import LayerNorm
from weft.typing import DType

Einsum = Callable[..., Array]


def dot_product_attention_weights(
    query: Float[Array, "*batch target heads dim"],
    key: Float[Array, "*batch source heads dim"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DType | None = None,
    precision: jax.lax.PrecisionLike = None,
    module: Module | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., Array] | None = None,
    einsum: Einsum | None = None,
) -> Float[Array, "*batch heads target source"]:
    """Returns the attention weights `softmax(query · key / sqrt(dim) + bias)`.

    Args:
        bias: added to the logits, broadcastable to `(*batch, heads, target, source)`.
        mask: True where a query may attend, broadcastable to the same shape.
        broadcast_dropout: whether all examples and heads share a dropout mask.
        dtype: dtype of the computation; by default promoted from query and key.
        precision: see `jax.lax.dot_general`.
        module: stores the weights before dropout, as `attention_weights` in its collection
            `intermediates`.
        force_fp32_for_softmax: whether to compute and return the softmax in float32.
        einsum_dot_general: replaces `jax.lax.dot_general`.
        einsum: replaces both; called with subscripts, queries and keys.

    Raises:
        ArgumentShapeError: if the shapes do not match.
        ArgumentValueError: if the key for dropout is missing.

    >>> x = jnp.ones((1, 2, 1, 4))
    >>> dot_product_attention_weights(x, x).tolist()
    [[[[0.5, 0.5], [0.5, 0.5]]]]
    """
    query, key = promote_dtype(query, key, dtype=dtype)
    attention.check_attention_shapes(query, key)
    weights = attention.attention_weights(
        query,
        key,
        bias=bias,
        mask=mask,
        float32_softmax=force_fp32_for_softmax,
        precision=precision,
        dot_general=einsum_dot_general
        or jax.lax.dot_general,  # as it is during the call
        einsum=einsum,
    )
    if module is not None:
        module.sow("intermediates", "attention_weights", weights)
    if deterministic or dropout_rate == 0.0:
        return weights
    return attention.drop_attention_weights(
        weights,
        rate=dropout_rate,
        prng_key=dropout_rng,
        broadcast=broadcast_dropout,
    )


def dot_product_attention(
    query: Float[Array, "*batch target heads dim"],
    key: Float[Array, "*batch source heads dim"],
    value: Float[Array, "*batch source heads value_dim"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | MaskFn | AttentionMask | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DType | None = None,
    precision: jax.lax.PrecisionLike = None,
    module: Module | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., Array] | None = None,
    qk_attn_weights_einsum: Einsum | None = None,
    attn_weights_value_einsum: Einsum | None = None,
    implementation: AttentionImplementation | None = None,
) -> Float[Array, "*batch target heads value_dim"]:
    """Returns the values averaged with the attention weights (Vaswani et al., 2017).

    See `dot_product_attention_weights` for the other arguments and errors.

    Args:
        mask: as there; or a function of positions or an `AttentionMask`, which is not written out
            for all pairs.
        attn_weights_value_einsum: einsum of weights and values; give both or neither.
        implementation: how to compute it (see `weft.functional.fused_attention`); None chooses by
            device, lengths and arguments. Only "plain" has weights to store and calls functions
            that replace products.

    Raises ArgumentValueError if `implementation` cannot compute it.

    >>> x = jnp.ones((1, 3, 2, 4))
    >>> dot_product_attention(x, x, x).shape
    (1, 3, 2, 4)
    """
    if (qk_attn_weights_einsum is None) != (attn_weights_value_einsum is None):
        raise errors.ArgumentValueError(
            "one of qk_attn_weights_einsum and attn_weights_value_einsum was given; give both, or "
            "none."
        )
    query, key, value = promote_dtype(query, key, value, dtype=dtype)
    attention.check_attention_shapes(query, key, value)
    context = attention.attention_without_weights(
        implementation,
        query,
        key,
        value,
        bias=bias,
        mask=attention_mask.as_attention_mask(mask),
        dropout_rate=0.0 if deterministic else dropout_rate,
        dropout_rng=dropout_rng,
        broadcast_dropout=broadcast_dropout,
        precision=precision,
        only_plain={
            "sow_weights stores the weights": module is not None,
            "einsum_dot_general computes the products": einsum_dot_general
            is not None,
            "an einsum is given": qk_attn_weights_einsum is not None,
        },
    )
    if context is not None:
        return context
    if callable(mask) or isinstance(mask, AttentionMask):
        mask = attention_mask.as_attention_mask(mask).to_array(
            query.shape[-3], key.shape[-3]
        )
    weights = dot_product_attention_weights(
        query, key, bias, mask, broadcast_dropout, dropout_rng, dropout_rate, deterministic,
        query.dtype, precision, module, force_fp32_for_softmax, einsum_dot_general,
        qk_attn_weights_einsum,
    )  # fmt: skip
    if attn_weights_value_einsum is not None:
        return attn_weights_value_einsum(
            "...hqk,...khd->...qhd", weights, value
        )
    return functional.attention_context(
        weights,
        value if value.dtype == weights.dtype else value.astype(weights.dtype),
        precision=precision,
        dot_general=einsum_dot_general
        or jax.lax.dot_general,  # as it is during the call
    )


_PARAMETERS = inspect.signature(dot_product_attention).parameters


class MultiHeadDotProductAttention(Module):
    """Multi-head attention (Vaswani et al., 2017).

    Attributes:
        dtype: dtype of the computation; by default promoted from inputs and parameters.
        qkv_features: total size of all heads; by default the size of `inputs_q`.
        out_features: output size; by default the size of `inputs_q`.
        deterministic: disables dropout; set here or in the call.
        out_kernel_init, out_bias_init: by default `kernel_init` and `bias_init`.
        attention_fn: replaces `dot_product_attention`; receives the options among its parameters.
        implementation: how `dot_product_attention` computes it: "plain", "blockwise", "cudnn" or
            "tokamax" (see `weft.functional.fused_attention`); None chooses.
        decode: whether to keep keys and values in the collection `cache`. The first call, with
            inputs of the full length, creates an empty cache; each later call has one position,
            which is added to the cache and attends to all cached positions.
        normalize_qk: whether to apply a layer norm to queries and keys (Dehghani et al., 2023).
        qkv_dot_general, out_dot_general: used in `query`, `key` and `value`, and in `out`.
        qkv_dot_general_cls, out_dot_general_cls: factories that take precedence over these.
        qk_attn_weights_einsum_cls, attn_weights_value_einsum_cls: factories of both einsums.

    >>> layer = MultiHeadDotProductAttention(num_heads=2, qkv_features=6)
    >>> text, image = jnp.ones((1, 5, 8)), jnp.ones((1, 7, 3))
    >>> y, variables = layer.init_with_output(jax.random.key(0), text, image)
    >>> y.shape, variables["params"]["key"]["kernel"].shape
    ((1, 5, 8), (3, 2, 3))
    """

    num_heads: int
    dtype: DType | None = None
    param_dtype: DType = jnp.float32
    qkv_features: int | None = None
    out_features: int | None = None
    broadcast_dropout: bool = True
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    precision: jax.lax.PrecisionLike = None
    kernel_init: Initializer = default_kernel_init
    out_kernel_init: Initializer | None = None
    bias_init: Initializer = initializers.zeros_init()
    out_bias_init: Initializer | None = None
    use_bias: bool = True
    attention_fn: Callable[..., Array] = dot_product_attention
    decode: bool = False
    normalize_qk: bool = False
    force_fp32_for_softmax: bool = False
    qkv_dot_general: DotGeneral | None = None
    out_dot_general: DotGeneral | None = None
    qkv_dot_general_cls: Callable[[], DotGeneral] | None = None
    out_dot_general_cls: Callable[[], DotGeneral] | None = None
    qk_attn_weights_einsum_cls: Callable[[], Callable[..., Array]] | None = None
    attn_weights_value_einsum_cls: Callable[[], Callable[..., Array]] | None = (
        None
    )
    implementation: AttentionImplementation | None = None

    @compact
    def __call__(
        self,
        inputs_q: Float[Array, "*batch queries features"],
        inputs_k: Float[Array, "*batch keys key_features"] | None = None,
        inputs_v: Float[Array, "*batch keys value_features"] | None = None,
        *,
        inputs_kv: Float[Array, "*batch keys key_features"] | None = None,
        mask: Bool[Array, "#*batch #heads #queries #keys"]
        | MaskFn
        | AttentionMask
        | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        sow_weights: bool = False,
    ) -> Float[Array, "*batch queries out_features"]:
        """Applies attention.

        Args:
            inputs_k: input of the keys; by default `inputs_q`.
            inputs_v: input of the values; by default `inputs_k`.
            inputs_kv: deprecated alternative to `inputs_k`, for both keys and values.
            mask: nonzero where a query may attend, a function of positions, or an `AttentionMask`.
            deterministic: see the attribute; with dropout, exactly one of the two must be set.
            dropout_rng: key to use instead of the stream `dropout`.
            sow_weights: whether to store the weights before dropout, in `intermediates`.

        Raises:
            ArgumentValueError: if inputs are given twice, the features are not divisible by the
                number of heads, or only one of the two einsums is given.
            ArgumentShapeError: if the shapes do not match each other or the cache.
            ParameterGivenTwiceError: if `deterministic` is given twice or not at all.
            InvalidRngError: if there is no stream for dropout.
        """
        sizes = ("num_heads", "qkv_features", "out_features")
        functional.check_sizes(
            type(self).__name__, **{name: getattr(self, name) for name in sizes}
        )
        inputs_k, inputs_v = self._inputs(
            inputs_q, inputs_k, inputs_v, inputs_kv
        )
        features = self.qkv_features or inputs_q.shape[-1]
        heads = (
            self.num_heads,
            attention.head_features(
                features, self.num_heads, self._name_in_errors
            ),
        )
        dense = functools.partial(
            DenseGeneral,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
        )
        to_heads = functools.partial(
            dense,
            heads,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            dot_general=self.qkv_dot_general,
            dot_general_cls=self.qkv_dot_general_cls,
        )
        query = to_heads(name="query")(inputs_q)
        key = to_heads(name="key")(inputs_k)
        value = to_heads(name="value")(inputs_v)
        if self.normalize_qk:
            layer_norm = functools.partial(
                LayerNorm,
                use_bias=False,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
            )
            query = layer_norm(name="query_ln")(query)
            key = layer_norm(name="key_ln")(key)
        if self.decode:
            key, value, mask = self._decode(query, key, value, mask)
        deterministic, dropout_rng = self._dropout(deterministic, dropout_rng)
        options = {
            "mask": mask,
            "dropout_rng": dropout_rng,
            "dropout_rate": self.dropout_rate,
            "broadcast_dropout": self.broadcast_dropout,
            "deterministic": deterministic,
            "dtype": self.dtype,
            "precision": self.precision,
            "force_fp32_for_softmax": self.force_fp32_for_softmax,
        }
        x = self.attention_fn(
            query, key, value, **self._accepted(options, sow_weights)
        )
        out = dense(
            self.out_features or inputs_q.shape[-1],
            axis=(-2, -1),
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
            dot_general=self.out_dot_general,
            dot_general_cls=self.out_dot_general_cls,
            name="out",
        )
        return out(x)

    @nowrap
    def _inputs(
        self,
        inputs_q: Array,
        inputs_k: Array | None,
        inputs_v: Array | None,
        both: Array | None,
    ) -> tuple[Array, Array]:
        if both is not None:
            errors.warn_deprecated(
                "inputs_kv", "give inputs_k, and inputs_v if it is another"
            )
            if inputs_k is not None or inputs_v is not None:
                raise errors.ArgumentValueError(
                    f"{self._name_in_errors} was given both inputs_kv and inputs_k or inputs_v; "
                    "give inputs_k, and inputs_v if it is another."
                )
            inputs_k = both
        return attention.key_and_value_inputs(
            inputs_q, inputs_k, inputs_v, self._name_in_errors
        )

    @nowrap
    def _decode(
        self,
        query: Array,
        key: Array,
        value: Array,
        mask: Array | MaskFn | AttentionMask | None,
    ) -> tuple[Array, Array, Array | MaskFn | AttentionMask | None]:
        """Returns all keys and values so far, and the mask of this position."""
        has_cache = self.has_variable("cache", "cached_key")
        cached_key = self.variable(
            "cache", "cached_key", jnp.zeros, key.shape, key.dtype
        )
        cached_value = self.variable(
            "cache", "cached_value", jnp.zeros, value.shape, value.dtype
        )
        index = self.variable(
            "cache", "cache_index", lambda: jnp.zeros((), jnp.int32)
        )
        if not has_cache:
            return (
                key,
                value,
                mask,
            )  # a call of the full length, which creates the cache
        keys, values, cached_positions = attention.attention_cache_step(
            cached_key.value,
            cached_value.value,
            index.value,
            query,
            key,
            value,
            layer=self._name_in_errors,
        )
        length = keys.shape[-3]
        mask = attention_mask.mask_of_step(mask, index.value, length)
        cached_key.value, cached_value.value = keys, values
        index.value = jnp.minimum(index.value + 1, length)
        return keys, values, combine_masks(mask, cached_positions)

    @nowrap
    def _dropout(
        self, deterministic: bool | None, rng: Array | None
    ) -> tuple[bool, Array | None]:
        if self.dropout_rate == 0.0:
            return True, None
        deterministic = merge_param(
            "deterministic", self.deterministic, deterministic
        )
        if rng is None and not deterministic:
            rng = self.make_rng("dropout")
        return deterministic, rng

    @nowrap
    def _accepted(
        self, options: dict[str, Any], sow_weights: bool
    ) -> dict[str, Any]:
        """Returns the options that `attention_fn` accepts, with those of this layer alone."""
        parameters = _PARAMETERS
        if self.attention_fn is not dot_product_attention:
            parameters = inspect.signature(self.attention_fn).parameters
            attention.check_accepts_implementation(
                self.implementation, parameters, self._name_in_errors
            )
        if self.implementation is not None:
            options["implementation"] = self.implementation
        accepted = {
            name: value for name, value in options.items() if name in parameters
        }
        einsum_factories = {
            "qk_attn_weights_einsum": self.qk_attn_weights_einsum_cls,
            "attn_weights_value_einsum": self.attn_weights_value_einsum_cls,
        }
        for name, factory in einsum_factories.items():
            if factory is not None and name in parameters:
                accepted[name] = factory()
        if sow_weights:
            accepted["module"] = self
        return accepted


class MultiHeadAttention(MultiHeadDotProductAttention):
    """Alias of `MultiHeadDotProductAttention`."""


class SelfAttention(MultiHeadDotProductAttention):
    """Self-attention; deprecated: call `MultiHeadDotProductAttention` with one input."""

    @compact
    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        inputs_q: Float[Array, "*batch length features"],
        mask: Bool[Array, "#*batch #heads #length #length"] | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        sow_weights: bool = False,
    ) -> Float[Array, "*batch length out_features"]:
        errors.warn_deprecated(
            "SelfAttention", "call MultiHeadDotProductAttention with inputs_q"
        )
        return super().__call__(
            inputs_q,
            mask=mask,
            deterministic=deterministic,
            dropout_rng=dropout_rng,
            sow_weights=sow_weights,
        )
