"""Multi-head self-attention and cross-attention, with a cache for decoding.

`query`, `key` and `value` project the inputs to heads; `out` projects the heads' results. For
decoding, `init_cache` allocates a cache for all positions; each call with `decode=True` takes one
position, adds it to the cache and attends to all cached positions. A function that accepts some of
the options of `dot_product_attention` can be the `attention_fn` of a layer.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from weft import errors, functional
from weft.functional import (
    arrays,
    attention,
    attention_mask,
    fused_attention,
    initializers,
)
from weft.functional.arrays import OutSharding
from weft.functional.attention_mask import AttentionMask, MaskFn
from weft.nnx.module import Module
from weft.nnx.nn import parameters
from weft.nnx.nn.linear import DotGeneral, LinearGeneral
from weft.nnx.nn.normalization import LayerNorm
from weft.nnx.nn.parameters import (
    NO_METADATA,
    Initializer,
    Metadata,
    PromoteDtype,
)
from weft.nnx.rngs import Rngs, RngStream
from weft.nnx.variables import Cache, Intermediate
from weft.typing import DType


def dot_product_attention(
    query: Float[Array, "*batch target heads dim"],
    key: Float[Array, "*batch source kv_heads dim"],
    value: Float[Array, "*batch source kv_heads value_dim"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | MaskFn | AttentionMask | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DType | None = None,
    precision: lax.PrecisionLike = None,
    module: Module | None = None,
    promote_dtype: PromoteDtype = parameters.promote_dtype,
    is_causal: bool = False,
    implementation: fused_attention.AttentionImplementation | None = None,
) -> Float[Array, "*batch target heads value_dim"]:
    """Returns `softmax(query · key / sqrt(dim) + bias) · value` (Vaswani et al., 2017).

    Args:
        key: keys; if they have fewer heads, consecutive query heads share one (Ainslie et al.,
            2023).
        bias: added to the logits, broadcastable to `(*batch, heads, target, source)`.
        mask: True, or nonzero, where a query may attend, broadcastable to the same shape; or a
            function of positions or `AttentionMask`, which is not written out for all pairs.
        broadcast_dropout: whether all examples and heads share one dropout mask.
        deterministic: whether dropout is off.
        dtype: computation dtype; by default promoted from query, key and value.
        precision: precision of the products, as in `jax.lax.dot_general`.
        module: module that sows the weights, before dropout, as the `Intermediate`
            `attention_weights`.
        is_causal: whether queries attend only to keys at or before their position.
        implementation: how to compute it (see `weft.functional.fused_attention`); None chooses by
            device, lengths and arguments. Only "plain" has weights to sow.

    Raises:
        ArgumentShapeError: if the shapes do not match.
        ArgumentValueError: if dropout has no key, or `implementation` cannot compute it.

    >>> x = jnp.ones((1, 3, 2, 4))
    >>> dot_product_attention(x, x[:, :, :1], x[:, :, :1]).shape
    (1, 3, 2, 4)
    """
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    attention.check_attention_shapes(query, key, value, shared_heads=True)
    structured_mask = attention_mask.as_attention_mask(mask)
    if is_causal:
        structured_mask = structured_mask.restricted(functional.causal_mask)
    if deterministic:
        dropout_rate = 0.0
    context = attention.attention_without_weights(
        implementation,
        query,
        key,
        value,
        bias=bias,
        mask=structured_mask,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        broadcast_dropout=broadcast_dropout,
        precision=precision,
        only_plain={"sow_weights keeps the weights": module is not None},
    )
    if context is not None:
        return context
    if is_causal or callable(mask) or isinstance(mask, AttentionMask):
        mask = structured_mask.to_array(query.shape[-3], key.shape[-3])
    weights = attention.attention_weights(
        query, key, bias=bias, mask=mask, precision=precision
    )
    if module is not None:
        module.sow(Intermediate, "attention_weights", weights)
    if dropout_rate != 0.0:
        weights = attention.drop_attention_weights(
            weights,
            rate=dropout_rate,
            prng_key=dropout_rng,
            broadcast=broadcast_dropout,
        )
    return functional.attention_context(weights, value, precision=precision)


@dataclass(repr=False, eq=False)
class MultiHeadAttention(Module):
    """Multi-head attention (Vaswani et al., 2017).

    Args:
        qkv_features: features of all heads together; by default `in_features`.
        out_features: features of the output; by default `in_features`.
        num_kv_heads: number of key and value heads, each shared by several query heads (Ainslie et
            al., 2023); by default `num_heads`.
        in_kv_features: features of the keys' and values' input; by default `in_features`.
        dtype: computation dtype; by default promoted from inputs and parameters.
        deterministic: whether dropout is off, set by `model.train()` and `model.eval()`; if None,
            calls must pass it where there is dropout.
        out_kernel_init: initializer of the kernel of `out`; by default `kernel_init`.
        out_bias_init: initializer of the bias of `out`; by default `bias_init`.
        attention_fn: computes the attention; receives those options of `dot_product_attention` that
            its signature names.
        implementation: how `dot_product_attention` computes it: "plain", "blockwise", "cudnn" or
            "tokamax" (see `weft.functional.fused_attention`); None chooses.
        decode: whether to use the cache; if None, calls must pass it.
        normalize_qk: whether to apply layer norms to queries and keys (Dehghani et al., 2023).
        qkv_promote_dtype: promotes inputs and parameters of `query`, `key` and `value`;
            `out_promote_dtype` and `ln_promote_dtype` do so for `out` and the layer norms.
        qkv_dot_general: replaces `jax.lax.dot_general` in `query`, `key` and `value`.
        qkv_dot_general_cls: returns such a function; takes precedence over `qkv_dot_general`.
            `out_dot_general` and `out_dot_general_cls` are the same for `out`.
        rngs: streams `params`, and `dropout` if there is dropout.
        keep_rngs: whether the layer keeps its own dropout stream; otherwise calls must pass one.
        kernel_metadata: metadata of the kernels except that of `out` (`out_kernel_metadata`).
        bias_metadata: metadata of the biases except that of `out` (`out_bias_metadata`).

    Raises:
        ArgumentValueError: if the heads do not divide the features, or `num_kv_heads` does not
            divide `num_heads`.

    >>> layer = MultiHeadAttention(2, 8, qkv_features=6, decode=False, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 5, 8))).shape, layer.key.kernel.shape
    ((1, 5, 8), (8, 2, 3))
    >>> layer.init_cache((1, 5, 8))
    >>> layer(jnp.ones((1, 1, 8)), decode=True).shape, int(layer.cache_index[...])
    ((1, 1, 8), 1)
    """

    num_heads: int
    in_features: int
    qkv_features: int | None = None
    out_features: int | None = None
    num_kv_heads: int | None = None
    in_kv_features: int | None = None
    _: KW_ONLY
    dtype: DType | None = None
    param_dtype: DType = jnp.float32
    broadcast_dropout: bool = True
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    precision: lax.PrecisionLike = None
    kernel_init: InitVar[Initializer] = parameters.default_kernel_init
    out_kernel_init: InitVar[Initializer | None] = None
    bias_init: InitVar[Initializer] = initializers.zeros
    out_bias_init: InitVar[Initializer | None] = None
    use_bias: bool = True
    attention_fn: Callable[..., Array] = dot_product_attention
    implementation: fused_attention.AttentionImplementation | None = None
    decode: bool | None = None
    normalize_qk: bool = False
    qkv_promote_dtype: PromoteDtype = parameters.promote_dtype
    out_promote_dtype: PromoteDtype = parameters.promote_dtype
    ln_promote_dtype: PromoteDtype = parameters.promote_dtype
    qkv_dot_general: DotGeneral | None = None
    out_dot_general: DotGeneral | None = None
    qkv_dot_general_cls: Callable[[], DotGeneral] | None = None
    out_dot_general_cls: Callable[[], DotGeneral] | None = None
    rngs: Rngs
    keep_rngs: InitVar[bool] = True
    kernel_metadata: InitVar[Metadata] = NO_METADATA
    out_kernel_metadata: InitVar[Metadata] = NO_METADATA
    bias_metadata: InitVar[Metadata] = NO_METADATA
    out_bias_metadata: InitVar[Metadata] = NO_METADATA
    query_ln_scale_metadata: InitVar[Metadata] = NO_METADATA
    key_ln_scale_metadata: InitVar[Metadata] = NO_METADATA

    def __post_init__(
        self,
        kernel_init: Initializer,
        out_kernel_init: Initializer | None,
        bias_init: Initializer,
        out_bias_init: Initializer | None,
        keep_rngs: bool,
        kernel_metadata: Metadata,
        out_kernel_metadata: Metadata,
        bias_metadata: Metadata,
        out_bias_metadata: Metadata,
        query_ln_scale_metadata: Metadata,
        key_ln_scale_metadata: Metadata,
    ) -> None:
        rngs = self.rngs
        sizes = self._resolve_sizes()
        linear = functools.partial(
            LinearGeneral,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
            rngs=rngs,
        )
        to_heads = functools.partial(
            linear,
            promote_dtype=self.qkv_promote_dtype,
            dot_general=self.qkv_dot_general,
            dot_general_cls=self.qkv_dot_general_cls,
            kernel_init=kernel_init,
            bias_init=bias_init,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
        )
        head_dim = attention.head_features(
            sizes.qkv_features, self.num_heads, "MultiHeadAttention"
        )
        self.head_dim = head_dim
        kv_heads = (sizes.num_kv_heads, head_dim)
        self.query = to_heads(self.in_features, (self.num_heads, head_dim))
        self.key = to_heads(sizes.in_kv_features, kv_heads)
        self.value = to_heads(sizes.in_kv_features, kv_heads)
        self.query_ln = self.key_ln = None
        if self.normalize_qk:
            layer_norm = functools.partial(
                LayerNorm,
                head_dim,
                use_bias=False,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                promote_dtype=self.ln_promote_dtype,
                rngs=rngs,
            )
            self.query_ln = layer_norm(scale_metadata=query_ln_scale_metadata)
            self.key_ln = layer_norm(scale_metadata=key_ln_scale_metadata)
        self.out = linear(
            (self.num_heads, head_dim),
            sizes.out_features,
            axis=(-2, -1),
            promote_dtype=self.out_promote_dtype,
            dot_general=self.out_dot_general,
            dot_general_cls=self.out_dot_general_cls,
            kernel_init=out_kernel_init or kernel_init,
            bias_init=out_bias_init or bias_init,
            kernel_metadata=out_kernel_metadata,
            bias_metadata=out_bias_metadata,
        )
        stream = None
        if keep_rngs and self.dropout_rate > 0:
            stream = parameters.fork_stream(
                rngs, "dropout", "MultiHeadAttention"
            )
        # The streams of the arguments belong to the caller.
        self.rngs = stream  # pyright: ignore[reportAttributeAccessIssue] - the argument is Rngs
        self.cached_key: Cache[Array] | None = None
        self.cached_value: Cache[Array] | None = None
        self.cache_index: Cache[Array] | None = None

    def _resolve_sizes(self) -> "_Sizes":
        """Sets the sizes that are None to their defaults, and returns them."""
        parameters.check_sizes(
            self, "num_heads", "in_features", "qkv_features", "out_features"
        )
        if self.qkv_features is None:
            self.qkv_features = self.in_features
        if self.out_features is None:
            self.out_features = self.in_features
        if self.num_kv_heads is None:
            self.num_kv_heads = self.num_heads
        if self.in_kv_features is None:
            self.in_kv_features = self.in_features
        if self.num_heads % self.num_kv_heads:
            raise errors.ArgumentValueError(
                f"MultiHeadAttention was given num_heads={self.num_heads} and "
                f"num_kv_heads={self.num_kv_heads}; expected num_heads to be a multiple of "
                "num_kv_heads."
            )
        return _Sizes(
            qkv_features=self.qkv_features,
            out_features=self.out_features,
            num_kv_heads=self.num_kv_heads,
            in_kv_features=self.in_kv_features,
        )

    def __call__(
        self,
        inputs_q: Float[Array, "*batch queries features"],
        inputs_k: Float[Array, "*batch keys kv_features"] | None = None,
        inputs_v: Float[Array, "*batch keys kv_features"] | None = None,
        *,
        mask: Bool[Array, "#*batch #heads #queries #keys"]
        | MaskFn
        | AttentionMask
        | None = None,
        deterministic: bool | None = None,
        rngs: Rngs | RngStream | Array | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        out_sharding: OutSharding = None,
        qkv_sharding: OutSharding = None,
    ) -> Float[Array, "*batch queries out_features"]:
        """Applies attention.

        Args:
            inputs_k: input of the keys; by default `inputs_q`.
            inputs_v: input of the values; by default `inputs_k`.
            mask: True, or nonzero, where a query may attend to a key; a function of positions; or
                an `AttentionMask`.
            deterministic, decode: override the attributes.
            rngs: PRNG streams, one stream or a key to use instead of the layer's own stream.
            sow_weights: whether to sow the attention weights, before dropout, as the `Intermediate`
                `attention_weights`.
            is_causal: whether queries attend only to keys at or before their position; implied by
                `decode`.
            out_sharding: sharding of the output, as in `jax.lax.dot_general`.

        Raises:
            ArgumentValueError: if values are given without keys.
            MissingCacheError: if `decode` is set and the layer has no cache.
        """
        layer = self._title()
        inputs_k, inputs_v = attention.key_and_value_inputs(
            inputs_q, inputs_k, inputs_v, layer
        )
        self._check_features(inputs_q, inputs_k, inputs_v)
        query = self.query(inputs_q, qkv_sharding)
        key = self.key(inputs_k, qkv_sharding)
        value = self.value(inputs_v, qkv_sharding)
        if self.query_ln is not None and self.key_ln is not None:
            query = self.query_ln(query)
            key = self.key_ln(key)
        if parameters.resolve_mode(self, "decode", decode):
            # The mask of the filled positions is causal.
            key, value, mask = self._decode(query, key, value, mask)
            is_causal = False
        has_dropout = self.dropout_rate != 0 and not parameters.resolve_mode(
            self, "deterministic", deterministic
        )
        dropout_rng = None
        if has_dropout:
            if rngs is None:
                rngs = self.rngs
            dropout_rng = parameters.draw_key(rngs, "dropout", layer)
        options: dict[str, Any] = {
            "mask": mask,
            "dropout_rng": dropout_rng,
            "dropout_rate": self.dropout_rate,
            "broadcast_dropout": self.broadcast_dropout,
            "deterministic": not has_dropout,
            "dtype": self.dtype,
            "precision": self.precision,
            "module": self if sow_weights else None,
            "is_causal": is_causal,
        }
        # Only if set, since an `attention_fn` of the user's need not have it.
        if self.implementation is not None:
            options["implementation"] = self.implementation
        if self.attention_fn is not dot_product_attention:
            options = self._accepted_options(options)
        context = self.attention_fn(query, key, value, **options)
        return self.out(context, out_sharding)

    def _accepted_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Returns the options that the signature of the user's `attention_fn` names."""
        accepted = inspect.signature(self.attention_fn).parameters
        for parameter in accepted.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                return options
        attention.check_accepts_implementation(
            self.implementation, accepted, self._title()
        )
        return {name: x for name, x in options.items() if name in accepted}

    def init_cache(
        self, input_shape: Sequence[int], dtype: DType = jnp.float32
    ) -> None:
        """Creates an empty cache: the variables `cached_key`, `cached_value` and `cache_index`.

        Args:
            input_shape: shape of the input with all positions, `(*batch, length, features)`.

        Raises:
            ArgumentShapeError: if the shape has no length and features.
        """
        if len(input_shape) < 2:
            raise errors.ArgumentShapeError(
                f"{self._title()} cannot make a cache for an input of shape {tuple(input_shape)}; "
                f"expected (*batch, length, {self.in_features})."
            )
        shape = (*input_shape[:-1], self.num_kv_heads, self.head_dim)
        self.cached_key = Cache(jnp.zeros(shape, dtype))
        self.cached_value = Cache(jnp.zeros(shape, dtype))
        self.cache_index = Cache(jnp.zeros((), jnp.int32))

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | Sequence[int] | None = None,
        max_length: int | None = None,
    ) -> None:
        """Sets the modes and creates a cache, see `nnx.view`; None leaves a mode unchanged.

        Args:
            batch_size: batch shape of a new cache; None for no new cache.

        Raises:
            ArgumentValueError: if only one of `batch_size` and `max_length` is given.
        """
        if (batch_size is None) != (max_length is None):
            raise errors.ArgumentValueError(
                f"{self._title()} was given batch_size={batch_size} and max_length={max_length} "
                "for a cache; give both, or neither for no new cache."
            )
        if deterministic is not None:
            self.deterministic = deterministic
        if decode is not None:
            self.decode = decode
        if batch_size is not None and max_length is not None:
            batch_shape = arrays.as_tuple(batch_size)
            input_shape = (*batch_shape, max_length, self.in_features)
            self.init_cache(input_shape, self.dtype or jnp.float32)

    def _title(self) -> str:
        return f"MultiHeadAttention with num_heads={self.num_heads}, in_features={self.in_features}"

    def _check_features(
        self, inputs_q: Array, inputs_k: Array, inputs_v: Array
    ) -> None:
        for name, x, features in (
            ("inputs_q", inputs_q, self.in_features),
            ("inputs_k", inputs_k, self.in_kv_features),
            ("inputs_v", inputs_v, self.in_kv_features),
        ):
            if x.ndim < 2 or x.shape[-1] != features:
                raise errors.ArgumentShapeError(
                    f"{self._title()}, in_kv_features={self.in_kv_features} was given {name} of "
                    f"shape {x.shape}; expected (*batch, length, {features})."
                )

    def _decode(
        self,
        query: Array,
        key: Array,
        value: Array,
        mask: Array | MaskFn | AttentionMask | None,
    ) -> tuple[Array, Array, Array | None]:
        """Adds a position to the cache; returns its keys and values, and a mask of the filled."""
        cached_key = self.cached_key
        cached_value = self.cached_value
        cache_index = self.cache_index
        if cached_key is None or cached_value is None or cache_index is None:
            raise errors.MissingCacheError(self._title(), self.in_features)
        index = cache_index.get_value()
        keys, values, filled_mask = attention.attention_cache_step(
            cached_key.get_value(),
            cached_value.get_value(),
            index,
            query,
            key,
            value,
            layer=self._title(),
        )
        length = keys.shape[-3]
        cached_key.set_value(keys)
        cached_value.set_value(values)
        cache_index.set_value(jnp.minimum(index + 1, length))
        step_mask = attention_mask.mask_of_step(mask, index, length)
        full_mask = attention_mask.combine_masks(
            step_mask, filled_mask, dtype=jnp.bool_
        )
        return keys, values, full_mask


class _Sizes(NamedTuple):
    """The sizes of a `MultiHeadAttention` that have defaults."""

    qkv_features: int
    out_features: int
    num_kv_heads: int
    in_kv_features: int
